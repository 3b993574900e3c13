"""What a benchmark shows: one row per algorithm, memory, way of calling and size, in the manner of nccl-tests. Pure.

A row's time is the median over its calls of the slowest rank's time; beside it the 95th percentile. algbw is bytes of
the whole vector per second. busbw is that, times the part of the vector that must cross each rank's link at least, so
that it compares with the speed of a link whatever the number of ranks:

    all_reduce 2 (p - 1) / p      reduce_scatter, all_gather (p - 1) / p      broadcast, reduce 1
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_COLUMNS = (      # title, unit, width
    ("size", "(B)", 12), ("count", "(elements)", 12), ("dtype", "", 9), ("op", "", 5), ("buffers", "", 8),
    ("in-place", "", 9), ("algorithm", "", 23), ("time", "(us)", 11), ("p95", "(us)", 11), ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8), ("link", "(%)", 6), ("#wrong", "", 8),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, and one object of the JSON's `rows`."""

    collective: str
    algorithm: str
    buffers: str
    in_place: bool
    dtype: str
    op: str | None
    """None for a collective that only moves elements."""
    count: int
    bytes: int
    """Of the whole vector, also where a rank gives or gets a shard of it."""
    median_s: float
    p95_s: float
    algbw_GBps: float
    busbw_GBps: float
    link_percent: float | None
    """busbw in percent of the best measured link; None where there is one rank."""
    wrong: int
    """Elements that were not what they must be, over all ranks."""
    ranks: int
    nodes: int
    mpi: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        link = "-" if self.link_percent is None else f"{self.link_percent:.0f}"
        return _line(
            self.bytes, self.count, self.dtype, self.op or "-", self.buffers, "yes" if self.in_place else "no",
            self.algorithm, f"{1e6 * self.median_s:.2f}", f"{1e6 * self.p95_s:.2f}", f"{self.algbw_GBps:.3f}",
            f"{self.busbw_GBps:.3f}", link, self.wrong,
        )  # fmt: skip


def speeds(
    collective: str, nbytes: int, seconds: Sequence[float], num_ranks: int, link_GBps: float | None
) -> dict[str, Any]:
    """The fields of a `Row` that follow from the times of its calls, each the time of the slowest rank."""
    median = statistics.median(seconds)
    algbw = nbytes / median / 1e9
    busbw = algbw * bus_factor(collective, num_ranks)
    return {
        "median_s": median,
        "p95_s": percentile(seconds, 95),
        "algbw_GBps": algbw,
        "busbw_GBps": busbw,
        "link_percent": 100 * busbw / link_GBps if link_GBps else None,
    }


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw: what must cross each rank's link at least, as a part of the whole vector; 0 on one rank."""
    if num_ranks == 1:
        return 0.0
    others = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * others, "reduce_scatter": others, "all_gather": others}.get(collective, 1.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-percent * len(ordered) // 100) - 1)]


def titles() -> str:
    """The two lines above the rows."""
    return "\n".join(f"#{_line(*texts)[1:]}".rstrip() for texts in (
        [title for title, _, _ in _COLUMNS], [unit for _, unit, _ in _COLUMNS],
    ))  # fmt: skip


def heading(header: Mapping[str, Any]) -> str:
    """The lines that say what was measured where."""
    links = ", ".join(f"{speed:.2f} GB/s {kind}" for kind, speed in header["links_GBps"].items())
    placed = "+".join(map(str, header["ranks_per_node"]))
    checked = "of every call" if header["check"] else "of the last"
    shared = {None: "no GPU", False: "no GPU is shared", True: "ranks share a GPU"}[header["shared_gpu"]]
    lines = (
        f"hpczero {header['hpczero']}: {header['collective']}",
        f"ranks {header['ranks']}, nodes {header['nodes']} ({placed}), hosts {', '.join(header['hosts'])}",
        f"machine {header['machine']}, cores {header['cores']}",
        f"MPI {header['mpi']}, thread level {header['thread_level']}",
        f"Python {header['python']}, NumPy {header['numpy']}, Numba {header['numba']}",
        f"device {header['device']} ({header['device_name']}), {shared}",
        f"best measured link: {links}" if links else "no link: there is one rank",
        f"order {header['order']}, results compared: {checked}",
        f"calls of a row: {header['warmup']} to warm up, {header['repeats']} timed",
    )
    return "\n".join(f"# {line}" for line in lines)


def verdict(rows: Sequence[Row]) -> str:
    """The last line."""
    wrong = [row for row in rows if row.wrong]
    if not wrong:
        return f"# {len(rows)} rows, every result right"
    first = wrong[0]
    return (
        f"# {len(rows)} rows, {len(wrong)} WRONG, {sum(row.wrong for row in wrong):,} elements; the first is "
        f"{first.algorithm}, {first.count} elements, {first.buffers}, in place {'yes' if first.in_place else 'no'}"
    )


def _line(*cells: object) -> str:
    return "".join(f"{cell!s:>{width}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))
