"""Time per step and bytes by ZeRO stage.

    mpirun -n 2 python benchmarks/step.py [--parameters 8M] [--layers 16] [--steps 20] [--stages 0,1,2,3] [--json FILE]

Trains `layers` square matrices with AdamW on gradients that cost nothing to make, so that what is timed is ZeRO: handing
gradients over, reducing, updating, publishing. Stages take turns within each round, and the table shows the median of the
slowest rank, its spread (quartiles), each time as a ratio to stage 0, and bytes per rank: counted, by formula, and what
crossed each link in one step. Beside them stands the MPI library's own all-reduce of the same gradients, which is the
communication of data-parallel training alone, without any update.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time

os.environ.setdefault("OMPI_MCA_osc", "^ucx")      # silences Open MPI about shared windows; only a program may set it

import numpy as np
from mpi4py import MPI

import hpczero
from hpczero.optim import AdamW
from hpczero.settings import Size
from hpczero.topology import Topology
from hpczero.zero.config import ZeroConfig
from hpczero.zero.engine import Zero3Engine
from hpczero.zero.optimizer import ZeroOptimizer


class Matrix:
    """A layer for stage 3 that computes nothing: its gradient is there already."""

    def __init__(self, gradient: np.ndarray):
        self.shapes = {"w": gradient.shape}
        self._gradient = gradient

    def forward(self, params, x):
        return x, None

    def backward(self, params, saved, dy):
        return dy, {"w": self._gradient}


class Stage:
    """One trained model at one stage."""

    def __init__(self, stage: int, gradients: dict[str, np.ndarray], topology: Topology, bucket: str):
        self.name = f"stage {stage}"
        params = {name: np.zeros_like(value) for name, value in gradients.items()}
        config = ZeroConfig(stage=stage, reduce_bucket_size=bucket)
        self._gradients = gradients
        self._engine = stage == 3
        if self._engine:
            layers = [(name.removesuffix(".w"), Matrix(value)) for name, value in gradients.items()]
            self.zero = Zero3Engine(layers, params, AdamW(), topology, config)
        else:
            self.zero = ZeroOptimizer(params, AdamW(), topology, config)

    def step(self):
        if self._engine:
            self.zero.forward(None)
            self.zero.backward(None)
        else:
            self.zero.accumulate(self._gradients)
        self.report = self.zero.step()


class SystemAllReduce:
    """MPI_Allreduce of the gradients, in place: what plain data-parallel training sends."""

    name = "MPI_Allreduce"

    def __init__(self, gradients: dict[str, np.ndarray], comm: MPI.Comm):
        self._flat = np.concatenate([value.ravel() for value in gradients.values()])
        self._comm = comm

    def step(self):
        self._flat[:] = 1
        self._comm.Allreduce(MPI.IN_PLACE, self._flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="8M", help="how many, such as 8M (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="in how many matrices (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed rounds (default: %(default)s)")
    parser.add_argument("--stages", default="0,1,2,3", help="which (default: %(default)s)")
    parser.add_argument("--bucket", default="25MiB", help="reduce_bucket_size (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    side = max(1, math.isqrt(Size.parse(f"{args.parameters} elements").count // args.layers))
    gradients = {f"layer{index}.w": np.full((side, side), 1e-3, np.float32) for index in range(args.layers)}
    with Topology(comm) as topology:
        stages = [Stage(int(stage), gradients, topology, args.bucket) for stage in args.stages.split(",")]
        contenders = [*stages, SystemAllReduce(gradients, comm)]
        seconds = timed(contenders, comm, args.steps)
        rows = [row(contender, seconds, stages[0].name, comm) for contender in contenders]
        for stage in stages:
            stage.zero.close()
    if comm.rank == 0:
        header = {
            "hpczero": hpczero.__version__, "mpi": MPI.Get_library_version().splitlines()[0].strip(), "ranks": comm.size,
            "nodes": topology.num_nodes, "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "thread_level": MPI.Query_thread(), "python": platform.python_version(), "numpy": np.__version__,
            "parameters": args.layers * side * side, "bucket": args.bucket, "steps": args.steps,
        }
        show(header, rows)
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"header": header, "rows": rows}, file, indent=1)


def timed(contenders: list, comm: MPI.Comm, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, per contender and round; contenders take turns, so that drift hits all alike."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 3):      # three rounds warm up caches, kernels and pages
        for contender in contenders:
            comm.Barrier()
            start = time.perf_counter()
            contender.step()
            slowest = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
            if number >= 3:
                seconds[contender.name].append(slowest)
    return seconds


def row(contender, seconds: dict[str, list[float]], base: str, comm: MPI.Comm) -> dict:
    times = seconds[contender.name]
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    ratios = [mine / other for mine, other in zip(times, seconds[base], strict=True)]
    found = {"name": contender.name, "median_s": statistics.median(times), "quartiles_s": [quartiles[0], quartiles[2]],
             f"ratio_to_{base.replace(' ', '_')}": statistics.median(ratios)}
    if isinstance(contender, Stage):
        found |= {"bytes_per_rank": comm.allreduce(sum(contender.zero.memory.values()), op=MPI.MAX),
                  "formula_bytes_per_rank": comm.allreduce(sum(contender.zero.memory_formula.values()), op=MPI.MAX),
                  "bytes_sent": {link: comm.allreduce(count) for link, count in contender.report.bytes_sent.items()}}
    return found


def show(header: dict, rows: list[dict]) -> None:
    out = sys.stdout
    for name, value in header.items():
        out.write(f"# {name}: {value}\n")
    titles = f"{'':14} {'median':>9} {'quartiles':>19} {'ratio':>6} {'MiB/rank':>9} {'formula':>8}"
    out.write(f"{titles}   bytes in a step, all ranks\n")
    for found in rows:
        ratio = next(value for key, value in found.items() if key.startswith("ratio"))
        low, high = (1e3 * value for value in found["quartiles_s"])
        line = f"{found['name']:14} {1e3 * found['median_s']:6.1f} ms {low:7.1f} - {high:6.1f} ms {ratio:6.2f}"
        if "bytes_per_rank" in found:
            sent = "  ".join(f"{link} {count / 2**20:.1f} MiB" for link, count in found["bytes_sent"].items() if count)
            line += f" {found['bytes_per_rank'] / 2**20:9.1f} {found['formula_bytes_per_rank'] / 2**20:8.1f}   {sent}"
        out.write(line + "\n")


if __name__ == "__main__":
    main()
