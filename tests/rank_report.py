"""What the ranks of an MPI run tell the pytest that started them: a file of JSON lines per rank, written at once.

Standard output would not do: mpirun mixes the ranks' lines, and a rank that is killed loses what it had not printed.
Each line has a `what`: "collected" (the number of tests), "start", "failed" (with its text, written at once, as the
clean-up may hang), "end" (with the outcome), "broken" (a file that could not be imported). `verdicts` puts the ranks
together again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from agreement import name_ranks


class RankReport:
    """The pytest plugin that writes, on one rank."""

    def __init__(self, folder: Path, rank: int):
        self.stacks = os.open(folder / f"rank-{rank}.stacks", os.O_WRONLY | os.O_CREAT)      # for `TimeLimit`
        self._lines = folder / f"rank-{rank}.jsonl"
        self._skipped: str | None = None
        self._failed = False

    def _write(self, what: str, test: str, **rest: str | int) -> None:
        with open(self._lines, "a") as lines:
            lines.write(json.dumps({"what": what, "test": test, **rest}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", "", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("broken", report.nodeid, text=report.longreprtext, cause="cannot be collected")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._skipped, self._failed = None, False
        self._write("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = True
            captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
            crash = getattr(report.longrepr, "reprcrash", None)
            cause = crash.message if crash else report.longreprtext
            self._write("failed", report.nodeid, text=report.longreprtext + captured, cause=cause)
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._skipped is not None and not self._failed:
            self._write("end", nodeid, outcome="skipped", text=self._skipped)
        else:
            self._write("end", nodeid, outcome="failed" if self._failed else "passed")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One test over all ranks: it passed where it passed on every one, and was skipped where every one skipped it."""

    test: str
    outcome: str        # "passed", "failed" or "skipped"
    text: str = ""      # what went wrong, rank by rank; or the reason for the skip


def verdicts(folder: Path, size: int) -> list[Verdict]:
    """The tests that any of the `size` ranks started, in their order.

    Where a rank did not come to the end of one, the stacks that it left are part of the text.
    """
    lines = [_read(folder / f"rank-{rank}.jsonl") for rank in range(size)]
    stacks = [_text(folder / f"rank-{rank}.stacks") for rank in range(size)]
    tests = dict.fromkeys(line["test"] for of_rank in lines for line in of_rank if line["what"] in ("start", "broken"))
    by_test = [{test: [] for test in tests} | _grouped(of_rank) for of_rank in lines]
    return [_verdict(test, [of_rank[test] for of_rank in by_test], stacks) for test in tests]


def left_out(folder: Path, size: int) -> int:
    """How many collected tests some rank did not start, because the run ended before."""
    missing = 0
    for rank in range(size):
        lines = _read(folder / f"rank-{rank}.jsonl")
        collected = sum(line["count"] for line in lines if line["what"] == "collected")
        missing = max(missing, collected - sum(line["what"] == "start" for line in lines))
    return missing


def _grouped(lines: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for line in lines:
        groups.setdefault(line["test"], []).append(line)
    return groups


def _verdict(test: str, lines: list[list[dict]], stacks: list[str]) -> Verdict:
    size = len(lines)
    said: dict[str, tuple[str, list[int]]] = {}     # cause -> text of its first rank, and all ranks with that cause
    outcomes: set[str] = set()
    for rank, of_rank in enumerate(lines):
        for line in of_rank:
            if line["what"] in ("failed", "broken"):
                said.setdefault(line["cause"], (line["text"], []))[1].append(rank)
        ends = [line for line in of_rank if line["what"] == "end"]
        outcomes.update(line["outcome"] for line in ends)
        if not ends and not any(line["what"] == "broken" for line in of_rank):
            where = "never began this test" if not of_rank else "did not come to the end of this test"
            said[f"{where} on {rank}"] = (f"{where}.\n{stacks[rank]}", [rank])
    if said:
        texts = [f"{name_ranks(ranks)} of {size}: {text}" for text, ranks in said.values()]
        return Verdict(test, "failed", "\n".join(texts))
    if outcomes == {"skipped"}:
        return Verdict(test, "skipped", next(line["text"] for line in lines[0] if line["what"] == "end"))
    if len(outcomes) > 1:
        return Verdict(test, "failed", f"ranks disagree: {sorted(outcomes)}; a skip must be the same on all of them")
    return Verdict(test, "passed")


def _read(path: Path) -> list[dict]:
    lines = _text(path).splitlines()
    if lines and not lines[-1].endswith("}"):       # killed in the middle of a line
        lines.pop()
    return [json.loads(line) for line in lines]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
