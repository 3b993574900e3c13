"""Which algorithm runs: what each one guarantees, and what "adaptive" takes.

Every algorithm gives all ranks the same bits, on every run. They differ in what the order of additions depends on
besides the ranks:

- `"any"`: the algorithm, and how the vector is cut;
- `"canonical"`: the nodes alone (`order.canonical`); also independent of size, bucket, and algorithm;
- `"world"`: nothing, not even the nodes: the canonical tree over all ranks.

`choose` depends on facts that all ranks share, so that all take the same. What it knows of costs comes in as a function;
without one, or where it makes no difference, a rule stands in, whose thresholds were measured on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hpczero.collectives.algorithms import SCHEDULES
from hpczero.collectives.order import balanced, canonical
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap

Order = Literal["any", "canonical", "world"]
ORDERS = ("any", "canonical", "world")

ALGORITHMS = {operation: (*names, "window", "system") for operation, names in SCHEDULES.items()}
"""The algorithms of each operation, beside "adaptive"."""

SMALL_BYTES, LARGE_BYTES = 256 * 2**10, 24 * 2**20
MOVES_ONLY = ("all_gather", "broadcast")
"""Operations that add nothing: every algorithm keeps every order."""


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


Costs = Callable[[Call, str], float]
"""costs(call, algorithm): seconds that it is expected to take; infinite where nothing is known."""


def choose(call: Call, algorithm: str = "adaptive", costs: Costs | None = None, tie: float = 1.0) -> str:
    """The algorithm that runs: the one that was named, if it can, or the cheapest that can.

    What is expected to take up to `tie` times as long as the cheapest counts as equal, and then the rule decides.

    Raises ConfigError if the named one does not exist for this operation, cannot run here, or does not keep the order.
    """
    if call.order not in ORDERS:
        raise ConfigError(f"order={call.order!r} is not one of {', '.join(ORDERS)}")
    known = ALGORITHMS[call.operation]
    if algorithm == "adaptive":
        able = candidates(call)
        expected = {name: 0.0 if costs is None else costs(call, name) for name in able}
        most = tie * min(expected.values())
        usual = next((name for name in _preferred(call) if name in able), None)
        if usual is not None and expected[usual] <= most:
            return usual
        return min(able, key=lambda name: (expected[name], known.index(name)))
    if algorithm not in known:
        from hpczero.settings import nearest      # imports pydantic, which is of use in this one case

        raise ConfigError(f"{call.operation}: algorithm={algorithm!r} is not one of adaptive, {', '.join(known)}"
                          f"{nearest(str(algorithm), ('adaptive', *known))}")
    reason = why_not(call, algorithm)
    if reason:
        raise ConfigError(f"{call.operation}: algorithm={algorithm!r} {reason}")
    return algorithm


def candidates(call: Call) -> list[str]:
    """The algorithms that can serve a call."""
    return [name for name in ALGORITHMS[call.operation] if why_not(call, name) is None]


def why_not(call: Call, algorithm: str) -> str | None:
    """Why an algorithm cannot serve this call, or None if it can."""
    if algorithm == "window" and len(call.nodes.nodes) > 1:
        return f"works inside one node, and here are {len(call.nodes.nodes)}: take 'hierarchical'"
    if algorithm == "window" and call.on_device:
        return "works on host memory, and the array is on a device"
    moves_only = call.operation in MOVES_ONLY
    if algorithm == "system" and call.is_half and not moves_only:
        return "has no sum of half types, since MPI has none: take another algorithm"
    # To one root, a tree runs between the nodes, and rounds on its way.
    by_tree = call.operation == "reduce" and algorithm in ("hierarchical", "leader") and len(call.nodes.nodes) > 2
    rounds = call.is_half and call.order != "any" and by_tree
    if moves_only or (keeps(algorithm, call.order, call.nodes, is_half=call.is_half) and not rounds):
        return None
    return f"does not add in order={call.order!r} over these {call.nodes.size} ranks: take 'pairwise', or order='any'"


def keeps(algorithm: str, order: Order, nodes: NodeMap, *, is_half: bool = False) -> bool:
    """Whether an algorithm's additions, and where they are rounded, depend on no more than `order` allows."""
    if order == "any" or nodes.size == 1:
        return True
    num_nodes = len(nodes.nodes)
    if is_half and not _rounds_once(algorithm, nodes):
        return False
    # Trees over consecutive ranks are the canonical ones where the nodes do not matter, or happen to agree.
    same = canonical(nodes.nodes) == balanced(range(nodes.size))
    over_ranks, over_nodes = order == "world" or same, order == "canonical" or same
    return {
        "pairwise": True,
        "window": True,
        "system": False,
        "tree": over_ranks,
        "butterfly": over_ranks and _is_power_of_two(nodes.size),
        "halving": over_ranks and _is_power_of_two(nodes.size),
        "hierarchical": over_nodes,
        "leader": over_nodes,
        "hierarchical:halving": over_nodes and _is_power_of_two(num_nodes),
        "hierarchical:ring": over_nodes and num_nodes <= 2,
        "hierarchical:circulant": over_nodes and num_nodes <= 2,
    }.get(algorithm, nodes.size == 2)      # the others rotate the order with the block


def _rounds_once(algorithm: str, nodes: NodeMap) -> bool:
    """Whether a sum of half types, which is made in float32, is rounded to a half type only once."""
    num_nodes = len(nodes.nodes)
    return (nodes.size == 2 or algorithm in ("pairwise", "window")
            or algorithm == "leader" and num_nodes == nodes.size
            or algorithm.startswith("hierarchical") and (num_nodes == 1 or algorithm == "hierarchical"
                                                         and num_nodes == nodes.size))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _preferred(call: Call) -> tuple[str, ...]:
    """Names from most to least wanted; the last of them can always run."""
    several = len(call.nodes.nodes) > 1
    if several:
        # On a host a small all-reduce needs no messages inside the nodes, and one each way between two of them.
        by_messages = call.on_device or call.operation != "all_reduce"
        first = "butterfly" if call.nbytes < SMALL_BYTES and by_messages and not call.in_window else "hierarchical"
    elif call.on_device or (call.nodes.size == 2 and call.nbytes > LARGE_BYTES and not call.in_window):
        # Two ranks that exchange halves copy less than two that meet in shared rows, which counts where caches do not.
        first = "ring"
    else:
        first = "window"
    return (first, "tree", "pairwise") if call.operation in ("broadcast", "reduce") else (first, "pairwise")
