"""The collectives as a program calls them: `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `reduce`.

They take arrays of any shape and layout, in host or device memory: NumPy, CuPy, or anything that shares its memory by the
buffer protocol, DLPack or the CUDA array interface. In place by default; with `out=`, the input stays as it is. Every rank
of the topology calls them with the same arguments but for the values, and all ranks get the same bits. What differs or is
wrong is raised on every rank. Names of algorithms and what each guarantees: `collectives.selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, from_any, is_device, is_half, namespace, to_host
from hpczero.collectives import butterfly, hierarchical, pairwise, reduction, ring, tree, window
from hpczero.collectives.guard import agree
from hpczero.collectives.order import balanced, canonical
from hpczero.collectives.schedule import Step
from hpczero.collectives.selection import Call, Order, choose
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError
from hpczero.memory import NodeRows
from hpczero.topology import Topology


def all_reduce(array: Any, topology: Topology, *, op: str = "sum", algorithm: str = "adaptive", order: Order = "any",
               out: Any = None) -> Array:
    """Combines the arrays of all ranks, element by element; every rank ends with the result.

    Called by every rank of `topology`, with the same shape, dtype, op, algorithm and order on each.

    Parameters
    ----------
    array : float16, bfloat16, float32, float64, int32, int64 or uint8, any shape and strides; host or device
        This rank's contribution; overwritten with the result unless `out` is given. Half types are added in float32, and
        must hold the sum where a mean is asked for. Arrays of `topology.empty` come from the same call on every rank.
    op : {"sum", "mean", "prod", "min", "max"}
    algorithm : str
        A name from `selection.ALGORITHMS["all_reduce"]`; "adaptive" lets a rule choose, the same on every rank.
    order : {"any", "canonical", "world"}
        What the order of additions may depend on; see `collectives.selection`.
    out : array of the same shape and dtype, optional
        Where the result goes; must not overlap `array` in part.

    Returns
    -------
    `array`, or `out`

    Raises
    ------
    MismatchError
        Shape, dtype or settings differ between ranks; on every rank, naming the odd one.
    ConfigError
        An argument that cannot be honoured.
    """
    call = _Call("all_reduce", array, topology, op, algorithm, order, out)
    if out is None:
        call.require_writable()
    flat = call.begin()
    _RUN_ALL_REDUCE[call.algorithm](call, flat)
    if op == "mean":
        reduction.divide(flat, topology.size)
    return call.finish(flat)


def reduce_scatter(array: Any, topology: Topology, *, op: str = "sum", algorithm: str = "adaptive", order: Order = "any",
                   out: Any = None) -> Array:
    """Combines the arrays of all ranks and leaves rank r shard r of the result.

    As `all_reduce`, but for what comes back. Shards are those of `shard_slice`: of n elements (in C order), the first
    n mod p shards hold one element more; a shard may be empty.

    Parameters
    ----------
    array : C-contiguous unless `out` is given
        Overwritten unless `out` is given: outside the returned shard it holds partial sums afterwards.
    out : 1-D array of the shard's size, optional

    Returns
    -------
    1-D view of `array`, or `out`
    """
    call = _Call("reduce_scatter", array, topology, op, algorithm, order, None)
    shard = shard_slice(call.count, topology.rank, topology.size)
    call.expect("out", out, (shard.stop - shard.start,))
    if out is None:
        call.require_contiguous()
        call.require_writable()
    flat = call.begin(apart=out is not None)
    _RUN_REDUCE_SCATTER[call.algorithm](call, flat)
    mine = flat[shard]
    if op == "mean":
        reduction.divide(mine, topology.size)
    if out is None:
        return mine
    copy(from_any(out), mine)
    return out


def all_gather(array: Any, topology: Topology, *, algorithm: str = "adaptive", out: Any = None) -> Array:
    """Puts together the shards of all ranks; every rank ends with the whole.

    Called by every rank. In place, `array` is the whole vector, in which rank r has filled shard r (`shard_slice`). With
    `out`, `array` is the shard alone and `out` the whole, which gives its size.

    Returns
    -------
    `array`, or `out`
    """
    whole = array if out is None else out
    call = _Call("all_gather", whole, topology, "sum", algorithm, "any", None)
    call.require_writable()
    shard = shard_slice(call.count, topology.rank, topology.size)
    if out is not None:
        call.expect("array", array, (shard.stop - shard.start,))
    flat = call.begin()
    if out is not None:
        copy(flat[shard], from_any(array))
    _RUN_ALL_GATHER[call.algorithm](call, flat)
    return call.finish(flat)


def broadcast(array: Any, topology: Topology, *, root: int = 0, algorithm: str = "adaptive") -> Array:
    """Every rank's `array` becomes that of rank `root`. Called by every rank, with the same root."""
    call = _Call("broadcast", array, topology, "sum", algorithm, "any", None, root=root)
    call.require_writable()
    flat = call.begin()
    if call.algorithm == "system":
        raw = _host(flat).view(np.uint8)
        call.complete(topology.world.Ibcast([raw, MPI.BYTE], root))
        call.back(flat, raw.view(flat.dtype))
    else:
        call.run(tree.broadcast(topology.rank, topology.size, root), flat)
    return call.finish(flat)


def reduce(array: Any, topology: Topology, *, root: int = 0, op: str = "sum", algorithm: str = "adaptive",
           order: Order = "any", out: Any = None) -> Array | None:
    """Combines the arrays of all ranks; rank `root` ends with the result, the arrays of the others stay as they are.

    As `all_reduce` otherwise; `out` counts on the root only. Returns the result on the root, None elsewhere.
    """
    at_root = topology.rank == root
    call = _Call("reduce", array, topology, op, algorithm, order, out if at_root else None, root=root)
    if at_root and out is None:
        call.require_writable()
    flat = call.begin(apart=not at_root)
    if call.algorithm == "tree":
        call.run(tree.reduce(topology.rank, topology.size, root), flat)
    elif call.algorithm == "pairwise":
        call.run(pairwise.reduce(topology.rank, topology.size, root, call.tree), flat)
    else:
        mine = _host(flat)
        total = np.empty_like(mine)
        call.complete(topology.world.Ireduce(mine, total if at_root else None, call.mpi_op, root))
        if at_root:
            copy(flat, total)
    if not at_root:
        return None
    if op == "mean":
        reduction.divide(flat, topology.size)
    return call.finish(flat)


def shard_slice(count: int, rank: int, size: int) -> slice:
    """The elements that rank `rank` of `size` owns among `count`: sizes differ by one at most, larger ones first."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def shard_offsets(count: int, size: int) -> list[int]:
    """Where the shards of `shard_slice` begin, and the end of the last: size + 1 numbers."""
    return [shard_slice(count, rank, size).start for rank in range(size)] + [count]


class _Call:
    """One call of a collective: its arguments checked, agreed on by all ranks, and as a flat vector."""

    def __init__(self, operation: str, array: Any, topology: Topology, op: str, algorithm: str, order: Order,
                 out: Any, root: int = 0):
        self.operation, self.topology, self.op, self.order, self.root = operation, topology, op, order, root
        self.transport = Transport.of(topology)
        self.original, self.given_out = array, out
        self.error: Exception | None = None
        self.count, self.what, self.algorithm = 0, operation, algorithm
        try:
            self._check(array, algorithm, out)
        except (TypeError, BufferError) as error:
            self.error = ConfigError(f"{operation}: {error}")
        except Exception as error:      # noqa: BLE001 - whatever an argument does when it is looked at: the others must hear
            self.error = error

    def expect(self, name: str, array: Any, shape: tuple[int, ...]) -> None:
        """Notes an error unless `array` is absent or a writable array of this shape and the call's dtype."""
        if array is None or self.error is not None:
            return
        try:
            array = from_any(array)
        except TypeError as error:
            self.error = ConfigError(f"{self.operation}: {name}: {error}")
            return
        if array.shape != shape or array.dtype != self.array.dtype:
            self.error = ConfigError(f"{self.operation}: {name} must be {shape} of {self.array.dtype}, not "
                                     f"{array.shape} of {array.dtype}")
        elif name == "out" and not is_device(array) and not array.flags.writeable:
            self.error = ConfigError(f"{self.operation}: {name} is read-only")

    def require_writable(self) -> None:
        if self.error is None and not is_device(self.array) and not self.array.flags.writeable:
            self.error = ConfigError(f"{self.operation}: the array is read-only; pass out=, or a copy")

    def require_contiguous(self) -> None:
        if self.error is None and not self.array.flags.c_contiguous:
            self.error = ConfigError(f"{self.operation}: a strided array has no shard that is a view; pass out=")

    def begin(self, *, apart: bool = False) -> Array:
        """The vector to work on, after all ranks have agreed; a copy if `apart`, or where the array is strided."""
        agree(self.transport, self.what, self.error)
        if self.given_out is not None:
            copy(self.out, self.array)
            self.array = self.out
        if apart or not self.array.flags.c_contiguous:
            return namespace(self.array).ascontiguousarray(self.array).reshape(-1).copy()
        return self.array.reshape(-1)

    def finish(self, flat: Array) -> Array:
        """The result in the caller's array, or in `out`."""
        if not self.array.flags.c_contiguous:
            copy(self.array, flat.reshape(self.array.shape))
        return self.original if self.given_out is None else self.given_out

    @property
    def tree(self) -> Any:
        """The order of additions where it can be chosen."""
        nodes = self.topology.map.nodes
        return balanced(range(self.topology.size)) if self.order == "world" else canonical(nodes)

    @property
    def mpi_op(self) -> MPI.Op:
        return {"sum": MPI.SUM, "mean": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}[self.op]

    def run(self, steps: Iterable[Step], flat: Array, num_blocks: int | None = None) -> None:
        offsets = shard_offsets(flat.size, num_blocks or self.topology.size)
        self.transport.execute(steps, flat, offsets, self.op, self.what)

    def complete(self, request: MPI.Request) -> None:
        self.transport.wait([request], self.what)

    def back(self, flat: Array, result: np.ndarray) -> None:
        """What MPI left in host memory, into a device array; a host array has it already."""
        if is_device(flat):
            copy(flat, result)

    def node_rows(self, flat: Array) -> NodeRows | None:
        """The rows that `flat` is one of, if it came whole from `topology.empty`."""
        for rows in self.topology.resources.get("node-shared arrays", ()):
            mine = rows.mine
            if not is_device(flat) and flat.size and mine.size == flat.size and mine.dtype == flat.dtype \
                    and mine.ctypes.data == flat.ctypes.data:
                return rows
        return None

    def _check(self, array: Any, algorithm: str, out: Any) -> None:
        self.array = from_any(array)
        self.count = self.array.size
        reduction.check(self.array.dtype, self.op)
        if not isinstance(self.root, (int, np.integer)) or not 0 <= self.root < self.topology.size:
            raise ConfigError(f"{self.operation}: root={self.root!r} is no rank of 0 to {self.topology.size - 1}")
        if out is not None:
            self._check_out(out)
        nbytes = self.count * self.array.dtype.itemsize
        self._memory = self._which_memory(self.array if out is None else self.out)
        facts = Call(self.operation, nbytes, self.topology.map, self.order, is_device(self.array),
                     self._memory != "private", is_half(self.array.dtype))
        self.algorithm = choose(facts, algorithm)
        shape = "x".join(map(str, self.array.shape)) or "scalar"
        self.what = (f"{self.operation} of {self.count} elements ({shape}) {self.array.dtype} op={self.op} "
                     f"algorithm={self.algorithm} order={self.order} root={self.root} memory={self._memory}")

    def _check_out(self, out: Any) -> None:
        self.out = from_any(out)
        self.expect("out", out, self.array.shape)
        if self.error is not None:
            raise self.error
        if not is_device(self.out) and not is_device(self.array) and np.may_share_memory(self.out, self.array):
            same = self.out.ctypes.data == self.array.ctypes.data and self.out.strides == self.array.strides
            if not same and np.shares_memory(self.out, self.array):
                raise ConfigError(f"{self.operation}: out overlaps the array in part")

    def _which_memory(self, array: Array) -> str:
        """"window 3" for the array that the fourth `topology.empty` gave, else "private"; ranks must agree on it.

        They would otherwise wait for each other in different ways, or read rows that the others do not mean.
        """
        if not is_device(array) and array.flags.c_contiguous:
            rows = self.node_rows(array.reshape(-1))
            if rows is not None:
                return f"window {self.topology.resources['node-shared arrays'].index(rows)}"
        return "private"


def _host(flat: Array) -> np.ndarray:
    return to_host(flat) if is_device(flat) else flat


def _scheduled(schedule: Callable[[int, int], Iterable[Step]], num_blocks: Callable[[int], int] | None = None) -> Callable:
    def run(call: _Call, flat: Array) -> None:
        size = call.topology.size
        call.run(schedule(call.topology.rank, size), flat, num_blocks(size) if num_blocks else None)

    return run


def _pairwise_reducing(schedule: Callable) -> Callable:
    return lambda call, flat: call.run(schedule(call.topology.rank, call.topology.size, call.tree), flat)


def _all_reduce_nodes(call: _Call, flat: Array) -> None:
    """Shared memory inside the node and messages between nodes; messages alone where the array is on a device."""
    topology, transport = call.topology, call.transport
    if is_device(flat):
        call.run(hierarchical.all_reduce(topology.rank, topology.map), flat)
        return
    offsets = shard_offsets(flat.size, topology.size)
    rows = call.node_rows(flat)
    if rows is None:
        window.Staging.of(topology).all_reduce(flat, offsets, transport, call.op, call.what)
    else:
        transport.barrier(topology.node, call.what)      # every contribution is written
        window.reduce_scatter(rows, offsets, transport, call.op, call.what)
        window.all_gather(rows, offsets, transport, rows.mine, call.what)
        transport.barrier(topology.node, call.what)      # the caller may write its row as soon as this returns


def _reduce_scatter_nodes(call: _Call, flat: Array) -> None:
    topology, transport = call.topology, call.transport
    if is_device(flat):
        call.run(hierarchical.reduce_scatter(topology.rank, topology.map), flat)
        return
    offsets = shard_offsets(flat.size, topology.size)
    rows = call.node_rows(flat)
    if rows is None:
        window.Staging.of(topology).reduce_scatter(flat, offsets, transport, call.op, call.what)
    else:
        transport.barrier(topology.node, call.what)
        window.reduce_scatter(rows, offsets, transport, call.op, call.what)
        transport.barrier(topology.node, call.what)


def _all_gather_nodes(call: _Call, flat: Array) -> None:
    topology, transport = call.topology, call.transport
    if is_device(flat):
        call.run(hierarchical.all_gather(topology.rank, topology.map), flat)
        return
    offsets = shard_offsets(flat.size, topology.size)
    rows = call.node_rows(flat)
    if rows is None:
        window.Staging.of(topology).all_gather(flat, offsets, transport, call.what)
    else:
        window.all_gather(rows, offsets, transport, rows.mine, call.what)
        transport.barrier(topology.node, call.what)


def _system_all_reduce(call: _Call, flat: Array) -> None:
    mine = _host(flat)
    call.complete(call.topology.world.Iallreduce(MPI.IN_PLACE, mine, call.mpi_op))
    call.back(flat, mine)


def _system_reduce_scatter(call: _Call, flat: Array) -> None:
    topology = call.topology
    offsets = shard_offsets(flat.size, topology.size)
    shard = np.empty(offsets[topology.rank + 1] - offsets[topology.rank], flat.dtype)
    counts = np.diff(offsets).tolist()
    call.complete(topology.world.Ireduce_scatter(_host(flat), shard, counts, call.mpi_op))
    copy(flat[offsets[topology.rank]:offsets[topology.rank + 1]], shard)


def _system_all_gather(call: _Call, flat: Array) -> None:
    topology = call.topology
    offsets = np.array(shard_offsets(flat.size, topology.size)) * flat.dtype.itemsize
    raw = _host(flat).view(np.uint8)
    target = [raw, np.diff(offsets).tolist(), offsets[:-1].tolist(), MPI.BYTE]
    call.complete(topology.world.Iallgatherv(MPI.IN_PLACE, target))
    call.back(flat, raw.view(flat.dtype))


_RUN_ALL_REDUCE = {
    "tree": _scheduled(tree.all_reduce),
    "ring": _scheduled(ring.all_reduce),
    "butterfly": _scheduled(butterfly.all_reduce),
    "halving": _scheduled(butterfly.halving_all_reduce, butterfly.num_halves),
    "pairwise": _pairwise_reducing(pairwise.all_reduce),
    "window": _all_reduce_nodes,
    "hierarchical": _all_reduce_nodes,
    "system": _system_all_reduce,
}
_RUN_REDUCE_SCATTER = {
    "ring": _scheduled(ring.reduce_scatter),
    "halving": _scheduled(butterfly.halving_reduce_scatter),
    "pairwise": _pairwise_reducing(pairwise.reduce_scatter),
    "window": _reduce_scatter_nodes,
    "hierarchical": _reduce_scatter_nodes,
    "system": _system_reduce_scatter,
}
_RUN_ALL_GATHER = {
    "ring": _scheduled(ring.all_gather),
    "halving": _scheduled(butterfly.doubling_all_gather),
    "pairwise": _scheduled(pairwise.all_gather),
    "window": _all_gather_nodes,
    "hierarchical": _all_gather_nodes,
    "system": _system_all_gather,
}
