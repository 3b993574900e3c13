"""Ranks compare the gradients they are about to add, and say which one differs, on which rank, how.

A fingerprint of all names, shapes, dtypes and settings is compared before any payload moves; only where it differs do
the descriptions behind it travel, a line per gradient. Of those, what differs is told.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from hpczero.collectives.aggregator_buckets import Entry
from hpczero.collectives.guard import same
from hpczero.collectives.transport import Transport
from hpczero.errors import MismatchError, gather_texts, raise_together

SHOWN = 5
"""A message names so many gradients that differ; the rest is counted."""


def compare(transport: Transport, fingerprint: int, call: str, entries: tuple[Entry, ...],
            error: Exception | None) -> None:
    """Every rank passes the fingerprint of `describe(call, entries)`, or FAILED and an error.

    Raises on every rank: the error, if any rank passes one; else MismatchError, if fingerprints differ. Looks at them
    as `guard.agree` does, which a rank in another call may be in.
    """
    world = transport.topology.world
    if not same(transport, fingerprint, call) or error is not None:
        raise_together(world, error, transport.timeout_s)
        texts = gather_texts(world, describe(call, entries), transport.timeout_s)
        raise MismatchError(f"{call}: {differences(texts)}")


def describe(call: str, entries: Iterable[Entry]) -> str:
    """What one rank is about to do, as text: a line for the call, one per gradient in the order of names."""
    lines = [f"{json.dumps(entry.name)}\t{entry}" for entry in sorted(entries, key=lambda entry: entry.name)]
    return "\n".join([call, *lines])


def differences(descriptions: Sequence[str]) -> str:
    """In what the descriptions of all ranks, in rank order, differ: which gradient, on which rank, how."""
    calls = [text.partition("\n")[0] for text in descriptions]
    if len(set(calls)) > 1:
        return f"ranks are in different calls: {_told(calls)}"
    tables = [dict(line.split("\t", 1) for line in text.split("\n")[1:]) for text in descriptions]
    values = {name: [table.get(name, "missing") for table in tables] for name in sorted(set().union(*tables))}
    odd = [f"{name} is {_told(found)}" for name, found in values.items() if len(set(found)) > 1]
    more = f"; and {len(odd) - SHOWN} more gradients differ" if len(odd) > SHOWN else ""
    return "; ".join(odd[:SHOWN]) + more


def _told(values: Sequence[str]) -> str:
    """The values that ranks have, odd ones first: `A on rank 1; B on the 3 other ranks`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    usual, count = Counter(values).most_common(1)[0]
    parts = [f"{value} on {_named(ranks)}" for value, ranks in ranks_of.items() if value != usual]
    return "; ".join([*parts, f"{usual} on " + (f"the {count} other ranks" if count > 1 else _named(ranks_of[usual]))])


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
