"""Inputs of a benchmark whose result is known exactly, and what each rank must then hold. Pure: numbers and arrays.

Every rank's vector is a pattern of small whole numbers with a prime period, so that a block that ends up at the wrong
place is seen, whatever power of two it is away; patterns of different ranks differ, so that a contribution that is
missing, or counted twice, is seen too. All partial results are whole numbers that the type holds, so every order of
additions gives the same bits, and one comparison finds each wrong element. Where many ranks would leave that range (a
sum of 200 ranks in bfloat16), only some contribute at each position, others at the next, and the rest hold what
changes nothing.

A mean is the exact sum, divided and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

PERIOD = 61
"""Of the pattern of a few ranks; where not all contribute everywhere, that many times their `stride`."""
POISON = 99
"""What elements hold that the call must write; every type has it, and no rank's pattern."""

_MOST_FACTORS = 7      # 2**7 fits into every type
_EXACT_UP_TO = {"uint8": 2**8 - 1, "bfloat16": 2**8, "float16": 2**11}
_ROOMY = 2**24
_COMBINE = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True)
class Problem:
    """One collective on vectors of `count` elements, as rank `rank` of `size` sees it; the root is rank 0."""

    collective: str
    op: str
    dtype: str
    count: int
    rank: int
    size: int

    @property
    def shard(self) -> slice:
        """This rank's part of the vector; the first `count` mod `size` ranks own one element more."""
        return self._shard_of(self.rank)

    @property
    def is_reducing(self) -> bool:
        return self.collective not in ("all_gather", "broadcast")

    @property
    def stride(self) -> int:
        """Of so many neighbouring ranks one contributes at each position: ceil(size / stride) in all."""
        if not self.is_reducing or self.op in ("min", "max"):
            return 1
        if self.op == "prod":
            return -(-self.size // _MOST_FACTORS)
        most = _EXACT_UP_TO.get(self.dtype, _ROOMY) // 2      # of contributions, each at most 2
        return -(-self.size // most)

    @property
    def is_overwritten(self) -> bool:
        """Whether a call in place changes this rank's array."""
        return self.collective != "reduce" or self.rank == 0

    def given(self, *, in_place: bool) -> np.ndarray:
        """What this rank's array holds before the call."""
        if self.collective != "all_gather":
            return self._own
        if not in_place:
            return self._own[self.shard]
        whole = np.full(self.count, POISON, self._dtype)
        whole[self.shard] = self._own[self.shard]
        return whole

    @cached_property
    def result(self) -> np.ndarray:
        """What this rank must hold afterwards: the whole vector, or after a reduce_scatter its shard."""
        if self.collective == "broadcast":
            return self._tiled(_pattern(self, 0), slice(0, self.count))
        if self.collective == "all_gather":
            shards = [self._tiled(_pattern(self, rank), self._shard_of(rank)) for rank in range(self.size)]
            return np.concatenate(shards)
        return self._tiled(_combined(self), self.shard if self.collective == "reduce_scatter" else slice(0, self.count))

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @cached_property
    def _own(self) -> np.ndarray:
        return self._tiled(_pattern(self, self.rank), slice(0, self.count))

    def _shard_of(self, rank: int) -> slice:
        base, extra = divmod(self.count, self.size)
        start = rank * base + min(rank, extra)
        return slice(start, start + base + (rank < extra))

    def _tiled(self, pattern: np.ndarray, part: slice) -> np.ndarray:
        """Elements `part` of the vector that repeats `pattern`."""
        shifted = np.roll(pattern, -(part.start % pattern.size)).astype(self._dtype)
        return np.resize(shifted, part.stop - part.start)


def count_wrong(found: np.ndarray, expected: np.ndarray) -> int:
    """Elements that are not what they must be; all of them if even the shape is wrong."""
    if found.shape != expected.shape:
        return max(found.size, expected.size, 1)
    return int(np.count_nonzero(found != expected))      # a NaN equals nothing


def _pattern(problem: Problem, rank: int) -> np.ndarray:
    """(period,) int64: what the vector of `rank` repeats."""
    pattern = np.full(PERIOD * problem.stride, 1 if problem.op == "prod" else 0, np.int64)
    part, values = _contribution(problem, rank)
    pattern[part] = values
    return pattern


def _contribution(problem: Problem, rank: int) -> tuple[slice, np.ndarray]:
    """Where in the pattern this rank takes part, and with what."""
    first, stride = -rank % problem.stride, problem.stride
    part, place = slice(first, None, stride), np.arange(first, PERIOD * stride, stride, dtype=np.int64)
    mixed = (place * place + 7 * rank * place + rank) % PERIOD
    if problem.is_reducing and problem.op in ("sum", "mean"):
        return part, mixed % 3
    return part, 1 + mixed % 2 if problem.is_reducing and problem.op == "prod" else mixed


def _combined(problem: Problem) -> np.ndarray:
    """(period,): the patterns of all ranks as one, exact; a mean in float64, which is rounded once more at the most."""
    total = _pattern(problem, 0)
    combine = _COMBINE[problem.op]
    for rank in range(1, problem.size):
        part, values = _contribution(problem, rank)
        total[part] = combine(total[part], values)
    return total / problem.size if problem.op == "mean" else total
