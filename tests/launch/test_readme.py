"""The code of the README, run as a user would run it."""

from __future__ import annotations

import re
import sys
from functools import partial

import pytest
from launcher import ROOT, ahead, mpirun

README = (ROOT / "README.md").read_text()


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


NUM_RANKS = [2, 4, 5]


@pytest.fixture(scope="module")
def done_on(tmp_path_factory):
    """How the example ended on so many ranks."""
    (code,) = python_blocks()
    program = tmp_path_factory.mktemp("readme") / "simulation.py"
    program.write_text(code)
    with ahead({num_ranks: partial(mpirun, num_ranks, [sys.executable, program], timeout=120, cwd=program.parent)
                for num_ranks in NUM_RANKS}) as done:  # fmt: skip
        yield done


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_an_mpi_code_hands_half_of_its_ranks_over_and_trains_its_own_model(num_ranks, done_on):
    done = done_on(num_ranks)
    assert done.status == 0, done
    said = re.fullmatch(r"step 300: every weight is near 1: \[(.*)\]\s*", done.stdout)
    assert said, done
    assert len(weights := [float(weight) for weight in said[1].split()]) == 8
    assert all(abs(weight - 1) < 0.05 for weight in weights), done


def test_the_example_is_as_short_as_it_claims():
    (code,) = python_blocks()
    body = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(body) <= 20
