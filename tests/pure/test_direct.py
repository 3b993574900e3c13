"""Whether MPI may read device memory: what each evidence says, how ranks agree, and children that fail at the trial."""

from __future__ import annotations

import os
import re
import sys
import time

import pytest

from hpczero.collectives import direct
from hpczero.collectives.direct import VARIABLE, Evidence, Verdict, agreed, child_environment, decide, try_in_child
from hpczero.errors import ConfigError

CRAY, MVAPICH = "MPI VERSION : CRAY MPICH version 8.1.28", "MVAPICH2 Version : 2.3.7"
OPEN_MPI = "Open MPI v5.0.5"
ON = {"MPICH_GPU_SUPPORT_ENABLED": "1"}
ALL = {"memory_kinds": "mpi,system,cuda", "query": True, "has_gtl": True}

# What a rank sees, what that means, and a word of the reason.
SAYS = [
    (Evidence({}), None, "does not say"),
    (Evidence({}, OPEN_MPI, query=False), None, "does not say"),
    (Evidence({}, OPEN_MPI, query=True), True, "MPIX_Query_cuda_support"),
    (Evidence({VARIABLE: "auto"}, OPEN_MPI, query=True), True, "MPIX_Query_cuda_support"),
    # The user's word is above all evidence.
    (Evidence({VARIABLE: "staged"}, OPEN_MPI, **ALL), False, "=staged"),
    (Evidence({VARIABLE: "ipc"}, OPEN_MPI, **ALL), False, "=ipc"),
    (Evidence({VARIABLE: "direct"}, OPEN_MPI, query=False), True, "=direct"),
    # Kinds of memory.
    (Evidence({}, memory_kinds="mpi,system"), None, ""),
    (Evidence({}, memory_kinds="mpi,system,cuda"), True, "system,cuda"),
    (Evidence({}, memory_kinds="system, cuda:device"), True, "cuda:device"),
    (Evidence({}, memory_kinds="system,cuda:managed:device"), True, "cuda"),
    (Evidence({}, memory_kinds="system,cuda:managed"), None, ""),
    (Evidence({}, memory_kinds="system,cuda:host,rocm:device,rocm"), None, ""),
    # Cray MPICH: the variable and the library, or no.
    (Evidence({}, CRAY), False, "only with MPICH_GPU_SUPPORT_ENABLED=1"),
    (Evidence({}, CRAY, has_gtl=True), False, "only with MPICH_GPU_SUPPORT_ENABLED=1"),
    (Evidence({"MPICH_GPU_SUPPORT_ENABLED": "0"}, CRAY, has_gtl=True), False, "only with"),
    (Evidence(ON, CRAY), False, "GTL library is not loaded"),
    (Evidence(ON, CRAY, has_gtl=True), True, "GTL library is loaded"),
    # The variable of another library says nothing.
    (Evidence(ON, OPEN_MPI, has_gtl=True), None, ""),
    (Evidence({"MV2_USE_CUDA": "1"}, OPEN_MPI), None, ""),
    # MVAPICH, by either name of its variable; a build that says it has no CUDA is tried.
    (Evidence({}, MVAPICH), False, "only with MVP_USE_CUDA=1"),
    (Evidence({"MV2_USE_CUDA": "0"}, MVAPICH), False, "only with"),
    (Evidence({"MV2_USE_CUDA": "1"}, MVAPICH), True, "MV2_USE_CUDA=1"),
    (Evidence({"MVP_USE_CUDA": "1"}, "MVAPICH Version: 3.0"), True, "MVP_USE_CUDA=1"),
    (Evidence({"MV2_USE_CUDA": "1"}, MVAPICH, query=False), None, ""),
]


@pytest.mark.parametrize(("evidence", "answer", "word"), SAYS)
def test_each_evidence_says_yes_or_no_or_leaves_it_to_a_trial(evidence, answer, word):
    verdict = decide(evidence)
    assert verdict.direct is answer and word in verdict.reason
    assert verdict.is_setting == (evidence.environment.get(VARIABLE, "auto") != "auto")


def test_any_other_word_is_refused():
    with pytest.raises(ConfigError, match="HPCZERO_DEVICE_TRANSFER='yes' is not one of auto, direct, staged, ipc"):
        decide(Evidence({VARIABLE: "yes"}))


YES, NO, DOUBT = Verdict(True, "yes"), Verdict(False, "no"), Verdict(None, "doubt")


@pytest.mark.parametrize(("verdicts", "result"), [
    ([YES, YES], YES), ([YES, NO], NO), ([NO, DOUBT], NO), ([DOUBT, NO, YES], NO), ([YES, DOUBT], DOUBT), ([DOUBT], DOUBT),
])
def test_mpi_reads_device_memory_if_it_does_so_on_every_rank(verdicts, result):
    assert agreed(verdicts) == result


def test_the_child_does_not_know_that_its_parent_is_a_rank():
    told = ["PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "PRTE_MCA_x", "HYDRA_A", "SLURM_PROCID", "MPI_LOCALRANKID"]
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "MV2_USE_CUDA": "1", "UCX_TLS": "all", "MPIR_CVAR_X": "1"}
    assert child_environment(dict.fromkeys(told, "0") | kept, ["", "a", "b"]) == kept | {"PYTHONPATH": f"a{os.pathsep}b"}


FAILS = {
    "import os; os.kill(os.getpid(), 11)": r"ended by signal 11 \(Segmentation fault\)",
    "import os; os.abort()": r"ended by signal 6 \(",
    "import sys; print('one'); sys.exit('no CUDA here')": "failed with status 1: no CUDA here",
    "import os; os._exit(3)": "failed with status 3: it said nothing",
    "pass": "other bytes arrived than were sent",
    "print('0' * 64)": "other bytes arrived than were sent",
    "import sys; print(sys.argv[3])": "other bytes arrived than were sent",
}


@pytest.mark.parametrize("program", FAILS)
def test_a_child_that_crashes_or_lies_means_staged_and_the_reason_says_how(tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    verdict = try_in_child(tmp_path / "program.py", "cupy", 0, timeout_s=30)
    assert verdict.direct is False
    assert re.search(FAILS[program], verdict.reason), verdict.reason


def test_a_child_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    (tmp_path / "program.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'helper')!r}).write_text(str(helper.pid))\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    verdict = try_in_child(tmp_path / "program.py", "cupy", 0, timeout_s=2)
    assert verdict == Verdict(False, "a trial in a child process did not end within 2 s")
    assert time.monotonic() - start < 10
    helper = int((tmp_path / "helper").read_text())
    assert _ended(helper)


def _ended(pid):
    """Whether a process is gone, or waits for nothing but its parent's attention; init may take a moment."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_child_that_sends_the_bytes_back_means_direct(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from hpczero.collectives.direct_probe import COUNTS, digest, pattern\n"
        "assert sys.argv[1:3] == ['cupy', '1']\n"
        "print(digest(pattern(sys.argv[3], count) for count in COUNTS))\n"
    )
    assert try_in_child(tmp_path / "program.py", "cupy", 1, timeout_s=30).direct is True


def test_no_child_is_started_where_python_is_part_of_another_program(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/solver/bin/solver")
    monkeypatch.setattr(direct.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("started a process"))
    verdict = try_in_child(tmp_path / "program.py", "cupy", 0, timeout_s=1)
    assert verdict.direct is False and "part of another program" in verdict.reason
