"""Where no folder for compiled kernels can be written, the library and the command line compile them and go on."""

from __future__ import annotations

import json
import sys

import pytest
from launcher import ROOT, command_line, mpirun_path, run

# The package read-only, as an administrator would have installed it, and no home; in this process and its children.
IN_A_READ_ONLY_PLACE = """
mount --bind hpczero hpczero && mount -o remount,ro,bind hpczero || exit 77
cd "$1" && shift
exec "$@"
"""
HOMELESS = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "NUMBA_CACHE_DIR": None,
            "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
PROGRAM = """
import os

import numpy as np
from mpi4py import MPI

import hpczero
from hpczero.kernels import cpu_loop

try:
    open(os.path.join(os.path.dirname(hpczero.__file__), "written"), "w")
    raise SystemExit("the package can be written")
except OSError:
    pass
assert cpu_loop.keywords["cache"] is False, "Numba has found a folder after all"
comm = MPI.COMM_WORLD
with hpczero.Topology(comm) as topology:
    found = hpczero.all_reduce(np.arange(1000.0) + comm.rank, topology)
assert np.array_equal(found, 2 * np.arange(1000.0) + 1), found
with hpczero.ZeroOptimizer({"w": np.zeros(100)}, hpczero.SGD(lr=0.5), comm) as zero:
    zero.accumulate({"w": np.full(100, comm.rank + 1.0)})
    assert zero.step().applied
    assert np.array_equal(zero.full_parameters()["w"], np.full(100, -0.75)), zero.full_parameters()
os.write(1, b"right\\n")
"""


def in_a_read_only_place(argv, cwd):
    return run(["unshare", "-m", "sh", "-c", IN_A_READ_ONLY_PLACE, "sh", cwd, *argv], 120.0, HOMELESS, ROOT)


def why_not() -> str | None:
    """The reason why this machine does not let us mount, if it does not."""
    try:
        done = in_a_read_only_place(["true"], "/")
    except FileNotFoundError:
        return "needs the command unshare"
    return None if done.status == 0 else f"needs a mount of its own: {done.stderr.strip()}"


pytestmark = [
    pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one"),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or ""),
]


def test_the_library_reduces_and_trains(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = in_a_read_only_place(command_line(2, [sys.executable, "program.py"]), tmp_path)
    assert (done.status, done.stdout) == (0, "right\n" * 2), done


def test_the_command_line_trains(tmp_path):
    small = ("--steps", "1", "--width", "8", "--depth", "1", "--heads", "1", "--sequence-length", "8", "--batch", "2")
    done = in_a_read_only_place(command_line(2, [sys.executable, "-m", "hpczero", *small, "--json"]), tmp_path)
    assert done.status == 0, done
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
    assert done.stderr.count("cannot be written; compiled kernels go to") == 1
