"""ZeRO stage 3: parameters are sharded too, and a layer exists in full only while it is being computed.

Rajbhandari et al., SC 2020, section 5.3. The engine runs the layers itself, since it must know when one is used: before a
layer's forward or backward pass its parameters are gathered from all ranks into one buffer, and the next layer takes their
place (the last one of the forward pass is still there for the backward pass). Its gradients are reduce-scattered as soon as
the layer's backward pass has produced them. Per step each parameter is gathered twice and each gradient reduced once: 1.5
times the traffic of stage 2, for 1 / ranks of the memory.

On a host the gathered layer is one copy per node, which its ranks fill together; layers get read-only views of it. A layer
must therefore not keep a parameter between forward and backward: it is handed its parameters both times.

The order of additions and every element's arithmetic are those of `ZeroOptimizer`: stages 0 to 3 give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpczero.arrays import Array, copy, to_host
from hpczero.collectives import exchange
from hpczero.collectives.exchange import flat_of
from hpczero.device import Device
from hpczero.errors import ConfigError
from hpczero.optim import Optimizer
from hpczero.optim.schedules import Schedule
from hpczero.topology import Topology
from hpczero.zero.buffers import GradientSlots, fill, parameter_buffer, put, views
from hpczero.zero.config import ZeroConfig
from hpczero.zero.layout import Layout, by_layer
from hpczero.zero.lifecycle import PartitionedTraining, listed
from hpczero.zero.param_groups import ParamGroup
from hpczero.zero.placement import checked_gradient
from hpczero.zero.step import FORWARD, STEP, StepReport, Updater, checked_lr, checked_weight

if TYPE_CHECKING:
    from mpi4py import MPI


class Layer(Protocol):
    """What the engine asks of a layer; `hpczero.models` has many."""

    shapes: dict[str, tuple[int, ...]]
    """Its parameters; may be empty."""

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        """(y, saved): the output, and what `backward` needs besides the parameters."""

    def backward(self, params: Mapping[str, Array], saved: Any, dy: Any) -> tuple[Any, Mapping[str, Array]]:
        """(dx, gradients by name)."""


class Zero3Engine(PartitionedTraining):
    """Trains a chain of layers whose parameters are spread over the ranks of a communicator.

    Called by every rank, like all its methods, and in the same order on each: gathering is collective.

    Parameters
    ----------
    layers : sequence of (name, Layer)
        In forward order. Parameter "weight" of layer "head" is called "head.weight".
    params : mapping of full name to array
        First values, float32 or float64, all on the host or all on one device; rank 0's count, and the arrays are only read.
    optimizer : one of `hpczero.optim`
    comm : Topology or MPI.Intracomm
        A communicator is duplicated; a topology is used, and stays the caller's to close.
    config : ZeroConfig
        With stage=3, its only choice here.
    device : Device, optional
        Where the parameters live; found from the arrays if not given.
    groups, schedule
        As for `ZeroOptimizer`.

    Examples
    --------
    >>> with Zero3Engine(model.layers, model.init(seed=1), AdamW(), comm) as engine:
    ...     for x, target in batches:
    ...         loss, dy = model.loss(engine.forward(x), target)
    ...         engine.backward(dy, weight=len(x))
    ...         engine.step()
    """

    def __init__(self, layers: Sequence[tuple[str, Layer]], params: Mapping[str, Any], optimizer: Optimizer,
                 comm: Topology | MPI.Intracomm, config: ZeroConfig | None = None, device: Device | None = None, *,
                 groups: Sequence[ParamGroup] = (), schedule: Schedule | None = None):
        self.layers = layers
        super().__init__(params, optimizer, comm, ZeroConfig(stage=3) if config is None else config, device, groups,
                         schedule)
        self.saved: list[Any] | None = None
        """What the layers keep from `forward` until `backward`, in forward order."""

    def forward(self, x: Any, *, train: bool = True) -> Any:
        """The output of the last layer for this rank's inputs (of which there may be none, with 0 rows).

        With `train=False` nothing is kept for `backward`. An error in a layer's forward pass is raised on every rank.
        """
        self._refuse_closed()
        saved, error = [], None
        with self._meter:
            # Layers are gathered together: who calls something else must be found out before the first of them.
            self._meet(0.0, None, FORWARD)
            for name, layer in self.layers:
                params = self._gathered(name, layer)
                try:
                    if error is None:
                        x, kept = layer.forward(params, x)
                        saved.append(kept)
                except Exception as wrong:      # noqa: BLE001 - the other ranks go on gathering, and must hear at the end
                    error = wrong
            self._meet(0.0, error, FORWARD)
        if train:
            self.saved = saved
        return x

    def backward(self, dy: Any, weight: float = 1.0) -> Any:
        """Gradients of all layers, reduced and added to the shards; returns the gradient by the first layer's input.

        Called once after each `forward`, equally often on all ranks before `step`. An error in a layer's backward pass is
        raised on every rank; what was accumulated for this step is dropped.

        Parameters
        ----------
        dy : array
            Gradient of the mean loss over this rank's samples by the output of `forward`.
        weight : float
            Number of samples behind it; 0 where a rank has none.
        """
        self._refuse_closed()
        error: Exception | None = None
        try:
            weight = checked_weight(weight)
            if self.saved is None:
                raise ConfigError("backward() before forward(): nothing was kept to go back through")
        except ConfigError as wrong:
            weight, error = 0.0, wrong
        with self._meter:
            return self._backward(dy, weight, error)

    def step(self, lr: float | None = None) -> StepReport:
        """As `ZeroOptimizer.step`: each rank updates the shards it owns. Nothing is published; the next gather does it."""
        start = time.perf_counter()
        self._refuse_closed()
        error = None
        try:
            lr = checked_lr(lr)
        except ConfigError as wrong:
            error = wrong
        with self._meter:
            self._meet(0.0, error, STEP, lr)
            weight = self._rounds.weight
            self._restart()
            decision = self._updater.decide(self._slots.shards, weight)
        rates: tuple[float, ...] = ()
        if not decision.reason:
            rates = self._updater.apply(self._shards, self._slots.shards, scale=decision.scale, lr=lr)
            self._held = None
        return self._report(decision, rates, start)

    def full_parameters(self) -> dict[str, np.ndarray]:
        """Host copies of all parameters, in the order of their names. Gathers layer by layer."""
        self._refuse_closed()
        found = {}
        for name, layer in self.layers:
            for short, view in self._gathered(name, layer).items():
                found[f"{name}.{short}"] = np.array(to_host(view))
        return {name: found[name] for name in sorted(found)}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as `ZeroOptimizer.state_dict` gives it."""
        self._refuse_closed()
        pieces = self.layout.pieces(self.topology.rank, in_shard=True)
        return self._updater.state_dict(3, ((piece, self._shards, piece.position, piece.position) for piece in pieces))

    def _checked(self, arrays: Mapping[str, Array]) -> str:
        if self.config.stage != 3:
            raise ConfigError(f"Zero3Engine is stage 3, and the settings say stage={self.config.stage}: take ZeroOptimizer")
        self.layers = tuple(self.layers)      # here, where the other ranks hear of it if that fails
        shapes = list(_shapes(self.layers))
        full_names = [name for name, _ in shapes]
        twice = {name for name in full_names if full_names.count(name) > 1}
        if twice or len(dict(self.layers)) < len(self.layers):
            raise ConfigError(f"layers: names must differ; twice there are {sorted(twice) or 'layers of one name'}")
        wanted = dict(shapes)
        for name, shape in wanted.items():
            if name not in arrays:
                raise ConfigError(f"params has no {name!r}, which a layer needs")
            if arrays[name].shape != tuple(shape):
                raise ConfigError(f"params[{name!r}] has shape {arrays[name].shape}, the layer needs {tuple(shape)}")
        for name in arrays:
            if name not in wanted:
                raise ConfigError(f"params has {name!r}, which no layer has")
        return "layers " + listed(wanted)

    def _lay_out(self, arrays: Mapping[str, Array]) -> Layout:
        names = {name: [f"{name}.{short}" for short in layer.shapes] for name, layer in self.layers}
        shapes = {full: arrays[full].shape for owned in names.values() for full in owned}
        layout = by_layer(shapes, list(names.values()), self.topology.size, self._grouping.group_of)
        self._bucket_of = {name: layout.places[owned[0]].bucket for name, owned in names.items() if owned}
        return layout

    def _allocate(self) -> None:
        layout, arena = self.layout, self._arena
        self._updater = Updater(self._grouping, self._schedule, layout, arena, self._transport, self.dtype, self.config,
                                in_shard=True, whole=False, params_in_shard=True)
        self._shards = arena.private(self._updater.shard_cuts[-1], self.dtype, "parameters")
        self._layer_buffer = parameter_buffer(arena, layout.largest_bucket, self.dtype, "buffers", shared=self.shared)
        self._slots = GradientSlots(arena, layout, self.dtype, self._transport)
        self._held: int | None = None      # the bucket whose parameters the layer buffer holds

    def _start_from(self, arrays: Mapping[str, Array]) -> None:
        """Rank 0's values, a layer at a time through the layer buffer, of which every rank keeps its shard."""
        flat = flat_of(self._layer_buffer)
        for index, bucket in enumerate(self.layout.buckets):
            if self.topology.rank == 0:
                fill(flat, arrays, self.layout, bucket.names, base=bucket.start)
            exchange.broadcast(self._layer_buffer, self._transport, "initial parameters")
            lo, hi = self._my_cuts(index)
            copy(self._shard_of(index), flat[lo:hi])
            self._transport.barrier("initial parameters")

    def _forget(self) -> None:
        self.saved = None

    def _gathered(self, name: str, layer: Layer) -> dict[str, Array]:
        """A layer's parameters by short name, whole; they stay until the next layer is gathered."""
        if name not in self._bucket_of:
            return {}
        index = self._bucket_of[name]
        bucket = self.layout.buckets[index]
        flat = flat_of(self._layer_buffer)
        if self._held != index:
            what = f"parameters of layer {name}"
            self._transport.node_barrier(what)      # neighbours are done with the layer that is there
            lo, hi = self._my_cuts(index)
            copy(flat[lo:hi], self._shard_of(index))
            cuts = [cut - bucket.start for cut in self.layout.cuts(index)]
            exchange.all_gather(self._layer_buffer, [cuts], self._transport, what)
            self._transport.node_barrier(what)      # and every part of this one has arrived
            self._held = index
        found = views(flat, self.layout, bucket.names, base=bucket.start, writable=False)
        return {short: found[f"{name}.{short}"] for short in layer.shapes}

    def _backward(self, dy: Any, weight: float, error: Exception | None) -> Any:
        self._meet(weight, error)
        for (name, layer), kept in zip(reversed(self.layers), reversed(self.saved), strict=True):
            params = self._gathered(name, layer)
            gradients: Mapping[str, Any] = {}
            try:
                if error is None:
                    dy, gradients = layer.backward(params, kept, dy)
                self._fill(name, gradients, weight)
            except Exception as wrong:      # noqa: BLE001 - the other ranks go on gathering, and must hear at the end
                error = wrong
            if name in self._bucket_of:
                self._slots.close(self._bucket_of[name])
        self._slots.micro_batch_done()
        self.saved = None
        self._meet(0.0, error)
        return dy

    def _fill(self, name: str, gradients: Mapping[str, Any], weight: float) -> None:
        """A layer's gradients into its open bucket; zero where there is none."""
        if name not in self._bucket_of:
            return
        places = self._slots.open(self._bucket_of[name])
        for place in places.values():
            place[...] = 0
        for short, gradient in gradients.items():
            full = f"{name}.{short}"
            if full not in places:
                raise ConfigError(f"layer {name!r} gave a gradient of {short!r}, which is none of its parameters")
            put(places[full].reshape(-1), checked_gradient(full, gradient, places[full].shape), weight, add=False)

    def _parts(self) -> dict[str, tuple[Array, bool]]:
        return {"parameter": (self._shards, True)} | {name: (array, True) for name, array in self._updater.states.items()}

    def _written_from_outside(self, part: str) -> None:
        self._held = None      # what the layer buffer holds is no longer so
        self._transport.node_barrier("set_full")

    def _my_cuts(self, index: int) -> tuple[int, int]:
        """Where this rank's shard lies in the layer buffer."""
        start, rank = self.layout.buckets[index].start, self.topology.rank
        lo, hi = self.layout.cuts(index)[rank:rank + 2]
        return lo - start, hi - start

    def _shard_of(self, index: int) -> Array:
        return self._shards[slice(*self._updater.shard_cuts[index:index + 2])]


def _shapes(layers: Sequence[tuple[str, Layer]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, layer in layers:
        for short, shape in layer.shapes.items():
            yield f"{name}.{short}", shape
