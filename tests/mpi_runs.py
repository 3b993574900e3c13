"""Runs pytest on several ranks, and shows what became of each of its tests as a subtest of the test that calls."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import mpirun
from rank_report import Verdict, left_out, verdicts

ROOT = Path(__file__).parent.parent
LIMIT_S = 300.0
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """One mpirun: what each test did, and a word on the run as a whole if it did not end as it should have."""

    verdicts: list[Verdict]
    problem: str


def run_tests(num_ranks: int, folder: Path, *arguments: str, **env: str) -> Run:
    """Pytest with `arguments` on `num_ranks` ranks, under the variables `env`. `folder` takes the reports."""
    options = ["--with-mpi", f"--report-to={folder}", "--tb=short", "-p", "no:cacheprovider"]
    argv = [sys.executable, "-m", "pytest", *options, *arguments]
    done = mpirun(num_ranks, argv, timeout=LIMIT_S, env=ENVIRONMENT | env, cwd=ROOT)
    found = verdicts(folder, num_ranks)
    problem = ""
    if done.status is None:
        problem = f"was still running after {LIMIT_S:.0f} s and was ended"
    elif missing := left_out(folder, num_ranks):
        problem = f"ended before {missing} of its tests had begun"
    elif done.status != 0 and not any(verdict.outcome == "failed" for verdict in found):
        problem = f"ended with status {done.status}"
    elif not found:
        problem = "ran no test"
    if problem:
        end = (done.stdout + done.stderr)[-4000:]
        problem = f"mpirun -n {num_ranks} {' '.join(argv)}\n{problem}; the end of its output:\n{end}"
    return Run(found, problem)


def show(run: Run, subtests: pytest.Subtests) -> None:
    for verdict in run.verdicts:
        with subtests.test(verdict.test):
            if verdict.outcome == "failed":
                pytest.fail(verdict.text, pytrace=False)
            elif verdict.outcome == "skipped":
                pytest.skip(verdict.text)
    if run.problem:
        pytest.fail(run.problem, pytrace=False)
