"""What leaves in one round: a few segments for each peer at a time.

More than the receiver asks for would only fill the queues of a network. Long queues let flows that cross hold each other up:
two ranks per node, each with 16 MiB for the other node both ways, took up to twice what the link needs with everything
posted at once, and what it needs with two or three segments of 256 KiB on their way (1 Gbit/s, TCP, Open MPI).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpczero.arrays import Array, copy, copy_async, namespace, synchronize
from hpczero.collectives.messages import DEPTH, Round, Segment, Traffic

if TYPE_CHECKING:
    from hpczero.collectives.transport import Transport


class Departures:
    """The messages that one round sends, on their way.

    Whoever waits for something else in the round calls `go_on` meanwhile: others wait for what has not left here.
    """

    def __init__(self, transport: Transport, flat: Array, round_: Round, traffic: Traffic, tag: int, staged: bool):
        self._transport, self._flat, self._tag = transport, flat, tag
        if staged:
            ready = self._staged([segment for _, segments in traffic.queues for segment in segments])
            self._take: Callable[[Segment], Array] = lambda segment: ready[segment]()
        else:
            self._take = self._packed
        self._open = [_Queue(peer, segments) for peer, segments in traffic.queues]
        for part in round_.send:
            transport.bytes_sent[part.link] += part.count * flat.itemsize
        self.go_on()

    @property
    def requests(self) -> list[MPI.Request]:
        """Of what is on its way."""
        return [request for queue in self._open for _, requests in queue.on_their_way for request in requests]

    def go_on(self) -> bool:
        """Sends what there is room for; whether everything has left."""
        if self._open:
            self._open = [queue for queue in self._open if not self._is_through(queue)]
        return not self._open

    def _is_through(self, queue: _Queue) -> bool:
        way = queue.on_their_way
        while way and MPI.Request.Testall(way[0][1]):
            way.popleft()
        while queue.waiting and len(way) < DEPTH:
            buffer = self._take(queue.waiting.popleft())
            way.append((buffer, self._transport.post(self._transport.topology.world.Isend, buffer, queue.peer, self._tag)))
        return not way

    def _packed(self, segment: Segment) -> Array:
        """A segment as one contiguous run of elements, where the vector is."""
        flat = self._flat
        if len(segment.runs) == 1:
            _, lo, hi = segment.runs[0]
            synchronize(flat)      # other elements may have been combined since the round began
            return flat[lo:hi]
        buffer = namespace(flat).empty(segment.count, flat.dtype)
        for place, lo, hi in segment.runs:
            copy(buffer[place:place + hi - lo], flat[lo:hi])
        synchronize(buffer)
        return buffer

    def _staged(self, segments: Sequence[Segment]) -> dict[Segment, Callable[[], Array]]:
        """Of a device array: each segment in host memory, or a token for it, once it is copied; the device goes on copying."""
        transport, flat = self._transport, self._flat
        counts = {True: 0, False: 0}
        for segment in segments:
            counts[transport.in_room(segment.part)] += segment.count
        room = {}
        if counts[False]:
            room[False] = transport.scratch("departures", counts[False] * flat.itemsize, flat).view(flat.dtype)
        if counts[True]:
            room[True] = transport.room.take(counts[True] * flat.itemsize).view(flat.dtype)
        begin, ready = {True: 0, False: 0}, {}
        for segment in segments:
            by_ipc = transport.in_room(segment.part)
            buffer = room[by_ipc][begin[by_ipc]:begin[by_ipc] + segment.count]
            for place, lo, hi in segment.runs:
                copied = copy_async(buffer[place:place + hi - lo], flat[lo:hi])
            token = transport.room.token(begin[True] * flat.itemsize) if by_ipc else buffer
            ready[segment] = partial(_once_copied, token, copied)
            begin[by_ipc] += segment.count
        return ready


class _Queue:
    """What one peer is sent: what waits, and what is on its way, with the buffers that MPI reads until it has left."""

    def __init__(self, peer: int, segments: Sequence[Segment]):
        self.peer, self.waiting = peer, deque(segments)
        self.on_their_way: deque[tuple[Array, list[MPI.Request]]] = deque()


def _once_copied(buffer: Array, copied: Any) -> Array:
    copied.synchronize()
    return buffer
