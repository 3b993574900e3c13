"""All-reduce beside MPI_Allreduce, as ratios: the better of the library's two, divided by ours.

    mpirun -n 2 python benchmarks/all_reduce.py [--sizes 64MiB] [--algorithms ring,adaptive] [--link 125MB/s] [--json FILE]
    python benchmarks/nodes.py 2+2 1gbit benchmarks/all_reduce.py --link 125MB/s      # on nodes of network namespaces, as root

Columns: `system` is MPI_Allreduce, the faster of in place and out of place; `shared` is ours on arrays of `topology.empty`;
the others are ours, by name, on private arrays, in place. All take turns within each round; a call takes as long as its
slowest rank; the table has medians in ms and the ratio to `system`. `--link` prints what the bytes that have to cross a
node's link need at that rate, and how the best of ours compares. The last column is what `adaptive` takes compared with the
best of all in that row, `system` included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time

os.environ.setdefault("OMPI_MCA_osc", "^ucx")      # silences Open MPI about shared windows; only a program may set it

import numpy as np
from mpi4py import MPI

import hpczero
from hpczero.cli.bench_settings import read_sizes
from hpczero.settings import Size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="4KiB:64MiB:4")
    parser.add_argument("--algorithms", default="ring,window,adaptive")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--link", help="rate of a node's link, such as 125MB/s")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    rows = []
    with hpczero.Topology(comm) as topology:
        names = [name for name in options.algorithms.split(",") if name != "window" or topology.num_nodes == 1]
        if comm.rank == 0:
            version = MPI.Get_library_version().splitlines()[0].strip("\0 ")
            print(f"# {version}, {topology!r}, {platform.machine()}, {os.cpu_count()} cores, thread level "
                  f"{MPI.Query_thread()}, hpczero {hpczero.__version__}", flush=True)
        for count in read_sizes(options.sizes, 4):
            times = measure(topology, count, names, options.rounds)
            rows.append(row(count * 4, times, topology, options.link))
            if comm.rank == 0:
                print(rows[-1]["text"], flush=True)
    if comm.rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump([{key: value for key, value in each.items() if key != "text"} for each in rows], file, indent=1)


def measure(topology: hpczero.Topology, count: int, names: list[str], rounds: int) -> dict[str, float]:
    """Median seconds of each, the slowest rank's; calls of little work are repeated within one timing."""
    comm = topology.world
    mine, out, shared = np.zeros(count, np.float32), np.zeros(count, np.float32), topology.empty(count, np.float32)
    calls = {
        "in place": lambda: comm.Allreduce(MPI.IN_PLACE, mine),
        "out of place": lambda: comm.Allreduce(mine, out),
        "shared": lambda: hpczero.all_reduce(shared, topology),
    } | {name: lambda name=name: hpczero.all_reduce(mine, topology, algorithm=name) for name in names}
    repeats = max(1, min(200, 2**22 // (4 * count)))
    seconds = np.empty((rounds, len(calls)))
    for index in range(-2, rounds):
        for column, call in enumerate(calls.values()):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds[max(index, 0), column] = (time.perf_counter() - start) / repeats
    slowest = np.empty((comm.size, *seconds.shape))
    comm.Allgather(seconds, slowest)
    return dict(zip(calls, np.median(slowest.max(axis=0), axis=0).tolist(), strict=True))


def row(nbytes: int, times: dict[str, float], topology: hpczero.Topology, link: str | None) -> dict:
    system = min(times["in place"], times["out of place"])
    ours = {name: seconds for name, seconds in times.items() if name not in ("in place", "out of place")}
    cells = [f"{name} {seconds * 1e3:9.3f} ({system / seconds:4.2f})" for name, seconds in ours.items()]
    text = f"{nbytes:>10} B   system {system * 1e3:9.3f}   " + "   ".join(cells)
    if link:
        nodes = topology.num_nodes
        needed = 2 * (nodes - 1) / nodes * nbytes / Size.parse(link.removesuffix("/s")).count
        text += f"   link {needed * 1e3:9.3f} ({min(ours.values()) / needed:4.2f} times it)"
    if "adaptive" in ours:
        best = min(system, *(seconds for name, seconds in ours.items() if name != "shared"))
        text += f"   adaptive {ours['adaptive'] / best:4.2f} times the best"
    return {"bytes": nbytes, "system_s": system, "ours_s": ours, "text": text}


if __name__ == "__main__":
    main()
