"""The flat memory behind parameters and gradients, and the views by name that users see.

`parameter_buffer` and `gradient_rows` allocate what a stage's placement asks for. `GradientSlots` is what stages 2 and 3
have instead of a whole gradient: room for two buckets, which are reduced into the owners' shards as they fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpczero.arrays import Array, copy, from_any, is_device, launch, namespace, to_host
from hpczero.collectives import exchange
from hpczero.collectives.exchange import Buffer, flat_of
from hpczero.collectives.transport import Transport
from hpczero.kernels import loops
from hpczero.memory import Arena
from hpczero.zero.layout import Layout


def gradient_rows(arena: Arena, count: int, dtype: Any, purpose: str) -> Buffer:
    """A vector that neighbours can read: a row per rank on a host, private memory on a device."""
    return arena.rows(count, dtype, purpose) if arena.device.kind == "cpu" else arena.private(count, dtype, purpose)


def parameter_buffer(arena: Arena, count: int, dtype: Any, purpose: str, *, shared: bool) -> Buffer:
    """A vector that is gathered from all ranks: one copy per node if `shared`, else one per rank."""
    return arena.single(count, dtype, purpose) if shared else gradient_rows(arena, count, dtype, purpose)


def views(flat: Array, layout: Layout, names: tuple[str, ...] | list[str], *, base: int = 0,
          writable: bool = True) -> dict[str, Array]:
    """Each parameter as an array of its shape over `flat`, whose first element is element `base` of the vector."""
    found = {}
    for name in names:
        place = layout.places[name]
        view = flat[place.offset - base:place.offset - base + place.size].reshape(place.shape)
        if not writable and not is_device(view):
            view.flags.writeable = False
        found[name] = view
    return found


def fill(flat: Array, values: Mapping[str, Any], layout: Layout, names: tuple[str, ...] | list[str],
         base: int = 0) -> None:
    """Copies each parameter's values to its place; what pads them stays zero."""
    for name, view in views(flat, layout, names, base=base).items():
        copy(view, from_any(values[name]))


def put(into: Array, gradient: Array, weight: float, *, add: bool) -> None:
    """into = weight * gradient, or += with `add`; `gradient` of any layout and floating dtype, cast first.

    With weight 0 the gradient is not looked at: the mean over no samples is NaN, and must not reach the others.
    """
    kind = into.dtype
    if weight == 0:
        if not add:
            into[...] = 0
        return
    if is_device(into):
        source = gradient if is_device(gradient) else namespace(into).asarray(gradient)
        source = namespace(into).ascontiguousarray(source.astype(kind, copy=False)).reshape(-1)
        launch(loops.add_scaled_cuda if add else loops.write_scaled_cuda, into.size, into, source, kind.type(weight))
        return
    source = np.ascontiguousarray(to_host(gradient), dtype=kind).reshape(-1)
    (loops.add_scaled if add else loops.write_scaled)(into, source, kind.type(weight))


class GradientSlots:
    """Two buckets' worth of gradient memory, reduced into the owners' shards bucket by bucket.

    A bucket is opened, filled, and closed, on all ranks in the same order. Two slots take turns: a rank that has closed a
    bucket may open the next at once, while its neighbours still read the slot before, since the barrier of the next
    reduction tells that they are done.
    """

    def __init__(self, arena: Arena, layout: Layout, dtype: Any, transport: Transport):
        self._layout, self._transport = layout, transport
        num_slots = min(2, len(layout.buckets))
        self._slots = [gradient_rows(arena, layout.largest_bucket, dtype, "buffers") for _ in range(num_slots)]
        self._shard_cuts = layout.shard_cuts(transport.topology.rank)
        self.shards = arena.private(self._shard_cuts[-1], dtype, "gradients")
        self._turn = 0
        self._is_first = True

    def restart(self) -> None:
        """The next micro-batch is the first of a step: its sums replace what the shards hold."""
        self._is_first = True

    def open(self, bucket: int) -> dict[str, Array]:
        """The views, by name, into which this bucket's gradients go; every one must be written before `close`."""
        whole = self._layout.buckets[bucket]
        return views(flat_of(self._slots[self._turn]), self._layout, whole.names, base=whole.start)

    def close(self, bucket: int) -> None:
        """Sums the open bucket over all ranks and adds it to the shards. Called by every rank."""
        slot, whole = self._slots[self._turn], self._layout.buckets[bucket]
        self._turn = (self._turn + 1) % len(self._slots)
        cuts = [cut - whole.start for cut in self._layout.cuts(bucket)]
        exchange.reduce_scatter(slot, [cuts], self._transport, f"gradients of bucket {bucket}")
        rank = self._transport.topology.rank
        mine = flat_of(slot)[cuts[rank]:cuts[rank + 1]]
        put(self.shards[slice(*self._shard_cuts[bucket:bucket + 2])], mine, 1.0, add=not self._is_first)
        if len(self._slots) == 1:
            # The only slot is opened again next: neighbours must have read it.
            self._transport.node_barrier(f"gradients of bucket {bucket}")

    def micro_batch_done(self) -> None:
        self._is_first = False

