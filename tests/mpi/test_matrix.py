"""Every collective by every algorithm, over counts, element types, operations, places and layouts of the arrays.

All of the product takes minutes and is a soak test (`tests/test_soak.py`). What runs each time is a part of it in which every
algorithm meets every count, every element type, every operation, and every place and layout, at least once.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.collectives import selection
from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce, reduce_scatter, shard_slice
from hpczero.topology import Topology

DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in (
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64, np.uint8)}
UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
OPS = (*UFUNCS, "mean")
IN, OUT = "in place", "out of place"
EVERYWHERE = [(IN, "contiguous"), (IN, "strided"), (IN, "transposed"),
              (OUT, "contiguous"), (OUT, "strided"), (OUT, "transposed"), (OUT, "read-only")]
ARRAYS = {
    "all_reduce": EVERYWHERE,
    # A strided array has no shard that is a view, and what is broadcast has no second array.
    "reduce_scatter": [(IN, "contiguous"), *EVERYWHERE[3:]],
    "all_gather": EVERYWHERE,
    "broadcast": EVERYWHERE[:3],
    "reduce": EVERYWHERE,
}
GUARD = 77
"""Stands around the elements of every array, and must stay."""


@dataclass(frozen=True)
class Case:
    operation: str
    algorithm: str
    count: int
    dtype: str
    op: str
    place: str
    layout: str


class Framed:
    """An array of some layout inside a larger one whose other elements must stay as they are."""

    def __init__(self, values, layout):
        count, kind = values.size, values.dtype
        if layout == "strided":
            self.whole, self._cut = np.full(2 * count + 2, GUARD, kind), lambda whole: whole[1:2 * count + 1:2]
        elif layout == "transposed":
            rows = next((rows for rows in (5, 4, 3, 2) if count % rows == 0), 1)
            columns = count // rows
            self.whole, self._cut = np.full((rows, columns + 1), GUARD, kind), lambda whole: whole[:, :columns].T
        else:
            self.whole, self._cut = np.full(count + 2, GUARD, kind), lambda whole: whole[1:count + 1]
        self.array = self._cut(self.whole)
        self.array[...] = values.reshape(self.array.shape)
        self.array.flags.writeable = layout != "read-only"

    def holds(self, values):
        """Whether the array has exactly these bits, in C order, and everything around it is untouched."""
        around = self.whole.copy()
        self._cut(around)[...] = GUARD
        return self.array.tobytes() == values.tobytes() and bool((around == GUARD).all())


def node_maps(size):
    """One node first; a node per rank; two of equal or almost equal size, striped; and a small and a large one."""
    maps = [[0] * size, list(range(size)), [rank % 2 for rank in range(size)], [0, *[1] * (size - 1)]]
    return [nodes for index, nodes in enumerate(maps) if nodes not in maps[:index]]


@pytest.fixture
def topologies(comm):
    made = [Topology(comm, nodes) for nodes in node_maps(comm.size)]
    yield made
    for topology in made:
        topology.close()


def counts(size):
    return sorted({0, 1, size - 1, size, size + 1, 1000, 65539})


@functools.lru_cache(maxsize=512)
def contribution(rank, count, dtype, op):
    """Small whole numbers, whose reduction is exact in every type up to 8 ranks, or wraps around in the same way."""
    numbers = (np.arange(count) * 7 + rank * 3) % 11
    return (1 + numbers % 2 if op == "prod" else numbers).astype(DTYPES[dtype])


@functools.lru_cache(maxsize=512)
def result(size, count, dtype, op):
    rows = np.stack([contribution(rank, count, dtype, op).astype(np.int64) for rank in range(size)])
    total = rows.sum(0) / size if op == "mean" else UFUNCS[op].reduce(rows, axis=0)
    return total.astype(DTYPES[dtype])


def names(operation, topology, dtype="float32", order="any"):
    """The algorithms that can serve there."""
    facts = selection.Call(operation, 0, topology.map, order, is_half=dtype in ("float16", "bfloat16"))
    return selection.candidates(facts)


def mistake(case, topology):
    """Plays a case, on every rank; what was wrong with its outcome here, or an empty text."""
    rank, size, count = topology.rank, topology.size, case.count
    mine = contribution(rank, count, case.dtype, case.op)
    total = result(size, count, case.dtype, case.op)
    shard = shard_slice(count, rank, size)
    root = count % size
    settings = {"algorithm": case.algorithm} | ({} if case.operation in selection.MOVES_ONLY else {"op": case.op})
    in_place = case.place == IN
    # The output has another layout than the input where its shape allows that.
    of_output = {"contiguous": "strided", "read-only": "contiguous", "strided": "contiguous"}.get(case.layout, case.layout)
    blank = np.full(count, 55).astype(mine.dtype)

    if case.operation == "all_reduce":
        given = Framed(mine, case.layout)
        out = None if in_place else Framed(blank, of_output)
        back = all_reduce(given.array, topology, out=out and out.array, **settings)
        ends = given if in_place else out
        ok = back is ends.array and ends.holds(total) and (in_place or given.holds(mine))
    elif case.operation == "reduce":
        given = Framed(mine, case.layout)
        out = None if in_place else Framed(blank, of_output)
        back = reduce(given.array, topology, root=root, out=out and out.array, **settings)
        ends = given if in_place else out
        if rank == root:
            ok = back is ends.array and ends.holds(total) and (in_place or given.holds(mine))
        else:
            ok = back is None and given.holds(mine) and (in_place or out.holds(blank))
    elif case.operation == "reduce_scatter":
        given = Framed(mine, case.layout)
        if in_place:
            back = reduce_scatter(given.array, topology, **settings)
            ok = back.tobytes() == total[shard].tobytes() and (not back.size or np.shares_memory(back, given.array))
            given.array[...] = mine      # it may hold partial sums; what is around it may not
            ok = ok and given.holds(mine)
        else:
            out = Framed(blank[shard], of_output if case.layout != "transposed" else "contiguous")
            back = reduce_scatter(given.array, topology, out=out.array, **settings)
            ok = back is out.array and out.holds(total[shard]) and given.holds(mine)
    elif case.operation == "all_gather":
        if in_place:
            filled = blank.copy()
            filled[shard] = total[shard]
            given = Framed(filled, case.layout)
            ok = all_gather(given.array, topology, **settings) is given.array and given.holds(total)
        else:
            given = Framed(total[shard], case.layout if case.layout != "transposed" else "contiguous")
            out = Framed(blank, of_output)
            back = all_gather(given.array, topology, out=out.array, **settings)
            ok = back is out.array and out.holds(total) and given.holds(total[shard])
    else:
        given = Framed(mine, case.layout)
        back = broadcast(given.array, topology, root=root, **settings)
        ok = back is given.array and given.holds(contribution(root, count, case.dtype, case.op))
    return "" if ok else f"{case} over nodes {topology.map.nodes}"


def mistakes(cases, topologies):
    """What is wrong with the cases, smallest first; an exception ends them, as ranks may be out of step then."""
    found = []
    for index, case in enumerate(cases):
        able = [topology for topology in topologies if case.algorithm in ("adaptive", *names(
            case.operation, topology, case.dtype))]
        if not able:
            continue
        topology = able[index % len(able)]
        try:
            text = mistake(case, topology)
        except Exception as error:      # noqa: BLE001 - told to all ranks with the case that it belongs to
            return [f"{case} over nodes {topology.map.nodes}: {type(error).__name__}: {error}"]
        if text:
            found.append((case.count, text))
    return [text for _, text in sorted(found)]


def everything(operation, size):
    """The whole matrix of an operation."""
    ops = ("sum",) if operation in selection.MOVES_ONLY else OPS
    axes = (*selection.ALGORITHMS[operation], "adaptive"), counts(size), DTYPES, ops, ARRAYS[operation]
    for algorithm, count, dtype, op, (place, layout) in itertools.product(*axes):
        if op != "mean" or DTYPES[dtype].kind not in "iu":
            yield Case(operation, algorithm, count, dtype, op, place, layout)


def part_of_everything(operation, size):
    """As many cases per algorithm as its longest axis has entries: each entry of each axis, in a shuffled order."""
    ops = ("sum",) if operation in selection.MOVES_ONLY else OPS
    axes = [counts(size), list(DTYPES), list(ops), ARRAYS[operation]]
    for algorithm in selection.ALGORITHMS[operation]:
        shuffled = random.Random(f"{operation} {algorithm} {size}")
        columns = [shuffled.sample(axis, len(axis)) for axis in axes]
        for row in range(max(map(len, columns))):
            count, dtype, op, (place, layout) = (column[row % len(column)] for column in columns)
            if op == "mean" and DTYPES[dtype].kind in "iu":
                op = "prod"
            yield Case(operation, algorithm, count, dtype, op, place, layout)


@pytest.mark.eight_ranks
@pytest.mark.time_limit(240)      # compiles kernels for many types where the cache is cold
@pytest.mark.parametrize("operation", ARRAYS)
def test_every_algorithm_is_right_for_every_count_type_operation_place_and_layout(comm, topologies, operation):
    wrong = mistakes(part_of_everything(operation, comm.size), topologies)
    check_everywhere(comm, not wrong, "\n".join(wrong[:5]))


@pytest.mark.soak
@pytest.mark.time_limit(3000)
@pytest.mark.parametrize("operation", ARRAYS)
def test_all_of_the_matrix_is_right(comm, topologies, operation):
    for _, cases in itertools.groupby(everything(operation, comm.size), lambda case: case.algorithm):
        wrong = mistakes(cases, topologies)
        check_everywhere(comm, not wrong, "\n".join(wrong[:5]))


SPECIAL = (np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0, -1.0)


def special_result(rows, op):
    """The reduction of SPECIAL numbers, which does not depend on the order; where it is NaN, any NaN."""
    if op in ("sum", "prod"):
        return functools.reduce(UFUNCS[op], rows)
    # Of the zeros, the negative one is the smaller; where a NaN is among them, it is the result.
    ranked = np.where(rows == 0, np.copysign(0.25, rows), rows)
    chosen = np.take_along_axis(rows, (ranked.argmin(0) if op == "min" else ranked.argmax(0))[None], axis=0)[0]
    return np.where(np.isnan(rows).any(0), np.nan, chosen)


def same_special(found, expected):
    """Equal, NaN where NaN is expected, and zeros of the same sign."""
    found = np.asarray(found, np.float64)
    nan = np.isnan(expected)
    return np.array_equal(np.isnan(found), nan) and np.array_equal(found[~nan], expected[~nan]) and np.array_equal(
        np.signbit(found[~nan]), np.signbit(expected[~nan]))


def wrong_specials(kinds, num_draws):
    """What is wrong on this rank; `kinds` are triples of a topology, an element type and an operation."""
    found = []
    with np.errstate(invalid="ignore"):
        for draw, (topology, dtype, op) in itertools.product(range(num_draws), kinds):
            size, rank = topology.size, topology.rank
            count = 7 * size + 3
            rows = np.random.default_rng(draw).choice(SPECIAL, (size, count))
            # Most elements would be NaN in a sum over many ranks: a third has no NaN, and a third no infinity either.
            rows[:, ::3][np.isnan(rows[:, ::3])] = -0.0
            rows[:, 1::3][~np.isin(rows[:, 1::3], (0.0, 1.0))] = -0.0
            expected = special_result(rows, op)
            mine, shard, root = rows[rank].astype(DTYPES[dtype]), shard_slice(count, rank, size), draw % size
            for operation, call in (("all_reduce", all_reduce), ("reduce_scatter", reduce_scatter), ("reduce", reduce)):
                part = {"all_reduce": slice(None), "reduce_scatter": shard, "reduce": slice(None)}[operation]
                for name in names(operation, topology, dtype):
                    if name == "system":      # promises what the MPI library does
                        continue
                    more = {"root": root} if operation == "reduce" else {}
                    back = call(mine.copy(), topology, op=op, algorithm=name, **more)
                    if back is not None and not same_special(back, expected[part]):
                        found.append(f"{operation} {name} {op} {dtype} {topology.map.nodes}: {back} of {rows}")
    return found


@pytest.mark.time_limit(240)
def test_nan_infinities_and_signed_zeros_do_not_depend_on_the_order_and_are_the_same_on_all_ranks(comm, topologies):
    turns = itertools.cycle([("float16", ("min", "sum")), ("float32", ("max", "prod")), ("float16", ("max", "prod")),
                             ("float32", ("min", "sum"))])
    pairs = [(topology, *turn) for topology, turn in zip(topologies * (4 // len(topologies)), turns, strict=False)]
    wrong = wrong_specials([(topology, dtype, op) for topology, dtype, ops in pairs for op in ops], 1)
    check_everywhere(comm, not wrong, "\n".join(wrong[:5]))


@pytest.mark.soak
@pytest.mark.time_limit(3000)
def test_nan_infinities_and_signed_zeros_in_many_draws(comm, topologies):
    wrong = wrong_specials(list(itertools.product(topologies, ["float16", "bfloat16", "float32", "float64"], UFUNCS)), 20)
    check_everywhere(comm, not wrong, "\n".join(wrong[:5]))
