"""What an algorithm would cost, from its steps and the costs of links: by replay, or by formula for more ranks.

`price` plays all ranks of a `Plan` with a clock each (practical up to 512 ranks). `predict` gives the same number for m
nodes of l ranks each, numbered node by node, without making a step: by a closed formula where all ranks are alike, else
from its shape (`shapes`), in which one rank stands for all with the same history. 65,536 ranks take some tenths of a
second for the first size, and milliseconds for others. Pure: numbers in, seconds out, no MPI.

The model, on top of `links` (Hockney's, one port each way):

- the messages of a step leave together when the step begins, share the rank's port, and are all out after the sum of
  their times; a message is under way from then on, whether the receiver waits for it or not;
- the receiver's port takes them in turn, so a step ends when all its messages are out, all have come, and the sum of
  what comes in has passed; then what arrived is added, at gamma seconds per byte;
- of one node, the ranks that send (or receive) network messages that left in the same round share its card; those that
  send inside the node share its memory. Rounds are those of `schedule.rounds`, in which every message takes one.

`double_tree` is the one algorithm whose formula is an estimate, not what a replay gives: all its rounds are taken to be
as full as the fullest one. It lies up to about twice above the replay. Vectors are cut evenly, to fractions of a byte.
The window and the MPI library's own collectives send no messages of ours, so they have no price; `tuning` has their
measured times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.collectives import ring, tree
from hpczero.collectives.links import Links
from hpczero.collectives.schedule import Message, Step, rounds
from hpczero.collectives.shapes import Shape, flat, full_round
from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from hpczero.collectives.algorithms import Plan
    from hpczero.topology import NodeMap

_BETWEEN = ("hierarchical", "hierarchical:ring", "hierarchical:circulant", "hierarchical:halving")
_SHARDED = ("ring", "segmented_ring", "halving", "circulant", "pairwise", *_BETWEEN)
PREDICTED = {
    "all_reduce": ("tree", "double_tree", "ring", "segmented_ring", "butterfly", "halving", "circulant", "pairwise",
                   *_BETWEEN, "leader"),
    "reduce_scatter": _SHARDED,
    "all_gather": _SHARDED,
    "broadcast": ("tree", "double_tree", "circulant", "hierarchical", "leader"),
    "reduce": ("tree", "double_tree", "circulant", "pairwise", "hierarchical", "leader"),
}
"""What `predict` knows, by operation."""
ESTIMATED = ("double_tree",)
"""Where `predict` is not equal to `price`."""


def price(plan: Plan, nodes: NodeMap, nbytes: float, links: Links, dtype: Any = "float32") -> float:
    """Seconds until the last rank has taken its last step, all ranks having begun together.

    `nbytes` is the whole vector's size. ConfigError where a message takes a link that was not measured.
    """
    if nbytes == 0:
        return 0.0
    table = rounds(lambda rank, size: plan.steps(rank), nodes.size)
    cost = _Cost(table, nodes, nbytes / plan.num_blocks, links, dtype)
    clock, port_free = [0.0] * nodes.size, [0.0] * nodes.size
    begun: dict[tuple[int, int], tuple[float, float]] = {}       # (rank, round): when its step began, and was all out
    for now, ending in enumerate(_by_end(table)):
        for rank, step in table[now].items():
            out = sum(cost.of(rank, message.peer, message, now) for message in step.send)
            begun[rank, now] = clock[rank], clock[rank] + out
        # Whatever a step that ends in this round waits for has begun by now.
        for rank, own, step, left_in in ending:
            end = begun[rank, own][1]
            if step.recv:
                sent = list(zip(step.recv, left_in, strict=True))
                first = min(begun[message.peer, then][0] for message, then in sent)
                last = max(begun[message.peer, then][1] for message, then in sent)
                taking = sum(cost.of(message.peer, rank, message, then) for message, then in sent)
                port_free[rank] = max(last, max(port_free[rank], first) + taking)
                end = max(end, port_free[rank])
                if step.add or step.fold is not None:
                    end += cost.adding(step)
            clock[rank] = end
    return max(clock)


def predict(operation: str, name: str, num_nodes: int, per_node: int, nbytes: float, links: Links,
            dtype: Any = "float32") -> float:
    """Seconds as `price` would give them, for `num_nodes` nodes of `per_node` ranks, numbered node by node; root 0.

    ConfigError for a name that has no formula (`PREDICTED`), or a link that is needed and was not measured.
    """
    if operation not in PREDICTED or name not in PREDICTED[operation]:
        known = ", ".join(PREDICTED.get(operation, PREDICTED))
        raise ConfigError(f"no formula for {operation} by {name!r}; there is one for {known}")
    if num_nodes < 1 or per_node < 1:
        raise ConfigError(f"{num_nodes} nodes of {per_node} ranks: at least one of each is needed")
    if nbytes == 0 or num_nodes * per_node == 1:
        return 0.0
    return _Formulas(num_nodes, per_node, nbytes, links, dtype).seconds(operation, name)


def fastest(operation: str, num_nodes: int, per_node: int, nbytes: float, links: Links, dtype: Any = "float32",
            names: Sequence[str] | None = None) -> tuple[str, float]:
    """The cheapest of `names` (of all by default) by `predict`, and its seconds; of equals the first."""
    prices = [(predict(operation, name, num_nodes, per_node, nbytes, links, dtype), name)
              for name in names or PREDICTED[operation]]
    # Two names for the same steps differ in the last digits, and must not take turns from size to size.
    least = min(prices)[0] * (1 + 1e-9)
    return next((name, seconds) for seconds, name in prices if seconds <= least)


def crossovers(operation: str, num_nodes: int, per_node: int, links: Links, dtype: Any = "float32",
               names: Sequence[str] | None = None, sizes: tuple[int, int] = (8, 2**30)) -> list[tuple[int, str]]:
    """[(from how many bytes, the cheapest algorithm)] over a range of sizes, the first entry being its lower end.

    Looks at every power of two in between, then halves the interval in which the cheapest one changes to 2 %.
    """
    def best(nbytes: int) -> str:
        return fastest(operation, num_nodes, per_node, nbytes, links, dtype, names)[0]

    low, end = sizes
    now = best(low)
    found = [(low, now)]
    while low < end:
        high = min(2 * low, end)
        there = best(high)
        # More than one change may lie between two powers of two: each half that differs is looked into.
        stack = [(low, now, high, there)]
        while stack:
            a, at_a, b, at_b = stack.pop()
            if at_a == at_b:
                continue
            if b - a <= max(1, a // 50):
                found.append((b, at_b))
                continue
            middle = (a + b) // 2
            at_middle = best(middle)
            stack += [(middle, at_middle, b, at_b), (a, at_a, middle, at_middle)]
        low, now = high, there
    return found


# Replay


_Ending = tuple[int, int, Step, list[int]]
"""rank, the round in which its step began, the step, the rounds in which the messages it receives left"""


def _by_end(table: list[dict[int, Step]]) -> list[list[_Ending]]:
    """The steps by the round in which they end: the one in which the last message they wait for has left."""
    left_in: dict[tuple[int, int], deque[int]] = {}
    for now, steps in enumerate(table):
        for rank, step in steps.items():
            for message in step.send:
                left_in.setdefault((rank, message.peer), deque()).append(now)
    found: list[list[_Ending]] = [[] for _ in table]
    for now, steps in enumerate(table):
        for rank, step in steps.items():
            sources = [left_in[message.peer, rank].popleft() for message in step.recv]
            found[max([now, *sources])].append((rank, now, step, sources))
    return found


class _Cost:
    """What a message takes, given who else was sending when it left."""

    def __init__(self, table: list[dict[int, Step]], nodes: NodeMap, block_bytes: float, links: Links, dtype: Any):
        self._node_of, self._block_bytes, self._links = nodes.node_of, block_bytes, links
        self._gamma_s = links.gamma(dtype)
        self._known: dict[tuple[float, str, int], float] = {}
        # Ranks of (node, round) that send inside the node, send over the card, receive over the card.
        inside, leaving, arriving = Counter(), Counter(), Counter()
        receivers = set()
        for now, steps in enumerate(table):
            for rank, step in steps.items():
                home = self._node_of[rank]
                away = [message.peer for message in step.send if self._node_of[message.peer] != home]
                leaving[home, now] += bool(away)
                inside[home, now] += len(away) < len(step.send)
                receivers.update((peer, now) for peer in away)
        for rank, now in receivers:
            arriving[self._node_of[rank], now] += 1
        self._inside, self._leaving, self._arriving = inside, leaving, arriving

    def of(self, source: int, target: int, message: Message, left_in: int) -> float:
        """Seconds for a message that left in that round."""
        here, there = self._node_of[source], self._node_of[target]
        if here == there:
            key = (len(message.blocks), "node", self._inside[here, left_in])
        else:
            key = (len(message.blocks), "network", max(self._leaving[here, left_in], self._arriving[there, left_in]))
        if key not in self._known:
            self._known[key] = self._links.time(key[0] * self._block_bytes, *key[1:])
        return self._known[key]

    def adding(self, step: Step) -> float:
        """Seconds for adding all that the step receives."""
        return self._gamma_s * self._block_bytes * sum(len(message.blocks) for message in step.recv)


# Formulas


class _Formulas:
    """The formulas for one machine and one size. Shares and clocks as in the replay."""

    def __init__(self, num_nodes: int, per_node: int, nbytes: float, links: Links, dtype: Any):
        self.m, self.l, self.p = num_nodes, per_node, num_nodes * per_node
        self.nbytes, self.links, self.gamma_s = nbytes, links, links.gamma(dtype)

    def seconds(self, operation: str, name: str) -> float:
        if name in ("ring", "segmented_ring"):
            segments = ring.num_segments(self.p, int(self.nbytes)) if name == "segmented_ring" else 1
            return self._phases(operation, lambda add: self._ring(segments, add))
        if name == "pairwise":
            return self._pairwise(operation)
        if name == "double_tree":
            return self._double_tree(operation)
        if name == "leader":
            return self._leader(operation)
        if name.startswith("hierarchical"):
            return self._hierarchical(operation, name.partition(":")[2] or "pairwise")
        return float(self._run(flat(operation, name, self.p, self.l)).max())

    def _phases(self, operation: str, phase: Callable[[bool], float]) -> float:
        """A reduce-scatter, an all-gather, or both."""
        reducing = phase(True) if operation in ("all_reduce", "reduce_scatter") else 0.0
        return reducing + (phase(False) if operation in ("all_reduce", "all_gather") else 0.0)

    def _ring(self, segments: int, add: bool) -> float:
        """The slowest link sets the pace of all: its sender never waits, and the others cannot get ahead of it."""
        nbytes = self.nbytes / self.p / segments
        costs = [self.links.time(nbytes, "network")] if self.m > 1 else []
        if self.l > 1:
            costs.append(self.links.time(nbytes, "node", self.l - 1 if self.m > 1 else self.l))
        return (self.p - 1) * segments * (max(costs) + add * self.gamma_s * nbytes)

    def _pairwise(self, operation: str) -> float:
        seconds = self._phases(operation if operation != "reduce" else "reduce_scatter", self._to_all)
        if operation == "reduce":         # then every rank sends its block to the root
            nbytes = self.nbytes / self.p
            seconds += (self.p - self.l) * self._network(nbytes, self.l) + (self.l - 1) * self._node(nbytes, self.l - 1)
        return seconds

    def _to_all(self, add: bool) -> float:
        """Every rank sends a block to every other."""
        nbytes = self.nbytes / self.p
        out = (self.p - self.l) * self._network(nbytes, self.l) + (self.l - 1) * self._node(nbytes, self.l)
        return out + add * self.gamma_s * (self.p - 1) * nbytes

    def _hierarchical(self, operation: str, between: str) -> float:
        if operation == "broadcast":
            return self._hierarchical_broadcast()
        if operation == "reduce":
            ends = self._across(flat("reduce", "tree", self.m, 1))
            return self._inside(True) + float(ends.max()) + self._spread(self.l - 1)

        def phase(add: bool) -> float:
            return self._inside(add) + self._between(between, add)

        return self._phases(operation, phase)

    def _between(self, between: str, add: bool) -> float:
        """Reduce-scatter or all-gather of a column over the nodes, all columns at once."""
        if self.m == 1:
            return 0.0
        nbytes = self.nbytes / self.p
        adding = add * self.gamma_s * (self.m - 1) * nbytes
        if between in ("pairwise", "ring"):         # as many bytes; in one step, or in as many as there are other nodes
            return (self.m - 1) * self._network(nbytes, self.l) + adding
        return float(self._across(flat("reduce_scatter" if add else "all_gather", between, self.m, 1)).max())

    def _hierarchical_broadcast(self) -> float:
        ends = self._across(flat("broadcast", "tree", self.m, 1))
        # The root has everything: its node's other ranks send it nothing.
        last = float(ends[0]) + self._spread(self.l if self.l > 2 else 1)
        if self.m > 1:
            last = max(last, float(ends[1:].max()) + self._spread(self.l))
        return self._spread(1) + last

    def _leader(self, operation: str) -> float:
        up = flat("reduce", "tree", self.l, self.l)
        down = flat("broadcast", "tree", self.l, self.l)
        inside_up = float(self._run(up)[0]) if operation != "broadcast" else 0.0
        inside_down = float(self._run(down).max()) if operation != "reduce" else 0.0
        if operation != "all_reduce":
            ends = self._run(flat(operation, "tree", self.m, 1))
            return inside_up + float(ends.max()) + inside_down
        nbytes = self.nbytes / self.m
        between = 2 * (self.m - 1) * self._network(nbytes, 1) + self.gamma_s * (self.m - 1) * nbytes
        return inside_up + between + inside_down

    def _double_tree(self, operation: str) -> float:
        segments = tree.num_segments(self.p, int(self.nbytes))
        num_rounds = (self.p - 1).bit_length() + segments - 1
        nbytes = self.nbytes / (2 * segments)
        seconds = 0.0
        for downwards in (False, True):
            if operation == ("reduce" if downwards else "broadcast"):
                continue
            kinds, ports = full_round(self.p, self.l, downwards)
            busiest = float((ports @ kinds.seconds(nbytes, self.links)).max())
            adding = 0.0 if downwards else self.gamma_s * nbytes * float(ports.sum(axis=1).max())
            seconds += num_rounds * (busiest + adding)
        return seconds

    def _inside(self, add: bool) -> float:
        """Every rank of a node exchanges with every other what the other answers for, an l-th of the vector."""
        return self._spread(self.l) + add * self.gamma_s * (self.l - 1) * self.nbytes / self.l

    def _spread(self, at_once: int) -> float:
        return (self.l - 1) * self._node(self.nbytes / self.l, at_once)

    def _across(self, shape: Shape) -> np.ndarray:
        """(m,) clocks of steps over the nodes, in all columns at once: an l-th of the vector each."""
        return self._run(shape, self.nbytes / self.l, self.l)

    def _run(self, shape: Shape, nbytes: float | None = None, together: int = 1) -> np.ndarray:
        """(ranks,) clocks at the end, for a vector of `nbytes`; each message stands for `together` of its node."""
        nbytes = self.nbytes if nbytes is None else nbytes
        clock = np.zeros(1 + int(shape.class_of.max()))
        port_free = clock.copy()
        for leaving, arriving, add in shape.steps:
            begun = clock.copy()
            clock[leaving.owner] += leaving.seconds(nbytes, self.links, together)
            taken = np.maximum(port_free[arriving.owner], begun[arriving.peer])
            taken += arriving.seconds(nbytes, self.links, together)
            port_free[arriving.owner] = taken
            adding = self.gamma_s * nbytes * arriving.share if add else 0.0
            clock[arriving.owner] = np.maximum(clock[arriving.owner], taken) + adding
        return clock[shape.class_of]

    def _network(self, nbytes: float, at_once: int) -> float:
        return self.links.time(nbytes, "network", at_once) if self.m > 1 else 0.0

    def _node(self, nbytes: float, at_once: int) -> float:
        return self.links.time(nbytes, "node", at_once) if self.l > 1 else 0.0
