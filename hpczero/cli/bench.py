"""`python -m hpczero bench COLLECTIVE`: the collectives beside each other and beside the MPI library's own.

    mpirun -n 4 python -m hpczero bench all_reduce --sizes 64KiB:64MiB --algorithms ring,window,system

A size at a time: its algorithms take turns, so that what the machine does meanwhile hits all alike. Before each
call the arrays are filled again and all ranks meet; the clock of a rank covers its own call and, on a device, the end
of its stream. Times are put together after the loop: a call takes as long as its slowest rank. Results are compared
with what `bench_inputs` knows they must be.

Memory: of each size two arrays per rank, twice where shared and private ones are asked for, and what they must be
before and after; shared ones are kept to the end.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpczero import __version__
from hpczero.cli import flags
from hpczero.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from mpi4py import MPI

    from hpczero.cli.bench_inputs import Problem
    from hpczero.cli.bench_settings import BenchSettings
    from hpczero.cli.bench_table import Row
    from hpczero.device import Device
    from hpczero.topology import Topology

LINK_BYTES = 4 * 2**20
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
_SOURCE = (Path(__file__).with_name("bench_settings.py"), "BenchSettings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s COLLECTIVE [flags]"
    parser.add_argument("collective", metavar="COLLECTIVE", help=", ".join(COLLECTIVES))
    flags.add_settings(parser, _SOURCE)
    parser.add_argument(
        "--check", action="store_true", help="compare the result of every call, not of a row's last alone"
    )
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-",
        help="also header and rows as one JSON object: into FILE, or as the last line of stdout",
    )  # fmt: skip


def run(args: argparse.Namespace, comm: MPI.Comm) -> int:
    """Measure and print; 1 if any result was wrong, else 0. Called by every rank."""
    from hpczero import device as devices
    from hpczero.cli.bench_table import heading, titles, verdict
    from hpczero.cli.train import together
    from hpczero.topology import Topology

    settings = together(comm, lambda: settings_of(args), only_rank_0=True)
    topology = Topology(comm)
    device = devices.select(settings.device, comm, topology.local_rank)
    bench = _Bench(args.collective, settings, args.check, topology, device)
    links = _link_speeds(topology)
    header = _header(bench, links, comm)
    show = print if comm.rank == 0 else lambda *_, **__: None
    rows: list[Row] = []
    for count in bench.counts:
        num_told = len(bench.left_out)
        cases = bench.prepare(count)
        reasons = [f"# left out: {reason}" for reason in bench.left_out[num_told:]]
        # Not before the first size has proved that there is something to measure.
        lines = reasons if rows else [heading(header), *reasons, titles()]
        rows += (found := bench.measure(count, cases, header["mpi"], max(links.values(), default=None)))
        show(*lines, *found, sep="\n", flush=True)
    show(verdict(rows), flush=True)
    if comm.rank == 0:
        _write(args.json, {"header": header | {"left_out": bench.left_out}, "rows": [row.as_dict() for row in rows]})
    topology.close()
    return 1 if any(row.wrong for row in rows) else 0


def _link_speeds(topology: Topology) -> dict[str, float]:
    """Kind of link -> GB/s of a large message alone, one way; the same on every rank, which all call this."""
    from hpczero.collectives import links

    costs = links.measure(topology, budget_s=0.5)
    kinds = {"node": "in a node", "network": "between nodes"}
    return {kinds[name]: LINK_BYTES / costs.time(LINK_BYTES, name) / 1e9
            for name in links.LINK_NAMES if getattr(costs, name) is not None}


def settings_of(args: argparse.Namespace) -> BenchSettings:
    """What was asked for; read on rank 0 for all. ConfigError for what could not be measured on any ranks."""
    import numpy as np

    from hpczero.cli import COMMANDS, VARIABLES
    from hpczero.cli.bench_inputs import Problem
    from hpczero.cli.bench_settings import BenchSettings, read_algorithms
    from hpczero.collectives import reduction, selection
    from hpczero.settings import nearest, refuse_unknown_variables, resolve

    collective = args.collective
    if collective not in COLLECTIVES:
        hint = nearest(collective, COLLECTIVES)
        raise ConfigError(f"{collective!r} is no collective{hint}; collectives are {', '.join(COLLECTIVES)}")
    refuse_unknown_variables(os.environ, VARIABLES, COMMANDS)
    settings = resolve(BenchSettings, "bench", environ=os.environ, flags=flags.given(args, _SOURCE)).settings
    try:
        read_algorithms(settings.algorithms, selection.ALGORITHMS[collective])
    except ValueError as error:
        raise ConfigError(f"algorithms = {settings.algorithms!r}: {collective}: {error}") from None
    if collective in ("all_gather", "broadcast"):
        for key in ("op", "order"):
            if getattr(settings, key) != BenchSettings.model_fields[key].default:
                raise ConfigError(f"{key} = {getattr(settings, key)}: {collective} adds nothing; leave --{key} out")
    if collective == "broadcast" and settings.in_place.strip() == "no":
        raise ConfigError("in_place = no: broadcast has one array, and overwrites it; leave --in-place out")
    reduction.check(np.dtype(Problem(collective, settings.op, settings.dtype, 1, 0, 1).result.dtype), settings.op)
    _check_writable(args.json)
    return settings


def _check_writable(json_file: str | None) -> None:
    """ConfigError if the file cannot be written, found out before anything is measured, and without making it."""
    if json_file in (None, "-"):
        return
    path = Path(json_file)
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or not (path.exists() or place.is_dir()) or not os.access(place, os.W_OK):
        raise ConfigError(f"--json {json_file}: cannot be written there; name a file in a folder that exists")


def _write(json_file: str | None, content: dict[str, Any]) -> None:
    if json_file == "-":
        print(json.dumps(content), flush=True)
    elif json_file is not None:
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n")


def _header(bench: _Bench, links: dict[str, float], comm: MPI.Comm) -> dict[str, Any]:
    """What was measured where. Called by every rank."""
    from importlib.metadata import version

    from mpi4py import MPI

    topology, device, settings = bench.topology, bench.device, bench.settings
    found = comm.allgather((socket.gethostname(), _gpu(device)))
    gpus = [(host, gpu) for host, gpu in found if gpu]
    name, number = MPI.get_vendor()
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
              MPI.THREAD_MULTIPLE: "multiple"}  # fmt: skip
    return {
        "hpczero": __version__,
        "collective": bench.collective,
        "ranks": topology.size,
        "nodes": topology.num_nodes,
        "ranks_per_node": list(topology.ranks_per_node),
        "hosts": [found[ranks[0]][0] for ranks in topology.map.nodes],
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "mpi": f"{name} {'.'.join(map(str, number))}",
        "mpi_library": " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
        "thread_level": levels[MPI.Query_thread()],
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "device": device.kind,
        "device_name": device.name,
        "shared_gpu": len(set(gpus)) < len(gpus) if gpus else None,
        "links_GBps": links,
        "order": settings.order,
        "check": bench.check,
        "warmup": settings.warmup,
        "repeats": settings.repeats,
    }


def _gpu(device: Device) -> str:
    """What tells this rank's GPU from the others of its host; "" for a CPU."""
    if device.kind != "cuda":
        return ""
    return repr(device.xp.cuda.runtime.getDeviceProperties(device.index)["uuid"])


@dataclass(slots=True)
class _Arrays:
    """The arrays of one size in one kind of memory, and what fills them."""

    buffers: str
    in_place: bool
    problem: Problem
    array: Any
    out: Any
    given: Any
    """What `array` holds before a call; lies beside it, so that filling is one copy."""

    def fill(self) -> None:
        from hpczero import arrays
        from hpczero.cli.bench_inputs import POISON

        arrays.copy(self.array, self.given)
        if self.out is not None:
            self.out.fill(POISON)
        arrays.synchronize(self.array)

    def count_wrong(self, result: Any) -> int:
        """This rank's wrong elements, those of an input that should be as it was among them."""
        from hpczero.arrays import to_host
        from hpczero.cli.bench_inputs import count_wrong

        wrong = 0
        if result is not None:
            wrong += count_wrong(to_host(result), self.problem.result)
        if not (self.in_place and self.problem.is_overwritten):
            wrong += count_wrong(to_host(self.array), to_host(self.given))
        return wrong


@dataclass(slots=True)
class _Case:
    """One row while it is measured."""

    algorithm: str
    arrays: _Arrays
    wrong: int = 0


class _Bench:
    """What is measured: a collective under settings, on these ranks."""

    def __init__(self, collective: str, settings: BenchSettings, check: bool, topology: Topology, device: Device):
        from hpczero.cli.bench_settings import read_algorithms, read_sizes, read_words
        from hpczero.collectives import api, selection

        self.collective, self.settings, self.check = collective, settings, check
        self.topology, self.device = topology, device
        self.left_out: list[str] = []
        """Why something cannot be measured, each reason once."""
        self._call: Callable[..., Any] = getattr(api, collective)
        self._dtype = self._problem(1).result.dtype
        self.counts = read_sizes(settings.sizes, self._dtype.itemsize)
        self._algorithms = read_algorithms(settings.algorithms, selection.ALGORITHMS[collective])
        self._buffers = read_words(settings.buffers, ("shared", "private"))
        self._answers = read_words(settings.in_place, ("yes", "no"))

    def prepare(self, count: int) -> list[_Case]:
        """The cases of this size that can be called, each called once. Called by every rank.

        ConfigError if there is none, or none of an algorithm that was asked for by name.
        """
        able: list[_Case] = []
        reasons: dict[str, str] = {}
        for arrays in self._arrays(count):
            for algorithm in self._algorithms:
                case = _Case(algorithm, arrays)
                try:
                    self._sample(case, check=self.check)
                except ConfigError as error:      # raised on all ranks alike: the call was refused before it began
                    reasons[algorithm] = str(error).removeprefix(f"{self.collective}: ")
                    self._leave_out(reasons[algorithm])
                else:
                    able.append(case)
        missing = set(self._algorithms) - {case.algorithm for case in able}
        if missing and (self.settings.algorithms != "all" or not able):
            name = next(name for name in self._algorithms if name in missing)
            raise ConfigError(f"bench {self.collective}: {reasons[name]}")
        return able

    def measure(self, count: int, cases: Sequence[_Case], mpi: str, link_GBps: float | None) -> list[Row]:
        """The rows of these cases. Called by every rank; the same on each."""
        import numpy as np
        from mpi4py import MPI

        from hpczero.cli.bench_table import Row, speeds

        seconds = self._times(cases)
        slowest = np.empty_like(seconds)
        self.topology.world.Allreduce(seconds, slowest, MPI.MAX)
        wrong = np.array([case.wrong for case in cases], np.int64)
        self.topology.world.Allreduce(MPI.IN_PLACE, wrong)
        nbytes = count * self._dtype.itemsize
        return [
            Row(
                collective=self.collective, algorithm=case.algorithm, buffers=case.arrays.buffers,
                in_place=case.arrays.in_place, dtype=self.settings.dtype, op=self._op, count=count, bytes=nbytes,
                wrong=bad, ranks=self.topology.size, nodes=self.topology.num_nodes, mpi=mpi,
                **speeds(self.collective, nbytes, times, self.topology.size, link_GBps),
            )
            for case, times, bad in zip(cases, slowest.tolist(), wrong.tolist(), strict=True)
        ]  # fmt: skip

    @property
    def _op(self) -> str | None:
        return None if self.collective in ("all_gather", "broadcast") else self.settings.op

    def _problem(self, count: int) -> Problem:
        from hpczero.cli.bench_inputs import Problem

        settings, topology = self.settings, self.topology
        return Problem(self.collective, settings.op, settings.dtype, count, topology.rank, topology.size)

    def _leave_out(self, reason: str) -> None:
        if reason not in self.left_out:
            self.left_out.append(reason)

    def _arrays(self, count: int) -> Sequence[_Arrays]:
        """The arrays of every kind of memory and way of calling that this collective and device have."""
        problem = self._problem(count)
        found = []
        for buffers in self._buffers:
            if buffers == "shared" and self.device.kind == "cuda":
                self._leave_out("buffers=shared are host memory, and the arrays lie on a device")
                continue
            whole = self._allocate(buffers, count)
            for answer in self._answers:
                in_place = answer == "yes"
                if not in_place and self.collective == "broadcast":
                    self._leave_out("in_place=no: broadcast has one array")
                    continue
                array, out = whole, None
                if not in_place and self.collective == "all_gather":
                    array, out = self._allocate(buffers, count, only_shard=True), whole
                elif not in_place:
                    out = self._allocate(buffers, count, only_shard=self.collective == "reduce_scatter")
                given = self.device.xp.asarray(problem.given(in_place=in_place))
                found.append(_Arrays(buffers, in_place, problem, array, out, given))
        if not found:
            raise ConfigError(f"bench {self.collective}: {'; '.join(self.left_out)}")
        return found

    def _allocate(self, buffers: str, count: int, *, only_shard: bool = False) -> Any:
        """`count` elements, or as many as this rank's shard of them has. Called by every rank."""
        mine = self._problem(count).shard
        wanted = mine.stop - mine.start if only_shard else count
        if buffers == "private":
            return self.device.xp.empty(wanted, self._dtype)
        # Rows of one node have one length, and shards need not: each gets room for the largest.
        return self.topology.empty(-(-count // self.topology.size) if only_shard else count, self._dtype)[:wanted]

    def _times(self, cases: Sequence[_Case]) -> Any:
        """(cases, repeats) seconds of this rank. Called by every rank."""
        import numpy as np

        seconds = np.empty((len(cases), self.settings.repeats))
        # The first call of each has been a warm-up already.
        for number in range(1 - self.settings.warmup, self.settings.repeats):
            is_last = number == self.settings.repeats - 1
            for place, case in enumerate(cases):
                took = self._sample(case, check=self.check or is_last)
                if number >= 0:
                    seconds[place, number] = took
        return seconds

    def _sample(self, case: _Case, *, check: bool) -> float:
        """One call and the seconds it took on this rank. Called by every rank."""
        from hpczero.arrays import synchronize

        arrays, call = case.arrays, self._call
        options: dict[str, Any] = {"algorithm": case.algorithm}
        if self._op is not None:
            options |= {"op": self._op, "order": self.settings.order}
        if arrays.out is not None:
            options["out"] = arrays.out
        arrays.fill()
        self.topology.world.Barrier()
        start = time.perf_counter()
        result = call(arrays.array, self.topology, **options)
        synchronize(arrays.array)
        took = time.perf_counter() - start
        if check:
            case.wrong += arrays.count_wrong(result)
        return took
