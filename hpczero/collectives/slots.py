"""The memory in which the ranks of a node meet: a line of flags for each, and room for small vectors.

What the flags mean stands in `kernels.slots`. Here they get their place: one block per node, (flags; a row per rank; the
rows again), made once per topology and zeroed. `transport` waits on it: as a barrier, to agree on a call, and to reduce a
vector of up to `slot_bytes` in the same breath. A meeting takes a microsecond or a few, less than a barrier of the MPI
libraries, and every one of them compares what the ranks are about to do.

Cost: 1 MiB per node and 128 bytes per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpczero.arrays import as_bits, is_half
from hpczero.collectives.messages import ODD_BYTES
from hpczero.collectives.order import balanced, depth, program
from hpczero.kernels import half, reduce
from hpczero.kernels import slots as kernels
from hpczero.memory import LINE_BYTES, node_rows
from hpczero.topology import Topology

ROWS_BYTES = 512 * 2**10
"""Room for the rows of one meeting. Every rank adds all of them, so what one row may hold shrinks with their number: with
two ranks this beats adding a stripe each, which takes a second meeting, up to here."""
FAILED, BARRIER = 0, 1
"""Marks that are no fingerprint of a call: of a rank whose arguments are wrong, and of one that waits for its neighbours."""
COPIED_BYTES = 24 * 2**10
"""From here on a vector is put into its row by a copy from outside of the kernel. The system's copy does not fetch the lines
that it overwrites from the neighbour that has read them: 256 KiB took 148 us instead of 244 where that is far, and 46 instead
of 34 where the two cores share a cache; MPI_Allreduce took 163 and 54."""
SPINS = 20000
"""Looks per call of a kernel, 5 to 20 us: long enough for a neighbour that is on its way. A look takes 0.3 ns on some
processors; coming back to Python for another one costs the call 1 us more."""
SPINS_SHARING = 50
"""The same where ranks outnumber cores, and looking keeps the core from the rank that is looked for."""


def slot_bytes(num_ranks: int) -> int:
    """What a slot holds on a node of so many ranks: whole cache lines, at least one."""
    return max(LINE_BYTES, ROWS_BYTES // num_ranks // LINE_BYTES * LINE_BYTES)


class Slots:
    """Called by every rank of the topology, to make and to close; a node of one rank meets itself."""

    def __init__(self, topology: Topology):
        self.size, self.me = topology.node.size, topology.local_rank
        self.row_bytes = slot_bytes(self.size)
        spins = SPINS_SHARING if topology.is_oversubscribed else SPINS
        self._state = np.array([0, self.me, self.size, spins], np.int64)
        flag_bytes, stride = 8 * kernels.LINE * self.size, self.row_bytes + ODD_BYTES
        self._memory = node_rows(topology, flag_bytes + 2 * self.size * stride, np.dtype(np.uint8), single=True)
        block = self._memory.mine
        self._flags = block[:flag_bytes].view(np.int64)
        self._rows = block[flag_bytes:].reshape(2, self.size, stride)
        self._folds: dict[tuple[np.dtype, int], _Fold] = {}
        self._asked = 0

    @property
    def nbytes(self) -> float:
        """This rank's part of the block."""
        return self._memory.nbytes / self.size

    def meet(self, mark: int, *, fresh: bool) -> int:
        """Comes to the next meeting if `fresh`, else looks again.

        How many ranks were seen to have come, of `size`; or -1 - r if local rank r came with another mark.
        """
        return kernels.meet(self._flags, self._state, mark, fresh)

    def next_rows(self, dtype: np.dtype) -> np.ndarray:
        """(size, n): a row per rank, in which they leave for each other what can be read after the next meeting.

        Write into row `me` alone, before that meeting; what is there is gone two meetings later.
        """
        return self._rows[(self._state[kernels.CALL] + 1) & 1].view(dtype)

    def last_rows(self, dtype: np.dtype) -> np.ndarray:
        """(size, n): what was left before the last meeting."""
        return self._rows[self._state[kernels.CALL] & 1].view(dtype)

    def adder(self, dtype: np.dtype, op: int, mark: int, nbytes: int) -> Callable[[np.ndarray, bool], int]:
        """add(flat, fresh): as `meet`; once all have come, `flat` holds the reduction over the ranks of the node, in the
        canonical order.

        `flat` : contiguous, `nbytes` of it, at most `row_bytes`, on all ranks; `op` : a code of `kernels.reduce`.
        """
        rows, instructions, stack, kind = self._folds.get((dtype, op)) or self._fold(dtype, op)
        flags, state, me, leaves = self._flags, self._state, self.me, nbytes < COPIED_BYTES

        def add(flat: np.ndarray, fresh: bool) -> int:
            if kind is not None:
                flat = as_bits(flat)
            if fresh and not leaves:
                rows[(state[kernels.CALL] + 1) & 1, me, :flat.size] = flat
            if kind is None:
                return kernels.all_reduce(flat, rows, instructions, stack, op, flags, state, mark, fresh, leaves)
            return kernels.all_reduce_half(flat, rows, instructions, stack, op, kind, flags, state, mark, fresh, leaves)

        return add

    def missing(self) -> list[int]:
        """The local ranks that have not come to this meeting."""
        return [rank for rank in range(self.size) if self._flags[kernels.LINE * rank] < self._state[kernels.CALL]]

    def ask(self, local_rank: int) -> None:
        """Asks for a rank that is missing: its watchdog shows where it is."""
        self._flags[kernels.LINE * local_rank + kernels.ASKED] += 1

    def asked(self) -> bool:
        """Whether somebody has asked for this rank since the last time."""
        times = int(self._flags[kernels.LINE * self.me + kernels.ASKED])
        seen, self._asked = self._asked, times
        return times != seen

    def close(self) -> None:
        """Called by every rank of the topology."""
        self._flags = self._rows = None
        self._folds.clear()
        self._memory.close()

    def _fold(self, dtype: np.dtype, op: int) -> _Fold:
        with_bits = is_half(dtype)
        widest = 4 if op == reduce.SUM and not with_bits else 1
        instructions = program(balanced(range(self.size)), {rank: rank for rank in range(self.size)}, widest)
        stack = np.empty((depth(instructions), reduce.BLOCK), np.float32 if with_bits else dtype)
        rows = self._rows.view(np.uint16 if with_bits else dtype)
        return self._folds.setdefault((dtype, op), _Fold(rows, instructions, stack,
                                                         half.FORMATS[dtype] if with_bits else None))


class _Fold(NamedTuple):
    """What the folds of one dtype and operation need."""

    rows: np.ndarray
    instructions: np.ndarray
    stack: np.ndarray
    kind: int | None
    """Which half type."""
