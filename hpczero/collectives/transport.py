"""Runs schedules over MPI: the one file that sends payload.

Rules that it keeps, each for a reason met in practice:

- everything goes over a private duplicate of the caller's communicator, with a tag of its own per call;
- receives are posted before sends: above the eager limit two ranks would otherwise sit in Send for ever;
- payload travels as bytes, since MPI has no portable half type, in segments, so that one is combined while the next is on
  its way, and in chunks below 2^31;
- every wait polls, gives way when ranks outnumber cores, and ends at a limit with the names of the missing ranks;
- a device array's stream is synchronised before MPI reads the array. Unless there is evidence that this MPI library can
  (`direct`), ranks of a node read each other's device memory where CUDA lets them (`ipc`), and all other messages pass
  through pinned host memory: one segment is copied while MPI has another. What arrives is combined on the device each way.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, copy_async, is_device, namespace, pinned, synchronize
from hpczero.collectives import direct, ipc, reduction, roll_call
from hpczero.collectives.messages import ODD_BYTES, Part, Round, Unit, depth, resolve
from hpczero.collectives.roll_call import RollCall
from hpczero.collectives.schedule import Step
from hpczero.collectives.slots import Slots
from hpczero.errors import ConfigError, MismatchError, StallError, gather_texts, raise_together
from hpczero.topology import Topology
from hpczero.waiting import DEFAULT_TIMEOUT_S, Patience, abandon, completed

LARGEST_COUNT = 2**31 - 1
_BARRIER = 1
"""The fingerprint of a barrier; those of calls are hashes."""
REPORT_S = 30.0
"""A wait that lasts longer is reported once; what it waits for may yet come."""
_NOTHING = [np.empty(0, np.uint8), 0, MPI.BYTE]
_log = logging.getLogger("hpczero.collectives")


class Transport:
    """What executing schedules needs between calls: tags, scratch memory, counters, and how long to wait.

    Attributes
    ----------
    timeout_s, report_s : float
        How long one wait may last before it ends in StallError, and before it is reported.
    slots : Slots
        Where the ranks of this node meet.
    decisions, small_sums : dict
        What `call` and `api` keep for calls like those before; equal on all ranks.
    bytes_sent : dict of str to int
        Payload this rank has sent since the start: "node" to ranks of its own node, "network" to others; "window" counts
        what it read of its neighbours' rows in shared memory.
    """

    def __init__(self, topology: Topology):
        self.topology = topology
        self.timeout_s, self.report_s = DEFAULT_TIMEOUT_S, REPORT_S
        self.bytes_sent = {"window": 0, "node": 0, "network": 0}
        self.max_count = _whole("HPCZERO_MAX_COUNT", LARGEST_COUNT)
        self._reads_device: bool | None = None
        self._room: ipc.Room | None = None
        # Open MPI does not know the attribute on a communicator that was split off; 32767 is what MPI promises.
        self._tag, self._last_tag = 0, topology.world.Get_attr(MPI.TAG_UB) or 32767
        self._scratch: dict[str, np.ndarray] = {}
        self.slots = Slots(topology)
        self._roll_call = RollCall(topology.world)
        self.decisions: dict[Any, Any] = {}
        self.small_sums: dict[Any, tuple[int, int, str]] = {}

    @classmethod
    def of(cls, topology: Topology) -> Transport:
        """The transport of this topology, made at the first call and closed with it."""
        return topology.keep("transport", lambda: cls(topology))

    @property
    def scratch_bytes(self) -> int:
        """Memory kept between calls for messages that arrive beside the data they are combined with, or leave from a copy."""
        return sum(buffer.nbytes for buffer in self._scratch.values()) + (self._room.nbytes if self._room else 0)

    def execute(self, steps: Iterable[Step], flat: Array, offsets: Sequence[int], op: str = "sum", what: str = "") -> None:
        """Plays this rank's steps on `flat`, in place. Called by every rank of the topology, if need be without steps.

        Parameters
        ----------
        steps : iterable of Step
            This rank's part of a schedule over `topology.world`.
        flat : (n,) C-contiguous array
            Host or device; a dtype of `reduction.DTYPES`.
        offsets : sequence of int
            Block b holds elements offsets[b] to offsets[b + 1]; the same on every rank.
        op : str
            How what arrives is combined; "mean" sums.
        what : str
            Names the call in error messages.
        """
        self.play(resolve(steps, offsets, self.topology.rank, self.topology.map), flat, op, what)

    def play(self, rounds: Iterable[Round], flat: Array, op: str = "sum", what: str = "") -> None:
        """As `execute`, for steps that were resolved before."""
        self.topology.drain()
        staged = not self.reads(flat)
        tag = self._next_tag()
        read_tag = self._next_tag() if staged else 0
        for round_ in rounds:
            landing = _Landing(self, flat, round_, staged)
            if not staged:
                synchronize(flat)      # kernels that still read or write it must not meet MPI's writes
            units = landing.units
            placed = [self._post(self.topology.world.Irecv, buffer, peer, tag) for peer, buffer in landing.places()]
            arriving = [self._await(unit, number, landing, tag) for number, unit in enumerate(units[:landing.depth])]
            leaving, kept = self._send(round_.send, flat, tag, staged)
            # A neighbour says so when it has read what was left for it in this rank's room.
            read = [self.topology.world.Irecv(_NOTHING, part.peer, read_tag)
                    for part in round_.send if staged and self.in_room(part)]
            if round_.sends_what_changes:
                self.wait(leaving, what)
            for number, unit in enumerate(units):
                self.wait(arriving[number], what)
                self._take_in(unit, number, landing, op)
                if number + landing.depth < len(units):
                    arriving.append(self._await(units[number + landing.depth], number + landing.depth, landing, tag))
            landing.finish()
            read += [self.topology.world.Isend(_NOTHING, part.peer, read_tag)
                     for part in round_.recv if staged and self.in_room(part)]
            self.wait([*itertools.chain(*placed), *leaving, *read], what)
            del kept      # sends read these buffers until now

    def reads(self, flat: Array) -> bool:
        """Whether MPI may be handed `flat` itself. Called by every rank; the first device array may take some seconds."""
        if not is_device(flat):
            return True
        if self._reads_device is None:
            self._reads_device, self._room = direct.choose(self.topology, flat, self.timeout_s, self._meet_to_close)
        return self._reads_device

    def found(self, token: np.ndarray, nbytes: int) -> Array:
        """(nbytes,) uint8 of a neighbour's device memory."""
        return self._room.find(token, nbytes)

    def in_room(self, part: Part) -> bool:
        """Whether elements of a device array that MPI may not be handed go by CUDA IPC instead of through the host."""
        return self._room is not None and part.link == "node" and part.count > 0

    def barrier(self, what: str = "") -> None:
        """Returns when every rank of the topology has called it."""
        self.node_barrier(what)
        if self.topology.num_nodes > 1:
            self.wait([self.topology.world.Ibarrier()], what)

    def node_barrier(self, what: str = "") -> None:
        """Returns when every rank of the node has called it; what they wrote before can be read after."""
        if not self.meet(_BARRIER, what):
            if self.topology.num_nodes == 1:      # the others are telling each other what they are in
                raise_together(self.topology.world, None, self.timeout_s)
                gather_texts(self.topology.world, what, self.timeout_s)
            raise MismatchError(f"rank {self.topology.rank} of {self.topology.size}: {what}: another rank of the node is in "
                                "another call: every rank makes the same calls in the same order")

    def meet(self, fingerprint: int, what: str) -> bool:
        """Every rank of the node is in this call; whether all came with the same fingerprint (any int64)."""
        self.topology.drain()
        return self._settle(self.slots.meet(fingerprint, fresh=True), fingerprint, what)

    def reduce_in_node(self, flat: np.ndarray, op: int, fingerprint: int, what: str) -> bool:
        """`flat` becomes the reduction over the ranks of the node, in the canonical order; a meeting in itself.

        Host memory, (n,) contiguous, at most `slots.row_bytes`; `op` is a code of `kernels.reduce`. False, with `flat` as it
        was, if fingerprints differ.
        """
        slots = self.slots
        self.bytes_sent["window"] += (slots.size - 1) * flat.nbytes
        seen = slots.sum_up(flat, op, fingerprint, fresh=True)
        if seen == slots.size:
            return True
        if not self._settle(seen, fingerprint, what):
            return False
        slots.sum_up(flat, op, fingerprint, fresh=False)      # all have come: it goes through
        return True

    def all_gather_small(self, values: np.ndarray, what: str = "", comm: MPI.Intracomm | None = None) -> np.ndarray:
        """(size, k): the (k,) values of every rank, in rank order, over `topology.world` or a duplicate of it."""
        self.topology.drain()
        gathered = np.empty((self.topology.size, *values.shape), values.dtype)
        values = np.ascontiguousarray(values)
        request = (comm or self.topology.world).Iallgather(
            [values.view(np.uint8), MPI.BYTE], [gathered.reshape(-1).view(np.uint8), MPI.BYTE]
        )
        self.wait([request], what)
        return gathered

    def wait(self, requests: list[MPI.Request], what: str) -> None:
        """Completes all requests, or raises StallError after `timeout_s`, naming the ranks that do not wait as well."""
        if not completed(requests, lambda: self._patience(what)):
            abandon(requests)
            raise StallError(self._stalled(what))

    def scratch(self, name: str, nbytes: int, beside: Array | None = None) -> np.ndarray:
        """(nbytes,) uint8 of host memory, kept for the next call that asks for the same name.

        Pinned where it is for copies to or from the device of an array `beside` it.
        """
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._scratch[name] = np.empty(nbytes, np.uint8) if beside is None else pinned(beside, nbytes)
        return buffer[:nbytes]

    def close(self) -> None:
        """Called by every rank."""
        self._scratch.clear()
        self.small_sums.clear()
        if self._room is not None:
            self._room.close(self._meet_to_close)
        self.slots.close()

    def _settle(self, seen: int, fingerprint: int, what: str) -> bool:
        """Waits until a meeting is complete, of which `seen` ranks have come; whether all came with one fingerprint."""
        slots = self.slots
        if seen == slots.size:
            return True
        patience, world = self._patience(what), self.topology.world
        while 0 <= seen < slots.size:
            # What this rank sent may still be in the library's hands, which move only when it is called.
            world.Iprobe(MPI.ANY_SOURCE, roll_call.TAG)
            if not patience.lasts():
                raise StallError(self._stalled(what))
            seen = slots.meet(fingerprint, fresh=False)
        return seen == slots.size

    def _patience(self, what: str) -> Patience:
        reported = False

        def attend(waited_s: float) -> None:
            nonlocal reported
            self._roll_call.attend(what)
            if waited_s > self.report_s and not reported:
                reported = True
                self._report(what, waited_s)

        return Patience(self.timeout_s, shares_cores=self.topology.is_oversubscribed, attend=attend)

    def _next_tag(self) -> int:
        self._tag = self._tag % self._last_tag + 1      # 1 to last_tag; 0 is for roll calls
        return self._tag

    def _send(self, parts: Sequence[Part], flat: Array, tag: int, staged: bool) -> tuple[list[MPI.Request], list[Array]]:
        """Posts all sends; the requests, and the buffers that must live as long."""
        requests, kept = [], []
        segments = [(part, start, stop) for part in parts
                    for start, stop in part.segments(flat.itemsize, is_device(flat))]
        buffers = self._staged(segments, flat) if staged else (_packed(*segment, flat) for segment in segments)
        for (part, _, _), buffer in zip(segments, buffers, strict=True):
            kept.append(buffer)
            requests += self._post(self.topology.world.Isend, buffer, part.peer, tag)
        for part in parts:
            self.bytes_sent[part.link] += part.count * flat.itemsize
        return requests, kept

    def _staged(self, segments: Sequence[tuple[Part, int, int]], flat: Array) -> Iterator[np.ndarray]:
        """Each segment of a device array in host memory, or a token for it, once it is copied; the device goes on copying."""
        counts = {True: 0, False: 0}
        for part, start, stop in segments:
            counts[self.in_room(part)] += stop - start
        room = {}
        if counts[False]:
            room[False] = self.scratch("departures", counts[False] * flat.itemsize, flat).view(flat.dtype)
        if counts[True]:
            room[True] = self._room.take(counts[True] * flat.itemsize).view(flat.dtype)
        begin, on_their_way = {True: 0, False: 0}, []
        for part, start, stop in segments:
            by_ipc, count = self.in_room(part), stop - start
            buffer = room[by_ipc][begin[by_ipc]:begin[by_ipc] + count]
            for place, lo, hi in part.runs(start, stop):
                copied = copy_async(buffer[place - start:place - start + hi - lo], flat[lo:hi])
            on_their_way.append((self._room.token(begin[True] * flat.itemsize) if by_ipc else buffer, copied))
            begin[by_ipc] += count
        for buffer, copied in on_their_way:
            copied.synchronize()
            yield buffer

    def _meet_to_close(self) -> None:
        self.wait([self.topology.node.Ibarrier()], "closing shared device memory")

    def _post(self, post: Any, buffer: Array, peer: int, tag: int) -> list[MPI.Request]:
        raw = buffer.view(np.uint8)
        parts = (raw[start:start + self.max_count] for start in range(0, raw.size, self.max_count))
        return [post([part, part.size, MPI.BYTE], peer, tag) for part in parts]

    def _await(self, unit: Unit, number: int, landing: _Landing, tag: int) -> list[MPI.Request]:
        """Posts the receives of a unit."""
        requests = []
        for row, index in enumerate(unit.indices):
            into, peer = landing.row(number, row, unit), landing.round.recv[index].peer
            for buffer in [into] if unit.pieces is None else [into[start - unit.start:stop - unit.start]
                                                              for start, stop in unit.pieces[row]]:
                requests += self._post(self.topology.world.Irecv, buffer, peer, tag)
        return requests

    def _take_in(self, unit: Unit, number: int, landing: _Landing, op: str) -> None:
        """Combines or places what has arrived."""
        flat, rank, parts = landing.flat, self.topology.rank, landing.round.recv
        rows = landing.rows(number, unit)
        peers = [parts[index].peer for index in unit.indices]
        row_of = {peer: row for row, peer in enumerate([*peers, rank])}
        for place, lo, hi in parts[unit.indices[0]].runs(unit.start, unit.stop):
            first = place - unit.start
            if unit.tree is not None:
                reduction.fold(rows, row_of, unit.tree, op, first, flat[lo:hi], (rank, flat[lo:hi]))
            elif landing.round.add:
                reduction.combine(flat[lo:hi], rows[0, first:first + hi - lo], op)
            else:
                copy(flat[lo:hi], rows[0, first:first + hi - lo])

    def _report(self, what: str, waited_s: float) -> None:
        """Says once who is missing; by the lowest of the ranks that wait, with the place it waits at."""
        here = self._roll_call.ask(what)
        if min(here) == self.topology.rank:
            place = "".join(traceback.format_stack(sys._getframe(1))[-12:])
            _log.warning("rank %d of %d waits since %.0f s, and goes on to %.0f s: %s\n%s", self.topology.rank,
                         self.topology.size, waited_s, self.timeout_s, self._absence(what, here), place)

    def _stalled(self, what: str) -> str:
        return (f"rank {self.topology.rank} of {self.topology.size} on {socket.gethostname()}: "
                f"{self._absence(what, self._roll_call.ask(what))} for {self.timeout_s:g} s; it may have died, or have "
                "left the order of calls that the other ranks follow")

    def _absence(self, what: str, here: dict[int, str]) -> str:
        """Who does not wait, or who waits somewhere else."""
        absent = [rank for rank in range(self.topology.size) if rank not in here]
        what = what or "a collective"
        if absent:
            return f"{what}: no word from rank {', '.join(map(str, absent))}"
        elsewhere = [f"rank {rank} is in {call}" for rank, call in here.items() if call != what]
        return f"{what}: all ranks wait, for each other{': ' if elsewhere else ''}{'; '.join(elsewhere)}"


class _Landing:
    """Where the messages of one round arrive: in `flat` itself, or a few segments at a time in rows beside it.

    Few, so that what arrives is still in the cache when it is combined, and room for it does not grow with the vector.
    """

    def __init__(self, transport: Transport, flat: Array, round_: Round, staged: bool):
        self.flat, self.round, self.staged, self._transport = flat, round_, staged, transport
        apart = round_.add or bool(round_.folds) or staged
        self._placed = [] if apart else [index for index, part in enumerate(round_.recv) if len(part.ranges) <= 1]
        apart = [index for index in range(len(round_.recv)) if index not in self._placed]
        self.units = round_.units(flat.itemsize, apart, is_device(flat))
        # Where what leaves must be gone before anything is written, all that arrives must find room meanwhile.
        most = max((len(unit.indices) for unit in self.units), default=0)
        link = "network" if any(part.link == "network" for part in round_.recv) else "node"
        self.depth = len(self.units) if round_.sends_what_changes else min(depth(link, most), len(self.units))
        # On a device a fold puts the rank's own elements into a row beside what arrived.
        num_rows = most + is_device(flat)
        longest = max((unit.stop - unit.start for unit in self.units
                       if not all(self._by_ipc(unit, row) for row in range(len(unit.indices)))), default=0)
        shape = self.depth, num_rows, longest + ODD_BYTES // flat.itemsize
        if is_device(flat) and not staged:
            self._rows = namespace(flat).empty(shape, flat.dtype)
            synchronize(self._rows)
        else:
            beside = ("arrivals of a device", flat) if staged else ("arrivals", None)
            raw = transport.scratch(beside[0], math.prod(shape) * flat.itemsize, beside[1])
            self._rows = raw.view(flat.dtype).reshape(shape)
        self._copied: dict[int, Any] = {}      # by place in _rows: the event of the copy to the device
        self._tokens = np.empty((self.depth, num_rows, ipc.TOKEN_BYTES), np.uint8)

    def places(self) -> Iterator[tuple[int, Array]]:
        """(peer, part of `flat`) for every segment that arrives where it belongs."""
        for index in self._placed:
            part = self.round.recv[index]
            for start, stop in part.segments(self.flat.itemsize, is_device(self.flat)):
                lo = part.ranges[0][0]
                yield part.peer, self.flat[lo + start:lo + stop]

    def row(self, number: int, row: int, unit: Unit) -> Array:
        """Where a message of a unit goes; that of the unit `depth` before has been taken in."""
        # The device may still be reading what was there before.
        if self.staged:
            self._await_copy(number % self.depth)
        elif number >= self.depth:
            synchronize(self._rows)
        if self._by_ipc(unit, row):
            return self._tokens[number % self.depth, row]
        return self._rows[number % self.depth, row, :unit.stop - unit.start]

    def rows(self, number: int, unit: Unit) -> Array:
        """(messages and one more, count or more): what has arrived, on the device that `flat` is on."""
        rows = self._rows[number % self.depth]
        if not self.staged:
            return rows
        count = unit.stop - unit.start
        on_device = namespace(self.flat).empty((len(unit.indices) + 1, count), self.flat.dtype)
        for row in range(len(unit.indices)):
            if self._by_ipc(unit, row):
                token = self._tokens[number % self.depth, row]
                arrived = self._transport.found(token, count * self.flat.itemsize).view(self.flat.dtype)
            else:
                arrived = rows[row, :count]
            self._copied[number % self.depth] = copy_async(on_device[row], arrived)
        return on_device

    def finish(self) -> None:
        """The rows may be used for other things."""
        for place in list(self._copied):
            self._await_copy(place)

    def _by_ipc(self, unit: Unit, row: int) -> bool:
        return self.staged and self._transport.in_room(self.round.recv[unit.indices[row]])

    def _await_copy(self, place: int) -> None:
        if (copied := self._copied.pop(place, None)) is not None:
            copied.synchronize()


def _packed(part: Part, start: int, stop: int, flat: Array) -> Array:
    """A segment as one contiguous run of bytes, where `flat` is."""
    runs = list(part.runs(start, stop))
    if len(runs) == 1:
        buffer = flat[runs[0][1]:runs[0][2]]
    else:
        buffer = namespace(flat).empty(stop - start, flat.dtype)
        for place, lo, hi in runs:
            copy(buffer[place - start:place - start + hi - lo], flat[lo:hi])
    synchronize(buffer)
    return buffer


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or not 0 < int(text) <= LARGEST_COUNT:
        raise ConfigError(f"{variable}={text!r}: a whole number from 1 to {LARGEST_COUNT} is allowed")
    return int(text)

