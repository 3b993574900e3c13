"""Runs schedules over MPI: the one file that sends payload.

Rules that it keeps, each for a reason met in practice:

- everything goes over a private duplicate of the caller's communicator, with a tag of its own per call;
- receives are posted before sends: above the eager limit two ranks would otherwise sit in Send for ever;
- payload travels as bytes, since MPI has no portable half type, in segments, so that one is combined while the next is on
  its way, and in chunks below 2^31;
- every wait polls, gives way when ranks outnumber cores, and ends at a limit with the names of the missing ranks;
- a device array's stream is synchronised before MPI reads the array. Unless `HPCZERO_DEVICE_TRANSFER=direct` says that
  this MPI library can read device memory, which most builds cannot (a wrong guess is a segmentation fault), it is staged
  through host memory.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, is_device, namespace, synchronize
from hpczero.collectives import reduction, roll_call
from hpczero.collectives.messages import Part, Round, resolve
from hpczero.collectives.order import leaves
from hpczero.collectives.roll_call import RollCall
from hpczero.collectives.schedule import Step
from hpczero.collectives.slots import Slots
from hpczero.errors import ConfigError, MismatchError, StallError
from hpczero.topology import Topology
from hpczero.waiting import DEFAULT_TIMEOUT_S, Patience, completed

LARGEST_COUNT = 2**31 - 1
_BARRIER = 1
"""The fingerprint of a barrier; those of calls are hashes."""
REPORT_S = 30.0
"""A wait that lasts longer is reported once; what it waits for may yet come."""
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
        self.direct = _choice("HPCZERO_DEVICE_TRANSFER", ("staged", "direct")) == "direct"
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
        """Host memory kept between calls for messages that arrive beside the data they are combined with."""
        return sum(buffer.nbytes for buffer in self._scratch.values())

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
        tag = self._next_tag()
        for round_ in rounds:
            landing = _Landing(self, flat, round_)
            if not landing.staged:
                synchronize(flat)      # kernels that still read or write it must not meet MPI's writes
            arriving = [[self._post(self.topology.world.Irecv, landing.buffer(index, start, stop), part.peer, tag)
                         for start, stop in part.segments(flat.itemsize)] for index, part in enumerate(round_.recv)]
            leaving, kept = self._send(round_.send, flat, tag)
            if round_.sends_what_changes:
                self.wait(leaving, what)
            if round_.folds:
                self._fold(round_, landing, arriving, op, what)
            else:
                self._take_in(round_, landing, arriving, op, what)
            self.wait(leaving, what)
            del kept      # sends read these buffers until now

    def barrier(self, what: str = "") -> None:
        """Returns when every rank of the topology has called it."""
        self.node_barrier(what)
        if self.topology.num_nodes > 1:
            self.wait([self.topology.world.Ibarrier()], what)

    def node_barrier(self, what: str = "") -> None:
        """Returns when every rank of the node has called it; what they wrote before can be read after."""
        if not self.meet(_BARRIER, what):
            raise MismatchError(f"rank {self.topology.rank} of {self.topology.size}: {what}: another rank of the node is in "
                                "another call: every rank makes the same calls in the same order")

    def meet(self, fingerprint: int, what: str) -> bool:
        """Every rank of the node is in this call; whether all came with the same fingerprint (any int64)."""
        return self._settle(self.slots.meet(fingerprint, fresh=True), fingerprint, what)

    def reduce_in_node(self, flat: np.ndarray, op: int, fingerprint: int, what: str) -> bool:
        """`flat` becomes the reduction over the ranks of the node, in the canonical order; a meeting in itself.

        Host memory, (n,) contiguous, at most `SLOT_BYTES`; `op` is a code of `kernels.reduce`. False, with `flat` as it was,
        if fingerprints differ.
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
            raise StallError(self._stalled(what))

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        """(nbytes,) uint8 of host memory, kept for the next call that asks for the same name."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._scratch[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def close(self) -> None:
        """Called by every rank."""
        self._scratch.clear()
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

    def _send(self, parts: Iterable[Part], flat: Array, tag: int) -> tuple[list[MPI.Request], list[Array]]:
        """Posts all sends; the requests, and the buffers that must live as long."""
        requests, kept = [], []
        for part in parts:
            for start, stop in part.segments(flat.itemsize):
                buffer = self._packed(part, start, stop, flat)
                kept.append(buffer)
                requests += self._post(self.topology.world.Isend, buffer, part.peer, tag)
            self.bytes_sent[part.link] += part.count * flat.itemsize
        return requests, kept

    def _packed(self, part: Part, start: int, stop: int, flat: Array) -> Array:
        """A segment as one contiguous run of bytes that MPI may read."""
        runs = list(part.runs(start, stop))
        if len(runs) == 1 and (self.direct or not is_device(flat)):
            buffer = flat[runs[0][1]:runs[0][2]]
        else:
            # Device memory that MPI cannot read passes through the host, a segment at a time.
            buffer = (namespace(flat) if self.direct else np).empty(stop - start, flat.dtype)
            for place, lo, hi in runs:
                copy(buffer[place - start:place - start + hi - lo], flat[lo:hi])
        synchronize(buffer)
        return buffer

    def _post(self, post: Any, buffer: Array, peer: int, tag: int) -> list[MPI.Request]:
        raw = buffer.view(np.uint8)
        parts = (raw[start:start + self.max_count] for start in range(0, raw.size, self.max_count))
        return [post([part, part.size, MPI.BYTE], peer, tag) for part in parts]

    def _take_in(self, round_: Round, landing: _Landing, arriving: list[list[list[MPI.Request]]], op: str,
                 what: str) -> None:
        """Combines or places what arrives, message by message in their order, a segment as soon as it is there."""
        flat = landing.flat
        for index, part in enumerate(round_.recv):
            for requests, (start, stop) in zip(arriving[index], part.segments(flat.itemsize), strict=True):
                self.wait(requests, what)
                if landing.is_direct[index]:
                    continue
                arrived = landing.arrived(index, start, stop)
                for place, lo, hi in part.runs(start, stop):
                    piece = arrived[place - start:place - start + hi - lo]
                    if round_.add:
                        reduction.combine(flat[lo:hi], piece, op)
                    else:
                        copy(flat[lo:hi], piece)

    def _fold(self, round_: Round, landing: _Landing, arriving: list[list[list[MPI.Request]]], op: str, what: str) -> None:
        """Combines the same segment of all messages of a fold with this rank's own elements, as soon as all of it is there."""
        flat, rank = landing.flat, self.topology.rank
        for indices, tree in round_.folds:
            peers = [round_.recv[index].peer for index in indices]
            assert sorted([rank, *peers]) == sorted(leaves(tree))
            part = round_.recv[indices[0]]
            for segment, (start, stop) in enumerate(part.segments(flat.itemsize)):
                for index in indices:
                    self.wait(arriving[index][segment], what)
                rows, places, base = landing.rows(indices, start, stop)
                row_of = dict(zip([*peers, rank], places, strict=True))
                for place, lo, hi in part.runs(start, stop):
                    reduction.fold(rows, row_of, tree, op, place - base, flat[lo:hi], (rank, flat[lo:hi]))

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
    """Where the messages of one round arrive: in `flat` itself, or in rows of scratch memory beside it."""

    def __init__(self, transport: Transport, flat: Array, round_: Round):
        self.flat, self._parts = flat, round_.recv
        self.staged = is_device(flat) and not transport.direct
        apart = round_.add or bool(round_.folds) or self.staged
        self.is_direct = [not apart and len(part.ranges) <= 1 for part in self._parts]
        stride = max((part.count for part in self._parts), default=0)
        num_rows = 0 if all(self.is_direct) else len(self._parts)
        if is_device(flat) and not self.staged:
            # One row more than messages: a fold on the device puts the rank's own elements beside what arrived.
            self._rows = namespace(flat).empty((num_rows + 1, stride), flat.dtype)
            synchronize(self._rows)
        else:
            raw = transport.scratch("arrivals", num_rows * stride * flat.itemsize)
            self._rows = raw.view(flat.dtype).reshape(num_rows, stride)

    def buffer(self, index: int, start: int, stop: int) -> Array:
        """Where elements `start` to `stop` of a message go."""
        if self.is_direct[index]:
            lo = self._parts[index].ranges[0][0]
            return self.flat[lo + start:lo + stop]
        return self._rows[index, start:stop]

    def arrived(self, index: int, start: int, stop: int) -> Array:
        """A segment that is there and not yet in place, on the device that `flat` is on."""
        segment = self._rows[index, start:stop]
        if not self.staged:
            return segment
        on_device = namespace(self.flat).empty(stop - start, self.flat.dtype)
        copy(on_device, segment)
        return on_device

    def rows(self, indices: Sequence[int], start: int, stop: int) -> tuple[Array, list[int], int]:
        """Rows in which a segment of some messages can be folded with the rank's own elements.

        Which row holds each message, and last the one for the rank's own; and the element of the message they begin with.
        """
        if not self.staged:
            return self._rows, [*indices, len(self._parts)], 0
        on_device = namespace(self.flat).empty((len(indices) + 1, stop - start), self.flat.dtype)
        for row, index in enumerate(indices):
            copy(on_device[row], self._rows[index, start:stop])
        return on_device, list(range(len(indices) + 1)), start


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or not 0 < int(text) <= LARGEST_COUNT:
        raise ConfigError(f"{variable}={text!r}: a whole number from 1 to {LARGEST_COUNT} is allowed")
    return int(text)


def _choice(variable: str, allowed: tuple[str, ...]) -> str:
    text = os.environ.get(variable, allowed[0])
    if text not in allowed:
        raise ConfigError(f"{variable}={text!r} is not one of {', '.join(allowed)}")
    return text
