"""`python -m hpczero topo`: on paper without MPI, drawn, and measured on several ranks."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import pytest
from launcher import ROOT, Result, mpirun, mpirun_path, run

PLAN = ("--plan", "8192x8", "--alpha", "2us", "--beta", "12GB/s")
with_mpirun = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")


def topo(*arguments: str, cwd: Path, ranks: int = 0, **env: str) -> Result:
    command = [sys.executable, "-m", "hpczero", "topo", *arguments]
    env = {"OPENBLAS_NUM_THREADS": "1", **env}
    return mpirun(ranks, command, 120.0, env, cwd) if ranks else run(command, 120.0, env, cwd)


def test_65536_ranks_on_paper_take_less_than_ten_seconds(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = topo(*PLAN, "--json", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.status == 0, done
    # Of the processor: what else this machine does meanwhile is no fault of the plan's.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 10
    found = json.loads(done.stdout)["plan"]
    assert found["nodes"] * found["ranks_per_node"] == 65536
    assert len(found["seconds"]) >= 12 and all(len(times) == len(found["sizes"]) for times in found["seconds"].values())
    assert found["crossovers"][0]["from_bytes"] == 8 and len(found["crossovers"]) >= 2
    for change in found["crossovers"][1:]:
        assert change["algorithm"] in found["seconds"]


def test_a_plan_starts_no_mpi(tmp_path):
    code = "import sys; from hpczero.cli import main; main(sys.argv[1:]); print('mpi4py.MPI' in sys.modules)"
    done = run([sys.executable, "-c", code, "topo", "--plan", "64x8", *PLAN[2:]], 60.0, cwd=tmp_path)
    assert done.status == 0 and done.stdout.splitlines()[-1] == "False", done


def test_a_plan_shows_every_algorithm_and_where_the_cheapest_changes(tmp_path):
    from hpczero.collectives.pricing import PREDICTED

    done = topo("--plan", "16x4", "--alpha", "2e-6", "--beta", "1e-10", "--node-alpha", "500ns", "--gamma", "10GB/s",
                cwd=tmp_path)
    assert done.status == 0, done
    for name in PREDICTED["all_reduce"]:
        assert re.search(rf"^{name}\b", done.stdout, re.MULTILINE), name
    assert re.search(r"^from 8 B to .*: \w+$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "text"), [
    (("--plan", "8192"), "nodes x ranks per node"),
    (("--plan", "0x8", *PLAN[2:]), "nodes x ranks per node"),
    (("--plan", "99999x99999", *PLAN[2:]), "1048576 ranks"),
    (("--plan", "2x2"), "needs --alpha and --beta"),
    ((*PLAN[:2], "--alpha", "soon", "--beta", "1GB/s"), "--alpha 'soon': a time is needed"),
    ((*PLAN[:2], "--alpha", "2us", "--beta", "fast"), "--beta 'fast': a rate is needed"),
    ((*PLAN[:2], "--alpha", "2us", "--beta", "-1"), "a rate is needed"),
    (("--alpha", "2us"), "belongs to --plan"),
    ((*PLAN, "--measure"), "ask for one of them"),
    ((*PLAN, "--draw", "ring"), "65536 ranks do not fit on a page"),
    (("--draw", "star"), "invalid choice"),
])
def test_what_cannot_be_planned_is_one_message(arguments, text, tmp_path):
    done = topo(*arguments, cwd=tmp_path)
    assert done.status == 2 and text in done.stderr and "Traceback" not in done.stderr and not done.stdout, done
    assert len(re.findall("^hpczero: ", done.stderr, re.MULTILINE)) == 1, done


def test_alone_there_is_one_rank_and_nothing_to_send(tmp_path):
    done = topo("--draw", "ring", cwd=tmp_path)
    assert done.status == 0 and "1 rank on 1 node" in done.stdout and "nothing is sent" in done.stdout, done


def test_a_planned_machine_can_be_drawn(tmp_path):
    done = topo("--plan", "2x2", *PLAN[2:], "--draw", "butterfly", "--json", cwd=tmp_path)
    drawing = json.loads(done.stdout)["drawing"]
    assert drawing["rounds"][0].split() == ["rank", "0", "rank", "1", "rank", "2", "rank", "3"]
    assert [line.split() for line in drawing["rounds"][1:]] == [
        ["round", "0", "1:0", "0:0", "3:0", "2:0"], ["round", "1", "2:0", "3:0", "0:0", "1:0"],
    ]


@with_mpirun
def test_nodes_are_shown_and_links_measured_by_all_ranks_and_said_once(tmp_path):
    done = topo("--measure", "--draw", "hierarchical", "--json", cwd=tmp_path, ranks=3, HPCZERO_NODE_MAP="0,0,1")
    assert done.status == 0, done
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["nodes"] == [[0, 1], [2]] and found["ranks"] == 3
    assert found["links"]["node"]["classes"] and found["links"]["network"]["classes"]
    between = found["node_topology"]
    assert between["adjacency"] == [[0, 1], [1, 0]] and between["bandwidth_MB_per_s"][0][1] > 0
    assert between["node_latency_ms"][0] > 0 and between["node_latency_ms"][1] is None
    assert len(found["drawing"]["rounds"]) == 5
    text = topo("--measure", cwd=tmp_path, ranks=2, HPCZERO_NODE_MAP="0,1")
    for words in ("2 ranks on 2 nodes", "node 1: rank 1", "between nodes, up to 8 KiB", "inside a node: no two ranks",
                  "adding float32"):
        assert words in text.stdout, text


@with_mpirun
def test_a_plan_under_mpirun_is_said_once(tmp_path):
    done = topo("--plan", "4x2", *PLAN[2:], cwd=tmp_path, ranks=2)
    assert done.status == 0 and done.stdout.count("all_reduce over 4 nodes of 2 ranks") == 1, done


def test_the_plan_on_the_page_is_what_the_command_prints(tmp_path):
    page = (ROOT / "docs" / "topo.md").read_text()
    (shown,) = re.findall(r"\$ python -m hpczero (topo --plan .*)\n(?:.*\n)*?```", page)
    block = re.search(r"\$ python -m hpczero topo --plan .*\n((?:.*\n)*?)```", page).group(1)
    done = topo(*shown.split()[1:], cwd=tmp_path)
    assert [line.rstrip() for line in done.stdout.splitlines()] == block.splitlines()
