"""CUDA IPC: ranks of a node read each other's device memory, whether or not MPI can.

What leaves for a neighbour is copied into this rank's `Room`, device memory that all neighbours have mapped; a token of
`TOKEN_BYTES` goes over MPI instead of the elements, and the neighbour copies them from there, from GPU to GPU, or inside the
GPU that the two share. A copy more than reading the caller's array itself, at the speed of device memory, and it works for
every array: handles name whole allocations, and memory of pools, of `cudaMallocAsync` and managed memory has none.

A token carries the handle of the allocation and the offset in it. Handles are opened once and kept; a larger room is an
allocation more, and what was shared stays until `close`, since memory must not be freed before all have closed it.

CUDA Programming Guide, "Interprocess Communication". What it takes is found out by trying, which is safe: CUDA refuses with an
error where a launcher shows every rank one GPU only, in some containers, and between GPUs that cannot read each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.arrays import Array, copy, namespace, synchronize, to_host
from hpczero.errors import gather_texts

if TYPE_CHECKING:
    from hpczero.topology import Topology

_HANDLE_BYTES = 64
TOKEN_BYTES = _HANDLE_BYTES + 16
_SMALLEST_BYTES = 2**21
"""What the driver takes for an allocation anyway."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """Device memory that CuPy did not allocate, as it wants to see it."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


class Room:
    """Device memory of this rank that its neighbours read, and what it has opened of theirs.

    Parameters
    ----------
    beside : device array
        Says which module and which device.
    """

    def __init__(self, beside: Array):
        self._xp = namespace(beside)
        self._runtime = self._xp.cuda.runtime
        self._own: list[tuple[_Memory, bytes]] = []
        self._opened: dict[bytes, tuple[int, Array]] = {}

    @property
    def nbytes(self) -> int:
        """Device memory that was allocated here."""
        return sum(memory.nbytes for memory, _ in self._own)

    def take(self, nbytes: int) -> Array:
        """(nbytes,) uint8, the same memory each time but where more is asked for than ever before."""
        if not self._own or self._own[-1][0].nbytes < nbytes:
            # Twice as much as before at least, so that what lies idle is less than what is used.
            size = max(nbytes, 2 * self._own[-1][0].nbytes if self._own else _SMALLEST_BYTES)
            memory = _Memory(self._runtime.malloc(size), size)
            self._own.append((memory, b""))
            self._own[-1] = memory, self._runtime.ipcGetMemHandle(memory.address)
        return self._xp.asarray(self._own[-1][0])[:nbytes]

    def token(self, offset: int) -> np.ndarray:
        """(TOKEN_BYTES,) uint8: what a neighbour needs to find byte `offset` of what was taken last."""
        memory, handle = self._own[-1]
        return np.frombuffer(handle + np.array([memory.nbytes, offset]).tobytes(), np.uint8)

    def find(self, token: np.ndarray, nbytes: int) -> Array:
        """(nbytes,) uint8: memory of the neighbour that sent the token."""
        handle = token[:_HANDLE_BYTES].tobytes()
        size, offset = token[_HANDLE_BYTES:].view(np.int64).tolist()
        if handle not in self._opened:
            address = self._runtime.ipcOpenMemHandle(handle)
            self._opened[handle] = address, self._xp.asarray(_Memory(address, size))
        return self._opened[handle][1][offset:offset + nbytes]

    def close(self, meet: Callable[[], None]) -> None:
        """Called by every rank; `meet` returns when all ranks of the node have called it."""
        for address, _ in self._opened.values():
            self._runtime.ipcCloseMemHandle(address)
        self._opened.clear()
        meet()
        for memory, _ in self._own:
            self._runtime.free(memory.address)
        self._own.clear()


def open_room(topology: Topology, beside: Array, timeout_s: float, meet: Callable[[], None]) -> Room | str:
    """A room in which all ranks of each node have read each other's first bytes, or why there is none; alike on all ranks.

    Called by every rank of `topology`.
    """
    room = Room(beside)
    if max(topology.ranks_per_node) == 1:
        return room      # nobody to read it
    mark = np.arange(8, dtype=np.uint8) + np.uint8(topology.rank)
    shown, problem = "", ""
    try:
        mine, seen = room.take(mark.size), namespace(beside).empty(mark.size, np.uint8)
        copy(mine, mark)
        shown = room.token(0).tobytes().hex()
    except Exception as error:  # noqa: BLE001 - whatever CUDA refuses: the others wait
        problem = _first_line(error)
    tokens = gather_texts(topology.world, shown, timeout_s)
    try:
        for rank in topology.map.nodes[topology.node_index]:
            if rank != topology.rank and not problem and tokens[rank]:
                there = room.find(np.frombuffer(bytes.fromhex(tokens[rank]), np.uint8), mark.size)
                copy(seen, there)      # as messages will be: on this device, whatever device it comes from
                if to_host(seen).tolist() != [(byte + rank) % 256 for byte in range(mark.size)]:
                    problem = f"what rank {rank} wrote cannot be seen"
    except Exception as error:  # noqa: BLE001
        problem = f"memory of rank {rank} cannot be opened: {_first_line(error)}"
    problems = gather_texts(topology.world, problem, timeout_s)
    bad = next((rank for rank, text in enumerate(problems) if text), None)
    if bad is None:
        return room
    synchronize(beside)
    room.close(meet)
    return f"CUDA IPC does not work on rank {bad}: {problems[bad]}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
