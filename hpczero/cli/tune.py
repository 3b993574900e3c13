"""`python -m hpczero tune`: measures every algorithm that can run here, and stores the table that "adaptive" goes by.

    mpirun -n 4 python -m hpczero tune --operations all_reduce --sizes 64KiB:64MiB:4

The table holds for these hosts, this MPI library, so many ranks per node, one element type, host memory. Where it is
stored, `collectives.tuning` says; the last line of the output too. Algorithms that took more than four times the best at
one size are left out at the next. Shared arrays are kept until the end: twice the largest size per rank, at most.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.cli import flags

if TYPE_CHECKING:
    import argparse

    from mpi4py import MPI

    from hpczero.cli.tune_settings import TuneSettings
    from hpczero.collectives.tuning import Entry
    from hpczero.topology import Topology

HOPELESS = 4.0
_SOURCE = (Path(__file__).with_name("tune_settings.py"), "TuneSettings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_settings(parser, _SOURCE)


def run(args: argparse.Namespace, comm: MPI.Comm) -> int:
    """Measure, print the fastest of each size, and store. Called by every rank."""
    import numpy as np

    from hpczero.cli.train import together
    from hpczero.collectives import links, tuning
    from hpczero.topology import Topology

    settings = together(comm, lambda: settings_of(args), only_rank_0=True)
    with Topology(comm) as topology:
        show = print if comm.rank == 0 else lambda *_, **__: None
        entries = _measure(settings, topology, show)
        costs = links.measure(topology, budget_s=2.0)
        table = tuning.Table.of(tuning.key_of(topology, np.dtype(_numpy_name(settings.dtype))), costs, entries)
        path = tuning.store(table, topology)
        show(f"{len(entries)} times stored in {path}", flush=True)
    return 0


def settings_of(args: argparse.Namespace) -> TuneSettings:
    """What was asked for; read on rank 0 for all."""
    from hpczero.cli import COMMANDS, VARIABLES
    from hpczero.cli.tune_settings import TuneSettings
    from hpczero.settings import refuse_unknown_variables, resolve

    refuse_unknown_variables(os.environ, VARIABLES, COMMANDS)
    return resolve(TuneSettings, "tune", environ=os.environ, flags=flags.given(args, _SOURCE)).settings


def _measure(settings: TuneSettings, topology: Topology, show) -> list[Entry]:
    import numpy as np

    from hpczero.arrays import is_half
    from hpczero.cli.bench_settings import read_sizes, read_words
    from hpczero.cli.tune_settings import OPERATIONS
    from hpczero.collectives.costs import time_calls
    from hpczero.collectives.selection import Call, candidates
    from hpczero.collectives.tuning import Entry

    dtype, entries = np.dtype(_numpy_name(settings.dtype)), []
    for operation in read_words(settings.operations, OPERATIONS):
        for buffers in read_words(settings.buffers, ("shared", "private")):
            hopeless: set[str] = set()
            for count in read_sizes(settings.sizes, dtype.itemsize):
                nbytes = count * dtype.itemsize
                facts = Call(operation, nbytes, topology.map, "any", in_window=buffers == "shared", is_half=is_half(dtype))
                names = [name for name in candidates(facts) if name not in hopeless]
                times = time_calls(topology, operation, names, nbytes, dtype, repeats=settings.repeats,
                                   shared=buffers == "shared", warmup=2)
                best = min(times, key=times.get)
                hopeless |= {name for name in times if times[name] > HOPELESS * times[best] and name != "system"}
                entries += [Entry(operation, name, nbytes, buffers, seconds) for name, seconds in times.items()]
                show(f"{operation} {buffers} {nbytes} bytes: {best} {times[best] * 1e6:.1f} us"
                     + (f", system {times['system'] * 1e6:.1f} us" if "system" in times else ""), flush=True)
    return entries


def _numpy_name(name: str) -> object:
    """The type that NumPy knows by this name, or ml_dtypes for the one it lacks."""
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name
