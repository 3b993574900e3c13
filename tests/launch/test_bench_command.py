"""`python -m hpczero bench` on several ranks: every collective's results, what the JSON says, what ends it."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from launcher import ROOT, mpirun, mpirun_path

from hpczero.collectives.selection import ALGORITHMS

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")

QUICK = ("--warmup", "1", "--repeats", "2")
KEYS = {
    "collective", "algorithm", "buffers", "in_place", "dtype", "op", "count", "bytes", "median_s", "p95_s",
    "algbw_GBps", "busbw_GBps", "link_percent", "wrong", "ranks", "nodes", "mpi",
}  # fmt: skip

# One start of MPI for all: `run` of the command, as the command line calls it.
ALL_FIVE = """
import sys
from mpi4py import MPI
from hpczero.cli import bench, parse

for collective in bench.COLLECTIVES:
    arguments = ["bench", collective, *sys.argv[1:], "--json", f"{collective}.json"]
    assert bench.run(parse(arguments), MPI.COMM_WORLD.Dup()) == 0
"""

# Rank 1 gets one element wrong in place, and changes an input that it should leave alone.
BROKEN = """
import sys
from hpczero.cli import bench, main

def spoiled(right):
    def wrong(array, topology, *, out=None, algorithm="adaptive", **options):
        result = right(array, topology, out=out, algorithm=algorithm, **options)
        if topology.rank == 1 and algorithm == "ring":
            array[3] += 1
        return result
    return wrong

def run(args, comm, run=bench.run):
    from hpczero.collectives import api
    api.all_reduce = spoiled(api.all_reduce)
    return run(args, comm)

bench.run = run
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> dict[str, dict]:
    """The JSON of each collective on three ranks of two nodes, of a size that does not divide."""
    folder = tmp_path_factory.mktemp("five")
    (folder / "five.py").write_text(ALL_FIVE)
    flags = ("--sizes", "4004", *QUICK, "--check")
    done = mpirun(3, [sys.executable, "five.py", *flags], 120.0, {"HPCZERO_NODE_MAP": "0,0,1"}, folder)
    assert done.status == 0, done
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_every_collective_has_a_row_for_each_way_it_can_be_called_and_all_are_right(five):
    for collective, known in ALGORITHMS.items():
        rows, left_out = five[collective]["rows"], five[collective]["header"]["left_out"]
        assert {frozenset(row) for row in rows} == {frozenset(KEYS)}
        assert [row["wrong"] for row in rows] == [0] * len(rows)
        ways = {(row["algorithm"], row["buffers"], row["in_place"]) for row in rows}
        assert len(ways) == len(rows)
        able = {algorithm for algorithm, *_ in ways}
        assert {"system", "adaptive"} <= able <= {*known, "adaptive"}
        for name in {*known} - able:
            assert any(f"'{name}'" in reason for reason in left_out), f"{collective}: nothing is said of {name}"
        assert len(set(left_out)) == len(left_out)
        answers = {True} if collective == "broadcast" else {True, False}
        assert {way[1:] for way in ways if way[0] == "system"} == {
            (buffers, answer) for buffers in ("shared", "private") for answer in answers
        }


def test_the_numbers_of_a_row_follow_from_each_other(five):
    factors = {"all_reduce": 4 / 3, "reduce_scatter": 2 / 3, "all_gather": 2 / 3, "broadcast": 1, "reduce": 1}
    for collective, found in five.items():
        best = max(found["header"]["links_GBps"].values())
        for row in found["rows"]:
            assert row["bytes"] == 4 * row["count"] and (row["ranks"], row["nodes"]) == (3, 2)
            assert 0 < row["median_s"] <= row["p95_s"]
            assert row["algbw_GBps"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)
            assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * factors[collective])
            assert row["link_percent"] == pytest.approx(100 * row["busbw_GBps"] / best)
            assert row["op"] == (None if collective in ("all_gather", "broadcast") else "sum")


def test_the_header_says_where_and_how(five):
    header = five["all_reduce"]["header"]
    assert (header["ranks"], header["nodes"], header["ranks_per_node"]) == (3, 2, [2, 1])
    assert set(header["links_GBps"]) == {"in a node", "between nodes"}
    assert header["mpi"] == five["all_reduce"]["rows"][0]["mpi"] and re.search(r"\d+\.\d+", header["mpi"])
    assert {"thread_level", "hosts", "python", "numpy", "numba", "device", "shared_gpu", "repeats"} <= set(header)


def test_a_wrong_element_on_one_rank_is_counted_and_ends_with_status_1(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = ("--sizes", "1KiB", "--algorithms", "ring,tree", "--buffers", "private", "--json", *QUICK)
    done = mpirun(2, [sys.executable, "broken.py", "bench", "all_reduce", *flags], 60.0, cwd=tmp_path)
    assert done.status == 1 and "Traceback" not in done.stderr, done
    *_, last, result = done.stdout.splitlines()
    assert last.startswith("# 4 rows, 2 WRONG, 2 elements; the first is ring")
    wrong = {(row["algorithm"], row["in_place"]): row["wrong"] for row in json.loads(result)["rows"]}
    assert wrong == {("ring", True): 1, ("ring", False): 1, ("tree", True): 0, ("tree", False): 0}


def test_an_algorithm_that_cannot_run_here_is_said_once_for_all_ranks(tmp_path):
    program = [sys.executable, "-m", "hpczero", "bench", "all_reduce", "--algorithms", "ring,window", *QUICK]
    done = mpirun(2, program, 60.0, {"HPCZERO_NODE_MAP": "0,1"}, tmp_path)
    assert (done.status, done.stdout.strip()) == (2, ""), done
    said = [line for line in re.findall(r"^hpczero: (.*)$", done.stderr, re.MULTILINE) if "device: cpu" not in line]
    assert len(said) == 1 and "works inside one node, and here are 2" in said[0], done
    assert "Traceback" not in done.stderr, done


def commands() -> list[str]:
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "bench.md").read_text(), re.DOTALL)
    return block.splitlines()


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_page_run(line, tmp_path):
    ranks, arguments = re.fullmatch(r"mpirun -n (\d) python (.*)", line).groups()
    done = mpirun(int(ranks), [sys.executable, *shlex.split(arguments), *QUICK], 60.0, cwd=tmp_path)
    assert done.status == 0 and "every result right" in done.stdout, done
    assert ("--json" in line) == (tmp_path / "result.json").exists()


def test_the_page_names_every_key_of_a_row():
    page = (ROOT / "docs" / "bench.md").read_text()
    assert not [key for key in KEYS if f"`{key}`" not in page]
