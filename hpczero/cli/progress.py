"""What rank 0 shows while a run trains: a bar on a terminal, a line now and then elsewhere. On stderr, never stdout.

Under mpirun a rank's stderr is a pipe (or, with Open MPI, its stdout a terminal that leads nowhere). What counts is
whether mpirun itself writes to a terminal: then what we write to the pipe reaches it unchanged, and a bar works.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

LINES = 10  # about so many lines per run where there is no terminal
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun")


class Progress:
    """Made, told of every step and closed by rank 0."""

    def __init__(self, steps: int, bytes_per_rank: int, terminal: str | None):
        """`bytes_per_rank`: of parameters, gradients, optimizer states and buffers, on the rank with most."""
        self._steps = steps
        self._memory = f"{bytes_per_rank / 2**20:.1f} MiB/rank"
        self._close: Callable[[], None] = lambda: None
        self._show = self._print_line
        self._next_line = 1
        self._drawn = 0.0
        if terminal is not None:
            self._start_bar(terminal)

    def update(self, step: int, loss: float, tokens_per_s: float) -> None:
        """After step `step`, counted from 1."""
        self._show(step, f"loss {loss:.4f}", f"{tokens_per_s:,.0f} tokens/s")

    def close(self) -> None:
        self._close()

    def _print_line(self, step: int, loss: str, speed: str) -> None:
        if step >= self._next_line or step == self._steps:
            self._next_line = step + max(1, self._steps // LINES)
            print(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  {loss}  {speed}  {self._memory}",
                file=sys.stderr,
                flush=True,
            )

    def _start_bar(self, terminal: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True, force_terminal=True, width=_columns(terminal))
        columns = [
            "step",
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            *map(TextColumn, ("{task.fields[loss]}", "{task.fields[speed]}", self._memory)),
        ]
        # No refresh thread of rich's own: it would take the core from the rank that computes.
        bar = Bar(*columns, TimeRemainingColumn(), console=console, auto_refresh=False, expand=True)
        task = bar.add_task("", total=self._steps, loss="", speed="")
        bar.start()

        def show(step: int, loss: str, speed: str) -> None:
            now = time.monotonic()
            if now - self._drawn > 0.1 or step == self._steps:
                self._drawn = now
                bar.update(task, completed=step, loss=loss, speed=speed, refresh=True)

        self._show, self._close = show, bar.stop


def terminal() -> str | None:
    """The terminal that stderr leads to in the end, directly or through mpirun; None where there is none."""
    if os.environ.get("TERM") == "dumb":
        return None
    if sys.stderr.isatty():
        return os.ttyname(sys.stderr.fileno())
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name in _LAUNCHERS:
                leads_to = os.readlink(f"/proc/{pid}/fd/2")
                return leads_to if leads_to.startswith(("/dev/pts/", "/dev/tty")) else None
            pid = int(rest.split()[1])
        except (OSError, ValueError, IndexError):  # no /proc, or a launcher of another user
            return None
    return None


def _columns(terminal: str) -> int:
    try:
        fd = os.open(terminal, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return 100
    try:
        return os.get_terminal_size(fd).columns or 100
    except OSError:
        return 100
    finally:
        os.close(fd)
