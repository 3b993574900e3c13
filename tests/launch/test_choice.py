"""`tune` and `explain`, as the page on choosing shows them, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from launcher import ROOT, Result, mpirun, mpirun_path

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")


def hpczero(*arguments: str, cwd, ranks: int = 2, **env: str) -> Result:
    return mpirun(ranks, [sys.executable, "-m", "hpczero", *arguments], 120.0, {"OPENBLAS_NUM_THREADS": "1", **env}, cwd)


def test_what_tune_has_stored_is_what_explain_and_adaptive_go_by(tmp_path):
    (commands,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "choice.md").read_text(), re.DOTALL)
    tune, explain, other = (shlex.split(line) for line in commands.splitlines())
    environment = dict([tune[0].split("=")])
    done = hpczero(*tune[tune.index("hpczero") + 1:], cwd=tmp_path, **environment)
    assert done.status == 0 and "times stored in here.json" in done.stdout, done
    entries = json.loads((tmp_path / "here.json").read_text())["entries"]
    measured = {entry["algorithm"]: entry["seconds"] for entry in entries if entry["nbytes"] == 2**20}
    assert {"ring", "window", "system", "circulant"} <= measured.keys()

    done = hpczero(*explain[explain.index("hpczero") + 1:], cwd=tmp_path, **environment)
    assert done.status == 0, done
    small, large = json.loads(done.stdout.splitlines()[-1])
    assert small["taken"] == "window" and not small["estimates"]
    assert large["taken"] == min(measured, key=measured.get)
    assert {each["algorithm"]: each["seconds"] for each in large["estimates"] if each["basis"] == "tuned"} == measured

    done = hpczero(*other[other.index("hpczero") + 1:], cwd=tmp_path)
    assert done.status == 0 and "measurement made now" in done.stdout, done


def test_a_table_that_is_damaged_is_not_used_and_the_run_goes_on(tmp_path):
    (tmp_path / "here.json").write_text("{")
    done = hpczero("explain", "all_reduce", "--sizes", "1MiB", cwd=tmp_path, HPCZERO_TUNING_TABLE="here.json")
    assert done.status == 0 and "measurement made now" in done.stdout, done
    assert done.stderr.count("the tuning table here.json is not used") == 1, done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tune", "--operations", "all_reduce,reduc"), "did you mean reduce?"),
        (("tune", "--sizes", "big"), "'big' is not"),
        (("explain", "allreduce"), "'allreduce' is no collective; did you mean all_reduce?"),
        (("explain", "all_reduce", "--order", "sorted"), "order = 'sorted'"),
    ],
)
def test_what_is_not_understood_is_one_message(arguments, said, tmp_path):
    done = hpczero(*arguments, cwd=tmp_path)
    assert done.status == 2 and said in done.stderr and "Traceback" not in done.stderr, done
    assert len(re.findall(r"^hpczero: ", done.stderr, re.MULTILINE)) == 1, done
