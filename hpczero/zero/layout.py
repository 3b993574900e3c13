"""Where everything lies: names and shapes in, offsets, buckets and shards out. Pure; works for 4096 ranks on a laptop.

The parameters are laid out in one vector in backward order, since that is the order in which their gradients appear. Each
begins at a multiple of 16 elements. Consecutive parameters form buckets, and each bucket is cut into one shard per rank, at
multiples of 16 elements from a parameter's start: a cache line then has one writer, and norms need not know the cuts
(`optim.norms`). The odd units of a bucket go to other ranks from bucket to bucket, so that small buckets balance.

    flat    |  w3   | b3 |      w2        |b2|   w1    |
    bucket  |------ 0 ---|------ 1 ----------|--- 2 ---|
    shard   | 0  | 1 | 2 |  0  |  1   |  2   | 0| 1 | 2|

Rank r's shards of all buckets, one behind the other, make its shard vector: optimizer states, and at stages 2 and 3
gradients, have that layout. Within a bucket the parameters of a group of equal hyperparameters lie together, so that a
shard has few runs of one group however many parameters there are.

The formulas of what each stage costs (Rajbhandari et al., "ZeRO", SC 2020, figure 1) stand here too, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from hpczero.collectives.messages import landing_bytes
from hpczero.optim.norms import LEAF, Piece

ALIGNMENT = LEAF
PURPOSES = ("parameters", "gradients", "optimizer_states", "buffers")


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter in the vector: elements `offset` to `offset + size`."""

    name: str
    shape: tuple[int, ...]
    offset: int
    bucket: int
    group: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the vector: parameters that are reduced together, in backward order."""

    start: int
    stop: int
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `start` to `stop` of the vector, of one bucket and one group, from `position` on in a rank's shard vector."""

    group: int
    start: int
    stop: int
    position: int


@dataclass(frozen=True)
class Layout:
    """The plan for `num_ranks` ranks. Build it with `in_buckets` or `by_layer`."""

    places: dict[str, Place]
    """In backward order."""
    buckets: tuple[Bucket, ...]
    num_ranks: int

    @property
    def size(self) -> int:
        """Elements of the vector, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def num_elements(self) -> int:
        """Elements of the parameters themselves."""
        return sum(place.size for place in self.places.values())

    @cached_property
    def largest_bucket(self) -> int:
        return max((bucket.size for bucket in self.buckets), default=0)

    @cached_property
    def largest_shard(self) -> int:
        """Elements of the largest shard of any bucket."""
        return max((-(-bucket.size // ALIGNMENT // self.num_ranks) * ALIGNMENT for bucket in self.buckets), default=0)

    def cuts(self, bucket: int) -> list[int]:
        """num_ranks + 1 offsets in the vector: rank r owns the elements cuts[r] to cuts[r + 1] of the bucket."""
        whole = self.buckets[bucket]
        base, extra = divmod(whole.size // ALIGNMENT, self.num_ranks)
        units = (base + ((rank - bucket) % self.num_ranks < extra) for rank in range(self.num_ranks))
        return [whole.start + unit * ALIGNMENT for unit in accumulate(units, initial=0)]

    def shard_cuts(self, rank: int) -> list[int]:
        """num_buckets + 1 offsets in rank's shard vector: where its shard of each bucket lies."""
        sizes = []
        for bucket in range(len(self.buckets)):
            cuts = self.cuts(bucket)
            sizes.append(cuts[rank + 1] - cuts[rank])
        return list(accumulate(sizes, initial=0))

    def runs(self, rank: int | None = None) -> list[Run]:
        """The runs of one group each in rank's shards; for None in the whole vector, where they are at `start`."""
        shard_cuts = [bucket.start for bucket in self.buckets] if rank is None else self.shard_cuts(rank)
        return [run for index in range(len(self.buckets)) for run in self._runs(index, rank, shard_cuts[index])]

    def _runs(self, bucket: int, rank: int | None, first: int) -> list[Run]:
        whole = self.buckets[bucket]
        lo, hi = (whole.start, whole.stop) if rank is None else self.cuts(bucket)[rank:rank + 2]
        ends = [self.places[name].offset for name in whole.names[1:]] + [whole.stop]
        found: list[Run] = []
        for name, end in zip(whole.names, ends, strict=True):
            place = self.places[name]
            start, stop = max(lo, place.offset), min(hi, end)
            if start >= stop:
                continue
            if found and found[-1].group == place.group:
                found[-1] = replace(found[-1], stop=stop)
            else:
                found.append(Run(place.group, start, stop, first + start - lo))
        return found

    def pieces(self, rank: int, *, in_shard: bool) -> list[Piece]:
        """The parts of parameters that `rank` owns; positions in its shard vector, or in the whole vector.

        A piece's `parameter` is the parameter's place in the order of names, which does not depend on the layout.
        """
        number = {name: index for index, name in enumerate(sorted(self.places))}
        shard_cuts = self.shard_cuts(rank)
        found = []
        for index, bucket in enumerate(self.buckets):
            lo, hi = self.cuts(index)[rank:rank + 2]
            for name in bucket.names:
                place = self.places[name]
                start, stop = max(lo, place.offset), min(hi, place.offset + place.size)
                if start < stop:
                    position = shard_cuts[index] + start - lo if in_shard else start
                    found.append(Piece(number[name], start - place.offset, stop - place.offset, position))
        return found


def in_buckets(shapes: Mapping[str, tuple[int, ...]], num_ranks: int, bucket_elements: int,
               group_of: Mapping[str, int] | None = None) -> Layout:
    """The layout of stages 0 to 2: `shapes` in forward order, buckets of at most `bucket_elements`, or one parameter."""
    groups: list[list[str]] = []
    filled = 0
    for name in reversed(shapes):
        size = _padded(math.prod(shapes[name]))
        if not groups or (filled and filled + size > bucket_elements):
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return _laid_out(shapes, groups, num_ranks, group_of)


def by_layer(shapes: Mapping[str, tuple[int, ...]], layers: Sequence[Sequence[str]], num_ranks: int,
             group_of: Mapping[str, int] | None = None) -> Layout:
    """The layout of stage 3: one bucket per layer, `layers` in forward order; layers without parameters have none."""
    return _laid_out(shapes, [list(reversed(names)) for names in reversed(layers) if names], num_ranks, group_of)


def formula_bytes(layout: Layout, *, stage: int, itemsize: int, num_states: int, ranks_per_node: int, num_nodes: int,
                  shared: bool) -> dict[str, float]:
    """Bytes per rank by purpose, in parameters n and ranks P, for `num_states` arrays of optimizer state.

    Stage 0: n + n + k n elements; 1: n + n + k n / P; 2: n + n / P + k n / P; 3: all of them / P. Shared parameters count
    once per node. Buffers: at stage 2 two buckets; at stage 3 the largest layer once gathered and twice as gradients;
    with several nodes, one arriving contribution per other node to the largest shard, or a few segments of it. Padding is
    not counted.
    """
    n, ranks = layout.num_elements, layout.num_ranks
    copies = 1 / ranks_per_node if shared else 1
    slots = min(2, len(layout.buckets)) if stage >= 2 else 0
    gathered = layout.largest_bucket * copies if stage == 3 else 0
    arriving = landing_bytes(layout.largest_shard * itemsize, "network", num_nodes - 1)
    elements = {
        "parameters": n / ranks if stage == 3 else n * copies,
        "gradients": n / ranks if stage >= 2 else n,
        "optimizer_states": num_states * (n / ranks if stage >= 1 else n),
        "buffers": slots * layout.largest_bucket + gathered,
    }
    found = {purpose: elements[purpose] * itemsize for purpose in PURPOSES}
    found["buffers"] += arriving
    return found


def _laid_out(shapes: Mapping[str, tuple[int, ...]], buckets_of_names: Iterable[Sequence[str]], num_ranks: int,
              group_of: Mapping[str, int] | None) -> Layout:
    places: dict[str, Place] = {}
    buckets: list[Bucket] = []
    offset = 0
    group_of = group_of or {}
    for names in buckets_of_names:
        start, names = offset, sorted(names, key=lambda name: group_of.get(name, 0))      # which keeps their order
        for name in names:
            places[name] = Place(name, tuple(shapes[name]), offset, len(buckets), group_of.get(name, 0))
            offset += _padded(places[name].size)
        buckets.append(Bucket(start, offset, tuple(names)))
    return Layout(places, tuple(buckets), num_ranks)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
