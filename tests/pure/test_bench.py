"""The parts of `bench` that need no ranks: what its flags mean, inputs with known results, the table."""

from __future__ import annotations

import json
import re
import sys
from functools import reduce
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher import run

from hpczero.cli import COMMANDS, bench, bench_table, parse
from hpczero.cli.bench_inputs import POISON, Problem, count_wrong
from hpczero.cli.bench_settings import BenchSettings, read_algorithms, read_sizes, read_words
from hpczero.collectives import reduction, selection
from hpczero.collectives.api import shard_slice
from hpczero.errors import ConfigError
from hpczero.settings import resolve

DTYPES = get_args(BenchSettings.model_fields["dtype"].annotation)
OPERATIONS = get_args(BenchSettings.model_fields["op"].annotation)
COMBINE = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


# Flags


def test_the_choices_are_those_of_the_collectives():
    assert tuple(map(np.dtype, DTYPES)) == reduction.DTYPES
    assert OPERATIONS == reduction.OPERATIONS
    assert get_args(BenchSettings.model_fields["order"].annotation) == selection.ORDERS
    assert set(bench.COLLECTIVES) == set(selection.ALGORITHMS)
    assert "bench" in COMMANDS


def test_the_defaults_are_accepted():
    settings = BenchSettings()
    assert len(read_sizes(settings.sizes, 4)) == 17


@pytest.mark.parametrize(
    ("text", "itemsize", "counts"),
    [
        ("4KiB", 4, [1024]),
        ("1KiB:8KiB", 8, [128, 256, 512, 1024]),
        ("1KiB:100KiB:10", 1, [1024, 10240, 102400]),
        ("1KB:3KB", 1, [1000, 2000]),
        ("8KiB,1KiB:2KiB,2048", 2, [512, 1024, 4096]),
        ("1:8", 4, [1, 2]),
        ("3 elements,7 elements", 4, [3, 7]),
        ("1K elements:4K elements:2", 8, [1000, 2000, 4000]),
    ],
)
def test_sizes_are_single_or_ranges_with_a_factor(text, itemsize, counts):
    assert list(read_sizes(text, itemsize)) == counts


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.integers(2, 9), st.sampled_from([1, 2, 4, 8]))
def test_a_range_goes_up_by_its_factor_and_not_beyond_its_end(start, more, factor, itemsize):
    counts = read_sizes(f"{start}:{start + more}:{factor}", itemsize)
    assert counts[0] == max(1, start // itemsize)
    assert list(counts) == sorted(set(counts))
    assert counts[-1] * itemsize <= max(itemsize, start + more) < (counts[-1] + 1) * itemsize * factor


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sizes": "64KiB:1KiB"}, "'64KiB:1KiB' ends before it begins"),
        ({"sizes": "1KiB:2KiB:1"}, "factor '1' is not a whole number of at least 2"),
        ({"sizes": "1KiB:2KiB:2.5"}, "factor '2.5' is not"),
        ({"sizes": "1:2:3:4"}, "'1:2:3:4' is not SIZE, FROM:TO or FROM:TO:FACTOR"),
        ({"sizes": "big"}, "'big' is not a size above 0, such as"),
        ({"sizes": "1KiB,"}, "'' is not a size above 0, such as"),
        ({"buffers": "sharde"}, "'sharde' is not one of shared, private; did you mean shared?"),
        ({"in_place": "yes,maybe"}, "'maybe' is not one of yes, no"),
        ({"dtype": "float23"}, "did you mean float32?"),
        ({"repeats": "0"}, "(from flag --repeats): allowed is a whole number of at least 1"),
    ],
)
def test_a_flag_that_means_nothing_is_refused_in_words(flags, message):
    with pytest.raises(ConfigError) as refusal:
        resolve(BenchSettings, "bench", flags=flags)
    assert message in str(refusal.value)


def test_a_list_keeps_its_order_and_names_each_once():
    assert read_words("no, yes,no", ("yes", "no")) == ("no", "yes")


def test_all_means_every_algorithm_with_system_and_adaptive():
    for known in selection.ALGORITHMS.values():
        assert read_algorithms("all", known) == (*known, "adaptive")
        assert {"system", "adaptive"} <= set(read_algorithms("all", known))
    assert read_algorithms("adaptive,ring", ("ring", "tree")) == ("adaptive", "ring")
    with pytest.raises(ValueError, match="'rign' is not one of ring, tree, adaptive; did you mean ring?"):
        read_algorithms("rign", ("ring", "tree"))


def test_help_loads_nothing_heavy_and_names_every_collective_and_setting(tmp_path):
    traced = run([sys.executable, "-X", "importtime", "-m", "hpczero", "bench", "--help"], cwd=tmp_path)
    assert traced.status == 0, traced
    loaded = {name.split(".")[0] for name in re.findall(r"\| +([\w.]+)$", traced.stderr, re.MULTILINE)}
    assert not loaded & {"mpi4py", "numpy", "numba", "pydantic", "rich"}
    for word in (*bench.COLLECTIVES, "--check", "--json", *(f"--{key}" for key in BenchSettings.model_fields)):
        assert word.replace("in_place", "in-place") in traced.stdout


def test_arguments_that_are_not_understood_are_refused_with_the_nearest():
    assert parse(["bench", "--sizes", "1KiB", "reduce", "--json"]).json == "-"
    with pytest.raises(ConfigError, match="COLLECTIVE"):
        parse(["bench"])
    with pytest.raises(ConfigError, match="--size: no such flag of bench; did you mean --sizes?"):
        parse(["bench", "reduce", "--size", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("allreduce", "'allreduce' is no collective; did you mean all_reduce?"),
        ("all_gather --op max", "op = max: all_gather adds nothing; leave --op out"),
        ("broadcast --order world", "order = world: broadcast adds nothing"),
        ("broadcast --in-place no", "in_place = no: broadcast has one array, and overwrites it"),
        ("reduce --op mean --dtype int32", "op='mean' of int32"),
        ("all_gather --algorithms ring,tree", "algorithms = 'ring,tree': all_gather: 'tree' is not one of"),
        ("reduce --json nowhere/x.json", "--json nowhere/x.json: cannot be written there"),
        ("reduce --json .", "--json .: cannot be written there"),
    ],
)
def test_what_no_machine_could_measure_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        bench.settings_of(parse(["bench", *arguments.split()]))


def test_variables_set_what_flags_do_not(monkeypatch):
    monkeypatch.setenv("HPCZERO_BENCH_REPEATS", "7")
    monkeypatch.setenv("HPCZERO_BENCH_DTYPE", "int32")
    settings = bench.settings_of(parse(["bench", "reduce", "--dtype", "float64"]))
    assert (settings.repeats, settings.dtype) == (7, "float64")


# Inputs


def inputs(collective: str, op: str, dtype: str, count: int, size: int, *, in_place: bool = True) -> list[np.ndarray]:
    return [Problem(collective, op, dtype, count, rank, size).given(in_place=in_place) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 130, 300])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in OPERATIONS for dtype in DTYPES if op != "mean" or np.dtype(dtype).kind not in "iu"],
)
def test_every_order_of_additions_gives_the_known_result_exactly(op, dtype, size):
    given = inputs("all_reduce", op, dtype, 1000, size)
    expected = Problem("all_reduce", op, dtype, 1000, 0, size).result
    for rows in (given, given[::-1]):
        found = reduce(COMBINE[op], rows)      # each partial result is rounded to the type
        assert found.dtype == expected.dtype
        if op == "mean":
            found = (found.astype(np.result_type(dtype, np.float32)) / size).astype(found.dtype)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 130])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_contribution_that_is_missing_or_counted_twice_or_displaced_is_seen(dtype, size):
    given = inputs("all_reduce", "sum", dtype, 4096, size)
    expected = Problem("all_reduce", "sum", dtype, 4096, 0, size).result
    for rank in range(size):
        assert count_wrong(expected - given[rank], expected)
        assert count_wrong(expected - given[rank] + given[(rank + 1) % size], expected)
    for distance in 2 ** np.arange(12):
        assert count_wrong(np.roll(expected, distance), expected) > 100


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 1003])
def test_shards_are_those_of_the_collectives_and_make_up_the_whole(count):
    problems = [Problem("all_gather", "sum", "float32", count, rank, 5) for rank in range(5)]
    assert [problem.shard for problem in problems] == [shard_slice(count, rank, 5) for rank in range(5)]
    shards = [problem.given(in_place=False) for problem in problems]
    for rank, problem in enumerate(problems):
        assert np.array_equal(problem.result, np.concatenate(shards))
        whole = problem.given(in_place=True)
        assert np.array_equal(whole[problem.shard], shards[rank])
        assert (np.delete(whole, np.r_[problem.shard]) == POISON).all()
    scattered = [Problem("reduce_scatter", "sum", "float32", count, rank, 5).result for rank in range(5)]
    assert np.array_equal(np.concatenate(scattered), Problem("all_reduce", "sum", "float32", count, 0, 5).result)


def test_a_broadcast_ends_with_the_roots_vector_which_nobody_else_had():
    first, *others = inputs("broadcast", "sum", "uint8", 500, 4)
    assert np.array_equal(Problem("broadcast", "sum", "uint8", 500, 3, 4).result, first)
    assert all(count_wrong(other, first) > 250 for other in others)


def test_no_rank_holds_what_marks_an_element_as_unwritten():
    for collective in ("all_reduce", "broadcast"):
        for op in OPERATIONS:
            assert all((vector != POISON).all() for vector in inputs(collective, op, "float32", 1000, 7))


def test_a_rank_among_very_many_stays_within_its_type():
    assert Problem("all_reduce", "prod", "uint8", 10, 16383, 2**14).result.max() <= 2**7
    assert Problem("all_reduce", "sum", "bfloat16", 10, 16383, 2**14).result.max() <= 2**8


def test_wrong_elements_are_counted_nan_and_shapes_too():
    expected = np.array([1, 2, 3], np.float32)
    assert count_wrong(expected.copy(), expected) == 0
    assert count_wrong(np.array([1, np.nan, 4], np.float32), expected) == 2
    assert count_wrong(expected[:2], expected) == 3


def test_a_rank_that_is_not_the_root_keeps_its_array_in_a_reduce():
    assert [Problem("reduce", "sum", "float32", 5, rank, 3).is_overwritten for rank in range(3)] == [True, False, False]
    assert Problem("all_reduce", "sum", "float32", 5, 2, 3).is_overwritten


# Table


KEYS = [
    "collective", "algorithm", "buffers", "in_place", "dtype", "op", "count", "bytes", "median_s", "p95_s",
    "algbw_GBps", "busbw_GBps", "link_percent", "wrong", "ranks", "nodes", "mpi",
]  # fmt: skip


def row(**changes) -> bench_table.Row:
    collective = changes.get("collective", "all_reduce")
    fields = {
        "collective": collective, "algorithm": "ring", "buffers": "private", "in_place": True, "dtype": "float32",
        "op": "sum", "count": 2**20, "bytes": 2**22, "wrong": 0, "ranks": 4, "nodes": 1, "mpi": "MPICH 5.0.2",
        **bench_table.speeds(collective, 2**22, [0.002, 0.001, 0.004], 4, 10.0),
    }  # fmt: skip
    return bench_table.Row(**(fields | changes))


def test_a_row_has_exactly_the_documented_keys():
    assert list(row().as_dict()) == KEYS
    assert json.loads(json.dumps(row().as_dict()))["in_place"] is True


def test_speeds_follow_from_the_median():
    found = bench_table.speeds("all_reduce", 10**9, [0.5, 0.1, 0.2], 4, 20.0)
    assert found == {"median_s": 0.2, "p95_s": 0.5, "algbw_GBps": 5.0, "busbw_GBps": 7.5, "link_percent": 37.5}
    assert bench_table.speeds("all_reduce", 10**9, [1.0], 1, None)["link_percent"] is None


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), ("broadcast", 1), ("reduce", 1)],
)
def test_bandwidth_of_the_bus_is_that_of_the_bytes_each_link_must_carry(collective, factor):
    assert bench_table.bus_factor(collective, 4) == factor
    assert bench_table.bus_factor(collective, 1) == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values, percent):
    found = bench_table.percentile(values, percent)
    reaches = [value for value in values if 100 * sum(other <= value for other in values) >= percent * len(values)]
    assert found == min(reaches)


def test_every_line_of_the_table_has_its_columns_under_the_titles():
    titles, units = bench_table.titles().splitlines()
    moved = row(op=None, link_percent=None, algorithm="hierarchical:circulant", in_place=False, wrong=12)
    lines = [str(row()), str(moved)]
    assert {len(line) for line in (titles, *lines)} == {len(titles)}
    names = titles.lstrip("# ").split()
    cells = dict(zip(names, lines[1].split(), strict=True))
    assert cells["algorithm"] == "hierarchical:circulant"
    assert (cells["op"], cells["link"], cells["in-place"], cells["#wrong"]) == ("-", "-", "no", "12")
    assert dict(zip(names, lines[0].split(), strict=True))["time"] == "2000.00"
    assert units.split() == ["#", "(B)", "(elements)", "(us)", "(us)", "(GB/s)", "(GB/s)", "(%)"]


def test_the_last_line_says_what_was_wrong_first():
    assert bench_table.verdict([row(), row()]) == "# 2 rows, every result right"
    said = bench_table.verdict([row(), row(wrong=1000, algorithm="tree"), row(wrong=24)])
    assert said.startswith("# 3 rows, 2 WRONG, 1,024 elements; the first is tree, 1048576 elements, private")
