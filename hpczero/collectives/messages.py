"""Steps resolved for a vector: which of its elements each message carries, and over which link.

A `Step` names blocks; a `Round` names elements. Resolving costs some microseconds per message, so what is called again with
the same shapes keeps its rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpczero.collectives.order import Tree
from hpczero.collectives.schedule import Message, Step, folds, spans

if TYPE_CHECKING:
    from hpczero.topology import NodeMap

SEGMENT_BYTES = 2**20
"""A longer message travels in segments of so many bytes: one is combined, while it is still in the cache, when the next is
on its way. It must not depend on anything that the two ends could see differently."""
WHOLE_BYTES = {"node": 2**23, "network": 2**20}
"""Up to here a message travels whole. Inside a node nothing is gained while what arrives fits into the last cache: a message
costs some 40 us there, as much as copying 300 KiB."""
DEVICE_SEGMENT_BYTES = 2**22
"""Of device memory a segment costs some 100 us in copies to queue, kernels to launch and events to wait for."""
DEPTH, NETWORK_DEPTH = 3, 16
"""Segments on their way at a time, where they land in scratch memory: one is combined, one arrives, one is asked for. A
network wants more, as asking takes as long as its queues are, but not as many from each of many peers."""
ODD_BYTES = 320
"""Rows that lie a power of two apart cost 40 % (4 KiB aliasing)."""


def landing_bytes(nbytes: int, link: str, num_messages: int) -> int:
    """Scratch memory for messages of `nbytes` that are folded together, or that follow each other (one)."""
    if nbytes <= WHOLE_BYTES[link]:
        return num_messages * (nbytes + ODD_BYTES)
    num_segments = min(depth(link, num_messages), -(-nbytes // SEGMENT_BYTES))
    return num_segments * num_messages * (SEGMENT_BYTES + ODD_BYTES)


def depth(link: str, num_messages: int) -> int:
    """How many segments of each of so many messages may be on their way."""
    return DEPTH if link == "node" else max(DEPTH, NETWORK_DEPTH // max(1, num_messages))


@dataclass(frozen=True, slots=True)
class Part:
    """One message: elements of the vector, as the runs in which they lie there."""

    peer: int
    link: str
    """"node" or "network"."""
    ranges: tuple[tuple[int, int], ...]
    """Half-open runs of elements, none of them empty."""
    count: int

    def segments(self, itemsize: int, on_device: bool = False) -> Iterator[tuple[int, int]]:
        """The message in segments: half-open ranges of its elements."""
        whole = self.count * itemsize <= WHOLE_BYTES[self.link] and not on_device
        segment_bytes = DEVICE_SEGMENT_BYTES if on_device else SEGMENT_BYTES
        most = max(1, self.count if whole else segment_bytes // itemsize)
        for start in range(0, self.count, most):
            yield start, min(start + most, self.count)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(place, lo, hi): elements `start` to `stop` of the message lie at lo to hi of the vector, from `place` on."""
        place = 0
        for lo, hi in self.ranges:
            first, last = max(start, place), min(stop, place + hi - lo)
            if first < last:
                yield first, lo + first - place, lo + last - place
            place += hi - lo


@dataclass(frozen=True, slots=True)
class Round:
    """A `Step` whose messages are resolved."""

    send: tuple[Part, ...]
    recv: tuple[Part, ...]
    add: bool
    folds: tuple[tuple[tuple[int, ...], Tree], ...]
    """What is kept apart and folded: which messages of `recv` together, and in the order of which tree of ranks."""
    sends_what_changes: bool
    """Elements that leave are also written by what arrives: they must have left before."""

    def units(self, itemsize: int, parts: Sequence[int], on_device: bool = False) -> list[Unit]:
        """What is taken in at once, in the order in which that happens; of `recv` only `parts`, unless they are folded."""
        if not self.folds:
            return [Unit((index,), None, start, stop) for index in parts
                    for start, stop in self.recv[index].segments(itemsize, on_device)]
        units = []
        for indices, tree in self.folds:
            # Messages of one fold may come over different links, and so in different segments: the longest contain the others.
            cuts = [list(self.recv[index].segments(itemsize, on_device)) for index in indices]
            longest = min(cuts, key=len)
            if all(cut == longest for cut in cuts):
                units += [Unit(indices, tree, start, stop) for start, stop in longest]
            else:
                units += [Unit(indices, tree, start, stop, tuple(
                    tuple(piece for piece in cut if start <= piece[0] < stop) for cut in cuts
                )) for start, stop in longest]
        return units


@dataclass(frozen=True, slots=True)
class Unit:
    """A segment of one message, or the same segment of all messages that are folded together."""

    indices: tuple[int, ...]
    """Of `recv`."""
    tree: Tree | None
    start: int
    stop: int
    pieces: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """The segments in which each of the messages comes, where that is not the one."""


def resolve(steps: Iterable[Step], offsets: Sequence[int], rank: int, nodes: NodeMap) -> list[Round]:
    """The rounds of `rank` over a vector whose block b holds elements offsets[b] to offsets[b + 1]."""
    home = nodes.node_of[rank]

    def part(message: Message) -> Part:
        ranges = tuple((offsets[a], offsets[b]) for a, b in spans(message.blocks) if offsets[a] < offsets[b])
        link = "node" if nodes.node_of[message.peer] == home else "network"
        return Part(message.peer, link, ranges, sum(hi - lo for lo, hi in ranges))

    rounds = []
    for step in steps:
        send, recv = tuple(map(part, step.send)), tuple(map(part, step.recv))
        apart = folds(step, rank) if step.fold is not None else ()
        rounds.append(Round(send, recv, step.add, tuple((tuple(some), tree) for some, tree in apart), _overlap(send, recv)))
    return rounds


def _overlap(some: Iterable[Part], others: Iterable[Part]) -> bool:
    runs = {run for part in some for run in part.ranges}
    return any(lo < hi2 and lo2 < hi for part in others for lo2, hi2 in part.ranges for lo, hi in runs)
