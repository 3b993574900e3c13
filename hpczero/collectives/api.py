"""The collectives as a program calls them: `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `reduce`.

They take arrays of any shape and layout, in host or device memory: NumPy, CuPy, or anything that shares its memory by the
buffer protocol, DLPack or the CUDA array interface. In place by default; with `out=`, the input stays as it is. Every rank
of the topology calls them with the same arguments but for the values, and all ranks get the same bits. What differs or is
wrong is raised on every rank. With `blocking=False` the communication thread does the work, and a `Handle` is returned.
Names of algorithms and what each guarantees: `collectives.selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpczero.arrays import Array, copy, from_any
from hpczero.collectives import reduction
from hpczero.collectives.call import Invocation, shard_offsets, shard_slice
from hpczero.collectives.comm_thread import Handle, submit
from hpczero.collectives.selection import Order
from hpczero.errors import ConfigError
from hpczero.topology import Topology

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter", "shard_offsets", "shard_slice"]


def all_reduce(array: Any, topology: Topology, *, op: str = "sum", algorithm: str = "adaptive", order: Order = "any",
               out: Any = None, blocking: bool = True) -> Array | Handle:
    """Combines the arrays of all ranks, element by element; every rank ends with the result.

    Called by every rank of `topology`, with the same shape, dtype, op, algorithm and order on each.

    Parameters
    ----------
    array : float16, bfloat16, float32, float64, int32, int64 or uint8, any shape and strides; host or device
        This rank's contribution; overwritten with the result unless `out` is given. Half types are added in float32, and
        must hold the sum where a mean is asked for. Arrays of `topology.empty` come from the same call on every rank.
    op : {"sum", "mean", "prod", "min", "max"}
    algorithm : str
        A name from `selection.ALGORITHMS["all_reduce"]`; "adaptive" takes the fastest that keeps `order`, the same on every
        rank, but under order="any" not necessarily on every run (docs/choice.md).
    order : {"any", "canonical", "world"}
        What the order of additions may depend on; see `collectives.selection`.
    out : array of the same shape and dtype, optional
        Where the result goes; must not overlap `array` in part.
    blocking : bool
        False returns a `Handle` at once; its `wait()` gives what is returned otherwise. See `collectives.comm_thread`.

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
    _refuse_communicator(topology)
    if blocking and out is None and _made_before(array, topology, op, algorithm, order):
        return array
    if not blocking:
        return submit(topology, array, lambda: all_reduce(array, topology, op=op, algorithm=algorithm, order=order, out=out))
    topology.drain()
    call = Invocation("all_reduce", array, topology, op=op, algorithm=algorithm, order=order, out=out)
    if out is None:
        call.require_writable()
    flat = call.begin()
    call.run(flat)
    return call.finish(flat)


def reduce_scatter(array: Any, topology: Topology, *, op: str = "sum", algorithm: str = "adaptive", order: Order = "any",
                   counts: Sequence[int] | None = None, out: Any = None, blocking: bool = True) -> Array | Handle:
    """Combines the arrays of all ranks and leaves rank r shard r of the result.

    As `all_reduce`, but for what comes back. Shards are those of `shard_slice`: of n elements (in C order), the first
    n mod p shards hold one element more; a shard may be empty. `counts` cuts otherwise.

    Parameters
    ----------
    array : C-contiguous unless `out` is given
        Overwritten unless `out` is given: outside the returned shard it holds partial sums afterwards.
    counts : sequence of int, optional
        Elements of each rank's shard, one number per rank, the same on every rank; they add up to the array's size.
    out : 1-D array of the shard's size, optional

    Returns
    -------
    1-D view of `array`, or `out`
    """
    _refuse_communicator(topology)
    if not blocking:
        return submit(topology, array, lambda: reduce_scatter(array, topology, op=op, algorithm=algorithm, order=order,
                                                       counts=counts, out=out))
    topology.drain()
    call = Invocation("reduce_scatter", array, topology, op=op, algorithm=algorithm, order=order, counts=counts,
                      in_place=out is None)
    shard = slice(*call.shards[topology.rank:topology.rank + 2])
    call.expect("out", out, (shard.stop - shard.start,), written=True)
    if out is None:
        call.require_contiguous()
        call.require_writable()
    flat = call.begin(apart=out is not None)
    call.run(flat)
    mine = flat[shard]
    if op == "mean":
        reduction.divide(mine, topology.size)
    if out is None:
        return mine
    copy(from_any(out), mine)
    return out


def all_gather(array: Any, topology: Topology, *, algorithm: str = "adaptive", counts: Sequence[int] | None = None,
               out: Any = None, blocking: bool = True) -> Array | Handle:
    """Puts together the shards of all ranks; every rank ends with the whole.

    Called by every rank. In place, `array` is the whole vector, in which rank r has filled shard r (`shard_slice`, or as
    `counts` says, see `reduce_scatter`). With `out`, `array` is the shard alone and `out` the whole, which gives its size.

    Returns
    -------
    `array`, or `out`
    """
    _refuse_communicator(topology)
    if not blocking:
        return submit(topology, array, lambda: all_gather(array, topology, algorithm=algorithm, counts=counts, out=out))
    topology.drain()
    whole = array if out is None else out
    call = Invocation("all_gather", whole, topology, algorithm=algorithm, counts=counts)
    call.require_writable()
    shard = slice(*call.shards[topology.rank:topology.rank + 2])
    if out is not None:
        call.expect("array", array, (shard.stop - shard.start,), written=False)
    flat = call.begin(replaces=out is not None)
    if out is not None:
        copy(flat[shard], from_any(array))
    call.run(flat)
    return call.finish(flat)


def broadcast(array: Any, topology: Topology, *, root: int = 0, algorithm: str = "adaptive",
              blocking: bool = True) -> Array | Handle:
    """Every rank's `array` becomes that of rank `root`. Called by every rank, with the same root."""
    _refuse_communicator(topology)
    if not blocking:
        return submit(topology, array, lambda: broadcast(array, topology, root=root, algorithm=algorithm))
    topology.drain()
    call = Invocation("broadcast", array, topology, algorithm=algorithm, root=root)
    call.require_writable()
    flat = call.begin()
    call.run(flat)
    return call.finish(flat)


def reduce(array: Any, topology: Topology, *, root: int = 0, op: str = "sum", algorithm: str = "adaptive",
           order: Order = "any", out: Any = None, blocking: bool = True) -> Array | Handle | None:
    """Combines the arrays of all ranks; rank `root` ends with the result, the arrays of the others stay as they are.

    As `all_reduce` otherwise; `out` counts on the root only. Returns the result on the root, None elsewhere.
    """
    _refuse_communicator(topology)
    if not blocking:
        return submit(topology, array, lambda: reduce(array, topology, root=root, op=op, algorithm=algorithm, order=order,
                                                      out=out))
    topology.drain()
    at_root = topology.rank == root
    call = Invocation("reduce", array, topology, op=op, algorithm=algorithm, order=order, root=root,
                      out=out if at_root else None)
    if at_root and out is None:
        call.require_writable()
    flat = call.begin(apart=not at_root)
    call.run(flat)
    if not at_root:
        return None
    if op == "mean":
        reduction.divide(flat, topology.size)
    return call.finish(flat)


def _refuse_communicator(topology: Any) -> None:
    if not isinstance(topology, Topology):
        raise ConfigError(f"topology: a hpczero.Topology is needed, not {type(topology).__name__}; make one of a communicator, "
                          "hpczero.Topology(comm), and use it for all calls")


def _made_before(array: Any, topology: Topology, op: str, algorithm: str, order: str) -> bool:
    """The short way of an all-reduce that was made before; False if there is none."""
    transport = topology.resources.get("transport")
    if transport is None or type(array) is not np.ndarray or not array.flags.carray:
        return False
    topology.drain()      # before looking: what is in the queue may make all ranks forget
    try:
        again = transport.made.get((array.shape, array.dtype, op, algorithm, order))
    except TypeError:      # no name but a list, say: the long way tells all ranks
        return False
    return again is not None and again(array if array.ndim == 1 else array.reshape(-1))
