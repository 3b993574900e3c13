"""Memory with an owner and a purpose: private to a rank, or shared by the ranks of a node.

Three shapes cover what training needs. `private` is an ordinary array. `NodeRows` is one block with a row per rank of the
node, which every rank of the node can read: gradients live there, so that a reduction reads its neighbours' rows in
place. `NodeRows` with a single row is one copy for the whole node: shared parameters live there. On a node with one
rank, and on devices, all of them are private memory.

`Arena` counts every byte by purpose, so that a program can print what it holds beside what the formula says. A shared
copy is charged to the node's ranks in equal parts.

Facts behind the code: MPICH allocates beyond the room in /dev/shm and dies by SIGBUS at the first touch, hence the check
before and the touch at once; rows of equal layout at a distance of a power of two lose 30 to 40 % to 4 KiB aliasing,
hence the odd row length; ranks in different containers can pass for one node and not share memory, hence the token.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.device import Device
from hpczero.errors import HpczeroError, RoomError, raise_together
from hpczero.topology import Topology, refuse_finalised
from hpczero.waiting import arrive

SHARED_MEMORY_FOLDER = "/dev/shm"
LINE_BYTES = 64
PAGE_BYTES = 4096


class NodeRows:
    """A block that the ranks of one node share: (num_rows, stride) elements, C-contiguous.

    Attributes
    ----------
    all : (num_rows, stride) array
        Every row. With one row per rank, row `local_rank` belongs to that rank.
    mine : (count,) array
        This rank's row without its padding; with a single row, the copy that all share.
    """

    def __init__(self, block: np.ndarray, count: int, row: int, window: MPI.Win | None, *, single: bool):
        self.all = block
        self.mine = block[row, :count]
        self.is_single = single      # a node of one rank has a single row too, and its neighbours have one each
        self._window = window

    @property
    def nbytes(self) -> int:
        return self.all.nbytes

    def viewed(self, dtype: np.dtype) -> NodeRows:
        """The same memory as elements of another type; not to be closed."""
        return self._view(self.all.view(dtype), self.mine.view(dtype))

    def part(self, lo: int, hi: int) -> NodeRows:
        """Elements `lo` to `hi` of every row; not to be closed."""
        return self._view(self.all[:, lo:hi], self.mine[lo:hi])

    def _view(self, block: np.ndarray, mine: np.ndarray) -> NodeRows:
        rows = NodeRows.__new__(NodeRows)
        rows.all, rows.mine, rows.is_single, rows._window = block, mine, self.is_single, None
        return rows

    def close(self) -> None:
        """Called by every rank of the node."""
        refuse_finalised()
        self.all = self.mine = None
        if self._window is not None:
            self._window.Free()
            self._window = None


def node_rows(topology: Topology, count: int, dtype: np.dtype, *, single: bool = False) -> NodeRows:
    """Zeroed memory of `count` elements per rank (or, if `single`, per node), readable by the whole node.

    Called by every rank of the topology, with its own count where ranks of different nodes differ, the same within a
    node. Raises RoomError on all ranks if /dev/shm is too small on any node.
    """
    arrive(topology.world, "making memory that the ranks of a node share (in the first collective, say)")
    node = topology.node
    num_rows = 1 if single else node.size
    stride = _odd_stride(count, dtype.itemsize) if num_rows > 1 else max(count, 1)
    row = 0 if single else node.rank
    nbytes = num_rows * stride * dtype.itemsize
    # Nodes of one rank share with nobody, but take part in both agreements: the other nodes may find something.
    shares = node.size > 1
    # Forced nodes may share a machine: what all of them are about to take must fit together.
    together = topology.machine.allreduce(nbytes if shares and node.rank == 0 else 0)
    raise_together(topology.world, _no_room(together) if together and topology.machine.rank == 0 else None)
    # One rank allocates the whole block: rows then lie at a known distance in one C-contiguous array, which is what
    # lets the reduction kernel vectorise.
    window = MPI.Win.Allocate_shared(nbytes if node.rank == 0 else 0, 1, comm=node) if shares else None
    memory = window.Shared_query(0)[0] if shares else np.zeros(nbytes, np.uint8)
    block = np.frombuffer(memory, dtype=dtype, count=num_rows * stride).reshape(num_rows, stride)
    if "memory is shared" not in topology.resources:      # the same on every rank: each has made as many windows
        raise_together(topology.world, _not_shared(node, block) if shares and nbytes else None)
        topology.resources["memory is shared"] = True
    if shares:
        _touch(block, node)
        node.Barrier()
    return NodeRows(block, count, row, window, single=single)


class Arena:
    """Allocates for one user (an optimizer, an engine) and knows how many bytes serve which purpose.

    `bytes_by_purpose` counts what this rank is charged with. `close` frees all windows, collectively.
    """

    def __init__(self, topology: Topology, device: Device):
        self.topology, self.device = topology, device
        self.bytes_by_purpose: dict[str, float] = {}
        self._rows: list[NodeRows] = []
        self._num_private = 0

    def private(self, count: int, dtype: Any, purpose: str) -> Any:
        """(count,) zeroed elements on the arena's device."""
        dtype = np.dtype(dtype)
        if self.device.kind == "cpu":
            array = _staggered_zeros(count, dtype, self._num_private)
            self._num_private += 1
        else:
            array = self.device.xp.zeros(count, dtype)
        self._charge(purpose, count * dtype.itemsize)
        return array

    def rows(self, count: int, dtype: Any, purpose: str) -> NodeRows:
        """A row per rank that its node can read; host memory only. Called by every rank."""
        return self._shared(count, dtype, purpose, single=False)

    def single(self, count: int, dtype: Any, purpose: str) -> NodeRows:
        """One copy for all ranks of the node; host memory only. Called by every rank."""
        return self._shared(count, dtype, purpose, single=True)

    def close(self) -> None:
        for rows in reversed(self._rows):
            rows.close()
        self._rows.clear()

    def _shared(self, count: int, dtype: Any, purpose: str, *, single: bool) -> NodeRows:
        rows = node_rows(self.topology, count, np.dtype(dtype), single=single)
        self._rows.append(rows)
        self._charge(purpose, rows.nbytes / self.topology.node.size)
        return rows

    def _charge(self, purpose: str, nbytes: float) -> None:
        self.bytes_by_purpose[purpose] = self.bytes_by_purpose.get(purpose, 0) + nbytes


def _odd_stride(count: int, itemsize: int) -> int:
    """Elements per row: whole cache lines, and never a multiple of 4 KiB from one row to the next."""
    nbytes = -(-max(count, 1) * itemsize // LINE_BYTES) * LINE_BYTES
    if nbytes % PAGE_BYTES < 5 * LINE_BYTES:
        nbytes += 5 * LINE_BYTES
    return nbytes // itemsize


def _staggered_zeros(count: int, dtype: np.dtype, index: int) -> np.ndarray:
    """Zeros that start `5 * index` cache lines into a page, so that buffers of one layout do not alias."""
    raw = np.zeros(count * dtype.itemsize + 2 * PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES + 5 * LINE_BYTES * index % PAGE_BYTES
    return raw[start:start + count * dtype.itemsize].view(dtype)


def _no_room(nbytes: int) -> RoomError | None:
    try:
        room = os.statvfs(SHARED_MEMORY_FOLDER)
    except OSError as error:
        return RoomError(f"{SHARED_MEMORY_FOLDER} cannot be asked for its room ({error.strerror}); ranks of a node "
                         "share memory through it")
    free = room.f_bavail * room.f_frsize
    if nbytes <= free:
        return None
    return RoomError(f"{nbytes / 2**20:.1f} MiB of shared memory needed, {free / 2**20:.1f} MiB free in "
                     f"{SHARED_MEMORY_FOLDER}: give the container more (docker run --shm-size=...), remove what dead "
                     "jobs left there, or start fewer ranks per node")


def _not_shared(node: MPI.Intracomm, block: np.ndarray) -> HpczeroError | None:
    """Whether all ranks that MPI calls one node see the same memory: rank 0 writes a token, the others read it."""
    token = np.array([time.time_ns() ^ os.getpid()], np.int64).view(np.uint8)[:min(8, block.nbytes)]
    seen = block.reshape(-1).view(np.uint8)[:token.size]
    expected = node.bcast(token if node.rank == 0 else None, root=0)
    if node.rank == 0:
        seen[:] = token
    node.Barrier()
    same = bool(np.array_equal(seen, expected))
    node.Barrier()
    if node.rank == 0:
        seen[:] = 0
    return None if same else HpczeroError(
        "MPI places this rank on one node with ranks whose memory it cannot see (different containers?): start all ranks "
        "of a machine in one container, or give each its own node with HPCZERO_NODE_MAP")


def _touch(block: np.ndarray, node: MPI.Intracomm) -> None:
    """Every page is written now, by the rank that will use it, so that a later shortage cannot strike mid-step."""
    if block.shape[0] == node.size:
        block[node.rank] = 0
    else:
        count = block.shape[1]
        block[0, count * node.rank // node.size:count * (node.rank + 1) // node.size] = 0
