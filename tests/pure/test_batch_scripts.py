"""The batch scripts in slurm/: what they start with each launcher, seen by stand-ins for srun, mpirun and module."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
# Says on its last lines how it was called: its name, each argument, and the variables that reach the ranks.
STAND_IN = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$@"
env | grep -E '^(OMP|OPENBLAS|NUMBA)_NUM_THREADS=|^SRUN_CPUS_PER_TASK=' | sort
"""

with_each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


@pytest.fixture
def submit(tmp_path):
    """Runs a script as sbatch would: the variables of a job set, and the folder of submission the current one."""
    for name in ("srun", "mpirun"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)

    def run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "4", "SLURM_NNODES": "2"}
        environment = kept | slurm | {"PATH": path, "VENV": ""} | variables
        argv = ["bash", str(script), *arguments]
        return subprocess.run(
            argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False
        )

    return run


def test_there_is_a_script_for_hosts_and_one_for_gpus():
    assert [script.name for script in SCRIPTS] == ["train-gpu.sbatch", "train.sbatch"]


@with_each_script
def test_bash_can_read_it(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


@with_each_script
def test_its_header_shows_the_line_that_submits_it_and_asks_for_resources(script):
    text = script.read_text()
    assert f"sbatch slurm/{script.name}" in text
    header = text.partition("\nset -")[0]
    asked = re.findall(r"^#SBATCH --([a-z-]+)=\S", header, re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= set(asked)
    assert ("gpus-per-node" in asked) == ("gpu" in script.name)
    # Slurm reads no #SBATCH line behind the first command.
    assert text.count("\n#SBATCH") == len(asked)


@with_each_script
@pytest.mark.parametrize("launch", ["pmix", "cray_shasta"])
def test_srun_starts_one_rank_per_task_with_the_asked_mpi_and_ends_all_of_them_when_one_fails(submit, script, launch):
    said = submit(script, "--steps", "7", LAUNCH=launch).stdout.splitlines()
    assert said[:2] == ["srun", f"--mpi={launch}"]
    assert "--kill-on-bad-exit=1" in said
    assert_trains(said, "cuda" if "gpu" in script.name else "cpu")


@with_each_script
def test_srun_with_pmix_is_what_is_used_when_nothing_is_said(submit, script):
    assert submit(script).stdout.splitlines()[:2] == ["srun", "--mpi=pmix"]


@with_each_script
def test_mpirun_starts_as_many_ranks_as_there_are_tasks(submit, script):
    said = submit(script, "--steps", "7", LAUNCH="mpirun").stdout.splitlines()
    assert said[:3] == ["mpirun", "-n", "8"]
    assert_trains(said, "cuda" if "gpu" in script.name else "cpu")


@with_each_script
def test_another_launcher_is_refused_with_the_allowed_ones(submit, script):
    done = submit(script, LAUNCH="aprun")
    assert done.returncode == 2
    assert done.stderr == "LAUNCH=aprun: not one of pmix, cray_shasta, mpirun\n"


@with_each_script
def test_modules_are_loaded_and_the_virtual_environment_entered_before_anything_starts(submit, script, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text('echo "entered with ${LOADED[*]}"\n')
    module = {"BASH_FUNC_module%%": "() { LOADED=(\"$@\"); }"}
    said = submit(script, VENV=".", MODULES="mpi/5 cuda/12", **module).stdout.splitlines()
    assert said[:2] == ["entered with load mpi/5 cuda/12", "srun"]


@with_each_script
def test_a_missing_environment_ends_the_job(submit, script):
    done = submit(script, VENV="nowhere")
    assert done.returncode != 0 and "nowhere/bin/activate" in done.stderr and not done.stdout


def assert_trains(said: list[str], device: str) -> None:
    command = said[said.index("python") : said.index("python") + 10]
    assert command[:4] == ["python", "-m", "hpczero", "train"]
    assert command[4:] == ["--device", device, "--out", "runs/slurm-42", "--steps", "7"]
    threads = {f"{library}_NUM_THREADS=4" for library in ("OMP", "OPENBLAS", "NUMBA")}
    assert threads | {"SRUN_CPUS_PER_TASK=4"} <= set(said)
