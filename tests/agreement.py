"""Assertions that every rank makes together, so that one wrong rank fails a test instead of hanging it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def check_everywhere(comm: MPI.Comm, ok: object, message: str) -> None:
    """Every rank of `comm` calls this; if `ok` is false on any of them, all raise, quoting each that was wrong.

    A plain `assert` fails on the wrong rank alone, which then leaves the test while the others wait in its next
    collective.
    """
    __tracebackhide__ = True
    found = comm.allgather(None if ok else str(message))
    if all(entry is None for entry in found):
        return
    ranks_of: dict[str, list[int]] = {}
    for rank, entry in enumerate(found):
        if entry is not None:
            ranks_of.setdefault(entry, []).append(rank)
    said = [f"{name_ranks(ranks)} of {comm.size}: {entry}" for entry, ranks in ranks_of.items()]
    raise AssertionError("\n".join(said))


def name_ranks(ranks: list[int]) -> str:
    """"rank 3", or "ranks 0, 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
