"""HierarchicalAggregator: the gradients of all ranks, added up by name, in few messages, over nodes and inside them.

For programs that keep parameters and optimizer themselves and want gradients summed: a dict of arrays goes in, and the
same arrays hold the sum afterwards. One call goes like this:

1. every rank looks at its own dict; a fingerprint of names, shapes, dtypes and settings tells whether all agree;
2. gradients of one dtype are copied, in the order of their names, into a vector of at most `bucket_size`; one that
   fills a bucket alone stays where it is;
3. each vector is reduced by the algorithm that its size asks for (`selection`), and copied back.

Cost: one small exchange per call and one per bucket; one vector per dtype, kept from the first call on, as large as the
largest bucket of several gradients.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from hpczero.arrays import Array, copy, is_half, namespace
from hpczero.collectives import aggregator_stats, reduction
from hpczero.collectives.aggregator_agreement import compare, describe
from hpczero.collectives.aggregator_arrays import as_arrays, as_entries, refuse_unwritable
from hpczero.collectives.aggregator_buckets import Bucket, Entry, in_buckets
from hpczero.collectives.aggregator_config import HierarchicalConfig, completed, contradiction, planned
from hpczero.collectives.aggregator_stats import AggregatorStats, Recommendation
from hpczero.collectives.api import all_reduce
from hpczero.collectives.groups import Groups, groups
from hpczero.collectives.guard import agree, fingerprint
from hpczero.collectives.selection import Call, choose
from hpczero.collectives.slots import FAILED
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, HpczeroError, NoCommunicatorError, StallError
from hpczero.topology import NodeMap, Topology, as_topology, refuse_finalised

_PLANS_KEPT = 16
"""Sets of gradients that are remembered; a program has one, or a few."""


class HierarchicalAggregator:
    """All-reduces dicts of named gradients, in place.

    With a communicator, it is made, attached, used and closed by every rank. Without one it plans: `groups` and `plan`
    are there for the ranks that the settings name, and a world of one is served.

    Parameters
    ----------
    config : HierarchicalConfig
        What it says of nodes and ranks is checked against the communicator; `op`, `strategy` and `bucket_size` must be
        the same on every rank.
    comm : MPI.Intracomm or Topology, optional
        May be given later, to `attach`. A topology stays the caller's.

    Attributes
    ----------
    config : HierarchicalConfig
        With a communicator, complete: what was left open is filled in.

    Raises
    ------
    WorldSizeMismatchError
        The settings name other numbers of nodes or ranks than the communicator has; on every rank.
    """

    def __init__(self, config: HierarchicalConfig | None = None, comm: Topology | MPI.Intracomm | None = None):
        self.config = HierarchicalConfig() if config is None else config
        self._topology: Topology | None = None
        self._owns_topology = self._closed = False
        self._ranks: tuple[int, NodeMap] | None = None
        self._groups: Groups | None = None
        self._meter = aggregator_stats.Meter()
        self._fused: dict[tuple[np.dtype, bool], Array] = {}
        self._plans: dict[tuple[Entry, ...], _Plan] = {}
        if comm is not None:
            self.attach(comm)
        else:
            _refuse_other(self.config)

    def attach(self, comm: Topology | MPI.Intracomm) -> None:
        """Serves the ranks of `comm` from now on. Called by every rank of it, with the same settings."""
        self._refuse_closed()
        topology, owned = as_topology(comm)
        transport = Transport.of(topology)
        error: Exception | None = None
        settings = ""
        try:
            _refuse_other(self.config)
            settings = self._settings(self.config.strategy)
            if self._topology is not None:
                raise ConfigError("this HierarchicalAggregator has a communicator already; make another for this one")
            if (error := contradiction(self.config, topology)) is None:
                choose(Call("all_reduce", 0, topology.map, "any"), self.config.strategy)
        except Exception as wrong:      # noqa: BLE001 - the others must hear of it, whatever it is
            error = wrong
        try:
            agree(transport, f"HierarchicalAggregator with {settings}", error)
        except StallError:
            raise      # somebody is missing, and would be for a collective free too
        except Exception:
            if owned:
                topology.close()      # every rank is here
            raise
        self._topology, self._owns_topology, self._groups = topology, owned, None
        self._ranks = topology.rank, topology.map
        self.config = completed(self.config, topology)
        transport.timeout_s = self.config.comm_timeout_ms / 1000

    @property
    def has_communicator(self) -> bool:
        return self._topology is not None

    @property
    def groups(self) -> Groups:
        """The groups of this rank, by the communicator or, without one, by the settings."""
        if self._groups is None:
            self._groups = groups(*self._place())
        return self._groups

    def plan(self, gradients: Mapping[str, Any]) -> tuple[tuple[Bucket, str], ...]:
        """What `all_reduce` would do with these: its buckets, in order, and the algorithm of each. Sends nothing."""
        nodes = self._place()[1]
        buckets = in_buckets(as_entries(as_arrays(gradients)), self.config.bucket_size)
        return tuple((bucket, _choice(self.config.strategy, bucket, nodes)) for bucket in buckets)

    def all_reduce(self, gradients: Mapping[str, Any], *, strategy: str | None = None) -> Mapping[str, Any]:
        """Every array becomes the sum (or mean) of the arrays of that name on all ranks. Called by every rank.

        Parameters
        ----------
        gradients : mapping of str to array
            Of the same names, shapes and dtypes on every rank, in any order; any shape and strides; host or device.
            A dtype of `reduction.DTYPES`. A mean is of floating dtypes only.
        strategy : str, optional
            The algorithm for this call alone, in place of that of the settings; the same on every rank.

        Returns
        -------
        `gradients`

        Raises
        ------
        MismatchError
            A name, shape, dtype or setting differs; on every rank, naming the gradient and the rank. No array was
            changed.
        ConfigError
            A gradient cannot be reduced in place, or not by this strategy; on every rank. No array was changed.
        NoCommunicatorError
            The settings name several ranks and there is no communicator.
        StallError
            A rank did not come; the arrays then hold anything.
        """
        self._refuse_closed()
        started = time.perf_counter()
        before = self._bytes_sent()
        try:
            if self._topology is None and self.config.world_size > 1:
                raise NoCommunicatorError(f"all_reduce over {self.config.world_size} ranks needs a communicator: pass "
                                          "comm=MPI.COMM_WORLD, or call attach")
            arrays, buckets = self._agreed(gradients, self.config.strategy if strategy is None else strategy)
            for bucket, algorithm in buckets:
                self._reduce(bucket, algorithm, arrays)
        except BaseException:
            self._meter.failures += 1
            raise
        finally:
            self._meter.moved(before, self._bytes_sent())
        self._meter.operations += 1
        self._meter.seconds += time.perf_counter() - started
        return gradients

    @property
    def stats(self) -> AggregatorStats:
        """What this rank has counted and timed since the start, or since `reset_stats`."""
        return self._meter.read()

    def reset_stats(self) -> None:
        self._meter = aggregator_stats.Meter()

    def recommend(self) -> tuple[Recommendation, ...]:
        """The strategy to take for each size of bucket seen so far, and why; each prints as a line.

        By the times of this rank, where several strategies were measured at a size. Needs no other rank.
        """
        return aggregator_stats.recommend(self.stats.history, self._place()[1])

    def close(self) -> None:
        """Frees vectors and what was made of the communicator. Called by every rank; a second call does nothing."""
        if self._closed:
            return
        if self._owns_topology:
            refuse_finalised()
        self._closed = True
        self._fused.clear()
        topology, self._topology = self._topology, None
        if topology is not None and self._owns_topology:
            topology.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After an error other ranks may never come to a collective free: leave it to the end of the job.
        if kind is None:
            self.close()

    def _place(self) -> tuple[int, NodeMap]:
        """This rank, and the nodes."""
        return planned(self.config) if self._ranks is None else self._ranks

    def _settings(self, strategy: str) -> str:
        size = self.config.bucket_size
        return f"op={self.config.op} strategy={strategy} bucket_size={size.count} {size.unit}"

    def _bytes_sent(self) -> dict[str, int]:
        return {} if self._topology is None else dict(Transport.of(self._topology).bytes_sent)

    def _plan_of(self, entries: tuple[Entry, ...]) -> _Plan:
        plan = self._plans.get(entries)
        if plan is None:
            if len(self._plans) == _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[entries] = _Plan(in_buckets(entries, self.config.bucket_size))
        return plan

    def _agreed(self, gradients: Any, strategy: str) -> tuple[dict[str, Array], list[tuple[Bucket, str]]]:
        """The gradients as arrays, and what runs on which bucket, after all ranks were found to mean the same."""
        arrays: dict[str, Array] = {}
        entries: tuple[Entry, ...] = ()
        buckets: list[tuple[Bucket, str]] = []
        error: Exception | None = None
        mine = FAILED
        call = f"HierarchicalAggregator.all_reduce with {self._settings(strategy)}"
        try:
            arrays = as_arrays(gradients)
            refuse_unwritable(arrays)
            entries = as_entries(arrays)
            plan, nodes = self._plan_of(entries), self._place()[1]
            for bucket in plan.buckets:
                reduction.check(bucket.dtype, self.config.op)
                buckets.append((bucket, _choice(strategy, bucket, nodes)))
            if call not in plan.fingerprints:
                plan.fingerprints[call] = fingerprint(describe(call, entries))
            mine = plan.fingerprints[call]
        except Exception as wrong:      # noqa: BLE001 - the others must hear of it, whatever it is
            error = wrong
        if self._topology is not None:
            compare(Transport.of(self._topology), mine, call, entries, error)
        elif error is not None:
            raise error
        return arrays, buckets

    def _reduce(self, bucket: Bucket, algorithm: str, arrays: Mapping[str, Array]) -> None:
        if self._topology is None:
            return      # the sum over one rank is what it has, and so is the mean
        started = time.perf_counter()
        alone = arrays[bucket.names[0]] if len(bucket.entries) == 1 else None
        if alone is not None:
            all_reduce(alone, self._topology, op=self.config.op, algorithm=algorithm)
        else:
            fused = self._vector(bucket, arrays)
            for entry, where in bucket.places:
                copy(fused[where].reshape(entry.shape), arrays[entry.name])
            all_reduce(fused, self._topology, op=self.config.op, algorithm=algorithm)
            for entry, where in bucket.places:
                copy(arrays[entry.name], fused[where].reshape(entry.shape))
        self._meter.reduced(bucket, algorithm, time.perf_counter() - started)

    def _vector(self, bucket: Bucket, arrays: Mapping[str, Array]) -> Array:
        """Room for the bucket: the beginning of the vector kept for its dtype and memory, made anew if too short."""
        kind = bucket.dtype, bucket.on_device
        kept = self._fused.get(kind)
        if kept is None or kept.size < bucket.size:
            kept = self._fused[kind] = namespace(arrays[bucket.names[0]]).empty(bucket.size, bucket.dtype)
        return kept[:bucket.size]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise HpczeroError("this HierarchicalAggregator was closed; make another one")


def _refuse_other(config: Any) -> None:
    if not isinstance(config, HierarchicalConfig):
        raise ConfigError(f"config must be a HierarchicalConfig, not {type(config).__name__}")


def _choice(strategy: str, bucket: Bucket, nodes: NodeMap) -> str:
    """The algorithm that reduces a bucket; ConfigError where the strategy cannot."""
    half = is_half(bucket.dtype)
    return choose(Call("all_reduce", bucket.nbytes, nodes, "any", bucket.on_device, is_half=half), strategy)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is kept for a set of names, shapes and dtypes, so that it is worked out once."""

    buckets: tuple[Bucket, ...]
    fingerprints: dict[str, int] = field(default_factory=dict)
    """By call."""
