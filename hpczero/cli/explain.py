"""`python -m hpczero explain OPERATION`: what "adaptive" takes for a call, and why.

    mpirun -n 4 python -m hpczero explain all_reduce --sizes 64KiB,16MiB --order canonical

For each size, every algorithm with the time it is expected to take and where that number comes from: `tuned` (the table
that `tune` stored), `measured` (the stand-in of at most a second, made now) or `predicted` (priced by the measured links);
and those that cannot serve the call, with the reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero.cli import flags
from hpczero.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from mpi4py import MPI

    from hpczero.cli.explain_settings import ExplainSettings

_SOURCE = (Path(__file__).with_name("explain_settings.py"), "ExplainSettings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s OPERATION [flags]"
    parser.add_argument("operation", metavar="OPERATION", help="all_reduce, reduce_scatter, all_gather, broadcast, reduce")
    flags.add_settings(parser, _SOURCE)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")


def run(args: argparse.Namespace, comm: MPI.Comm) -> int:
    """Measure what is not known yet, and print. Called by every rank."""
    import ml_dtypes
    import numpy as np

    from hpczero.cli.bench_settings import read_sizes
    from hpczero.cli.train import together
    from hpczero.collectives.explanation import explain
    from hpczero.topology import Topology

    settings = together(comm, lambda: settings_of(args), only_rank_0=True)
    dtype = np.dtype(ml_dtypes.bfloat16 if settings.dtype == "bfloat16" else settings.dtype)
    with Topology(comm) as topology:
        found = [
            explain(topology, args.operation, count * dtype.itemsize, dtype=dtype, order=settings.order,
                    shared=settings.buffers == "shared")
            for count in read_sizes(settings.sizes, dtype.itemsize)
        ]
    if comm.rank == 0:
        print("\n\n".join(map(str, found)), flush=True)
        if args.json:
            print(json.dumps([each.as_dict() for each in found]), flush=True)
    return 0


def settings_of(args: argparse.Namespace) -> ExplainSettings:
    """What was asked for; read on rank 0 for all."""
    from hpczero.cli import COMMANDS, VARIABLES
    from hpczero.cli.explain_settings import ExplainSettings
    from hpczero.collectives.selection import ALGORITHMS
    from hpczero.settings import nearest, refuse_unknown_variables, resolve

    if args.operation not in ALGORITHMS:
        hint: Any = nearest(args.operation, ALGORITHMS)
        raise ConfigError(f"{args.operation!r} is no collective{hint}; collectives are {', '.join(ALGORITHMS)}")
    refuse_unknown_variables(os.environ, VARIABLES, COMMANDS)
    return resolve(ExplainSettings, "explain", environ=os.environ, flags=flags.given(args, _SOURCE)).settings
