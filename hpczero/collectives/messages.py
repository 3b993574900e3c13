"""Steps resolved for a vector: which of its elements each message carries, and over which link.

A `Step` names blocks; a `Round` names elements. Resolving costs some microseconds per message, so what is called again with
the same shapes keeps its rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpczero.collectives.order import Tree
from hpczero.collectives.schedule import Message, Step, folds, spans

if TYPE_CHECKING:
    from hpczero.topology import NodeMap

SEGMENT_BYTES = {"node": 2**20, "network": 2**18}
"""A longer message travels in segments of so many bytes: one is combined, while it is still in the cache, when the next is
on its way. It must not depend on anything that the two ends could see differently. On a network shorter ones keep its queues
short (`departures`), and are still as long as what a link of 25 GB/s carries in 10 us."""
WHOLE_BYTES = {"node": 2**23, "network": 2**18}
"""Up to here a message travels whole. Inside a node nothing is gained while what arrives fits into the last cache: a message
costs some 40 us there, as much as copying 300 KiB."""
DEVICE_SEGMENT_BYTES = 2**22
"""Of device memory a segment costs some 100 us in copies to queue, kernels to launch and events to wait for."""
DEPTH = 3
"""Segments of a message on their way at a time: one is combined, one arrives, one is asked for."""
MOST_KEPT = 256
"""Segments of a round that are worked out once and kept: of longer vectors that is little beside sending them."""
ODD_BYTES = 320
"""Rows that lie a power of two apart cost 40 % (4 KiB aliasing)."""


def landing_bytes(nbytes: int, link: str, num_messages: int) -> int:
    """Scratch memory for messages of `nbytes` that are folded together, or that follow each other (one)."""
    if nbytes <= WHOLE_BYTES[link]:
        return num_messages * (nbytes + ODD_BYTES)
    num_segments = min(DEPTH, -(-nbytes // SEGMENT_BYTES[link]))
    return num_segments * num_messages * (SEGMENT_BYTES[link] + ODD_BYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """One message: elements of the vector, as the runs in which they lie there."""

    peer: int
    link: str
    """"node" or "network"."""
    ranges: tuple[tuple[int, int], ...]
    """Half-open runs of elements, none of them empty."""
    count: int

    def cuts(self, itemsize: int, on_device: bool = False) -> list[tuple[int, int]]:
        """The message in segments: half-open ranges of its elements."""
        whole = self.count * itemsize <= WHOLE_BYTES[self.link] and not on_device
        segment_bytes = DEVICE_SEGMENT_BYTES if on_device else SEGMENT_BYTES[self.link]
        most = max(1, self.count if whole else segment_bytes // itemsize)
        return [(start, min(start + most, self.count)) for start in range(0, self.count, most)]

    def segment(self, start: int, stop: int) -> Segment:
        """Elements `start` to `stop` of the message."""
        runs, place = [], 0
        for lo, hi in self.ranges:
            first, last = max(start, place), min(stop, place + hi - lo)
            if first < last:
                runs.append((first - start, lo + first - place, lo + last - place))
            place += hi - lo
        return Segment(self, stop - start, tuple(runs))


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a message that travels at once."""

    part: Part
    count: int
    runs: tuple[tuple[int, int, int], ...]
    """(place, lo, hi): elements lo to hi of the vector are those from `place` on of the segment."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is taken in at once: a segment of one message, or the same segment of all messages that are folded together."""

    indices: tuple[int, ...]
    """Of `Round.recv`."""
    tree: Tree | None
    row_of: dict[int, int]
    """In which of the rows each peer's contribution arrives; that of this rank comes after them."""
    segment: Segment
    """Of the first message; the others hold the same elements."""
    pieces: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Where the messages come over different links, and so in different segments: those of each, within this one."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A round in segments, for elements of one size, in host or device memory."""

    placed: tuple[tuple[int, int, int], ...]
    """(peer, lo, hi): what arrives where it belongs, elements lo to hi of the vector."""
    units: tuple[Unit, ...]
    """What arrives beside the vector, in the order in which it is taken in."""
    depth: int
    """How many units may be asked for at a time."""
    num_rows: int
    """Messages of the largest unit."""
    longest: int
    """Elements of the longest unit."""
    queues: tuple[tuple[int, tuple[Segment, ...]], ...]
    """What each peer is sent, in this order: that in which it expects it."""


@dataclass(frozen=True, slots=True)
class Round:
    """A `Step` whose messages are resolved."""

    rank: int
    send: tuple[Part, ...]
    recv: tuple[Part, ...]
    add: bool
    folds: tuple[tuple[tuple[int, ...], Tree], ...]
    """What is kept apart and folded: which messages of `recv` together, and in the order of which tree of ranks."""
    sends_what_changes: bool
    """Elements that leave are also written by what arrives: they must have left before."""
    _traffic: dict[tuple[int, bool, bool], Traffic] = field(default_factory=dict, compare=False, repr=False)

    def traffic(self, itemsize: int, on_device: bool = False, staged: bool = False) -> Traffic:
        """The round in segments; kept, if they are few. `staged`: nothing can arrive in the vector itself."""
        key = itemsize, on_device, staged
        traffic = self._traffic.get(key)
        if traffic is None:
            traffic = self._cut(*key)
            if len(traffic.placed) + len(traffic.units) + sum(len(segments) for _, segments in traffic.queues) <= MOST_KEPT:
                self._traffic[key] = traffic
        return traffic

    def _cut(self, itemsize: int, on_device: bool, staged: bool) -> Traffic:
        apart = self.add or bool(self.folds) or staged
        in_place = [] if apart else [index for index, part in enumerate(self.recv) if len(part.ranges) <= 1]
        placed = [(part.peer, lo + start, lo + stop) for part in (self.recv[index] for index in in_place)
                  for lo, _ in part.ranges for start, stop in part.cuts(itemsize, on_device)]
        units = self._units(itemsize, on_device, [index for index in range(len(self.recv)) if index not in in_place])
        queues: dict[int, list[Segment]] = {}
        for part in self.send:
            queues.setdefault(part.peer, []).extend(part.segment(*cut) for cut in part.cuts(itemsize, on_device))
        return Traffic(
            tuple(placed), tuple(units),
            # Where what leaves must be gone before anything is written, all that arrives must find room meanwhile.
            depth=len(units) if self.sends_what_changes else min(DEPTH, len(units)),
            num_rows=max((len(unit.indices) for unit in units), default=0),
            longest=max((unit.segment.count for unit in units), default=0),
            queues=tuple((peer, tuple(segments)) for peer, segments in queues.items()),
        )

    def _units(self, itemsize: int, on_device: bool, parts: Sequence[int]) -> list[Unit]:
        if not self.folds:
            return [self._unit((index,), None, *cut) for index in parts for cut in self.recv[index].cuts(itemsize, on_device)]
        units = []
        for indices, tree in self.folds:
            # Messages of one fold may come over different links, and so in different segments: the longest contain the others.
            cuts = [self.recv[index].cuts(itemsize, on_device) for index in indices]
            longest = min(cuts, key=len)
            differ = any(cut != longest for cut in cuts)
            units += [self._unit(indices, tree, start, stop, tuple(
                tuple((lo - start, hi - start) for lo, hi in cut if start <= lo < stop) for cut in cuts
            ) if differ else None) for start, stop in longest]
        return units

    def _unit(self, indices: tuple[int, ...], tree: Tree | None, start: int, stop: int,
              pieces: tuple[tuple[tuple[int, int], ...], ...] | None = None) -> Unit:
        peers = [*(self.recv[index].peer for index in indices), self.rank]
        return Unit(indices, tree, {peer: row for row, peer in enumerate(peers)},
                    self.recv[indices[0]].segment(start, stop), pieces)


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
        rounds.append(Round(rank, send, recv, step.add, tuple((tuple(some), tree) for some, tree in apart),
                            _overlap(send, recv)))
    return rounds


def _overlap(some: Iterable[Part], others: Iterable[Part]) -> bool:
    runs = {run for part in some for run in part.ranges}
    return any(lo < hi2 and lo2 < hi for part in others for lo2, hi2 in part.ranges for lo, hi in runs)
