"""What started this process, and what our own command line sets up around the start of MPI.

Only `python -m hpczero` does this, never `import hpczero`: a host program's MPI and threads are its own. Everything is
a default: a variable that the user has set stays as it is. Rare modules are imported where they are needed, since
`--help` comes through here too.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

OPENMPI = "mpirun (Open MPI)"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
_SPECIAL_STEPS = 0xFFFFFFF0  # Slurm numbers its batch, extern and interactive "steps" from here; nobody launched ranks

_log = logging.getLogger("hpczero.cli.launch")


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher's variables say about this process; the numbers are None where no launcher is seen."""

    name: str
    rank: int | None = None
    size: int | None = None
    several_nodes: bool = False


def read(environ: Mapping[str, str]) -> Launch:
    """Find out what started this process.

    salloc and sbatch leave SLURM_NTASKS (and SLURM_PROCID=0) to a plain python, which is then alone: only the variables
    of a job step show that srun started us. mpirun is looked for first, since inside a job it may itself use srun.
    """
    jobs_nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    for name, rank, size, local_size in (
        (OPENMPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("mpirun (MPICH or Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ):
        if (num_ranks := _number(environ, size)) is not None:
            on_node = _number(environ, local_size)
            several = jobs_nodes > 1 if on_node is None else on_node < num_ranks
            return Launch(name, _number(environ, rank), num_ranks, several)
    step = _number(environ, "SLURM_STEP_ID")
    if step is not None and step < _SPECIAL_STEPS and (rank := _number(environ, "SLURM_PROCID")) is not None:
        return Launch("srun", rank, _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), jobs_nodes > 1)
    return Launch("none", several_nodes=jobs_nodes > 1)


def before_mpi(environ: MutableMapping[str, str], started: Launch) -> None:
    """Defaults that Open MPI reads when it starts; other libraries do not look at them.

    Without the first, every shared window prints an error about osc/ucx. The second takes MPI_Init from 1.1 s to 0.1 s,
    but would take a fast network away from a job on several nodes.
    """
    environ.setdefault("OMPI_MCA_osc", "^ucx")
    if not started.several_nodes:
        environ.setdefault("OMPI_MCA_btl", "^ofi")


def check_launcher(started: Launch, understood: bool, library: str) -> None:
    """ConfigError if the launcher started several processes, and the MPI library has not `understood` that it did."""
    if understood or (started.size or 1) == 1:
        return
    beside = Path(sys.executable).with_name("mpirun")
    use = f"start with {beside}" if beside.exists() else "start with the mpirun of that library"
    if started.name == "srun":
        use = "start with srun --mpi=pmix (srun --mpi=list shows what there is), or with the mpirun of that library"
    raise ConfigError(
        f"{started.name} started {started.size} processes, but the MPI library that mpi4py loaded ({library}) knows "
        f"nothing of it: each process would train alone. {use[0].upper()}{use[1:]}."
    )


def share_cores(environ: MutableMapping[str, str], comm: MPI.Comm) -> int:
    """Threads per rank for BLAS and Numba: the cores this process may use, divided among the ranks that may use them.

    Called by every rank of `comm`, after MPI has started and before NumPy is imported, which reads the variables. If
    the user has set any of them, none is touched. Returns the number of threads.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    mine = os.sched_getaffinity(0)
    masks = node.allgather(mine)
    node.Free()
    # A core in the masks of three ranks is a third of a core to each; launchers bind some, all or none of the ranks.
    sharing = [sum(core in mask for mask in masks) for core in mine]
    threads = max(1, int(sum(1 / ranks for ranks in sharing) + 1e-6))
    if not any(name in environ for name in THREAD_VARIABLES):
        environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return threads


def kernel_cache(environ: MutableMapping[str, str]) -> Path:
    """The folder for compiled kernels, set before Numba is imported and usable for certain.

    Without NUMBA_CACHE_DIR it lies in the user's cache, under a hash of our kernel sources: Numba looks only at the
    date of the file a kernel stands in, and would run stale code after an update of what the kernel calls. A folder
    that cannot be made or written is replaced by one in the temporary directory: Numba would refuse to import them.
    """
    wanted = Path(environ["NUMBA_CACHE_DIR"]) if environ.get("NUMBA_CACHE_DIR") else _user_cache(environ)
    folder = wanted
    if folder is None or not _writable(folder):
        import tempfile

        # Others could have put compiled code there before us, hence the check of the owner; else a folder nobody knows.
        folder = Path(tempfile.gettempdir()) / f"hpczero-{os.getuid()}" / f"kernels-{_sources_hash()}"
        if not (_private(folder.parent) and _writable(folder)):
            folder = Path(tempfile.mkdtemp(prefix="hpczero-kernels-"))
        _log.info("kernel cache %s cannot be written; compiled kernels go to %s", wanted or "(no home folder)", folder)
    environ["NUMBA_CACHE_DIR"] = str(folder)
    return folder


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that holds a whole number."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def _user_cache(environ: Mapping[str, str]) -> Path | None:
    """Where this version's kernels belong, or None for a user without a home."""
    base = environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "hpczero" / f"kernels-{_sources_hash()}"


def _sources_hash() -> str:
    """A hash of every source file that has to do with Numba, wherever in the package it stands."""
    import hashlib

    root = Path(__file__).parent.parent
    content = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        if b"numba" in text:
            content.update(str(path.relative_to(root)).encode() + b"\0" + text)
    return content.hexdigest()[:12]


def _writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, which is made if it is not there. Access bits alone do not tell."""
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _private(folder: Path) -> bool:
    """Whether `folder`, made if it is not there, is a folder that only this user can write to."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
