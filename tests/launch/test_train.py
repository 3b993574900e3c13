"""`python -m hpczero` on several ranks, as users start it: equal results, and one voice for what goes wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from launcher import Result, mpirun, mpirun_path

SMALL = ("--steps", "6", "--width", "16", "--depth", "1", "--heads", "2", "--sequence-length", "16", "--batch", "5",
         "--dtype", "float64")  # fmt: skip

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")


def train(ranks: int, *arguments: str, cwd: Path, **env: str) -> Result:
    return mpirun(
        ranks, [sys.executable, "-m", "hpczero", *arguments], 180.0, {"OPENBLAS_NUM_THREADS": "1", **env}, cwd
    )


def result(ranks: int, *arguments: str, cwd: Path, **env: str) -> dict:
    done = train(ranks, *SMALL, *arguments, "--json", cwd=cwd, **env)
    assert done.status == 0, done
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """The same training on one rank at stage 0, where nothing is shared or sharded."""
    return result(1, "--stage", "0", cwd=tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_stages_end_with_the_same_bits_and_the_losses_of_one_rank(ranks, alone, tmp_path):
    found = [result(ranks, "--stage", str(stage), cwd=tmp_path) for stage in range(4)]
    assert len({each["param_sha256"] for each in found}) == 1
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert found[0]["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-9)
    assert [each["bytes_per_rank"] > 0 for each in found] == [True] * 4


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_step_may_have_fewer_sequences_than_there_are_ranks(stage, tmp_path):
    few = ("--batch", "2", "--stage", stage)
    assert result(3, *few, cwd=tmp_path)["losses"] == pytest.approx(result(1, *few, cwd=tmp_path)["losses"], rel=1e-9)


def one_message(done: Result) -> str:
    """The only thing that was said, ending all ranks with status 2 and leaving nothing behind."""
    assert done.status == 2, done
    said = re.findall(r"^hpczero: (.*)$", done.stderr, re.MULTILINE)
    assert len(said) == 1 and "Traceback" not in done.stderr and not done.stdout.strip(), done
    return said[0]


def test_what_cannot_be_done_is_said_once_for_all_ranks(tmp_path):
    (tmp_path / "two.csv").write_text("1,2\n3,4.5\n5,6\n7,8\n")
    assert "stage = '4' (from flag --stage)" in one_message(train(3, "--stage", "4", cwd=tmp_path))
    assert "--lrr: no such flag" in one_message(train(3, "--lrr", "4", cwd=tmp_path))
    assert "nowhere: no such file" in one_message(train(3, "--data", "nowhere", cwd=tmp_path))
    few = one_message(train(4, "--model", "mlp", "--data", "two.csv", cwd=tmp_path))
    assert "4 ranks, but only 3 rows to train on" in few
    assert [path.name for path in tmp_path.iterdir()] == ["two.csv"]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_exception_inside_a_step_on_one_rank_ends_all_with_its_traceback_once(stage, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from mpi4py import MPI\n"
        "from hpczero import models\n"
        "class Failing(models.mlp.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, params, x):\n"
        "        Failing.calls += 1\n"
        "        if Failing.calls == 3 and MPI.COMM_WORLD.rank == 1:\n"
        "            raise ZeroDivisionError('in the third step')\n"
        "        return super().forward(params, x)\n"
        "def build(dataset, settings):\n"
        "    layer = Failing(dataset.num_inputs, dataset.num_outputs)\n"
        "    return models.Model((('only', layer),), models.mean_squared_error)\n"
    )
    (tmp_path / "table.csv").write_text("\n".join(f"{i},{i * i % 7},{2.0 * i + 1.0}" for i in range(50)))
    done = train(2, *SMALL, "--stage", stage, "--model", "mine:build", "--data", "table.csv", cwd=tmp_path)
    assert done.status == 1, done
    assert done.stderr.count("Traceback") == 1 and done.stderr.count("ZeroDivisionError: in the third step") == 1
    assert "rank 1 of 2" in done.stderr


def test_sys_exit_in_the_users_model_on_one_rank_ends_all(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom mpi4py import MPI\ndef build(dataset, settings):\n"
        "    if MPI.COMM_WORLD.rank == 1:\n        sys.exit(7)\n    return 1\n"
    )
    done = train(2, *SMALL, "--model", "mine:build", cwd=tmp_path)
    assert done.status == 7, done
    assert "rank 1 of 2" in done.stderr and "called sys.exit(7)" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


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
