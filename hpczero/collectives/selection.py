"""Which algorithm runs: what each one guarantees, and what "adaptive" takes.

Every algorithm gives all ranks the same bits, on every run. They differ in what the order of additions depends on
besides the ranks:

- `"any"`: the algorithm, and how the vector is cut;
- `"canonical"`: the nodes alone (`order.canonical`); also independent of size, bucket, and algorithm;
- `"world"`: nothing, not even the nodes: the canonical tree over all ranks.

`choose` is a rule, the same on every rank since it depends on shared facts alone. Its one threshold comes from measuring
MPICH and Open MPI on two cores: below 64 KiB rounds cost more than bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpczero.collectives.order import balanced, canonical
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap

Order = Literal["any", "canonical", "world"]
ORDERS = ("any", "canonical", "world")

ALGORITHMS = {
    "all_reduce": ("tree", "ring", "butterfly", "halving", "pairwise", "window", "hierarchical", "system"),
    "reduce_scatter": ("ring", "halving", "pairwise", "window", "hierarchical", "system"),
    "all_gather": ("ring", "halving", "pairwise", "window", "hierarchical", "system"),
    "broadcast": ("tree", "system"),
    "reduce": ("tree", "pairwise", "system"),
}
"""The algorithms of each operation, beside "adaptive"."""

SMALL_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Call:
    """The facts on which a choice may depend; the same on every rank."""

    operation: str
    nbytes: int
    nodes: NodeMap
    order: Order
    on_device: bool = False
    in_window: bool = False
    """The vector lives in node-shared memory."""
    is_half: bool = False
    """Partial sums that are sent are rounded, so an order is kept only by what rounds once."""


def choose(call: Call, algorithm: str = "adaptive") -> str:
    """The algorithm that runs: the one that was named, if it can, or the rule's choice.

    Raises ConfigError if the named one does not exist for this operation, cannot run here, or does not keep the order.
    """
    if call.order not in ORDERS:
        raise ConfigError(f"order={call.order!r} is not one of {', '.join(ORDERS)}")
    known = ALGORITHMS[call.operation]
    if algorithm == "adaptive":
        return next(name for name in _preferred(call) if name in known and why_not(call, name) is None)
    if algorithm not in known:
        raise ConfigError(f"{call.operation}: algorithm={algorithm!r} is not one of adaptive, {', '.join(known)}")
    reason = why_not(call, algorithm)
    if reason:
        raise ConfigError(f"{call.operation}: algorithm={algorithm!r} {reason}")
    return algorithm


def why_not(call: Call, algorithm: str) -> str | None:
    """Why an algorithm cannot serve this call, or None if it can."""
    if algorithm == "window" and len(call.nodes.nodes) > 1:
        return f"works inside one node, and here are {len(call.nodes.nodes)}: take 'hierarchical'"
    if algorithm == "window" and call.on_device:
        return "works on host memory, and the array is on a device"
    moves_only = call.operation in ("all_gather", "broadcast")
    if algorithm == "system" and call.is_half and not moves_only:
        return "has no sum of half types, since MPI has none: take another algorithm"
    if moves_only or keeps(algorithm, call.order, call.nodes, is_half=call.is_half):
        return None
    return f"does not add in order={call.order!r} over these {call.nodes.size} ranks: take 'pairwise', or order='any'"


def keeps(algorithm: str, order: Order, nodes: NodeMap, *, is_half: bool = False) -> bool:
    """Whether an algorithm's additions, and where they are rounded, depend on no more than `order` allows."""
    if order == "any" or nodes.size == 1:
        return True
    one_level = len(nodes.nodes) in (1, nodes.size)
    rounds_once = algorithm in ("pairwise", "window") or nodes.size == 2 or (algorithm == "hierarchical" and one_level)
    if is_half and not rounds_once:
        return False
    # Trees over consecutive ranks are the canonical ones where the nodes do not matter, or happen to agree.
    flat = order == "world" or canonical(nodes.nodes) == balanced(range(nodes.size))
    return {
        "pairwise": True,
        "tree": flat,
        "butterfly": flat and nodes.size & (nodes.size - 1) == 0,
        "halving": flat and nodes.size & (nodes.size - 1) == 0,
        "ring": nodes.size == 2,
        "window": True,
        "hierarchical": order == "canonical" or canonical(nodes.nodes) == balanced(range(nodes.size)),
        "system": False,
    }[algorithm]


def _preferred(call: Call) -> tuple[str, ...]:
    """Names from most to least wanted; the last of them can always run."""
    several = len(call.nodes.nodes) > 1
    if call.in_window:
        first = "hierarchical" if several else "window"
    elif call.nbytes < SMALL_BYTES:
        first = "butterfly"
    elif several:
        first = "hierarchical"
    else:
        first = "ring" if call.on_device or call.nodes.size == 2 else "window"
    return (first, "tree", "pairwise") if call.operation in ("broadcast", "reduce") else (first, "pairwise")
