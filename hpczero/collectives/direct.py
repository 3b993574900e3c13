"""Whether MPI may be handed device memory: found out by evidence, since a wrong guess is a segmentation fault.

In the order of `decide`, the first that answers counts:

1. `HPCZERO_DEVICE_TRANSFER`: `direct`, `staged` or `ipc` is the user's word; `auto`, the default, asks what follows.
2. The kinds of memory that MPI says it supports (MPI 4.1, section 12.4.3, and the side document on memory allocation kinds).
   Asked of the communicator: what `MPI_INFO_ENV` shows is only what the user asked `mpirun` for.
3. `MPIX_Query_cuda_support`, which Open MPI and MPICH have. Its yes counts; a no may come from a wrapper, and is tried.
4. Cray MPICH and MVAPICH read device memory if a variable says so (and Cray's library for it was linked).
5. A child process sends a device array to itself, point to point, and shows what arrived (`direct_probe.py`). It has
   `TRIAL_S` seconds; if it crashes, hangs or is wrong in any way, memory is staged.

Ranks agree: MPI reads device memory on all of them or on none. If on none, the ranks of a node read each other's by CUDA IPC
(`ipc.py`), where CUDA lets all of them, and what goes to other nodes is staged; so too with `ipc`, where MPI is not asked,
and it is an error if CUDA does not. With `staged` everything goes through the host.

Nothing is looked at before the first device array is about to be sent. Then it costs some small exchanges and, once per node
and process, the seconds of the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.arrays import Array, namespace
from hpczero.collectives import direct_probe
from hpczero.collectives.ipc import Room, open_room
from hpczero.errors import ConfigError, gather_texts, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.topology import Topology

VARIABLE = "HPCZERO_DEVICE_TRANSFER"
SETTINGS = ("auto", "direct", "staged", "ipc")
TRIAL_S = 5.0
LAUNCHERS = ("PMI", "OMPI", "PRTE", "HYDRA", "HYDI", "SLURM", "PALS", "FLUX", "MPI_LOCAL", "MPIEXEC")
"""Variables that begin so tell a process that it is a rank of a job; a child that has them waits for that job."""
_log = logging.getLogger("hpczero.collectives")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rank sees of its MPI library without handing it device memory."""

    environment: Mapping[str, str]
    library: str = ""
    """What MPI calls itself."""
    memory_kinds: str = ""
    """Supported kinds of memory, such as "mpi,system,cuda:device"; "" where MPI does not say."""
    query: bool | None = None
    """What `MPIX_Query_cuda_support` says; None where the library does not have it."""
    has_gtl: bool = False
    """Cray's library for transfers from GPUs is loaded."""


@dataclass(frozen=True, slots=True)
class Verdict:
    direct: bool | None
    """None: only a trial can tell."""
    reason: str
    is_setting: bool = False
    """It is what the user asked for."""


def decide(evidence: Evidence) -> Verdict:
    """What the evidence says. Pure. ConfigError where the setting is none of the three."""
    environment, setting = evidence.environment, evidence.environment.get(VARIABLE, SETTINGS[0])
    if setting not in SETTINGS:
        raise ConfigError(f"{VARIABLE}={setting!r} is not one of {', '.join(SETTINGS)}")
    if setting != "auto":
        return Verdict(setting == "direct", f"{VARIABLE}={setting}", is_setting=True)
    if _has_device_memory(evidence.memory_kinds):
        return Verdict(True, f"MPI lists the kinds of memory {evidence.memory_kinds}")
    if evidence.query:
        return Verdict(True, "MPIX_Query_cuda_support says yes")
    if "CRAY MPICH" in evidence.library.upper():
        if environment.get("MPICH_GPU_SUPPORT_ENABLED", "0") != "1":
            return Verdict(False, "Cray MPICH reads device memory only with MPICH_GPU_SUPPORT_ENABLED=1")
        if not evidence.has_gtl:
            return Verdict(False, "MPICH_GPU_SUPPORT_ENABLED=1, but Cray's GTL library is not loaded: load the module "
                                  "craype-accel-… before mpi4py is built, or preload libmpi_gtl_cuda.so")
        return Verdict(True, "MPICH_GPU_SUPPORT_ENABLED=1, and Cray's GTL library is loaded")
    if "MVAPICH" in evidence.library.upper():
        switch = next((name for name in ("MVP_USE_CUDA", "MV2_USE_CUDA") if environment.get(name, "0") != "0"), None)
        if switch is None:
            return Verdict(False, "MVAPICH reads device memory only with MVP_USE_CUDA=1 (MV2_USE_CUDA=1 before version 3)")
        if evidence.query is None:
            return Verdict(True, f"MVAPICH with {switch}=1")
    return Verdict(None, "MPI does not say whether it can read device memory")


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """One for all ranks, from those of each: direct only if all say so; a no before a doubt."""
    return next((verdict for wanted in (False, None) for verdict in verdicts if verdict.direct is wanted), verdicts[0])


def choose(topology: Topology, array: Array, timeout_s: float, meet: Callable[[], None]) -> tuple[bool, Room | None]:
    """Whether MPI may be handed device memory such as that of `array`; if not, the room for CUDA IPC, if that works.

    Called by every rank; the same answer on all. `meet` returns when all ranks of the node have called it.
    """
    if topology.size == 1:
        return False, None      # nothing is ever sent
    verdict, setting = _verdict(topology, array, timeout_s)
    room = None
    if not verdict.direct and setting != "staged":
        found = open_room(topology, array, timeout_s, meet)
        if isinstance(found, str):
            if setting == "ipc":
                raise ConfigError(f"{VARIABLE}=ipc: {found}")
            verdict = Verdict(False, f"{verdict.reason}; {found}")
        else:
            room = found
    if topology.rank == 0:
        _say(verdict, room is not None, topology.num_nodes > 1)
    return verdict.direct, room


def _verdict(topology: Topology, array: Array, timeout_s: float) -> tuple[Verdict, str]:
    """Whether MPI reads device memory, and the setting, which must be the same on all ranks."""
    mine, error = None, None
    try:
        mine = decide(_look(topology.world))
    except ConfigError as found:
        error = found
    raise_together(topology.world, error, timeout_s)
    setting = os.environ.get(VARIABLE, SETTINGS[0])
    settings = gather_texts(topology.world, setting, timeout_s)
    if len(set(settings)) > 1:
        odd = next(rank for rank, other in enumerate(settings) if other != settings[0])
        raise ConfigError(f"{VARIABLE}={settings[0]} on rank 0, but {settings[odd]} on rank {odd} of {topology.size}: the "
                          "ranks must agree")
    verdicts = _gathered(topology, mine, timeout_s)
    verdict = agreed(verdicts)
    if verdict.direct is None:
        # Whoever is sure is so of its own library: the trial speaks for the others, one for those of a node.
        in_doubt = [rank for rank in topology.map.nodes[topology.node_index] if verdicts[rank].direct is None]
        if in_doubt and topology.rank == in_doubt[0]:
            module = namespace(array)
            mine = _tried(module.__name__, module.cuda.Device().id)
        after = _gathered(topology, mine, timeout_s)
        verdict = agreed([one for one in after if one.direct is not None])
    return verdict, setting


def try_in_child(program: Path, module: str, index: int, timeout_s: float) -> Verdict:
    """Whether a process that runs `program` sends device memory through MPI and gets back what it sent.

    Parameters
    ----------
    program : path
        `direct_probe.py`, or in tests something that fails in its place.
    module : str
        The array module, "cupy".
    index : int
        Number of the GPU.
    timeout_s : float
    """
    if not re.fullmatch(r"(python|pypy)[\d.]*", Path(sys.executable or "").name):
        return Verdict(False, "no trial: this Python is part of another program, which a child would start again")
    seed = secrets.token_hex(8)
    # Descendants of fork may neither call nor close MPI; this is a vfork and exec, in which nothing of the parent runs. -P:
    # the folder of the program holds files with names that others use for modules.
    child = subprocess.Popen(
        [sys.executable, "-P", str(program), module, str(index), seed], env=child_environment(os.environ, sys.path),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )
    try:
        shown, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"a trial in a child process did not end within {timeout_s:g} s")
    finally:
        # The whole session: MPI libraries start helpers, which would hold on to the pipes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode < 0:
        return Verdict(False, f"a trial in a child process was ended by signal {-child.returncode} "
                              f"({signal.strsignal(-child.returncode)})")
    if child.returncode > 0:
        last = complaint.strip().splitlines()[-1:] or ["it said nothing"]
        return Verdict(False, f"a trial in a child process failed with status {child.returncode}: {last[0][:200]}")
    if shown.split() != [direct_probe.digest(direct_probe.pattern(seed, count) for count in direct_probe.COUNTS)]:
        return Verdict(False, "in a trial in a child process other bytes arrived than were sent")
    return Verdict(True, "a trial in a child process got back what it sent")


def child_environment(environment: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    """For a child that starts an MPI of its own: without what a launcher said, and with this process's import path."""
    kept = {name: value for name, value in environment.items() if not name.startswith(LAUNCHERS)}
    return kept | {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}


def _has_device_memory(kinds: str) -> bool:
    """Whether a list of kinds has CUDA device memory: "cuda", unrestricted, or with "device" among its restrictions."""
    found = [kind.strip().lower().split(":") for kind in kinds.split(",")]
    return any(name == "cuda" and (not restrictions or "device" in restrictions) for name, *restrictions in found)


def _look(comm: MPI.Intracomm) -> Evidence:
    from mpi4py import MPI

    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    loaded = _loaded_libraries()
    return Evidence(os.environ, MPI.Get_library_version(), kinds, _query(loaded),
                    any(Path(name).name.startswith("libmpi_gtl_cuda") for name in loaded))


def _loaded_libraries() -> list[str]:
    """Paths of the shared libraries in this process whose names begin with libmpi."""
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi" in line}
    return sorted(mapped)


def _query(loaded: Sequence[str]) -> bool | None:
    for name in loaded:
        with contextlib.suppress(OSError, AttributeError):
            # Not loaded anew, and not searched for: MPI libraries need not be visible to all of the process.
            return bool(ctypes.CDLL(name, mode=os.RTLD_NOLOAD).MPIX_Query_cuda_support())
    return None


@functools.cache
def _tried(module: str, index: int) -> Verdict:
    return try_in_child(Path(direct_probe.__file__), module, index, TRIAL_S)


def _gathered(topology: Topology, mine: Verdict, timeout_s: float) -> list[Verdict]:
    """The verdicts of all ranks."""
    answers = {None: "?", True: "direct", False: "staged"}
    texts = gather_texts(topology.world, f"{answers[mine.direct]} {mine.is_setting} {mine.reason}", timeout_s)
    back = {answer: direct for direct, answer in answers.items()}
    found = (text.split(" ", 2) for text in texts)
    return [Verdict(back[answer], reason, is_setting == "True") for answer, is_setting, reason in found]


@functools.cache
def _say(verdict: Verdict, by_ipc: bool, several_nodes: bool) -> None:
    """Once for each thing to say, however many topologies there are."""
    if verdict.direct:
        _log.info("MPI is handed device memory: %s", verdict.reason)
    elif by_ipc and not several_nodes:
        _log.info("device arrays go from rank to rank by CUDA IPC, not over MPI: %s", verdict.reason)
    elif not verdict.is_setting:
        _log.warning("device arrays pass through pinned host memory on their way to other %s: %s (%s=%s overrules this)",
                     "nodes" if by_ipc else "ranks", verdict.reason, VARIABLE, "|".join(SETTINGS[1:]))
