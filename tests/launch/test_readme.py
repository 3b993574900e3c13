"""The code of the README, run as a user would run it."""

from __future__ import annotations

import re
import sys

import pytest
from launcher import ROOT, mpirun

README = (ROOT / "README.md").read_text()


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_an_mpi_code_hands_half_of_its_ranks_over_and_trains_its_own_model(num_ranks, tmp_path):
    (code,) = python_blocks()
    (tmp_path / "simulation.py").write_text(code)
    done = mpirun(num_ranks, [sys.executable, "simulation.py"], timeout=120, cwd=tmp_path)
    assert done.status == 0, done
    said = re.fullmatch(r"step 300: every weight is near 1: \[(.*)\]\s*", done.stdout)
    assert said, done
    assert len(weights := [float(weight) for weight in said[1].split()]) == 8
    assert all(abs(weight - 1) < 0.05 for weight in weights), done


def test_the_example_is_as_short_as_it_claims():
    (code,) = python_blocks()
    body = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(body) <= 20
