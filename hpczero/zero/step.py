"""The part of a step that all stages share: agree, measure, decide, update.

Gradients arrive here summed over ranks and micro-batches, each weighted by its number of samples. First pass: the norm of
this rank's shards, from which all ranks compute the same global norm; only then does anyone branch. Second pass: one fused
kernel applies averaging, clipping and the optimizer to this rank's shards.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, to_host
from hpczero.collectives import pairwise
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, HpczeroError, MismatchError, StallError, raise_together
from hpczero.memory import Arena
from hpczero.optim.lamb import LAMB, trust
from hpczero.optim.norms import NORMS, TWO, GlobalNorm, PartialNorms, Piece, clip_coefficient, norm
from hpczero.optim.schedules import Schedule
from hpczero.zero.config import ZeroConfig
from hpczero.zero.layout import Layout
from hpczero.zero.param_groups import Grouping

_log = logging.getLogger("hpczero.zero")

ACCUMULATE, STEP, FORWARD, LEFT, CLOSE = 1.0, 2.0, 3.0, 4.0, 5.0
_CALLS = {ACCUMULATE: "accumulate() or backward()", STEP: "step()", FORWARD: "forward()", CLOSE: "close()"}
FAREWELL_S = 3.0
"""How long a rank that leaves with an exception waits for the others to hear of it; its traceback waits as long."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did; equal on all ranks but for `bytes_sent` and `seconds`."""

    step: int
    """Steps applied so far, this one included if it was."""
    applied: bool
    reason: str
    """Why the step was skipped; empty if it was applied."""
    non_finite: tuple[str, ...]
    """Names of the parameters whose gradients hold a NaN or an infinity, in the order of names."""
    grad_norm: float
    """Norm of the averaged gradients over all parameters, before clipping: the one that clipping goes by."""
    clip_coef: float
    """What clipping multiplied the gradients by; 1 if it did nothing."""
    lr: tuple[float, ...]
    """Learning rate of each parameter group, the rest of the parameters first; empty if the step was skipped."""
    bytes_sent: dict[str, int]
    """By this rank for this step: "window" (read from neighbours' memory), "node" and "network" (messages)."""
    seconds: float
    """Spent in `step` on this rank."""

    @property
    def clipped_norm(self) -> float:
        """Norm of the gradients as they were applied."""
        return self.grad_norm * self.clip_coef


class Decision(NamedTuple):
    """What `Updater.decide` says."""

    reason: str
    """To skip the step; empty if it is applied."""
    non_finite: tuple[str, ...]
    grad_norm: float
    clip_coef: float
    scale: float
    """What summed gradients are multiplied by: the mean over samples, and clipping."""
    end: str
    """Why training cannot go on, for an error on all ranks; mostly empty."""


class Rounds:
    """Keeps the ranks in the same call: every one begins or ends with a small exchange, in which errors spread.

    A rank that leaves its `with` block with an exception takes part once more, to say so; the others would wait for it
    until their limit.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        # Of its own, so that a call here and a collective of the caller's never meet.
        self._comm = transport.topology.world.Dup()
        self._all_know = False
        self._farewell: tuple | None = None
        self.weight = 0.0
        """Sum of the weights of all ranks since the last step; the same on every rank."""

    def meet(self, call: float, weight: float, error: Exception | None, lr: float | None = None) -> None:
        """Every rank is in `call`, with the same `lr`, and none has an error; else all raise. Adds up the weights."""
        self._all_know = False
        mine = [call, weight, float(error is not None), -1.0 if lr is None else lr]
        met = self._transport.all_gather_small(np.array(mine), _CALLS[call], self._comm)
        self._all_know = True      # what is raised from here on is raised on all ranks
        self._refuse_mixed_calls(met)
        if met[:, 2].any():
            raise_together(self._transport.topology.world, error)
        if (met[:, 3] != met[0, 3]).any():
            odd = int(np.argmax(met[:, 3] != met[0, 3]))
            raise MismatchError(f"rank {odd} of {len(met)} calls step(lr={met[odd, 3]:g}), rank 0 step(lr={met[0, 3]:g}); "
                                "every rank passes the same (-1 stands for none)")
        for value in met[:, 1].tolist():      # in rank order, so that every rank has the same bits
            self.weight += value
        self._all_know = False

    def leave(self, error: BaseException) -> None:
        """Called on the way out with an exception that the other ranks need not have seen; waits a moment at most."""
        if self._all_know or isinstance(error, StallError) or MPI.Is_finalized():
            return
        # The buffers stay with this object: the exchange may complete after the wait was given up.
        mine, met = np.array([LEFT, 0.0, 1.0, -1.0]), np.empty((self._comm.size, 4))
        request = self._comm.Iallgather([mine.view(np.uint8), MPI.BYTE], [met.reshape(-1).view(np.uint8), MPI.BYTE])
        self._farewell = mine, met, request
        start = time.monotonic()
        while not request.Test() and time.monotonic() - start < FAREWELL_S:
            time.sleep(0.001)

    def restart(self) -> None:
        self.weight = 0.0

    def close(self) -> None:
        """Called by every rank."""
        self._comm.Free()

    @staticmethod
    def _refuse_mixed_calls(met: np.ndarray) -> None:
        gone = [rank for rank, call in enumerate(met[:, 0]) if call == LEFT]
        if gone:
            raise HpczeroError(f"rank {gone[0]} of {len(met)} left its `with` block with an exception, which it shows "
                               "itself; the other ranks cannot go on without it")
        if (met[:, 0] != met[0, 0]).any():
            calls = [_CALLS[value] for value in met[:, 0]]
            odd = next(rank for rank, name in enumerate(calls) if name != calls[0])
            raise MismatchError(f"rank {odd} of {len(calls)} is in {calls[odd]} while rank 0 is in {calls[0]}: every rank "
                                "calls these equally often per step, with weight=0 where it has no samples")


class Meter:
    """Counts what this object's own calls send, on a transport that others may use as well: `with meter: ...`."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._before: dict[str, int] = {}
        self._counted: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._before = dict(self._transport.bytes_sent)

    def __exit__(self, *error: object) -> None:
        for link, count in self._transport.bytes_sent.items():
            self._counted[link] += count - self._before[link]

    def read(self) -> dict[str, int]:
        """Bytes by link since the last reading."""
        found, self._counted = dict(self._counted), Counter()
        return found


class SharedSums:
    """Sums over whole parameters, of vectors of which every rank has its pieces; the same bits for any partition.

    Made by every rank, in the same order.
    """

    def __init__(self, pieces: Sequence[Piece], num_parameters: int, transport: Transport, kind: int):
        self._transport, self._partial = transport, PartialNorms(pieces, kind)
        self._global = GlobalNorm(transport.topology.world.allgather(self._partial.nodes), num_parameters, kind)
        self._offsets = [0, *np.cumsum(self._global.counts).tolist()]

    @property
    def nbytes(self) -> int:
        return self._partial.nbytes + 8 * self._offsets[-1]

    def by_parameter(self, vector: Array, what: str) -> np.ndarray:
        """(num_parameters,) float64, in the order of names. Called by every rank: one small all-gather."""
        rank, size = self._transport.topology.rank, self._transport.topology.size
        sums = np.zeros(self._offsets[-1])
        sums[self._offsets[rank]:self._offsets[rank + 1]] = self._partial.sums(vector)
        self._transport.execute(pairwise.all_gather(rank, size), sums, self._offsets, what=what)
        return self._global.by_parameter(sums)


class ByTensor:
    """The second half of a step whose length depends on norms of whole tensors."""

    def __init__(self, layout: Layout, transport: Transport, in_shard: tuple[bool, bool], whole: bool):
        rank = transport.topology.rank
        at_params, at_directions = (layout.pieces(rank, in_shard=sharded) for sharded in in_shard)
        self._weights = SharedSums(at_params, len(layout.places), transport, TWO)
        self._directions = SharedSums(at_directions, len(layout.places), transport, TWO)
        names = sorted(layout.places)
        self._groups = np.array([layout.places[name].group for name in names], np.int64)
        if whole:
            rows = [(number, layout.places[name].offset, layout.places[name].offset, layout.places[name].size)
                    for number, name in enumerate(names)]
        else:
            rows = [(here.parameter, here.position, there.position, here.stop - here.start)
                    for here, there in zip(at_params, at_directions, strict=True)]
        table = np.array(rows, np.int64).reshape(-1, 4)
        self._parameters, self._table = table[:, 0], np.ascontiguousarray(table[:, 1:])

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes + self._directions.nbytes + self._table.nbytes

    def move(self, optimizer: LAMB, params: Array, directions: Array, rates: Sequence[float]) -> None:
        """Takes the step. Called by every rank."""
        ratios = trust(self._weights.by_parameter(params, "norms of parameters"),
                       self._directions.by_parameter(directions, "norms of directions"))
        lengths = np.array(rates)[self._groups] * ratios
        optimizer.move(params, directions, self._table, lengths[self._parameters])


class Updater:
    """Optimizer state of this rank's shards, and what brings gradients into the parameters.

    Parameters
    ----------
    in_shard, params_in_shard : bool
        Whether gradients (stages 2 and 3) and parameters (stage 3) lie in a shard vector, or in a whole vector.
    whole : bool
        Stage 0: states of all elements, which every rank updates.
    """

    def __init__(self, grouping: Grouping, schedule: Schedule | None, layout: Layout, arena: Arena, transport: Transport,
                 dtype: Any, config: ZeroConfig, *, in_shard: bool, whole: bool, params_in_shard: bool):
        self.grouping, self.schedule, self.layout, self.config = grouping, schedule, layout, config
        self._transport = transport
        rank, optimizer = transport.topology.rank, grouping.optimizers[0]
        self.shard_cuts = layout.shard_cuts(rank)
        count = layout.size if whole else self.shard_cuts[-1]
        self.states = {name: arena.private(count, dtype, "optimizer_states") for name in optimizer.state_names}
        for name, start in optimizer.state_starts.items():
            self.states[name][...] = start
        self._spans = list(_spans(layout, None if whole else rank, (params_in_shard, in_shard, not whole)))
        self.step, self.skipped, self._in_a_row = 0, 0, 0
        self._norm = NORMS[config.gradient_clipping_norm]
        pieces = layout.pieces(rank, in_shard=in_shard)
        self._gradients = SharedSums(pieces, len(layout.places), transport, self._norm)
        self._by_tensor = ByTensor(layout, transport, (params_in_shard, in_shard), whole) \
            if getattr(optimizer, "by_tensor", False) else None

    @property
    def scratch_bytes(self) -> int:
        return self._gradients.nbytes + (self._by_tensor.nbytes if self._by_tensor else 0)

    def grad_norm(self, gradients: Array, weight: float) -> tuple[float, tuple[str, ...]]:
        """The norm of the averaged gradients over all ranks' shards, the same bits on every rank, at every stage; and the
        names of the parameters where it is not finite."""
        by_parameter = self._gradients.by_parameter(gradients, "gradient norm")
        bad = np.flatnonzero(~np.isfinite(by_parameter))
        names = sorted(self.layout.places) if bad.size else []
        return norm(by_parameter, self._norm) / weight, tuple(names[index] for index in bad)

    def learning_rates(self, lr: float | None) -> tuple[float, ...]:
        """Of each group at the current step. `lr` stands in for that of groups that have none of their own."""
        factor = 1.0 if self.schedule is None or lr is not None else self.schedule.factor(self.step)
        return tuple(optimizer.lr * factor if lr is None or own else lr for optimizer, own in
                     zip(self.grouping.optimizers, self.grouping.own_lr, strict=True))

    def apply(self, params: Array, gradients: Array, *, scale: float, lr: float | None) -> tuple[float, ...]:
        """The optimizers of all groups on this rank's elements, or at stage 0 on all; the learning rates."""
        rates, states = self.learning_rates(lr), tuple(self.states.values())
        for group, at_params, at_gradients, at_states in self._spans:
            self.grouping.optimizers[group].update(
                params[at_params], gradients[at_gradients], tuple(array[at_states] for array in states),
                step=self.step, scale=scale, lr=rates[group],
            )
        if self._by_tensor is not None:
            self._by_tensor.move(self.grouping.optimizers[0], params, gradients, rates)
        return rates

    def decide(self, gradients: Array, weight: float) -> Decision:
        """Whether the step is applied, and how; counts it. The same on every rank, since all that it depends on is."""
        grad_norm, non_finite = self.grad_norm(gradients, weight) if weight else (math.nan, ())
        if weight and math.isfinite(grad_norm):
            self.step, self._in_a_row = self.step + 1, 0
            coefficient = clip_coefficient(grad_norm, self.config.gradient_clipping)
            return Decision("", (), grad_norm, coefficient, coefficient / weight, "")
        self.skipped += 1
        self._in_a_row += bool(weight)
        shown = ", ".join(non_finite[:5]) + (f" and {len(non_finite) - 5} more" if len(non_finite) > 5 else "")
        reason = f"a gradient is not finite: {shown or 'its norm overflows'}" if weight else "no rank had a sample"
        end = ""
        if self._in_a_row > self.config.max_consecutive_skips:
            end = (f"{self._in_a_row} steps in a row were skipped ({reason}), and max_consecutive_skips="
                   f"{self.config.max_consecutive_skips}: parameters and states are as they were before them")
        if self._transport.topology.rank == 0:
            _log.warning("step %d skipped (%d so far): %s", self.step + self.skipped, self.skipped, reason)
        return Decision(reason, non_finite, grad_norm, 1.0, 0.0, end)

    def state_dict(self, stage: int, pieces: Iterable[tuple[Piece, Array, int, int]]) -> dict[str, Any]:
        """Copies of the pieces this rank owns: (piece, vector of parameters, place in it, place in the states) each."""
        names, found = sorted(self.layout.places), []
        for piece, params, place, state_place in pieces:
            count = piece.stop - piece.start
            parts = {"parameter": params[place:place + count]} | {
                name: array[state_place:state_place + count] for name, array in self.states.items()
            }
            found.append({"name": names[piece.parameter], "start": piece.start, "stop": piece.stop}
                         | {part: np.array(to_host(array)) for part, array in parts.items()})
        return {"step": self.step, "stage": stage, "pieces": found,
                "schedule": None if self.schedule is None else self.schedule.to_dict()}


def _spans(layout: Layout, rank: int | None, in_shard: tuple[bool, ...]) -> Iterator[tuple[int, ...]]:
    """(group, slices of parameters, gradients, states) of one update each, as long as they can be."""
    group, begins, ends = -1, (), ()
    for run in layout.runs(rank):
        places = tuple(run.position if sharded else run.start for sharded in in_shard)
        if (run.group, places) != (group, ends):
            if group >= 0:
                yield group, *map(slice, begins, ends)
            group, begins = run.group, places
        ends = tuple(place + run.stop - run.start for place in places)
    if group >= 0:
        yield group, *map(slice, begins, ends)


def checked_weight(weight: Any) -> float:
    """A number of samples: finite and not negative."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.integer, np.floating)) \
            or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"weight={weight!r}: the number of samples behind these gradients, 0 or more, is needed")
    return float(weight)


def checked_lr(lr: Any) -> float | None:
    if lr is None:
        return None
    if isinstance(lr, bool) or not isinstance(lr, (int, float, np.integer, np.floating)) or not math.isfinite(lr) or lr < 0:
        raise ConfigError(f"lr={lr!r}: a finite number, 0 or more, is needed")
    return float(lr)
