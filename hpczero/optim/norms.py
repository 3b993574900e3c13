"""Norms of partitioned vectors that do not depend on the partition, down to the last bit.

A clip coefficient multiplies every gradient, so a norm that changed its last bit with the stage, the bucket size or the
number of ranks would change every parameter. Here the sum of squares of a parameter (of absolute values, for the 1-norm; the
largest of them, for the maximum norm) is a fixed binary tree over its elements, in float64: leaves of 16 elements, siblings
added, then what is left over added from the right. Whoever owns some elements computes the nodes of the tree that lie wholly
inside; the few nodes at the cuts are added up after one small all-gather. Parameters are then added in their order.

All cuts must lie at multiples of `LEAF` elements from a parameter's start; `zero.layout` sees to that. A piece of n
elements sends at most 2 lg(n / 16) numbers. Squares of float32 are exact in float64; sums round, always in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numba import cuda

from hpczero.arrays import Array, is_device, launch, namespace, to_host
from hpczero.kernels import cpu_loop

MOST, ONE, TWO = range(3)
NORMS = {1: ONE, 2: TWO, "inf": MOST}
"""The norms, as settings name them, and the numbers by which kernels know what is added up: |x|, x squared, or the largest."""
LEAF = 16
LEAVES = 64
"""A segment, the unit of work of one thread, is a node of at most this many leaves."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of parameter `parameter`, which lie at `position` of some vector of this rank."""

    parameter: int
    start: int
    stop: int
    position: int


@dataclass(frozen=True)
class Nodes:
    """Nodes of the trees, in order: node i of parameter `parameters[i]` begins at leaf `starts[i]`, 2^levels[i] leaves."""

    parameters: np.ndarray
    levels: np.ndarray
    starts: np.ndarray


class PartialNorms:
    """What one rank contributes: planned once from its pieces, computed at every step.

    Attributes
    ----------
    nodes : Nodes
        What `sums` returns, in this order; exchanged once between the ranks, like everything shape-dependent.
    nbytes : int
        Host memory kept for the segments' sums.
    """

    def __init__(self, pieces: Sequence[Piece], kind: int = TWO):
        self._kind = kind
        rows = [row for piece in pieces for row in _segments(piece)]
        table = np.array(rows, np.int64).reshape(-1, 5)
        self._first, self._count = np.ascontiguousarray(table[:, 3]), np.ascontiguousarray(table[:, 4])
        self._parts = Nodes(*(np.ascontiguousarray(table[:, column]) for column in range(3)))
        self._sums = np.zeros(len(rows))
        self._on_device: tuple[Array, Array, Array] | None = None
        self.nodes, _ = merge(self._parts, self._sums, kind)

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes + self._first.nbytes + self._count.nbytes

    def sums(self, vector: Array) -> np.ndarray:
        """(num_nodes,) float64 on the host: what `vector`'s elements in each of `nodes` add up to, or the largest."""
        if is_device(vector):
            if self._on_device is None:
                xp = namespace(vector)
                self._on_device = xp.asarray(self._first), xp.asarray(self._count), xp.asarray(self._sums)
            first, count, sums = self._on_device
            launch(sums_cuda, sums.size, vector, first, count, sums, self._kind)
            self._sums[:] = to_host(sums)
        else:
            sums_cpu(vector, self._first, self._count, self._sums, self._kind, np.empty(LEAVES))
        return merge(self._parts, self._sums, self._kind)[1]


def merge(nodes: Nodes, sums: np.ndarray, kind: int) -> tuple[Nodes, np.ndarray]:
    """Adds siblings as long as there are any, per parameter; nodes must come in order."""
    parameters, levels, starts, merged = _merge(nodes.parameters, nodes.levels, nodes.starts, sums, kind)
    return Nodes(parameters, levels, starts), merged


class GlobalNorm:
    """Puts the contributions of all ranks together: the same numbers on every rank, whatever the partition.

    Built from the `Nodes` of every rank, in rank order.
    """

    def __init__(self, nodes_by_rank: Sequence[Nodes], num_parameters: int, kind: int = TWO):
        self._kind = kind
        parameters, levels, starts = (
            np.concatenate([getattr(nodes, name) for nodes in nodes_by_rank])
            for name in ("parameters", "levels", "starts")
        )
        self._order = np.lexsort((starts, parameters))
        self._nodes = Nodes(parameters[self._order], levels[self._order], starts[self._order])
        self.counts = [len(nodes.parameters) for nodes in nodes_by_rank]
        self.num_parameters = num_parameters

    def by_parameter(self, sums: np.ndarray) -> np.ndarray:
        """(num_parameters,) sums, from the concatenated (num_nodes,) sums of all ranks."""
        nodes, sums = merge(self._nodes, sums[self._order], self._kind)
        total = np.zeros(self.num_parameters)
        _add_from_the_right(nodes.parameters, sums, total, self._kind)
        return total


def norm(by_parameter: np.ndarray, kind: int = TWO) -> float:
    """The norm over all parameters, added in their order; infinite or NaN if any element was."""
    if kind == MOST:
        return float(by_parameter.max(initial=0.0))      # which hands a NaN on
    total = 0.0
    for value in by_parameter.tolist():
        total += value
    return math.sqrt(total) if kind == TWO and total >= 0 else total


def clip_coefficient(grad_norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most `max_norm`; 1 if it is, or if `max_norm` is 0."""
    return max_norm / grad_norm if 0 < max_norm < grad_norm else 1.0


def _segments(piece: Piece) -> list[tuple[int, int, int, int, int]]:
    """A piece cut into nodes of up to `LEAVES` leaves: (parameter, level, first leaf, position, elements)."""
    assert piece.start % LEAF == 0
    leaf, end = piece.start // LEAF, -(-piece.stop // LEAF)
    rows = []
    while leaf < end:
        # The largest node that begins here: as aligned as the leaf is, and not beyond the piece.
        level = min(_trailing_zeros(leaf, LEAVES), (end - leaf).bit_length() - 1, LEAVES.bit_length() - 1)
        first = leaf * LEAF
        rows.append((piece.parameter, level, leaf, piece.position + first - piece.start,
                     min(LEAF << level, piece.stop - first)))
        leaf += 1 << level
    return rows


def _trailing_zeros(number: int, most: int) -> int:
    return most.bit_length() - 1 if number % most == 0 else (number & -number).bit_length() - 1


def _together(a, b, kind):
    """The sum of two sums, or the larger of two maxima; a NaN stays."""
    if kind != MOST:
        return a + b
    return a if a > b or a != a else b


def _node_squares(x, first, count, scratch):
    """The tree's sum of squares over `count` elements from `first`, at most LEAVES leaves; all but the last are full."""
    leaves = (count + 15) // 16
    for leaf in range(leaves):
        total = np.float64(0)
        for i in range(first + leaf * 16, min(first + leaf * 16 + 16, first + count)):
            value = np.float64(x[i])
            total += value * value
        scratch[leaf] = total
    while leaves > 1:
        leaves //= 2
        for leaf in range(leaves):
            scratch[leaf] = scratch[2 * leaf] + scratch[2 * leaf + 1]
    return scratch[0]


def _node_sizes(x, first, count, scratch, kind):
    """The same of absolute values. Apart, as the usual norm would take half as long again in one function with this."""
    leaves = (count + 15) // 16
    for leaf in range(leaves):
        total = np.float64(0)
        for i in range(first + leaf * 16, min(first + leaf * 16 + 16, first + count)):
            value = abs(np.float64(x[i]))
            if kind == ONE:
                total += value
            else:
                total = total if total > value or total != total else value
        scratch[leaf] = total
    while leaves > 1:
        leaves //= 2
        for leaf in range(leaves):
            one, other = scratch[2 * leaf], scratch[2 * leaf + 1]
            if kind == ONE:
                scratch[leaf] = one + other
            else:
                scratch[leaf] = one if one > other or one != one else other
    return scratch[0]


_together_cpu = numba.njit(error_model="numpy")(_together)
_node_squares_cpu, _node_squares_cuda = numba.njit(error_model="numpy")(_node_squares), cuda.jit(device=True)(_node_squares)
_node_sizes_cpu, _node_sizes_cuda = numba.njit(error_model="numpy")(_node_sizes), cuda.jit(device=True)(_node_sizes)


@cpu_loop()
def sums_cpu(x, first, count, sums, kind, scratch):
    if kind == TWO:
        for i in range(sums.size):
            sums[i] = _node_squares_cpu(x, first[i], count[i], scratch)
    else:
        for i in range(sums.size):
            sums[i] = _node_sizes_cpu(x, first[i], count[i], scratch, kind)


@cuda.jit
def sums_cuda(x, first, count, sums, kind):
    scratch = cuda.local.array(64, numba.float64)
    for i in range(cuda.grid(1), sums.size, cuda.gridsize(1)):
        if kind == TWO:
            sums[i] = _node_squares_cuda(x, first[i], count[i], scratch)
        else:
            sums[i] = _node_sizes_cuda(x, first[i], count[i], scratch, kind)


@cpu_loop()
def _merge(parameters, levels, starts, sums, kind):
    out_parameters, out_levels = np.empty_like(parameters), np.empty_like(levels)
    out_starts, out_sums = np.empty_like(starts), np.empty_like(sums)
    top = -1
    for i in range(sums.size):
        top += 1
        out_parameters[top], out_levels[top], out_starts[top], out_sums[top] = parameters[i], levels[i], starts[i], sums[i]
        while top > 0 and out_parameters[top - 1] == out_parameters[top] and out_levels[top - 1] == out_levels[top] \
                and out_starts[top - 1] + (1 << out_levels[top]) == out_starts[top] \
                and out_starts[top - 1] % (2 << out_levels[top]) == 0:
            top -= 1
            out_sums[top] = _together_cpu(out_sums[top], out_sums[top + 1], kind)
            out_levels[top] += 1
    return out_parameters[:top + 1], out_levels[:top + 1], out_starts[:top + 1], out_sums[:top + 1]


@cpu_loop()
def _add_from_the_right(parameters, sums, total, kind):
    for i in range(sums.size - 1, -1, -1):
        total[parameters[i]] = _together_cpu(sums[i], total[parameters[i]], kind)


_indices = numba.int64[::1]
CUDA_SIGNATURES = {
    sums_cuda: [(kind[::1], _indices, _indices, numba.float64[::1], numba.int64) for kind in (numba.float32, numba.float64)],
}
"""What each CUDA kernel is compiled for when a test compiles all of them without a GPU."""
