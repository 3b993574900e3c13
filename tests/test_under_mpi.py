"""Runs tests/mpi under mpirun, once per number of ranks; and sees that what fails there, however, is reported."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from launcher import ahead, mpirun
from mpi_runs import ROOT, run_tests, show

BROKEN = [
    ("test_that_is_wrong_on_rank_1", "test_that_is_right", "test_that_dies_on_rank_1"),
    ("test_that_raises_on_rank_1", "test_that_is_right"),
    ("test_that_hangs",),
]


# What is claimed for every number of ranks up to 5; the rest of tests/mpi is about one, a few, and odd numbers of them.
ON_FOUR = ("tests/mpi/test_collectives.py", "tests/mpi/test_training.py")
# These draw node maps and sizes of their own, and tests/test_soak.py runs all of them on 1 to 8 ranks.
NOT_ON_FIVE = tuple(f"--ignore=tests/mpi/test_{name}.py" for name in ("bits", "communicators", "links", "matrix"))


# One rank first: it finds the kernels compiled, or compiles them for all that follow.
@pytest.mark.parametrize(("num_ranks", "what"), [(1, ["tests/mpi"]), (2, ["tests/mpi"]), (3, ["tests/mpi"]), (4, ON_FOUR),
                                                 (5, ["tests/mpi", *NOT_ON_FIVE])], ids=[1, 2, 3, 4, 5])  # fmt: skip
def test_tests_mpi_on(num_ranks, what, tmp_path, subtests):
    show(run_tests(num_ranks, tmp_path, *what), subtests)


def test_what_is_marked_eight_ranks_on_8(tmp_path, subtests):
    show(run_tests(8, tmp_path, "tests/mpi", "-m", "eight_ranks"), subtests)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The run of those tests of broken_on_purpose.py, by name, on two ranks."""
    files = {names: [f"tests/mpi/broken_on_purpose.py::{name}" for name in names] for names in BROKEN}
    with ahead({names: partial(run_tests, 2, tmp_path_factory.mktemp("reports"), *tests)
                for names, tests in files.items()}) as run:  # fmt: skip
        yield run


def test_a_check_that_fails_on_one_rank_names_it_and_the_next_test_runs_and_a_rank_that_dies_is_named(broken):
    wrong, right, dies = broken(BROKEN[0]).verdicts
    assert wrong.outcome == "failed" and "ranks 0, 1 of 2: " in wrong.text
    assert "rank 1 of 2: forty-two was expected" in wrong.text
    assert right.outcome == "passed"
    assert dies.outcome == "failed" and "rank 1 of 2: did not come to the end of this test" in dies.text


def test_an_exception_on_one_rank_is_shown_though_the_other_rank_waits_for_it(broken):
    run = broken(BROKEN[1])
    (raises,) = run.verdicts
    assert "rank 1 of 2: " in raises.text and 'raise KeyError("only here")' in raises.text
    assert "rank 0 of 2: did not come to the end of this test" in raises.text
    assert "ended before 1 of its tests had begun" in run.problem


def test_a_test_that_hangs_ends_at_its_limit_with_the_stacks_of_every_rank(broken):
    (hangs,) = broken(BROKEN[2]).verdicts
    assert "in wait_on_rank_0" in hangs.text and "in wait_on_rank_1" in hangs.text


def test_pytest_inside_mpirun_refuses_to_start_runs_of_its_own():
    done = mpirun(2, [sys.executable, "-m", "pytest", "tests/test_under_mpi.py"], timeout=60.0, cwd=ROOT)
    assert done.status != 0
    assert "inside mpirun pytest needs --with-mpi" in done.stdout + done.stderr
