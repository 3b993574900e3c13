"""What an aggregator has done so far, and what follows from it for the choice of an algorithm.

Times are this rank's own, so two ranks may read different advice from them. A strategy must be the same on every rank:
take the advice of rank 0 for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpczero.collectives.aggregator_buckets import Bucket
from hpczero.collectives.selection import Call, choose
from hpczero.topology import NodeMap


@dataclass(frozen=True, slots=True)
class StrategyUse:
    """One algorithm on buckets of one size."""

    nbytes: int
    dtype: str
    on_device: bool
    algorithm: str
    calls: int
    mean_s: float
    best_s: float

    @property
    def bucket(self) -> tuple[int, str, bool]:
        """What two algorithms must share to be compared."""
        return self.nbytes, self.dtype, self.on_device


@dataclass(frozen=True, slots=True)
class AggregatorStats:
    """What happened since the start, or since `reset_stats`."""

    operations: int
    """Dicts that were reduced."""
    mean_s: float
    """Seconds that one took, fusing included."""
    bytes_sent: Mapping[str, int]
    """Payload that this rank moved, by link: "network" to other nodes, "node" to ranks of its node, "window" read from
    its neighbours' memory."""
    failures: int
    """Calls that raised."""
    history: tuple[StrategyUse, ...]
    """Which algorithm ran for which size, smallest first."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The strategy for buckets of one size."""

    nbytes: int
    dtype: str
    strategy: str
    reason: str

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.dtype}: {self.strategy} ({self.reason})"


@dataclass
class Meter:
    """The counters behind `AggregatorStats`."""

    operations: int = 0
    seconds: float = 0.0
    failures: int = 0
    bytes_sent: dict[str, int] = field(default_factory=lambda: {"window": 0, "node": 0, "network": 0})
    _uses: dict[tuple[int, str, bool, str], list[float]] = field(default_factory=dict)
    """Calls, seconds, and the shortest call, for each size and algorithm."""

    def reduced(self, bucket: Bucket, algorithm: str, seconds: float) -> None:
        key = bucket.nbytes, str(bucket.dtype), bucket.on_device, algorithm
        calls, total, best = self._uses.get(key, (0, 0.0, seconds))
        self._uses[key] = [calls + 1, total + seconds, min(best, seconds)]

    def moved(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        for link, count in after.items():
            self.bytes_sent[link] = self.bytes_sent.get(link, 0) + count - before.get(link, 0)

    def read(self) -> AggregatorStats:
        history = tuple(StrategyUse(*key, int(calls), total / calls, best)
                        for key, (calls, total, best) in sorted(self._uses.items()))
        mean_s = self.seconds / self.operations if self.operations else 0.0
        return AggregatorStats(self.operations, mean_s, dict(self.bytes_sent), self.failures, history)


def recommend(history: tuple[StrategyUse, ...], nodes: NodeMap) -> tuple[Recommendation, ...]:
    """For each size seen: the fastest, where several algorithms were measured; else what the rule takes."""
    found = []
    for bucket in dict.fromkeys(use.bucket for use in history):
        nbytes, dtype, on_device = bucket
        uses = sorted((use for use in history if use.bucket == bucket), key=lambda use: use.best_s)
        measured = ", ".join(f"{use.algorithm} {use.best_s * 1e3:.3g} ms at best of {use.calls}" for use in uses)
        if len(uses) > 1:
            strategy, reason = uses[0].algorithm, f"the fastest that was measured: {measured}"
        else:
            half = dtype in ("float16", "bfloat16")
            strategy = choose(Call("all_reduce", nbytes, nodes, "any", on_device, is_half=half))
            reason = f"the rule's choice on nodes of {'+'.join(str(len(ranks)) for ranks in nodes.nodes)} ranks"
            reason += f"; measured was only {measured}"
        found.append(Recommendation(nbytes, dtype, strategy, reason))
    return tuple(found)
