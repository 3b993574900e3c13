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

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, is_device, pinned, synchronize
from hpczero.collectives import direct, ipc, roll_call
from hpczero.collectives.departures import Departures
from hpczero.collectives.landing import Landing
from hpczero.collectives.messages import Part, Round, resolve
from hpczero.collectives.roll_call import RollCall
from hpczero.collectives.schedule import Step
from hpczero.collectives.slots import BARRIER, Slots
from hpczero.collectives.watchdog import Watchdog
from hpczero.errors import ConfigError, MismatchError, StallError, gather_texts, raise_together
from hpczero.topology import Topology
from hpczero.waiting import DEFAULT_TIMEOUT_S, REPORT_S, Patience, abandon, completed, until

LARGEST_COUNT = 2**31 - 1
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
    watchdog : Watchdog
        Over calls that block inside the MPI library, and for this rank where others miss it.
    decisions, made : dict
        What `call` and `api` keep for calls like those before; equal on all ranks. `made` holds all-reduces ready to run: by
        shape, dtype, op, algorithm and order, a function of the array, 1-D, that returns False if it does not serve it.
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
        self.room: ipc.Room | None = None
        # Open MPI does not know the attribute on a communicator that was split off; 32767 is what MPI promises.
        self._tag, self._last_tag = 0, topology.world.Get_attr(MPI.TAG_UB) or 32767
        self._scratch: dict[str, np.ndarray] = {}
        self.slots = Slots(topology)
        self._roll_call = RollCall(topology.world)
        self.watchdog = Watchdog(lambda: (self.report_s, self.timeout_s), self.slots.asked, topology.world)
        self.decisions: dict[Any, Any] = {}
        self.made: dict[Any, Callable[[np.ndarray], bool]] = {}

    @classmethod
    def of(cls, topology: Topology) -> Transport:
        """The transport of this topology, made at the first call and closed with it."""
        return topology.keep("transport", lambda: cls(topology))

    @property
    def scratch_bytes(self) -> int:
        """Memory kept between calls for messages that arrive beside the data they are combined with, or leave from a copy."""
        return sum(buffer.nbytes for buffer in self._scratch.values()) + (self.room.nbytes if self.room else 0)

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
        on_device = is_device(flat)
        staged = not self.reads(flat)
        tag = self.next_tag()
        read_tag = self.next_tag() if staged else 0
        for round_ in rounds:
            if not staged:
                synchronize(flat)      # kernels that still read or write it must not meet MPI's writes
            traffic = round_.traffic(flat.itemsize, on_device, staged)
            landing = Landing(self, flat, round_, traffic, tag, staged)
            departures = Departures(self, flat, round_, traffic, tag, staged)
            # A neighbour says so when it has read what was left for it in this rank's room.
            read = [self.topology.world.Irecv(_NOTHING, part.peer, read_tag)
                    for part in round_.send if staged and self.in_room(part)]
            try:
                if round_.sends_what_changes:
                    self._until(departures.go_on, what)
                for number in range(len(landing.units)):
                    self.wait(landing.arriving(number), what, departures.go_on)
                    landing.take_in(number, op)
                landing.finish()
                read += [self.topology.world.Isend(_NOTHING, part.peer, read_tag)
                         for part in round_.recv if staged and self.in_room(part)]
                self.wait([*landing.placed, *read], what, departures.go_on)
                self._until(departures.go_on, what)
            except StallError:
                abandon([*landing.requests, *departures.requests, *read])
                self._scratch.clear()      # what was asked for may yet arrive there
                raise

    def reads(self, flat: Array) -> bool:
        """Whether MPI may be handed `flat` itself. Called by every rank; the first device array may take some seconds."""
        if not is_device(flat):
            return True
        if self._reads_device is None:
            self._reads_device, self.room = direct.choose(self.topology, flat, self.timeout_s, self._meet_to_close)
        return self._reads_device

    def found(self, token: np.ndarray, nbytes: int) -> Array:
        """(nbytes,) uint8 of a neighbour's device memory."""
        return self.room.find(token, nbytes)

    def in_room(self, part: Part) -> bool:
        """Whether elements of a device array that MPI may not be handed go by CUDA IPC instead of through the host."""
        return self.room is not None and part.link == "node" and part.count > 0

    def barrier(self, what: str = "") -> None:
        """Returns when every rank of the topology has called it."""
        self.node_barrier(what)
        if self.topology.num_nodes > 1:
            self.wait([self.topology.world.Ibarrier()], what)

    def node_barrier(self, what: str = "") -> None:
        """Returns when every rank of the node has called it; what they wrote before can be read after."""
        if not self.meet(BARRIER, what):
            if self.topology.num_nodes == 1:      # the others are telling each other what they are in
                raise_together(self.topology.world, None, self.timeout_s)
                gather_texts(self.topology.world, what, self.timeout_s)
            raise MismatchError(f"rank {self.topology.rank} of {self.topology.size}: {what}: another rank of the node is in "
                                "another call: every rank makes the same calls in the same order")

    def meet(self, fingerprint: int, what: str) -> bool:
        """Every rank of the node is in this call; whether all came with the same fingerprint (any int64)."""
        self.topology.drain()
        return self._settle(self.slots.meet(fingerprint, fresh=True), fingerprint, what)

    def reduce_in_node(self, flat: np.ndarray, add: Callable[[np.ndarray, bool], int], fingerprint: int, what: str) -> bool:
        """`flat` becomes the reduction over the ranks of the node, in the canonical order; a meeting in itself.

        Host memory, (n,) contiguous, at most `slots.row_bytes`; `add` is what `slots.adder` gives for this fingerprint. False,
        with `flat` as it was, if fingerprints differ.
        """
        size = self.slots.size
        self.bytes_sent["window"] += (size - 1) * flat.nbytes
        seen = add(flat, True)
        if seen == size:
            return True
        if not self._settle(seen, fingerprint, what):
            return False
        add(flat, False)      # all have come: it goes through
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

    def wait(self, requests: list[MPI.Request], what: str, meanwhile: Callable[[], Any] | None = None) -> None:
        """Completes all requests, or raises StallError after `timeout_s`, naming the ranks that do not wait as well."""
        if not completed(requests, lambda: self._patience(what), meanwhile):
            abandon(requests)
            raise StallError(self._stalled(what))

    def post(self, call: Any, buffer: Array, peer: int, tag: int) -> list[MPI.Request]:
        """Sends or receives (`call` is world.Isend or world.Irecv) the bytes of a buffer, in messages of `max_count`."""
        raw = buffer.view(np.uint8)
        if raw.size <= self.max_count:
            return [call([raw, MPI.BYTE], peer, tag)]
        parts = (raw[start:start + self.max_count] for start in range(0, raw.size, self.max_count))
        return [call([part, MPI.BYTE], peer, tag) for part in parts]

    def next_tag(self) -> int:
        """A tag that no message of this topology has; every rank takes as many."""
        self._tag = self._tag % self._last_tag + 1      # 1 to last_tag; 0 is for roll calls
        return self._tag

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
        self.watchdog.close()
        self._scratch.clear()
        self.made.clear()
        if self.room is not None:
            self.room.close(self._meet_to_close)
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

    def _meet_to_close(self) -> None:
        self.wait([self.topology.node.Ibarrier()], "closing shared device memory")

    def _until(self, done: Callable[[], bool], what: str) -> None:
        if not until(done, lambda: self._patience(what)):
            raise StallError(self._stalled(what))

    def _report(self, what: str, waited_s: float) -> None:
        """Says once who is missing; by the lowest of the ranks that wait, with the place it waits at.

        The lowest that waits on the node of a missing rank asks it to show its stack.
        """
        here, nodes = self._roll_call.ask(what), self.topology.map
        if min(rank for rank in here if nodes.node_of[rank] == self.topology.node_index) == self.topology.rank:
            for local_rank, rank in enumerate(nodes.nodes[self.topology.node_index]):
                if rank not in here:
                    self.slots.ask(local_rank)
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


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or not 0 < int(text) <= LARGEST_COUNT:
        raise ConfigError(f"{variable}={text!r}: a whole number from 1 to {LARGEST_COUNT} is allowed")
    return int(text)

