"""What "adaptive" knows: how long each algorithm takes here, for a call of this size.

In order of trust:

1. the table that `tune` has stored for these hosts, this MPI library, ranks per node and element type (`tuning`);
2. a stand-in, measured by the first adaptive call that needs it, in about a second: the links, and the algorithms that
   have no price (shared memory, the system's collective) beside the two cheapest that have one, at a few sizes;
3. the price of the schedule by the measured links (`pricing`), corrected by what the stand-in found those to take that have
   a price too.

All ranks hold the same numbers, rank 0's, so all choose alike. On devices nothing is measured without being asked to:
without a table a rule decides (`selection`), since numbers from host memory are wrong there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from hpczero.collectives import algorithms, links, pricing, tuning
from hpczero.collectives.selection import Call, candidates
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, RoomError
from hpczero.topology import NodeMap, Topology

BUDGET_S = 0.8
"""For the stand-in of one operation; with what the last measurement runs over, about a second."""
LINKS_S = 0.3
SIZES = (2**14, 2**17, 2**20, 2**22, 2**24)
REPEATS = 3
TYPICAL_BYTES = 2**20
MOST_REPLAYED = 48
"""Ranks whose steps are priced one by one, which takes a fraction of a second; beyond, the formulas for equal nodes."""

DOUBT = 1.3
"""What was measured here is preferred to what is only predicted, unless the prediction is clearly better: the prices of a
ring were seen to be off by so much where a network carries the first bytes after a pause faster."""

TIE = 1.1
"""Measurements of a second are no better than this."""

Basis = Literal["tuned", "measured", "predicted", "unknown"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that an algorithm is expected to take, and where the number comes from."""

    algorithm: str
    seconds: float
    """Infinite where nothing is known."""
    basis: Basis


class Costs:
    """Estimates for one element type in host memory. Every rank of the topology holds the same.

    `of` and `prepare` are called by every rank; the rest only reads.
    """

    def __init__(self, topology: Topology, dtype: np.dtype):
        self._topology, self.dtype = topology, dtype
        self.table = tuning.load(topology, tuning.key_of(topology, dtype))
        """What `tune` stored, or None."""
        self.links = self.table.links if self.table else None
        self._stand_in: tuning.Table | None = None
        self._prepared: set[tuple[str, str, str]] = set()

    @classmethod
    def of(cls, topology: Topology, dtype: Any) -> Costs:
        known = topology.resources.setdefault("costs", {})
        dtype = np.dtype(dtype)
        if dtype not in known:
            known[dtype] = cls(topology, dtype)
        return known[dtype]

    def prepare(self, call: Call) -> None:
        """Measures the stand-in for calls like this one, unless a table or an earlier call makes it unnecessary."""
        kind = call.operation, _buffers(call)
        if (*kind, call.order) in self._prepared or (self.table and self.table.algorithms(*kind)):
            return
        self._prepared.add((*kind, call.order))
        begin = time.monotonic()
        if self.links is None:
            self.links = links.measure(self._topology, LINKS_S)
        entries = self._measured(call, begin)
        before = self._stand_in.entries if self._stand_in else ()
        key = tuning.Key("", "", self._topology.ranks_per_node, str(self.dtype), "cpu")
        self._stand_in = tuning.Table.of(key, self.links, (*before, *entries))

    def cover(self, call: Call) -> bool:
        """Whether a choice by these numbers is better than the rule's: not far beyond what the stand-in had time for.

        Where a vector outgrows the last cache, times no longer grow in proportion: MPI_Allreduce takes seven times as long
        for 64 MiB as for 16, a ring three times.
        """
        if self.table and self.table.algorithms(call.operation, _buffers(call)):
            return True
        measured = self._measured_sizes(call)
        return bool(measured) and call.nbytes <= 2 * max(measured)

    def tie(self, call: Call) -> float:
        """How much longer than the cheapest another may take and count as equal."""
        return 1.0 if self.table and self.table.algorithms(call.operation, _buffers(call)) else TIE

    def __call__(self, call: Call, algorithm: str) -> float:
        return self.estimate(call, algorithm).seconds

    def estimate(self, call: Call, algorithm: str) -> Estimate:
        """What is known of an algorithm for a call."""
        asked = call.operation, algorithm, call.nbytes, _buffers(call)
        for table, basis in ((self.table, "tuned"), (self._stand_in, "measured")):
            seconds = table.seconds(*asked) if table else None
            if seconds is not None:
                return Estimate(algorithm, seconds, basis)
        if self._stand_in and algorithm in self._stand_in.algorithms(call.operation, _buffers(call)):
            # Larger than what there was time for: in proportion, as the sizes that were measured are near bandwidth.
            largest = max(entry.nbytes for entry in self._stand_in.entries
                          if (entry.operation, entry.algorithm, entry.buffers) == (*asked[:2], asked[3]))
            seconds = self._stand_in.seconds(call.operation, algorithm, largest, _buffers(call))
            return Estimate(algorithm, seconds * max(1.0, call.nbytes / largest), "measured")
        if algorithm in algorithms.SCHEDULES[call.operation] and self.links is not None:
            predicted = self._predicted(call, algorithm)
            if predicted is not None:
                doubt = DOUBT if self._measured_sizes(call) else 1.0
                return Estimate(algorithm, predicted * self._correction(call) * doubt, "predicted")
        return Estimate(algorithm, float("inf"), "unknown")

    def estimates(self, call: Call) -> list[Estimate]:
        """All that can serve a call, the cheapest first: `choose` takes the first, or one that is nearly as cheap."""
        return sorted((self.estimate(call, name) for name in candidates(call)), key=lambda found: found.seconds)

    def _measured_sizes(self, call: Call) -> list[int]:
        return [entry.nbytes for entry in (self._stand_in.entries if self._stand_in else ())
                if (entry.operation, entry.buffers) == (call.operation, _buffers(call))]

    def _measured(self, call: Call, begin: float) -> list[tuning.Entry]:
        """Direct measurements of what has no price, and of what seems cheapest, with sizes that grow as time allows."""
        found, transport = [], Transport.of(self._topology)
        names, longest, previous = self._worth_measuring(replace(call, nbytes=TYPICAL_BYTES)), 0.0, SIZES[0]
        for nbytes in SIZES:
            # Calls grow with the bytes, and half as much again where a cache ends; rank 0's clock decides for all.
            expected_s = 1.5 * nbytes / previous * longest * len(names) * (REPEATS + 1)
            goes_on = time.monotonic() - begin + expected_s < BUDGET_S
            previous = nbytes
            if not transport.all_gather_small(np.array([goes_on]), "measure algorithms")[0, 0]:
                break
            try:
                times = time_calls(self._topology, call.operation, names, nbytes, self.dtype, repeats=REPEATS,
                                   shared=call.in_window)
            except RoomError:      # on all ranks; the call itself may need less
                break
            found += [tuning.Entry(call.operation, name, nbytes, _buffers(call), each) for name, each in times.items()]
            longest = max(times.values())
        return found

    def _worth_measuring(self, call: Call) -> list[str]:
        able = candidates(call)
        priced = [name for name in able if self.estimate(call, name).basis == "predicted"]
        cheapest = sorted(priced, key=lambda name: self(call, name))[:2]
        # In host memory of several nodes these two use less than their messages, which is what their prices count.
        in_memory = ("hierarchical", "leader") if len(call.nodes.nodes) > 1 else ()
        return [name for name in able if name in cheapest or name not in priced or name in in_memory]

    def _correction(self, call: Call) -> float:
        """How much longer than predicted those took that were also measured: the median of the stand-in."""
        buffers, ratios = _buffers(call), []
        for entry in self._stand_in.entries if self._stand_in else ():
            if (entry.operation, entry.buffers) == (call.operation, buffers) and entry.nbytes > SIZES[0] \
                    and entry.algorithm in algorithms.SCHEDULES[call.operation]:
                predicted = self._predicted(replace(call, nbytes=entry.nbytes), entry.algorithm)
                ratios += [entry.seconds / predicted] if predicted else []
        return float(np.median(ratios)) if ratios else 1.0

    def _predicted(self, call: Call, algorithm: str) -> float | None:
        try:
            return _price(call.operation, algorithm, call.nodes, call.nbytes, self.links, str(self.dtype))
        except ConfigError:      # it needs a link that was not measured
            return None


def time_calls(topology: Topology, operation: str, names: Sequence[str], nbytes: int, dtype: np.dtype, *, repeats: int,
               shared: bool = False, warmup: int = 1) -> dict[str, float]:
    """Median seconds of a call by each of the algorithms, which take turns, so that what disturbs one disturbs all.

    Called by every rank; a call takes as long as its slowest rank, and all ranks return the same. With `shared` the array
    lives in node-shared memory, until the topology is closed.
    """
    from hpczero.collectives import api

    count = max(1, nbytes // dtype.itemsize)
    array = topology.empty(count, dtype) if shared else np.zeros(count, dtype)
    call, transport = getattr(api, operation), Transport.of(topology)
    seconds = np.empty((repeats, len(names)))
    for index in range(-warmup, repeats):
        # Each goes first once: a network that was idle may carry the first bytes faster.
        for turn in range(len(names)):
            column = (turn + index) % len(names)
            name = names[column]
            transport.barrier("time an algorithm")
            start = time.perf_counter()
            call(array, topology, algorithm=name)
            seconds[max(index, 0), column] = time.perf_counter() - start
    slowest = transport.all_gather_small(seconds, "time an algorithm").max(axis=0)
    return dict(zip(names, np.median(slowest, axis=0).tolist(), strict=True))


@lru_cache(maxsize=4096)
def _price(operation: str, algorithm: str, nodes: NodeMap, nbytes: int, costs: links.Links, dtype: str) -> float:
    if nodes.size <= MOST_REPLAYED:
        plan = algorithms.plan(operation, algorithm, nodes, nbytes=nbytes)
        return pricing.price(plan, nodes, nbytes, costs, dtype)
    per_node = max(map(len, nodes.nodes))
    return pricing.predict(operation, algorithm, len(nodes.nodes), per_node, nbytes, costs, dtype)


def _buffers(call: Call) -> tuning.Buffers:
    return "shared" if call.in_window else "private"
