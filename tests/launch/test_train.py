"""`python -m hpczero` on several ranks, as users start it: equal results, and one voice for what goes wrong."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from launcher import Result, ahead, mpirun, mpirun_path

SMALL = ("--steps", "6", "--width", "16", "--depth", "1", "--heads", "2", "--sequence-length", "16", "--batch", "5",
         "--dtype", "float64")  # fmt: skip

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")


def train(ranks: int, *arguments: str, cwd: Path, **env: str) -> Result:
    return mpirun(
        ranks, [sys.executable, "-m", "hpczero", *arguments], 180.0, {"OPENBLAS_NUM_THREADS": "1", **env}, cwd
    )


def result_of(run: tuple, cwd: Path) -> dict:
    ranks, *arguments = run
    done = train(ranks, *SMALL, *arguments, "--json", cwd=cwd)
    assert done.status == 0, done
    return json.loads(done.stdout.splitlines()[-1])


# On one rank at stage 0 nothing is shared or sharded.
ALONE = (1, "--stage", "0")
ALL_STAGES = {ranks: [(ranks, "--stage", str(stage)) for stage in range(4)] for ranks in (2, 3)}
FEW = {stage: [(ranks, "--batch", "2", "--stage", stage) for ranks in (3, 1)] for stage in ("2", "3")}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The JSON line of one of the runs above."""
    folder = tmp_path_factory.mktemp("results")
    runs = [ALONE, *(run for group in (ALL_STAGES, FEW) for runs in group.values() for run in runs)]
    with ahead({run: partial(result_of, run, folder) for run in runs}) as result:
        yield result


@pytest.mark.parametrize("ranks", ALL_STAGES)
def test_all_stages_end_with_the_same_bits_and_the_losses_of_one_rank(ranks, result):
    alone, found = result(ALONE), [result(run) for run in ALL_STAGES[ranks]]
    assert len({each["param_sha256"] for each in found}) == 1
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert found[0]["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-9)
    assert [each["bytes_per_rank"] > 0 for each in found] == [True] * 4


@pytest.mark.parametrize("stage", FEW)
def test_a_step_may_have_fewer_sequences_than_there_are_ranks(stage, result):
    several, one = (result(run)["losses"] for run in FEW[stage])
    assert several == pytest.approx(one, rel=1e-9)


def one_message(done: Result) -> str:
    """The only thing that was said, ending all ranks with status 2 and leaving nothing behind."""
    assert done.status == 2, done
    said = re.findall(r"^hpczero: (.*)$", done.stderr, re.MULTILINE)
    assert len(said) == 1 and "Traceback" not in done.stderr and not done.stdout.strip(), done
    return said[0]


def test_what_cannot_be_done_is_said_once_for_all_ranks(tmp_path):
    (tmp_path / "two.csv").write_text("1,2\n3,4.5\n5,6\n7,8\n")
    refused = {
        (3, "--stage", "4"): "stage = '4' (from flag --stage)",
        (3, "--lrr", "4"): "--lrr: no such flag",
        (3, "--data", "nowhere"): "nowhere: no such file",
        (4, "--model", "mlp", "--data", "two.csv"): "4 ranks, but only 3 rows to train on",
    }
    with ahead({run: partial(train, *run, cwd=tmp_path) for run in refused}) as done:
        for run, message in refused.items():
            assert message in one_message(done(run))
    assert [path.name for path in tmp_path.iterdir()] == ["two.csv"]


FAILING = """
import sys
from mpi4py import MPI
from hpczero import models

class Failing(models.mlp.Linear):
    calls = 0

    def forward(self, params, x):
        Failing.calls += 1
        if Failing.calls == 3 and MPI.COMM_WORLD.rank == 1:
            raise ZeroDivisionError('in the third step')
        return super().forward(params, x)

def build(dataset, settings):
    layer = Failing(dataset.num_inputs, dataset.num_outputs)
    return models.Model((('only', layer),), models.mean_squared_error)

def leave(dataset, settings):
    if MPI.COMM_WORLD.rank == 1:
        sys.exit(7)
    return 1
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """(its folder, how it ended) of a run on two ranks with that stage and that function of the model above."""
    jobs = {}
    for stage, function in [("2", "build"), ("3", "build"), ("2", "leave")]:
        folder = tmp_path_factory.mktemp("failed")
        (folder / "mine.py").write_text(FAILING)
        (folder / "table.csv").write_text("\n".join(f"{i},{i * i % 7},{2.0 * i + 1.0}" for i in range(50)))
        arguments = ("--stage", stage, "--model", f"mine:{function}", "--data", "table.csv")
        jobs[stage, function] = partial(lambda *run, cwd: (cwd, train(*run, cwd=cwd)), 2, *SMALL, *arguments, cwd=folder)
    with ahead(jobs, workers=3) as failed:  # most of it is waiting for a grace of three seconds
        yield failed


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_exception_inside_a_step_on_one_rank_ends_all_with_its_traceback_once(stage, failed):
    _, done = failed((stage, "build"))
    assert done.status == 1, done
    assert done.stderr.count("Traceback") == 1 and done.stderr.count("ZeroDivisionError: in the third step") == 1
    assert "rank 1 of 2" in done.stderr


def test_sys_exit_in_the_users_model_on_one_rank_ends_all(failed):
    folder, done = failed(("2", "leave"))
    assert done.status == 7, done
    assert "rank 1 of 2" in done.stderr and "called sys.exit(7)" in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "runs").exists()


def test_ranks_that_share_cores_share_them_out_as_threads(tmp_path):
    done = mpirun(3, [sys.executable, "-m", "hpczero", "doctor", "--json"], cwd=tmp_path,
                  env=dict.fromkeys(["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"]))  # fmt: skip
    facts = json.loads(done.stdout)
    assert (facts["world_size"], facts["ranks_per_node"]) == (3, [3])
    for rank in facts["ranks"]:
        assert rank["threads"] == dict.fromkeys(rank["threads"], str(max(1, rank["cores"] // 3)))


def test_a_json_file_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    done = train(1, *SMALL, "--json", "file/x.json", cwd=tmp_path)
    assert "--json file/x.json: cannot be written there" in one_message(done)


def test_a_run_in_which_no_step_was_applied_has_failed(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import numpy as np\n"
        "from hpczero import Model\n"
        "class Bad:\n"
        "    shapes = {'w': (3,)}\n"
        "    def init(self, rng, dtype): return {'w': np.zeros(3, dtype)}\n"
        "    def forward(self, params, x): return x, None\n"
        "    def backward(self, params, saved, dy): return dy, {'w': np.full(3, np.nan, np.float32)}\n"
        "def build(dataset, settings): return Model((('bad', Bad()),), lambda y, target: (1.0, y))\n"
    )
    done = train(2, "--steps", "3", "--model", "broken:build", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.status == 2 and "all 3 steps were skipped" in done.stderr, done
    assert "step 3 skipped (3 so far)" in done.stderr, done
