"""From the first agreement to the last free: the life that `ZeroOptimizer` and `Zero3Engine` have in common.

Where state is partitioned, making, failing and freeing are collective, and that shapes a life:

    made       every rank looks at its own arguments; all agree, or all raise; only then is anything allocated
    in a call  all ranks meet in the same call; an error on one of them is raised on all, and the step begins anew
    left       `close` frees collectively; a rank on its way out with an exception frees nothing, but tells the others
    closed     every further call is refused; so is freeing after MPI was finalised, which would abort the process

Cost: the agreement is one small all-gather, made once, and a meeting one of four numbers per rank. Beside the arena and
what `topology` keeps, one duplicated communicator is held, for the meetings.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from hpczero.arrays import Array
from hpczero.collectives.guard import agree
from hpczero.collectives.transport import Transport
from hpczero.device import Device
from hpczero.errors import ConfigError, HpczeroError, RoomError, StallError
from hpczero.memory import Arena
from hpczero.optim import Optimizer
from hpczero.optim.schedules import Schedule
from hpczero.topology import Topology, as_topology, refuse_finalised
from hpczero.zero.access import PARAMETER, Access
from hpczero.zero.buffers import GradientSlots
from hpczero.zero.config import ZeroConfig
from hpczero.zero.layout import PURPOSES, Layout, formula_bytes
from hpczero.zero.memory_stats import ZeroMemoryStats, memory_stats
from hpczero.zero.param_groups import ParamGroup, grouped
from hpczero.zero.placement import as_arrays, device_of, refuse_optimizer, refuse_schedule, shares
from hpczero.zero.step import ACCUMULATE, CLOSE, Decision, Meter, Rounds, StepReport, Updater

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI


class PartitionedTraining(ABC):
    """Base of `ZeroOptimizer` and `Zero3Engine`, which add what is done with gradients. Called by every rank.

    Attributes
    ----------
    config : ZeroConfig
    stage : int
    topology : Topology
        The one that was passed, or one made here and closed here.
    device : Device
    dtype : np.dtype
    shared : bool
        Whether the ranks of a node keep one copy of the parameters.
    layout : Layout
    """

    _updater: Updater
    _slots: GradientSlots | None

    def __init__(self, params: Mapping[str, Any], optimizer: Optimizer, comm: Topology | MPI.Intracomm,
                 config: ZeroConfig, device: Device | None, groups: Sequence[ParamGroup], schedule: Schedule | None):
        self.config = config
        self.topology, self._owns_topology = as_topology(comm)
        self._transport = Transport.of(self.topology)
        self._closed = False
        try:
            arrays = self._agreed(params, optimizer, device, groups, schedule)
        except StallError:
            raise      # somebody is missing, and would be for a collective free too
        except Exception:
            if self._owns_topology:
                self.topology.close()      # every rank is here
            raise
        self.stage, self.shared = config.stage, shares(config, self.device)
        self._transport.timeout_s = config.comm_timeout_ms / 1000
        self.layout = self._lay_out(arrays)
        self._arena = Arena(self.topology, self.device)
        try:
            self._allocate()
        except RoomError:
            self._arena.close()                # on every rank: smaller settings may yet find room
            if self._owns_topology:
                self.topology.close()
            raise
        self._start_from(arrays)
        self._rounds = Rounds(self._transport)
        self._meter = Meter(self._transport)
        self._bytes_moved: int | None = None

    @abstractmethod
    def _checked(self, arrays: Mapping[str, Array]) -> str:
        """What ranks must agree on besides settings, in words; ConfigError for what this class cannot serve."""

    @abstractmethod
    def _lay_out(self, arrays: Mapping[str, Array]) -> Layout:
        """Where everything lies, from names and shapes."""

    @abstractmethod
    def _allocate(self) -> None:
        """What the placement table says, from the arena; sets `_updater` and `_slots`."""

    @abstractmethod
    def _start_from(self, arrays: Mapping[str, Array]) -> None:
        """Rank 0's values on every rank."""

    @abstractmethod
    def _forget(self) -> None:
        """Lets go of what lies in memory that is about to be freed."""

    @property
    def memory(self) -> dict[str, float]:
        """Bytes this rank holds, by purpose: parameters, gradients, optimizer_states, buffers. Counted, not estimated."""
        held = dict.fromkeys(PURPOSES, 0.0) | self._arena.bytes_by_purpose
        held["buffers"] += self._transport.scratch_bytes + self._updater.scratch_bytes
        return held

    @property
    def memory_formula(self) -> dict[str, float]:
        """What `memory` should be by the formulas of the stage; see `layout.formula_bytes`."""
        return formula_bytes(self.layout, stage=self.stage, itemsize=self.dtype.itemsize,
                             num_states=len(self._updater.states), ranks_per_node=self.topology.node.size,
                             num_nodes=self.topology.num_nodes, shared=self.shared)

    @property
    def memory_stats(self) -> ZeroMemoryStats:
        """What partitioning saves on this rank, and what the last step moved for it."""
        return memory_stats(self.layout, self.dtype.itemsize, len(self._updater.states), self.memory, self.memory_formula,
                            self._bytes_moved)

    def get_full(self, names: Sequence[str] | None = None, part: str = PARAMETER) -> dict[str, np.ndarray]:
        """Host copies of whole arrays by name, the same bits on all ranks, put together in one exchange.

        Called by every rank with the same arguments: `names` (all parameters if not given), and `part`, "parameter" or a
        state of the optimizer, such as "exp_avg".
        """
        self._refuse_closed()
        access = Access(self.layout, self.topology, self._parts())
        return access.get(list(self.layout.places) if names is None else names, part)

    def set_full(self, values: Mapping[str, Any], part: str = PARAMETER) -> None:
        """Parameters, or a state of the optimizer, become these whole arrays, which every rank passes alike.

        Raises
        ------
        ConfigError
            An unknown name or part, a wrong shape; on every rank.
        MismatchError
            The arrays differ between ranks.
        """
        self._refuse_closed()
        Access(self.layout, self.topology, self._parts()).set(values, part)
        self._written_from_outside(part)

    @abstractmethod
    def _parts(self) -> dict[str, tuple[Array, bool]]:
        """What `get_full` can be asked for; see `access.Access`."""

    @abstractmethod
    def _written_from_outside(self, part: str) -> None:
        """Brings what owners have just been given to where it is used."""

    def close(self) -> None:
        """Frees the buffers, collectively; arrays handed out before must not be used any more."""
        if self._closed:
            return
        refuse_finalised()
        self._rounds.meet(CLOSE, 0.0, None)      # freeing would wait for a rank that is in another call, without a word
        self._closed = True
        self._forget()
        self._arena.close()
        self._rounds.close()
        if self._owns_topology:
            self.topology.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Others may never come to a collective free: that is left to the end of the job. But they must hear of it.
            self._rounds.leave(error)

    def _agreed(self, params: Any, optimizer: Any, device: Device | None, groups: Any, schedule: Any) -> dict[str, Array]:
        """The parameters as arrays, after every rank has found them good and all agree on names, shapes and settings.

        Sets `dtype`, `device`, `_grouping` and `_schedule`.
        """
        arrays: dict[str, Array] = {}
        error, call = None, ""
        try:
            if not isinstance(self.config, ZeroConfig):
                raise ConfigError(f"config: a ZeroConfig(...) is needed, not {self.config!r}")
            arrays, self.dtype = as_arrays(params)
            self.device = device or device_of(arrays)
            refuse_optimizer(optimizer)
            refuse_schedule(schedule)
            self._schedule = schedule
            self._grouping = grouped({name: array.shape for name, array in arrays.items()}, optimizer, groups)
            parts = self._checked(arrays)
            shares(self.config, self.device)
            call = (f"{type(self).__name__} with {self._grouping}, schedule={schedule}, {self.config!r}, {self.dtype} on "
                    f"{self.device.kind}, {parts}")
        except Exception as wrong:      # noqa: BLE001 - whatever an argument does when it is looked at: the others must hear
            error = wrong
        agree(self._transport, call, error)
        return arrays

    def _meet(self, weight: float, error: Exception | None, call: float = ACCUMULATE, lr: float | None = None) -> None:
        """All ranks are in the same call; after an error on any of them all raise, and what this step had is dropped."""
        try:
            self._rounds.meet(call, weight, error, lr)
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        """What was accumulated for this step is of no use."""
        self._restart()

    def _restart(self) -> None:
        """The next micro-batch is the first of its step."""
        if self._slots is not None:
            self._slots.restart()
        self._rounds.restart()

    def _report(self, decision: Decision, rates: tuple[float, ...], start: float) -> StepReport:
        """Of a step that began at `start` by the clock of `time.perf_counter`. HpczeroError, on all ranks, if it was one
        too many to be skipped."""
        sent = self._meter.read()
        self._bytes_moved = sum(sent.values())
        if decision.end:
            raise HpczeroError(decision.end)
        return StepReport(self._updater.step, not decision.reason, decision.reason, decision.non_finite, decision.grad_norm,
                          decision.clip_coef, rates, sent, time.perf_counter() - start)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise HpczeroError(f"this {type(self).__name__} was closed: its memory is gone; nothing can be called on it "
                               "any more")
        refuse_finalised()


def listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Names and shapes as one line, for ranks to compare."""
    return ", ".join(f"{name}{tuple(shape)}" for name, shape in shapes.items())
