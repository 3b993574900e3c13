"""Why "adaptive" takes what it takes: every algorithm with its expected time, or the reason why it cannot serve."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpczero.arrays import is_half
from hpczero.collectives.costs import Costs, Estimate
from hpczero.collectives.selection import ALGORITHMS, Call, Order, choose, why_not
from hpczero.collectives.slots import slot_bytes
from hpczero.topology import Topology


@dataclass(frozen=True)
class Explanation:
    """One choice. `str` prints it."""

    operation: str
    nbytes: int
    dtype: str
    order: str
    taken: str
    why: str
    estimates: tuple[Estimate, ...]
    """The cheapest first; empty where nothing had to be known."""
    cannot: tuple[tuple[str, str], ...]
    """(algorithm, reason)."""

    def __str__(self) -> str:
        lines = [f"{self.operation} of {self.nbytes} bytes, {self.dtype}, order={self.order}: {self.taken}, {self.why}"]
        lines += [f"  {each.algorithm:<24}{_seconds(each.seconds):>12}  {each.basis}" for each in self.estimates]
        lines += [f"  {name:<24}{'-':>12}  {reason}" for name, reason in self.cannot]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for each in found["estimates"]:
            each["seconds"] = None if each["seconds"] == float("inf") else each["seconds"]
        return found | {"cannot": dict(self.cannot)}


def explain(topology: Topology, operation: str, nbytes: int, *, dtype: Any = np.float32, order: Order = "any",
            shared: bool = False) -> Explanation:
    """What an adaptive call on host memory would take. Called by every rank; measures what is not known yet.

    `nbytes` is the size of the whole vector; `shared` says that it lives in an array of `topology.empty`.
    """
    dtype = np.dtype(dtype)
    call = Call(operation, nbytes, topology.map, order, in_window=shared, is_half=is_half(dtype))
    reasons = [(name, why_not(call, name)) for name in ALGORITHMS[operation]]
    cannot = tuple((name, reason) for name, reason in reasons if reason is not None)
    if topology.size == 1 or (topology.num_nodes == 1 and nbytes <= slot_bytes(topology.size)):
        why = "as it takes one meeting of the node" if topology.size > 1 else "as there is one rank"
        return Explanation(operation, nbytes, str(dtype), order, choose(call), why, (), cannot)
    costs = Costs.of(topology, dtype)
    costs.prepare(call)
    estimates = tuple(costs.estimates(call))
    source = f"by the table of {costs.table.made}" if costs.table else "by a measurement made now; `tune` stores a better one"
    if not costs.cover(call):
        source = "by a rule, as the measurement made now ended far below this size; `tune` goes on"
    taken = choose(call, costs=costs if costs.cover(call) else None, tie=costs.tie(call))
    return Explanation(operation, nbytes, str(dtype), order, taken, source, estimates, cannot)


def _seconds(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
