"""How the tests run: plainly, or on every rank of an MPI run that the plain one starts.

`pytest` alone runs everything. It does not look into tests/mpi; tests/test_under_mpi.py starts
`mpirun -n N python -m pytest --with-mpi tests/mpi` for several N, and this file is then loaded a second time, on every
rank. There it adds a time limit to each test, writes a report for the pytest that started it (--report-to), and runs
nothing but tests/mpi, so that no run starts another.

By hand: `mpirun -n 3 python -m pytest --with-mpi tests/mpi -k ring`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from rank_report import RankReport
from time_limit import TimeLimit

if TYPE_CHECKING:
    from mpi4py import MPI

ROOT = Path(__file__).parent.parent
MPI_TESTS = ROOT / "tests" / "mpi"
LIMIT_S = 60.0
AFTER_FAILURE_S = 5.0      # how long a rank whose test failed waits for the others to leave it too
# One of these is set in every process that mpirun or srun starts.
LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
BY_HAND = "mpirun -n 3 python -m pytest --with-mpi tests/mpi"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hpczero")
    group.addoption("--report-to", metavar="DIR", type=Path, help="each rank of an MPI run writes its results there")
    group.addoption("--no-skip", metavar="MARK", help="a test with this mark that is skipped has failed")


def pytest_configure(config: pytest.Config) -> None:
    under_mpi = config.getoption("--with-mpi")
    if not under_mpi and any(name in os.environ for name in LAUNCHED):
        raise pytest.UsageError(f"inside mpirun pytest needs --with-mpi: {BY_HAND}")
    if not under_mpi and any(_is_mpi_test(Path(argument.split("::")[0])) for argument in config.args):
        raise pytest.UsageError(f"what is in tests/mpi runs under mpirun: {BY_HAND}")
    # What a test starts (mpirun, python -m hpczero) shall import this checkout too, from whatever folder it is started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Ranks must draw the same examples, and a machine that is busy is no error.
    hypothesis.settings.register_profile("plain", deadline=None)
    hypothesis.settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("ranks" if under_mpi else "plain")
    if under_mpi:
        folder = config.getoption("--report-to")
        report = RankReport(folder, _rank()) if folder else None
        if report:
            config.pluginmanager.register(report)
        stacks = report.stacks if report else os.dup(sys.stderr.fileno())
        config.pluginmanager.register(LimitEachTest(TimeLimit(stacks)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.is_dir() and collection_path != MPI_TESTS:
        return None
    return True if _is_mpi_test(collection_path) != config.getoption("--with-mpi") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in config.option.markexpr:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
        config.stash[_SOAK] = len(soak)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(_SOAK, 0):
        terminalreporter.write_line(f"{left_out} soak tests take minutes and were left out: -m soak runs them")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _missing_for_gpu()):
        pytest.skip(reason)
    if item.get_closest_marker("cuda_compile") and (reason := _missing("numba_cuda", "cupy")):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    mark = item.config.getoption("--no-skip")
    if mark and item.get_closest_marker(mark) and report.skipped:
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, which --no-skip={mark} forbids: {reason}"
    return report


class LimitEachTest:
    """The plugin that gives each test of a rank its time limit."""

    def __init__(self, limit: TimeLimit):
        self._limit = limit

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        mark = item.get_closest_marker("time_limit")
        self._limit.start(mark.args[0] if mark else LIMIT_S)
        try:
            return (yield)
        finally:
            self._limit.stop()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        # Its failure is written, but the others may wait inside the test for this rank, until their own limit. Here and
        # not in a hook for reports, since pytest's own hook of this name cancels the timer that ends the process.
        if report.when != "collect":
            self._limit.start(AFTER_FAILURE_S)


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Comm]:
    """A duplicate of COMM_WORLD for one test, over all ranks; the test ends on all of them together."""
    from mpi4py import MPI

    from hpczero.collectives import costs

    # A test makes many topologies, each of which would measure for a second what "adaptive" goes by.
    monkeypatch.setattr(costs, "BUDGET_S", 0.02)
    monkeypatch.setattr(costs, "LINKS_S", 0.02)
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    # No rank is in the next test while another is still in this one. Sleeping, not spinning: ranks may share a core.
    arrived = duplicate.Ibarrier()
    while not arrived.Test():
        time.sleep(0.0005)
    duplicate.Free()


def _is_mpi_test(path: Path) -> bool:
    return path.resolve().is_relative_to(MPI_TESTS)


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def _missing(*modules: str) -> str | None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}: pip install 'hpczero[cuda12]'" if missing else None


@functools.cache
def _missing_for_gpu() -> str | None:
    if reason := _missing("cupy"):
        return reason
    import cupy

    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"


_SOAK = pytest.StashKey[int]()
