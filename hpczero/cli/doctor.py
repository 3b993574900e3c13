"""`python -m hpczero doctor`: what hpczero finds here, so that a question about a machine can begin with its output.

Start it as the training would be started (`mpirun -n 4 python -m hpczero doctor`): most of what it shows depends on
that.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero import __version__
from hpczero.cli import launch
from hpczero.errors import DeviceError

if TYPE_CHECKING:
    import argparse

    from mpi4py import MPI

PACKAGES = ("mpi4py", "numpy", "numba", "ml_dtypes", "pydantic", "rich", "cupy", "numba-cuda", "matplotlib")
_CUPY_WHEELS = ("cupy", "cupy-cuda12x", "cupy-cuda13x")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace, comm: MPI.Comm) -> int:
    """Gather the facts of all ranks and print them on rank 0. Called by every rank."""
    facts = gather(comm)
    if comm.rank == 0:
        print(json.dumps(facts) if args.json else describe(facts), flush=True)
    return 0


def gather(comm: MPI.Comm) -> dict[str, Any]:
    """All facts, the same on every rank; `ranks` has one entry per rank."""
    from mpi4py import MPI, rc

    from hpczero.topology import Topology

    with Topology(comm) as topology:
        device, reason = _device(comm, topology.local_rank)
        mine = {
            "host": socket.gethostname(),
            "node": topology.node_index,
            "cores": len(os.sched_getaffinity(0)),
            "threads": {name: os.environ.get(name) for name in launch.THREAD_VARIABLES},
            "device": device,
        }
        nodes = topology.ranks_per_node
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
              MPI.THREAD_MULTIPLE: "multiple"}  # fmt: skip
    return {
        "hpczero": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "mpi_library": " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": {"asked": rc.thread_level, "provided": levels[MPI.Query_thread()]},
        "launcher": launch.read(os.environ).name,
        "world_size": comm.size,
        "ranks_per_node": list(nodes),
        "ranks": comm.allgather(mine),
        "no_cuda_because": reason,
        "kernel_cache": _kernel_cache(Path(os.environ["NUMBA_CACHE_DIR"])),
    }


def describe(facts: dict[str, Any]) -> str:
    """The facts as lines; what is the same on several ranks is said once, with their numbers."""
    ranks, nodes, cache = facts["ranks"], facts["ranks_per_node"], facts["kernel_cache"]
    hosts = [next(rank["host"] for rank in ranks if rank["node"] == node) for node in range(len(nodes))]
    placed = ", ".join(f"{host} {count}" for host, count in zip(hosts, nodes, strict=True))
    state = "writable" if cache["writable"] else "NOT writable"
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    lines = [
        ("hpczero", f"{facts['hpczero']}, Python {facts['python']}"),
        ("packages", packages),
        ("MPI", f"{facts['mpi_library']} (standard {facts['mpi_standard']})"),
        ("thread level", f"{facts['thread_level']['provided']} (asked: {facts['thread_level']['asked']})"),
        ("launcher", facts["launcher"]),
        ("ranks", f"{facts['world_size']} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}: {placed}"),
        *(("cores", text) for text in _by_rank(f"{rank['cores']} in the affinity mask" for rank in ranks)),
        *(("threads", text) for text in _by_rank(_threads(rank["threads"]) for rank in ranks)),
        *(("device", text) for text in _by_rank(rank["device"] for rank in ranks)),
        *([("no CUDA", facts["no_cuda_because"])] if facts["no_cuda_because"] else []),
        ("kernel cache", f"{cache['folder']}: {state}, {cache['entries']} entries, {cache['bytes'] / 2**20:.1f} MiB"),
    ]
    return "\n".join(f"{name:<13} {text}" for name, text in lines)


def _device(comm: MPI.Comm, local_rank: int) -> tuple[str, str]:
    """This rank's device as a text, and why it is no GPU ("" if it is one). Called by every rank."""
    from hpczero import device

    try:
        found = device.select("cuda", comm, local_rank)
    except DeviceError as error:
        return f"cpu ({platform.machine()})", str(error)
    return f"cuda {found.index} ({found.name})", ""


def _kernel_cache(folder: Path) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in folder.rglob("*.nbc")]
    return {
        "folder": str(folder), "writable": os.access(folder, os.W_OK), "entries": len(sizes), "bytes": sum(sizes),
    }  # fmt: skip


def _threads(variables: dict[str, str | None]) -> str:
    return ", ".join(f"{name}={value or 'unset'}" for name, value in variables.items())


def _by_rank(texts: Iterable[str]) -> Sequence[str]:
    """Each different text once, followed by the ranks it holds for unless it holds for all."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        return list(ranks_of)
    return [
        f"{text} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})" for text, ranks in ranks_of.items()
    ]


def _version(package: str) -> str:
    """The installed version of a distribution, or "". CuPy's wheels are named after the CUDA they are for."""
    for name in _CUPY_WHEELS if package == "cupy" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
