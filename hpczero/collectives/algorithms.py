"""The table of algorithms: every schedule by operation and name, as a `Plan` for given nodes.

Everything that has to know which algorithms there are reads it here: what runs them, prices them, draws them and proves
them. Names that are no schedule (`window`, `system`, `adaptive`) are the business of `selection`.

What the order of additions depends on, by algorithm (`selection` describes "canonical" and "world"):

- `pairwise`: the tree that it is given, by default the canonical one;
- `tree`: the ranks alone ("world"), for every size and root;
- `butterfly`, `halving`: the ranks alone, at powers of two;
- `hierarchical`, `leader`: the nodes alone ("canonical"), for every node map and root; `hierarchical:halving` where the
  number of nodes is a power of two, `hierarchical:ring` and `hierarchical:circulant` where there are one or two;
- `ring`, `segmented_ring`, `circulant`, `double_tree`: how the vector is cut, except with two ranks.

What keeps one of the two orders keeps both where the canonical tree and the tree over all ranks are the same. In all of
them, all ranks end with the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from hpczero.collectives import butterfly, circulant, hierarchical, pairwise, ring
from hpczero.collectives import tree as trees
from hpczero.collectives.order import Tree, canonical
from hpczero.collectives.schedule import Step
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap


@dataclass(frozen=True, slots=True)
class Plan:
    """An algorithm for given nodes: the steps of every rank, and how the vector is cut into the blocks they name."""

    steps: Callable[[int], Iterable[Step]]
    """steps(rank): ranks are those of the node map."""
    num_blocks: int
    per_shard: int = 1
    """reduce_scatter, all_gather: into how many blocks each rank's shard is cut, so that num_blocks = size * per_shard
    and shard r begins with block r * per_shard. 1 for the other operations, whose blocks are cut evenly."""

    def offsets(self, vector: int | Sequence[int]) -> list[int]:
        """Where in the vector each block begins, and the end of the last: num_blocks + 1 numbers.

        Of a number of elements, cut evenly; or of the offsets of all shards, size + 1 numbers, each shard cut evenly.
        """
        num_shards = self.num_blocks // self.per_shard
        shards = even_offsets(vector, num_shards) if isinstance(vector, Integral) else list(vector)
        if self.per_shard == 1:
            return shards
        found = [shards[0]]
        for start, end in itertools.pairwise(shards):
            found.extend(start + place for place in even_offsets(end - start, self.per_shard)[1:])
        return found


Builder = Callable[..., Plan]
"""builder(nodes, *, root=0, tree=None, nbytes=0) -> Plan; what they mean stands at `plan`."""


def plan(operation: str, name: str, nodes: NodeMap, *, root: int = 0, tree: Tree | None = None,
         nbytes: int = 0) -> Plan:
    """The plan of an algorithm; the same on every rank that asks with the same arguments.

    Parameters
    ----------
    operation, name : str
        Keys of `SCHEDULES`.
    root : int
        broadcast, reduce: the rank that has, or gets, the vector.
    tree : Tree, optional
        The order of additions, for algorithms that can follow any; the canonical one of `nodes` by default.
    nbytes : int
        Size of the vector, which decides the number of segments; 0 for as few as possible.

    Raises
    ------
    ConfigError
        Operation or name is not in the table; root is no rank.
    """
    if operation not in SCHEDULES:
        raise ConfigError(_unknown("operation", operation, SCHEDULES))
    if name not in SCHEDULES[operation]:
        raise ConfigError(_unknown(f"{operation}: algorithm", name, SCHEDULES[operation]))
    if not 0 <= root < nodes.size:
        raise ConfigError(f"{operation}: root={root!r} is no rank of 0 to {nodes.size - 1}")
    return SCHEDULES[operation][name](nodes, root=root, tree=tree, nbytes=nbytes)


def even_offsets(count: int, parts: int) -> list[int]:
    """Where the parts of `count` elements begin, and the end of the last; the first count mod parts hold one more."""
    base, extra = divmod(count, parts)
    return [part * base + min(part, extra) for part in range(parts + 1)]


def _over_ranks(schedule: Callable, *takes: str, num_blocks: Callable[[int], int] = lambda size: size) -> Builder:
    """schedule(rank, size), which takes of `root` and `tree` what is named; by default over a block per rank."""

    def build(nodes: NodeMap, *, root: int = 0, tree: Tree | None = None, nbytes: int = 0) -> Plan:
        taken: dict[str, Any] = {"root": root} if "root" in takes else {}
        if "tree" in takes:
            taken["tree"] = canonical(nodes.nodes) if tree is None else tree
        return Plan(lambda rank: schedule(rank, nodes.size, **taken), num_blocks(nodes.size))

    return build


def _uncut(schedule: Callable, *takes: str) -> Builder:
    """schedule(rank, size, blocks=...), which sends whole vectors."""
    return _over_ranks(partial(schedule, blocks=(0,)), *takes, num_blocks=lambda size: 1)


def _over_nodes(schedule: Callable, *takes: str,
                num_blocks: Callable[[NodeMap], int] = lambda nodes: nodes.size) -> Builder:
    """schedule(rank, nodes), which takes `root` if named."""

    def build(nodes: NodeMap, *, root: int = 0, tree: Tree | None = None, nbytes: int = 0) -> Plan:
        taken = {"root": root} if "root" in takes else {}
        return Plan(lambda rank: schedule(rank, nodes, **taken), num_blocks(nodes))

    return build


def _two_levels(between: str) -> Builder:
    """The hierarchical all-reduce; its cut brings every card to the bound, whatever the sizes of the nodes."""

    def build(nodes: NodeMap, *, root: int = 0, tree: Tree | None = None, nbytes: int = 0) -> Plan:
        cut = hierarchical.even(nodes)
        return Plan(lambda rank: hierarchical.all_reduce(rank, nodes, cut, between), cut.num_blocks)

    return build


def _double_tree(schedule: Callable, *takes: str) -> Builder:
    """schedule(rank, size, segments=...), over two trees; takes `root` if named."""

    def build(nodes: NodeMap, *, root: int = 0, tree: Tree | None = None, nbytes: int = 0) -> Plan:
        taken = {"root": root} if "root" in takes else {}
        segments = trees.num_segments(nodes.size, nbytes)
        return Plan(lambda rank: schedule(rank, nodes.size, segments=segments, **taken), 2 * segments)

    return build


def _segmented_ring(schedule: Callable, *, of_shards: bool) -> Builder:
    """schedule(rank, size, segments), over so many blocks per rank: parts of its shard, or of the vector."""

    def build(nodes: NodeMap, *, root: int = 0, tree: Tree | None = None, nbytes: int = 0) -> Plan:
        segments = ring.num_segments(nodes.size, nbytes)
        num_blocks, per_shard = nodes.size * segments, segments if of_shards else 1
        return Plan(lambda rank: schedule(rank, nodes.size, segments), num_blocks, per_shard)

    return build


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    from hpczero.settings import nearest      # imports pydantic, which is of use in this one case

    return f"{what}={name!r} is not one of {', '.join(known)}{nearest(name, known)}"


SCHEDULES: dict[str, dict[str, Builder]] = {
    "all_reduce": {
        "tree": _uncut(trees.all_reduce),
        "double_tree": _double_tree(trees.double_all_reduce),
        "ring": _over_ranks(ring.all_reduce),
        "segmented_ring": _segmented_ring(ring.all_reduce, of_shards=False),
        "butterfly": _uncut(butterfly.all_reduce),
        "halving": _over_ranks(butterfly.halving_all_reduce, num_blocks=butterfly.num_halves),
        "circulant": _over_ranks(circulant.all_reduce),
        "pairwise": _over_ranks(pairwise.all_reduce, "tree"),
        "hierarchical": _two_levels("pairwise"),
        "hierarchical:ring": _two_levels("ring"),
        "hierarchical:circulant": _two_levels("circulant"),
        "hierarchical:halving": _two_levels("halving"),
        "leader": _over_nodes(hierarchical.leader_all_reduce, num_blocks=lambda nodes: len(nodes.nodes)),
    },
    "reduce_scatter": {
        "ring": _over_ranks(ring.reduce_scatter),
        "segmented_ring": _segmented_ring(ring.reduce_scatter, of_shards=True),
        "halving": _over_ranks(butterfly.halving_reduce_scatter),
        "circulant": _over_ranks(circulant.reduce_scatter),
        "pairwise": _over_ranks(pairwise.reduce_scatter, "tree"),
        "hierarchical": _over_nodes(hierarchical.reduce_scatter),
        "hierarchical:ring": _over_nodes(partial(hierarchical.reduce_scatter, between="ring")),
        "hierarchical:circulant": _over_nodes(partial(hierarchical.reduce_scatter, between="circulant")),
        "hierarchical:halving": _over_nodes(partial(hierarchical.reduce_scatter, between="halving")),
    },
    "all_gather": {
        "ring": _over_ranks(ring.all_gather),
        "segmented_ring": _segmented_ring(ring.all_gather, of_shards=True),
        "halving": _over_ranks(butterfly.doubling_all_gather),
        "circulant": _over_ranks(circulant.all_gather),
        "pairwise": _over_ranks(pairwise.all_gather),
        "hierarchical": _over_nodes(hierarchical.all_gather),
        "hierarchical:ring": _over_nodes(partial(hierarchical.all_gather, between="ring")),
        "hierarchical:circulant": _over_nodes(partial(hierarchical.all_gather, between="circulant")),
        "hierarchical:halving": _over_nodes(partial(hierarchical.all_gather, between="halving")),
    },
    "broadcast": {
        "tree": _uncut(trees.broadcast, "root"),
        "double_tree": _double_tree(trees.double_broadcast, "root"),
        "circulant": _over_ranks(circulant.broadcast, "root"),
        "hierarchical": _over_nodes(hierarchical.broadcast, "root", num_blocks=hierarchical.num_columns),
        "leader": _over_nodes(hierarchical.leader_broadcast, "root", num_blocks=lambda nodes: 1),
    },
    "reduce": {
        "tree": _uncut(trees.reduce, "root"),
        "double_tree": _double_tree(trees.double_reduce, "root"),
        "circulant": _over_ranks(circulant.reduce, "root"),
        "pairwise": _over_ranks(pairwise.reduce, "root", "tree"),
        "hierarchical": _over_nodes(hierarchical.reduce, "root", num_blocks=hierarchical.num_columns),
        "leader": _over_nodes(hierarchical.leader_reduce, "root", num_blocks=lambda nodes: 1),
    },
}
"""The builder of every algorithm, by operation and name."""
