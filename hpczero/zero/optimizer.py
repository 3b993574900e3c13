"""ZeRO stages 0, 1 and 2: the optimizer for parameters that every rank can see.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020. One table decides:

    stage  parameters           gradients           states   a step
    0      a copy per rank      whole               whole    all-reduce of gradients
    1      one copy per node    whole               sharded  reduce-scatter of gradients, all-gather of parameters
    2      one copy per node    sharded per bucket  sharded  the same, bucket by bucket during backward

All three add gradients in the same order and update elements by the same formula: at a given number of ranks and nodes they
give the same bits, whatever the bucket size.

On a host the parameters of stages 1 and 2 are one copy in memory that the ranks of a node share, and the views handed out
are read-only: `p *= 0.5` on two ranks would otherwise give a quarter. A model that writes into its parameters needs
`share_parameters=False`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.arrays import Array, to_host
from hpczero.collectives import exchange, pairwise
from hpczero.collectives.exchange import flat_of
from hpczero.device import Device
from hpczero.errors import ConfigError
from hpczero.optim import Optimizer
from hpczero.optim.schedules import Schedule
from hpczero.settings import nearest
from hpczero.topology import Topology
from hpczero.zero.buffers import (
    GradientSlots,
    fill,
    gradient_rows,
    parameter_buffer,
    put,
    views,
)
from hpczero.zero.config import ZeroConfig
from hpczero.zero.layout import Layout, in_buckets
from hpczero.zero.lifecycle import PartitionedTraining, listed
from hpczero.zero.param_groups import ParamGroup
from hpczero.zero.placement import checked_gradient
from hpczero.zero.step import STEP, StepReport, Updater, checked_lr, checked_weight

if TYPE_CHECKING:
    from mpi4py import MPI


class ZeroOptimizer(PartitionedTraining):
    """Trains named parameters, partitioned over the ranks of a communicator as `config.stage` says.

    Called by every rank of the communicator, like all its methods. Rank 0's values are where training starts; they are
    moved into buffers of this object, and `params` hands back arrays by name, which are the parameters from then on.

    Parameters
    ----------
    params : mapping of str to array
        In the order of the forward pass; one dtype, float32 or float64; any shapes, () and (0, 4) included; none at all is
        fine. All on the host, or all on one device.
    optimizer : one of `hpczero.optim`
    comm : Topology or MPI.Intracomm
        A communicator is duplicated; a topology is used, and stays the caller's to close.
    config : ZeroConfig
        Stage 3 belongs to `Zero3Engine`, which knows when a layer is used.
    device : Device, optional
        Where the parameters live; found from the arrays if not given.
    groups : list of ParamGroup
        Parameters with hyperparameters of their own, by name.
    schedule : one of `hpczero.optim.schedules`, optional
        What learning rates are multiplied by, step for step; steps that are skipped do not count.

    Attributes
    ----------
    params : dict of str to array
        Whole parameters, current after every `step`. Read-only where a node shares them.

    Raises
    ------
    ConfigError, MismatchError
        On every rank: settings that cannot be honoured; names, shapes or settings that differ between ranks.

    Examples
    --------
    >>> with ZeroOptimizer(params, AdamW(lr=1e-3), comm, ZeroConfig(stage=2)) as opt:
    ...     for batch in batches:
    ...         opt.accumulate(gradients(opt.params, batch), weight=len(batch))
    ...         opt.step()
    """

    def __init__(self, params: Mapping[str, Any], optimizer: Optimizer, comm: Topology | MPI.Intracomm,
                 config: ZeroConfig | None = None, device: Device | None = None, *, groups: Sequence[ParamGroup] = (),
                 schedule: Schedule | None = None):
        super().__init__(params, optimizer, comm, ZeroConfig() if config is None else config, device, groups, schedule)
        self._written: set[str] = set()
        self._by_hand = self._accumulated = False

    @property
    def grads(self) -> dict[str, Array]:
        """Views by name of this rank's gradients, for a backward pass that writes them itself (stages 0 and 1).

        Write the mean over the local samples, call `step`; the ranks then count equally. For batches of unequal size use
        `accumulate`. Zeroed by `step`. At stage 2 no whole gradient exists, and this raises.
        """
        self._refuse_closed()
        if self._gradients is None:
            raise ConfigError("stage 2 keeps no whole gradient to write into: pass gradients to accumulate(), all at once "
                              "or as (name, array) pairs while backward produces them; or take stage 1")
        if not self._by_hand and not self._accumulated:
            flat_of(self._gradients)[...] = 0      # the sums of steps before would be taken for gradients
        self._by_hand = True
        return dict(self._gradient_views)

    def accumulate(self, gradients: Mapping[str, Any] | Iterable[tuple[str, Any]], weight: float = 1.0) -> None:
        """Adds the gradients of one micro-batch. Every rank calls it equally often before `step`.

        Parameters
        ----------
        gradients : mapping of name to array, or iterable of (name, array)
            Means over this rank's samples. Pairs in backward order (last parameter first) are used as they come: at stage
            2 a full bucket is reduced while the rest is still being computed. A name that is missing counts as zero.
        weight : float
            Number of samples behind them; 0 where a rank has none. The step uses the mean over all samples of all ranks.

        Raises
        ------
        ConfigError
            An unknown name, a wrong shape, a name given twice; on every rank, naming the one that found it. What was
            accumulated for this step is dropped.
        MismatchError
            Another rank is in `step`.
        """
        self._refuse_closed()
        error: Exception | None = None
        self._accumulated = True
        try:
            weight = checked_weight(weight)
        except ConfigError as wrong:
            weight, error = 0.0, wrong
        with self._meter:
            if self._gradients is None:
                # Buckets are closed together: who calls something else must be found out before the first of them.
                self._meet(weight, error)
                self._meet(0.0, self._take_by_bucket(gradients, weight))
            else:
                self._meet(weight, error or self._take_whole(gradients, weight))

    def step(self, lr: float | None = None) -> StepReport:
        """Averages what was accumulated over all samples of all ranks, and updates the parameters.

        Skipped, on every rank and without a trace in parameters and states, if a gradient is not finite or no rank had
        samples; the report says so, and after too many in a row (`max_consecutive_skips`) an HpczeroError on every rank.

        Parameters
        ----------
        lr : float, optional
            Learning rate of this step, the same on every rank, for groups that have none of their own; the schedule is
            not asked then. If not given, that of each group, as scheduled.
        """
        start = time.perf_counter()
        self._refuse_closed()
        error, by_hand = None, self._by_hand and not self._accumulated
        try:
            lr = checked_lr(lr)
        except ConfigError as wrong:
            error = wrong
        with self._meter:
            self._meet(1.0 if by_hand else 0.0, error, STEP, lr)
            gradients = self._reduced(by_hand)
            rates: tuple[float, ...] = ()
            decision = self._updater.decide(gradients, self._rounds.weight)
            if not decision.reason:
                rates = self._updater.apply(flat_of(self._parameters), gradients, scale=decision.scale, lr=lr)
                self._publish()
            self._reopen()
        return self._report(decision, rates, start)

    def full_parameters(self) -> dict[str, np.ndarray]:
        """Host copies of all parameters, in the order of their names."""
        self._refuse_closed()
        return {name: np.array(to_host(self.params[name])) for name in sorted(self.params)}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as copies: enough, over all ranks, to go on from here.

        Returns
        -------
        dict
            `step`, `stage`, and `pieces`: for every part of a parameter that this rank owns, its `name`, `start` and `stop`
            (elements of the flattened parameter), `parameter` and one array per optimizer state, all (stop - start,).
        """
        self._refuse_closed()
        rank, flat = self.topology.rank, flat_of(self._parameters)
        in_whole, in_shard = self.layout.pieces(rank, in_shard=False), self.layout.pieces(rank, in_shard=True)
        return self._updater.state_dict(self.stage, (
            (whole, flat, whole.position, whole.position if self.stage == 0 else shard.position)
            for whole, shard in zip(in_whole, in_shard, strict=True)
        ))

    def _checked(self, arrays: Mapping[str, Array]) -> str:
        if self.config.stage == 3:
            raise ConfigError("ZeroOptimizer serves stages 0 to 2; stage 3 shards the parameters too and must know when a "
                              "layer is used: take Zero3Engine")
        return "parameters " + listed({name: array.shape for name, array in arrays.items()})

    def _lay_out(self, arrays: Mapping[str, Array]) -> Layout:
        shapes = {name: array.shape for name, array in arrays.items()}
        return in_buckets(shapes, self.topology.size, self.config.reduce_bucket_size.elements(self.dtype.itemsize),
                          self._grouping.group_of)

    def _allocate(self) -> None:
        """What the placement table says: parameters, gradients (whole, or slots and shards), states."""
        layout, arena, stage = self.layout, self._arena, self.stage
        if stage == 0:
            self._parameters = arena.private(layout.size, self.dtype, "parameters")
        else:
            self._parameters = parameter_buffer(arena, layout.size, self.dtype, "parameters", shared=self.shared)
        self._gradients = self._slots = None
        if stage == 2:
            self._slots = GradientSlots(arena, layout, self.dtype, self._transport)
        else:
            self._gradients = gradient_rows(arena, layout.size, self.dtype, "gradients")
            self._gradient_views = views(flat_of(self._gradients), layout, list(layout.places))
        self._updater = Updater(self._grouping, self._schedule, layout, arena, self._transport, self.dtype, self.config,
                                in_shard=stage == 2, whole=stage == 0, params_in_shard=False)

    def _start_from(self, arrays: Mapping[str, Array]) -> None:
        flat = flat_of(self._parameters)
        if self.topology.rank == 0:
            fill(flat, arrays, self.layout, list(self.layout.places))
        exchange.broadcast(self._parameters, self._transport, "initial parameters")
        in_forward_order = list(arrays)
        self.params = views(flat, self.layout, in_forward_order, writable=not self.shared)

    def _forget(self) -> None:
        self.params = {}

    def _pairs(self, gradients: Any) -> Iterator[tuple[str, Array]]:
        """(name, gradient), checked: a mapping in backward order, any other pairs as they come."""
        if isinstance(gradients, Mapping):
            unknown = [name for name in gradients if name not in self.layout.places]
            if unknown:
                raise self._unknown(unknown[0])
            pairs = [(name, gradients[name]) for name in self.layout.places if name in gradients]
        else:
            pairs = gradients
        seen: set[str] = set()
        for name, gradient in pairs:
            place = self.layout.places.get(name)
            if place is None:
                raise self._unknown(name)
            if name in seen:
                raise ConfigError(f"gradient of {name!r} given twice in one accumulate()")
            seen.add(name)
            yield name, checked_gradient(name, gradient, place.shape)

    def _unknown(self, name: str) -> ConfigError:
        return ConfigError(f"gradient of {name!r}: there is no such parameter{nearest(str(name), self.layout.places)}")

    def _take_whole(self, gradients: Any, weight: float) -> Exception | None:
        """Into the whole gradient of stages 0 and 1: the first of a step overwrites, later ones add."""
        try:
            for name, gradient in self._pairs(gradients):
                put(self._gradient_views[name].reshape(-1), gradient, weight, add=name in self._written)
                self._written.add(name)
        except Exception as error:      # noqa: BLE001 - also the caller's own, from a generator: the other ranks must hear
            return error
        return None

    def _take_by_bucket(self, gradients: Any, weight: float) -> Exception | None:
        """Into the open bucket of stage 2; buckets are closed in their order, since closing is collective.

        After an error the rank still closes the remaining buckets, so that the others need not wait for it.
        """
        pairs, error = self._pairs(gradients), None
        early: dict[str, Array] = {}
        for bucket in range(len(self.layout.buckets)):
            places = self._slots.open(bucket)
            try:
                self._fill_bucket(places, pairs, early, weight)
            except Exception as wrong:      # noqa: BLE001 - also the caller's own: the other ranks must hear
                error, pairs = wrong, iter(())
            for name in places:             # whoever got no gradient
                places[name][...] = 0
            self._slots.close(bucket)
        self._slots.micro_batch_done()
        try:
            for _ in pairs:                 # what is left names no parameter, or one a second time
                pass
        except Exception as wrong:          # noqa: BLE001
            error = wrong
        return error

    def _fill_bucket(self, places: dict[str, Array], pairs: Iterator[tuple[str, Array]], early: dict[str, Array],
                     weight: float) -> None:
        """Takes pairs until every place is filled, or there are no more; a filled place leaves `places`."""
        for name in [name for name in places if name in early]:
            put(places.pop(name).reshape(-1), early.pop(name), weight, add=False)
        while places:
            name, gradient = next(pairs, (None, None))
            if name is None:
                return
            if name in places:
                put(places.pop(name).reshape(-1), gradient, weight, add=False)
            else:
                # Its bucket comes later, and the caller may reuse the array before that.
                early[name] = gradient.copy()

    def _reduced(self, by_hand: bool) -> Array:
        """This rank's shards of the summed gradients: in its shard vector, or at their places in the whole one."""
        if self._gradients is None:
            return self._slots.shards
        flat = flat_of(self._gradients)
        if not by_hand:
            for name in self.layout.places.keys() - self._written:      # missing everywhere or here: counts as zero
                self._gradient_views[name][...] = 0
        cuts = [self.layout.cuts(bucket) for bucket in range(len(self.layout.buckets))]
        exchange.reduce_scatter(self._gradients, cuts, self._transport, "gradients")
        if self.stage == 0:
            exchange.all_gather(self._gradients, cuts, self._transport, "gradients")
        return flat

    def _parts(self) -> dict[str, tuple[Array, bool]]:
        states = {name: (array, self.stage > 0) for name, array in self._updater.states.items()}
        return {"parameter": (flat_of(self._parameters), False)} | states

    def _written_from_outside(self, part: str) -> None:
        # At stage 0 every rank holds everything, but has written only what it would own.
        if self.stage == 0:
            cuts = [self.layout.cuts(bucket) for bucket in range(len(self.layout.buckets))]
            for offsets in cuts:
                steps = pairwise.all_gather(self.topology.rank, self.topology.size)
                self._transport.execute(steps, self._parts()[part][0], offsets, what=f"set_full of {part}")
        elif part == "parameter":
            self._publish()
            self._transport.node_barrier("set_full")

    def _publish(self) -> None:
        """Updated shards become visible to all; within a node that shares parameters a barrier is all it takes."""
        if self.stage > 0:
            cuts = [self.layout.cuts(bucket) for bucket in range(len(self.layout.buckets))]
            exchange.all_gather(self._parameters, cuts, self._transport, "updated parameters")

    def _reopen(self) -> None:
        """Ready for the next micro-batch: neighbours have read this rank's rows, and the single copy is whole."""
        self._transport.node_barrier("end of step")
        if self._by_hand and self._gradients is not None:
            flat_of(self._gradients)[...] = 0
        self._restart()

    def _drop(self) -> None:
        given = self._accumulated
        super()._drop()
        self._accumulated = given      # what lies in `grads` was not put there by hand

    def _restart(self) -> None:
        super()._restart()
        self._written.clear()
        self._accumulated = False
