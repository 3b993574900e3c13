"""The settings of the gradient aggregator, and how they are checked against the ranks that are really there.

What describes the machine (how many nodes, which rank is this) need not be given: a communicator says it. What is given
is a claim, which is checked, so that a script written for another job stops at its first line. Without a communicator
it is what there is to plan with.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from hpczero.collectives.selection import ALGORITHMS
from hpczero.errors import ConfigError, HpczeroError, WorldSizeMismatchError
from hpczero.settings import Settings, Size, nearest
from hpczero.topology import NodeMap, Topology

Number = Annotated[int, Field(ge=0)]


class HierarchicalConfig(Settings):
    """Which ranks there are, and how their gradients are combined. Frozen; unknown keys are refused."""

    num_nodes: Annotated[int, Field(ge=1)] | None = None
    """Nodes of the communicator. Of what is not given and no communicator says, there is one."""

    devices_per_node: Annotated[int, Field(ge=1)] | tuple[int, ...] | None = None
    """Ranks per node, each with its device; one number per node where they differ, such as (4, 4, 2)."""

    node_rank: Number | None = None
    """The number of this rank's node."""

    local_rank: Number | None = None
    """This rank's place on its node."""

    global_rank: Number | None = None
    """This rank's place among all ranks."""

    strategy: str = "adaptive"
    """The algorithm of every all-reduce, by name; "adaptive" takes one by the size of the bucket."""

    bucket_size: Size = "25MiB"
    """Gradients of one dtype travel together up to this size; one that is larger travels alone."""

    op: Literal["sum", "mean"] = "sum"
    """What becomes of the gradients of all ranks."""

    comm_timeout_ms: Annotated[int, Field(gt=0)] = 600_000
    """How long a rank waits for the others before it says who is missing. Holds for all that use the same topology,
    from the last to set it."""

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        names = ("adaptive", *ALGORITHMS["all_reduce"])
        if value not in names:
            raise ValueError(f"not one of {', '.join(names)}{nearest(value, names)}")
        return value

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        sizes = self.ranks_per_node
        if self.num_nodes not in (None, len(sizes)):
            raise ValueError(f"devices_per_node={self.devices_per_node} is of {len(sizes)} nodes, "
                             f"num_nodes={self.num_nodes}")
        if min(sizes, default=0) < 1:
            raise ValueError(f"devices_per_node={self.devices_per_node}: every node has one rank or more")
        # A size that is not given is not known yet: a communicator may say it.
        if self.num_nodes is not None and self.node_rank is not None and self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank={self.node_rank} is none of 0 to {self.num_nodes - 1}")
        if self.devices_per_node is not None and self.local_rank is not None and self.local_rank >= max(sizes):
            raise ValueError(f"local_rank={self.local_rank} is none of 0 to {max(sizes) - 1}")
        if self._sizes_are_known and self.global_rank is not None and self.global_rank >= self.world_size:
            raise ValueError(f"global_rank={self.global_rank} is none of 0 to {self.world_size - 1}")
        return self

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """The number of ranks of each node."""
        if isinstance(self.devices_per_node, tuple):
            return self.devices_per_node
        return (self.devices_per_node or 1,) * (self.num_nodes or 1)

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return sum(self.ranks_per_node)

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0 of all."""
        return place(self)[0] == 0

    @property
    def is_node_master(self) -> bool:
        """Whether this is rank 0 of its node."""
        return place(self)[2] == 0

    @property
    def _sizes_are_known(self) -> bool:
        return isinstance(self.devices_per_node, tuple) or None not in (self.num_nodes, self.devices_per_node)


def place(config: HierarchicalConfig) -> tuple[int, int, int]:
    """(global rank, node, local rank): as given; the rest by counting ranks node after node, from 0."""
    sizes = config.ranks_per_node
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    rank = config.global_rank
    if rank is None:
        rank = starts[min(config.node_rank or 0, len(starts) - 1)] + (config.local_rank or 0)
    node = max(index for index, start in enumerate(starts) if start <= rank)
    local = rank - starts[node]
    return (rank, node if config.node_rank is None else config.node_rank,
            local if config.local_rank is None else config.local_rank)


def planned(config: HierarchicalConfig) -> tuple[int, NodeMap]:
    """This rank and the map of the nodes where no communicator says them: ranks are counted node after node.

    ConfigError where the settings name a rank that is elsewhere then.
    """
    sizes = config.ranks_per_node
    nodes = NodeMap(tuple(node for node, size in enumerate(sizes) for _ in range(size)))
    rank, node, local = place(config)
    if rank >= nodes.size or (nodes.node_of[rank], nodes.local_of[rank]) != (node, local):
        raise ConfigError(f"global_rank={rank} is not node_rank={node}, local_rank={local} where nodes of "
                          f"{'+'.join(map(str, sizes))} ranks are counted one after the other; without a communicator "
                          "nothing else can be planned")
    return rank, nodes


def contradiction(config: HierarchicalConfig, topology: Topology) -> HpczeroError | None:
    """What the settings claim and the communicator denies, or None. For this rank alone: others may find none."""
    sizes = topology.ranks_per_node
    given = config.devices_per_node
    claimed = (given,) * len(sizes) if isinstance(given, int) else given
    if config.num_nodes not in (None, len(sizes)) or claimed not in (None, sizes):
        said = [f"{key}={value}" for key in ("num_nodes", "devices_per_node")
                if (value := getattr(config, key)) is not None]
        return WorldSizeMismatchError(
            f"{', '.join(said)}, and the communicator has {topology.size} rank{'s' if topology.size > 1 else ''} on "
            f"{_counted(sizes)}: leave these settings out, or start as many ranks as they say")
    for key, value in _ranks(topology).items():
        if getattr(config, key) not in (None, value):
            return ConfigError(f"{key}={getattr(config, key)}, and by the communicator it is {value}: leave it out")
    return None


def completed(config: HierarchicalConfig, topology: Topology) -> HierarchicalConfig:
    """The settings, with what the communicator says in place of what was left open."""
    sizes = topology.ranks_per_node
    facts = {"num_nodes": len(sizes), "devices_per_node": sizes[0] if len(set(sizes)) == 1 else sizes}
    given = {key: getattr(config, key) for key in type(config).model_fields}
    return type(config)(**given | facts | _ranks(topology))


def _ranks(topology: Topology) -> dict[str, int]:
    return {"node_rank": topology.node_index, "local_rank": topology.local_rank, "global_rank": topology.rank}


def _counted(sizes: tuple[int, ...]) -> str:
    return f"{len(sizes)} nodes of {'+'.join(map(str, sizes))}" if len(sizes) > 1 else "one node"
