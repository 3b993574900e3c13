"""Which rank runs on which machine, and the communicators that follow from it.

Everything hierarchical starts here: ranks of one node share memory, ranks of different nodes share a network card.
`NodeMap` is the plain fact (numbers only, testable for 4096 ranks); `Topology` finds it out for a communicator and owns
what must be freed afterwards. Nodes are numbered by their lowest rank; local ranks follow the order of the
communicator's ranks, whatever order the launcher placed them in (block, round-robin, irregular).

Cost: one duplicate, three splits and a few small exchanges, once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from hpczero.errors import ConfigError, HpczeroError, raise_together


@dataclass(frozen=True)
class NodeMap:
    """The node of every rank: `node_of[rank]`, numbered from 0 in the order in which the nodes appear."""

    node_of: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.node_of)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in rank order: a rank's place in its tuple is its local rank."""
        found: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            found[node].append(rank)
        return tuple(map(tuple, found))

    @cached_property
    def local_of(self) -> tuple[int, ...]:
        """The local rank of every rank."""
        found = [0] * self.size
        for ranks in self.nodes:
            for local, rank in enumerate(ranks):
                found[rank] = local
        return tuple(found)

    def deputy(self, owner: int, node: int) -> int:
        """The rank of `node` that speaks for `owner` there: itself at home, elsewhere the one at its local rank.

        On a node with fewer ranks the local rank wraps around, so that nodes of unequal size still share the work and
        every byte crosses the network once.
        """
        ranks = self.nodes[node]
        return ranks[self.local_of[owner] % len(ranks)]


class Topology:
    """Nodes and ranks of a communicator, with private communicators over all ranks, a node, and across the nodes.

    Called by every rank of `comm`, which stays the caller's: what is used here are duplicates, so that no message of
    ours can meet one of the caller's. Closing (or leaving the `with` block) is collective too, and never left to the
    garbage collector, which runs at different moments on different ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Any communicator: the world, or the half of it that trains.
    node_map : sequence of int, optional
        Forces the nodes, one number per rank, for tests and for machines whose sockets should count as nodes. Ranks of
        one forced node must share memory. Without it `HPCZERO_NODE_MAP=0,0,1` is read, then the machine is asked.

    Attributes
    ----------
    world, node, cross : MPI.Intracomm
        All ranks; the ranks of this node; the ranks with this local rank, one on each node that has so many.
    machine : MPI.Intracomm
        The ranks that share this machine's memory: those of this node, and of others where the nodes are forced.
    rank, size, num_nodes, node_index, local_rank : int
    ranks_per_node : tuple of int
        May differ from node to node.
    is_leader : bool
        True on local rank 0.
    is_oversubscribed : bool
        True if more ranks than cores share this machine: waits must then give way to each other.
    """

    def __init__(self, comm: MPI.Intracomm, node_map: Sequence[int] | None = None):
        _refuse_unusable(comm)
        self._owned: list[Any] = []
        self._running: list[Any] = []
        self._closers: list[Callable[[], None]] = []
        self._closed = False
        self.resources: dict[str, Any] = {}
        """What later layers keep for this set of ranks (transport, staging window); see `keep`."""
        self.shared_arrays: dict[int, tuple[int, Any]] = {}
        """What `empty` gave: address -> (the how manyth, its rows)."""
        try:
            self.world = self._own(comm.Dup())
            self.machine = self._own(self.world.Split_type(MPI.COMM_TYPE_SHARED, key=self.world.rank))
            self.map = _agree_on_map(self.world, self.machine, node_map)
            # A launcher may bind each rank to cores of its own: what a machine offers is all of them together.
            cores = set().union(*self.machine.allgather(os.sched_getaffinity(0)))
            # The same on every rank: it decides how some calls are made.
            self.is_oversubscribed = self.world.allreduce(self.machine.size > len(cores), MPI.LOR)
            self.rank, self.size = self.world.rank, self.world.size
            self.num_nodes = len(self.map.nodes)
            self.ranks_per_node = tuple(len(ranks) for ranks in self.map.nodes)
            self.node_index, self.local_rank = self.map.node_of[self.rank], self.map.local_of[self.rank]
            self.is_leader = self.local_rank == 0
            self.node = self._own(self.world.Split(self.node_index, self.rank))
            self.cross = self._own(self.world.Split(self.local_rank, self.rank))
        except BaseException:
            self._free()
            raise

    @property
    def node_of(self) -> tuple[int, ...]:
        return self.map.node_of

    @property
    def closed(self) -> bool:
        return self._closed

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """An array of this rank in memory that the other ranks of its node can read; zeroed. Called by every rank.

        Collectives recognise such arrays and reduce them without a copy. Freed by `close`, not before.
        """
        from hpczero.memory import node_rows

        self.drain()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        rows = node_rows(self, int(np.prod(shape, dtype=np.int64)), np.dtype(dtype))
        self._closers.append(rows.close)
        self.shared_arrays[rows.mine.ctypes.data] = len(self.shared_arrays), rows
        return rows.mine.reshape(shape)

    def keep(self, name: str, build: Callable[[], Any], *, ends_first: bool = False) -> Any:
        """The resource called `name`, built at the first call; its `close` is called before the communicators go.

        Later resources are closed before earlier ones; those that use others while they run (`ends_first`; they can `drain`)
        before all.
        """
        if name not in self.resources:
            self.drain()      # it may be about to be built there
        if name not in self.resources:
            self.resources[name] = build()
            if ends_first:
                self._running.append(self.resources[name])
            else:
                self._closers.append(self.resources[name].close)
        return self.resources[name]

    def drain(self) -> None:
        """Waits for what other threads do with this topology; on these threads, for nothing."""
        for running in self._running:
            running.drain()

    def close(self) -> None:
        """Frees windows and communicators. Called by every rank; a second call does nothing."""
        if self._closed:
            return
        refuse_finalised()
        for running in self._running:      # with all that is on its way
            running.close()
        self._closed = True
        for closer in reversed(self._closers):
            closer()
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After an error other ranks may never come to a collective free: leave it to the end of the job.
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"Topology(rank {self.rank} of {self.size}, nodes of {'+'.join(map(str, self.ranks_per_node))} ranks)"

    def _own(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        # A host written in C may have left MPI_ERRORS_ARE_FATAL in place; errors must come back to Python.
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._owned.append(comm)
        return comm

    def _free(self) -> None:
        for comm in reversed(self._owned):
            comm.Free()
        self._owned.clear()


def refuse_finalised() -> None:
    """HpczeroError if MPI is gone, with what to do; freeing anything then would abort the process without a word."""
    if MPI.Is_finalized():
        raise HpczeroError("MPI was finalised before close(): close what hpczero made (or leave its `with` block) first, "
                           "then call MPI.Finalize()")


def as_topology(comm_or_topology: Topology | MPI.Intracomm) -> tuple[Topology, bool]:
    """A topology for either, and whether it was made here (and so must be closed here)."""
    if isinstance(comm_or_topology, Topology):
        return comm_or_topology, False
    return Topology(comm_or_topology), True


def _refuse_unusable(comm: Any) -> None:
    if not isinstance(comm, MPI.Intracomm):
        raise ConfigError(f"a communicator of mpi4py (MPI.Intracomm) is needed here, not {type(comm).__name__}")
    refuse_finalised()
    if comm == MPI.COMM_NULL:
        raise ConfigError("the communicator is MPI.COMM_NULL: this rank is not part of the group that trains")


def _agree_on_map(world: MPI.Intracomm, machine: MPI.Intracomm, node_map: Sequence[int] | None) -> NodeMap:
    """The same map on every rank: forced, or by machine; refused on every rank if it cannot be."""
    forced, source = (node_map, "node_map") if node_map is not None else _from_environment()
    domain = machine.bcast(world.rank, root=0)       # names the machine by its lowest rank
    entries = world.allgather((None if forced is None else tuple(forced), domain))
    error = None
    if any(entry[0] != entries[0][0] for entry in entries):
        odd = next(rank for rank, entry in enumerate(entries) if entry[0] != entries[0][0])
        error = ConfigError(f"{source} differs between ranks: rank 0 has {entries[0][0]}, rank {odd} {entries[odd][0]}")
    elif forced is not None:
        error = _wrong(forced, source, [entry[1] for entry in entries])
    raise_together(world, error)
    return NodeMap(_renumbered(forced if forced is not None else [entry[1] for entry in entries]))


def _from_environment() -> tuple[list[int] | None, str]:
    text, source = os.environ.get("HPCZERO_NODE_MAP"), "HPCZERO_NODE_MAP"
    if not text:
        return None, source
    try:
        return [int(part) for part in text.split(",")], source
    except ValueError:
        return [], f"{source}={text!r}"


def _wrong(forced: Sequence[int], source: str, machines: list[int]) -> ConfigError | None:
    if not all(isinstance(node, (int, np.integer)) and not isinstance(node, bool) and node >= 0 for node in forced):
        return ConfigError(f"{source}: one whole number from 0 per rank, such as 0,0,1; got {list(forced)}")
    if len(forced) != len(machines):
        return ConfigError(f"{source} names {len(forced)} ranks, the communicator has {len(machines)}: "
                           "give one node number per rank, such as 0,0,1 for three")
    home: dict[int, int] = {}
    for rank, (node, machine) in enumerate(zip(forced, machines, strict=True)):
        if home.setdefault(node, machine) != machine:
            return ConfigError(f"{source} puts rank {rank} on node {node} together with ranks of another machine, "
                               "which cannot share memory")
    return None


def _renumbered(nodes: Sequence[int]) -> tuple[int, ...]:
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)
