"""What the cost model says beside what was measured, for all-reduce by the named algorithms.

    python benchmarks/nodes.py 1+1+1+1+1 100mbit benchmarks/predicted.py --size 16MiB --algorithms circulant,halving

The links are measured first (`--budget` seconds of it), then the algorithms take turns, on private float32 arrays; a call
takes as long as its slowest rank. One line per algorithm: median and predicted seconds and their ratio. The last line
compares the first two algorithms with each other, measured and predicted.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMPI_MCA_osc", "^ucx")      # silences Open MPI about shared windows; only a program may set it

import numpy as np
from mpi4py import MPI

import hpczero
from hpczero.collectives import algorithms, links, pricing
from hpczero.settings import Size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="16MiB")
    parser.add_argument("--algorithms", default="circulant,halving")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for measuring the links")
    options = parser.parse_args()
    names = options.algorithms.split(",")
    count = Size.parse(options.size).count // 4
    with hpczero.Topology(MPI.COMM_WORLD) as topology:
        costs = links.measure(topology, options.budget)
        measured = measure(topology, count, names, options.rounds)
        if topology.rank == 0:
            predicted = {name: pricing.price(
                algorithms.plan("all_reduce", name, topology.map, nbytes=4 * count), topology.map, 4 * count, costs
            ) for name in names}
            report(topology, count, measured, predicted)


def measure(topology: hpczero.Topology, count: int, names: list[str], rounds: int) -> dict[str, float]:
    """Median seconds of each, the slowest rank's."""
    comm, array = topology.world, np.zeros(count, np.float32)
    seconds = np.empty((rounds, len(names)))
    for index in range(-1, rounds):
        for column, name in enumerate(names):
            comm.Barrier()
            start = time.perf_counter()
            hpczero.all_reduce(array, topology, algorithm=name)
            seconds[max(index, 0), column] = time.perf_counter() - start
    slowest = np.empty((comm.size, *seconds.shape))
    comm.Allgather(seconds, slowest)
    return dict(zip(names, np.median(slowest.max(axis=0), axis=0).tolist(), strict=True))


def report(topology: hpczero.Topology, count: int, measured: dict[str, float], predicted: dict[str, float]) -> None:
    print(f"# {topology!r}, {4 * count} B, hpczero {hpczero.__version__}")
    for name, seconds in measured.items():
        print(f"{name:>16}   measured {seconds:8.4f} s   predicted {predicted[name]:8.4f} s   "
              f"ratio {seconds / predicted[name]:5.2f}")
    first, second, *_ = [*measured, None]
    if second:
        ratio, expected = measured[second] / measured[first], predicted[second] / predicted[first]
        print(f"{second} takes {ratio:.2f} times as long as {first}; predicted {expected:.2f} ({ratio / expected:.2f} of it)")


if __name__ == "__main__":
    main()
