"""Algorithms as arrays: who sends to whom in every step, without sizes or times, for as many ranks as there are.

What `pricing.predict` needs of an algorithm whose ranks are not all alike, for nodes with equal numbers of ranks. A
flat algorithm is a handful of rules (`_tree_reduce`, `_circulant`, `_Folded`), each giving an exchange of all ranks at
once. From these follow, for every message, the link it takes and how many share that; then ranks with the same history
are put into one class, of which one rank is looked at. 65,536 ranks in a butterfly are one class; in a binomial tree
there are as many as rounds. The rules repeat in NumPy what the schedules (`tree`, `circulant`, `butterfly`) say rank by
rank: tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hpczero.collectives.links import Link, Links


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages as one of their ends sees them: whose they are, what is in them, and how they travel; arrays."""

    owner: np.ndarray
    peer: np.ndarray
    share: np.ndarray
    network: np.ndarray
    """True where the two ends are on different nodes."""
    at_once: np.ndarray
    """How many share the card, or the node's memory, with it."""

    def of(self, chosen: np.ndarray) -> Messages:
        return Messages(*(getattr(self, name)[chosen] for name in Messages.__slots__))

    def reversed(self) -> Messages:
        return Messages(self.peer, self.owner, self.share, self.network, self.at_once)

    def seconds(self, nbytes: float, links: Links, together: int = 1) -> np.ndarray:
        """What each takes, of a vector of `nbytes`, where each stands for `together` of its node."""
        found = np.empty(self.share.shape)
        for name, chosen in (("network", self.network), ("node", ~self.network)):
            if chosen.any():
                found[chosen] = _times(links.link(name), self.share[chosen] * nbytes, self.at_once[chosen] * together)
        return found


@dataclass(frozen=True, slots=True)
class Shape:
    """An algorithm without sizes: for ranks that all do the same at the same times, only one of them."""

    class_of: np.ndarray
    """The class of each rank; the owners and peers of messages are classes."""
    steps: tuple[tuple[Messages, Messages, bool], ...]
    """What leaves, what arrives, and whether that is added."""


@lru_cache(maxsize=64)
def flat(operation: str, name: str, size: int, per_node: int) -> Shape:
    """The shape of a flat algorithm over `size` ranks, `per_node` of which, one after the other, share a node."""
    exchanges = list(_SHAPES[operation, name](size))
    if not exchanges:
        return Shape(np.zeros(size, np.int64), ())
    messages = _travelling(exchanges, size, per_node)
    class_of = _classes(messages, size)
    first = np.zeros(size, bool)             # one rank of each class
    first[np.unique(class_of, return_index=True)[1]] = True
    steps = []
    for leaving, exchange in zip(messages, exchanges, strict=True):
        both = []
        for seen in (leaving, leaving.reversed()):
            seen = seen.of(first[seen.owner])
            both.append(replace(seen, owner=class_of[seen.owner], peer=class_of[seen.peer]))
        steps.append((*both, exchange.add))
    return Shape(class_of, tuple(steps))


@lru_cache(maxsize=8)
def full_round(size: int, per_node: int, downwards: bool) -> tuple[Messages, np.ndarray]:
    """A round in which the ranks of both trees of `tree.double_reduce` all send to their parents, or these all to them.

    One message of each kind, and the different ports there are: (ports, kinds) counts of the messages through each.
    """
    last = size - 1
    labels = np.arange(1, size)
    label, above = labels.copy(), np.zeros_like(labels)
    climbing = np.ones(labels.size, bool)
    while climbing.any():
        bit = label & -label
        label = np.where(climbing, label - bit | 2 * bit, label)
        fits = label <= last
        above = np.where(climbing & fits, label, above)
        climbing &= ~fits & (label & -label <= last)
    # The second tree numbers the ranks backwards, or shifted by one.
    second = np.concatenate([[0], (labels - 2) % last + 1 if last % 2 else last + 1 - labels])
    source, target = np.concatenate([labels, second[labels]]), np.concatenate([above, second[above]])
    if downwards:
        source, target = target, source
    (messages,) = _travelling([_Exchange(source, target, np.ones(source.size))], size, per_node)
    _, first, kind = np.unique(2 * messages.at_once + messages.network, return_index=True, return_inverse=True)
    ports = np.concatenate([
        np.bincount(ends * first.size + kind, minlength=size * first.size).reshape(size, first.size)
        for ends in (source, target)
    ])
    return messages.of(first), np.unique(ports, axis=0)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One step of every rank that takes part: at most one message out and one in; arrays over the messages."""

    source: np.ndarray
    target: np.ndarray
    share: np.ndarray
    """Which part of the vector each message carries, or one number for all."""
    add: bool = False


def _times(link: Link, nbytes: np.ndarray | float, at_once: np.ndarray) -> np.ndarray:
    """`Link.time` for arrays."""
    ends = np.array([part.up_to for part in link.classes[:-1]], np.float64)
    index = np.searchsorted(ends, nbytes)
    alpha, beta, shared = (np.array([getattr(part, key) for part in link.classes])[index]
                           for key in ("alpha_s", "beta_s", "shared_s"))
    return alpha + nbytes * np.where(at_once <= 1, beta, np.maximum(beta, at_once * shared))


def _travelling(exchanges: Sequence[_Exchange], size: int, per_node: int) -> list[Messages]:
    """The messages of each exchange, with who leaves in the same round as whom; rounds as in `schedule.rounds`."""
    now = np.zeros(size, np.int64)
    left_in = []
    for step in exchanges:
        left_in.append(now[step.source])
        after = now.copy()
        after[step.source] += 1
        after[step.target] = np.maximum(now[step.target], now[step.source]) + 1
        now = after
    num_rounds = int(now.max()) + 1
    source, target, when = (np.concatenate(parts) for parts in (
        [step.source for step in exchanges], [step.target for step in exchanges], left_in))
    network = source // per_node != target // per_node

    def ranks_of(ends: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """How many ranks at the chosen messages' ends there are in the node and round of each message."""
        there = np.zeros((-(-size // per_node) * per_node, num_rounds), bool)
        there[ends[chosen], when[chosen]] = True
        return there.reshape(-1, per_node, num_rounds).sum(axis=1)[ends // per_node, when]

    card = np.maximum(ranks_of(source, network), ranks_of(target, network))
    at_once = np.where(network, card, ranks_of(source, ~network))
    cuts = np.cumsum([step.source.size for step in exchanges])[:-1]
    return [
        Messages(step.source, step.target, np.broadcast_to(step.share, step.source.shape), over, count)
        for step, over, count in zip(exchanges, np.split(network, cuts), np.split(at_once, cuts), strict=True)
    ]


def _classes(steps: Sequence[Messages], size: int) -> np.ndarray:
    """(size,) a number for each rank, equal for ranks with the same history, whose clocks are the same all the time.

    The history is what a rank sent, and what it received from ranks of what history until then; as a 64-bit hash.
    """
    history = np.zeros(size, np.uint64)
    for index, step in enumerate(steps):
        message = _mixed(np.ascontiguousarray(step.share, np.float64).view(np.uint64) + np.uint64(index)
                         + step.at_once.astype(np.uint64) * np.uint64(1 << 32) + step.network * np.uint64(1 << 62))
        came_with = _mixed(history[step.owner])
        history[step.owner] = _mixed(history[step.owner] ^ message)
        history[step.peer] = _mixed(history[step.peer] + message + came_with)
    return np.unique(history, return_inverse=True)[1]


def _mixed(value: np.ndarray) -> np.ndarray:
    """Spreads the bits of 64-bit numbers: the last steps of MurmurHash3 (Appleby)."""
    value = (value ^ value >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ value >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ value >> np.uint64(33)


def _tree_reduce(size: int, scattered: bool = False) -> Iterator[_Exchange]:
    distance = 1
    while distance < size:
        source = np.arange(distance, size, 2 * distance)
        share = (np.minimum(source + distance, size) - source) / size if scattered else np.ones(source.size)
        yield _Exchange(source, source - distance, share, add=not scattered)
        distance *= 2


def _tree_broadcast(size: int, scattered: bool = False) -> Iterator[_Exchange]:
    for step in reversed(list(_tree_reduce(size, scattered))):
        yield _Exchange(step.target, step.source, step.share)


def _circulant(size: int, add: bool) -> Iterator[_Exchange]:
    ranks, distances, far = np.arange(size), [], size
    while far > 1:
        near = (far + 1) // 2
        distances.append((far, near))
        far = near
    for far, near in distances if add else reversed(distances):
        there = (ranks + near) % size
        source, target = (ranks, there) if add else (there, ranks)
        # A rank sends to one and receives from another: as a step of each, by the rank that sends.
        order = np.argsort(source)
        yield _Exchange(source[order], target[order], np.full(size, (far - near) / size), add)


class _Folded:
    """Butterflies over the largest power of two of ranks; the others stand behind their left neighbours."""

    def __init__(self, size: int):
        self.size, self.active = size, 1 << size.bit_length() - 1
        self.extra = size - self.active
        places = np.arange(self.active)
        self.rank = np.where(places < self.extra, 2 * places, places + self.extra)
        self.places, self.behind = places, 2 * np.arange(self.extra) + 1
        self.held = 1 + (places < self.extra)          # blocks that each active rank answers for

    def enter(self, share: float, add: bool) -> Iterator[_Exchange]:
        if self.extra:
            yield _Exchange(self.behind, self.behind - 1, np.full(self.extra, share), add)

    def leave(self, share: float) -> Iterator[_Exchange]:
        if self.extra:
            yield _Exchange(self.behind - 1, self.behind, np.full(self.extra, share))

    def distances(self) -> list[int]:
        return [1 << power for power in range(self.active.bit_length() - 1)]

    def swap(self, distance: int, share: np.ndarray | float, add: bool) -> _Exchange:
        """Every active rank sends `share` to its partner."""
        return _Exchange(self.rank, self.rank[self.places ^ distance], np.broadcast_to(share, self.active), add)


def _butterfly(size: int) -> Iterator[_Exchange]:
    fold = _Folded(size)
    yield from fold.enter(1.0, True)
    for distance in fold.distances():
        yield fold.swap(distance, 1.0, True)
    yield from fold.leave(1.0)


def _halving_all_reduce(size: int) -> Iterator[_Exchange]:
    fold = _Folded(size)
    yield from fold.enter(1.0, True)
    for distance in fold.distances():
        yield fold.swap(distance, 1 / (2 * distance), True)
    for distance in reversed(fold.distances()):
        yield fold.swap(distance, 1 / (2 * distance), False)
    yield from fold.leave(1.0)


def _halving_reduce_scatter(size: int) -> Iterator[_Exchange]:
    fold = _Folded(size)
    yield from fold.enter(1.0, True)
    for distance in fold.distances():
        # A rank sends the blocks of all whose number agrees with its partner's in the bits looked at so far.
        alike = np.bincount(fold.places % (2 * distance), fold.held)
        yield fold.swap(distance, alike[(fold.places ^ distance) % (2 * distance)] / size, True)
    yield from fold.leave(1 / size)


def _doubling_all_gather(size: int) -> Iterator[_Exchange]:
    fold = _Folded(size)
    yield from fold.enter(1 / size, False)
    for distance in fold.distances():
        near = np.bincount(fold.places // distance, fold.held)
        yield fold.swap(distance, near[fold.places // distance] / size, False)
    yield from fold.leave(1.0)


_SHAPES: dict[tuple[str, str], Callable[[int], Iterable[_Exchange]]] = {
    ("all_reduce", "tree"): lambda size: [*_tree_reduce(size), *_tree_broadcast(size)],
    ("broadcast", "tree"): _tree_broadcast,
    ("reduce", "tree"): _tree_reduce,
    ("all_reduce", "butterfly"): _butterfly,
    ("all_reduce", "halving"): _halving_all_reduce,
    ("reduce_scatter", "halving"): _halving_reduce_scatter,
    ("all_gather", "halving"): _doubling_all_gather,
    ("all_reduce", "circulant"): lambda size: [*_circulant(size, True), *_circulant(size, False)],
    ("reduce_scatter", "circulant"): lambda size: _circulant(size, True),
    ("all_gather", "circulant"): lambda size: _circulant(size, False),
    ("reduce", "circulant"): lambda size: [*_circulant(size, True), *_tree_reduce(size, scattered=True)],
    ("broadcast", "circulant"): lambda size: [*_tree_broadcast(size, scattered=True), *_circulant(size, False)],
}
