"""Every algorithm of the table, for every operation, is played by all ranks: who ends with what, in which order it was
added, in how many rounds and with how many bytes, on one node and on several of any shape."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest

from hpczero.collectives import ring, tree
from hpczero.collectives.algorithms import SCHEDULES, Plan, even_offsets, plan
from hpczero.collectives.order import balanced, canonical
from hpczero.collectives.schedule import rounds, simulate
from hpczero.collectives.selection import keeps
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap

ALL = [(operation, name) for operation, builders in SCHEDULES.items() for name in builders]
SUMMING = [(operation, name) for operation, name in ALL if operation not in ("all_gather", "broadcast")]
SIZES = [*range(1, 10), 13, 16, 17, 33]
NODE_MAPS = [NodeMap(nodes) for nodes in (
    (0, 1), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 1, 2, 2), (0, 0, 0, 1), (0, 1, 1, 1, 2, 2),
    (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 0, 1, 2, 0), (0, 0, 0, 1, 1, 2), (0, 1, 2, 3, 3), tuple(range(7)),
    (0, 0, 0, 0, 1, 1, 1, 1), (0, 1) * 8, (0, 1, 1, 2, 0, 2, 2, 2, 1, 3, 4, 4),
    tuple(rank // 4 for rank in range(32)), tuple(rank % 5 for rank in range(33)),
)]


def name_of(nodes):
    return "".join(map(str, nodes.node_of[:12]))


class Sums:
    """Additions as numbers, so that large expressions are cheap to compare; the two sides of one count as the same,
    since addition commutes in IEEE arithmetic. Refuses to add a contribution to a sum that has it."""

    def __init__(self, size: int):
        self._known: dict[tuple[int, int], int] = {}
        self.members = [1 << rank for rank in range(size)]       # of every expression, as a bit per rank

    def __call__(self, left: int, right: int) -> int:
        key = (left, right) if left < right else (right, left)
        if key not in self._known:
            assert not self.members[left] & self.members[right], "a contribution is added twice"
            self._known[key] = len(self.members)
            self.members.append(self.members[left] | self.members[right])
        return self._known[key]

    def of(self, part) -> int:
        return part if isinstance(part, int) else self(self.of(part[0]), self.of(part[1]))


def roots(operation, size):
    return sorted({0, size // 2, size - 1}) if operation in ("broadcast", "reduce") else [0]


def sizes_in_bytes(name, size):
    """Vectors for which an algorithm cuts one segment, and a few."""
    return {"segmented_ring": (0, size * 2**20), "double_tree": (0, 2**17)}.get(name, (0,))


def results(operation, made: Plan, size, root, held):
    """What each rank that must have a result ends with: {rank: its blocks}."""
    if operation == "reduce":
        return {root: held[root]}
    if operation == "reduce_scatter":
        width = made.per_shard
        return {rank: held[rank][rank * width:(rank + 1) * width] for rank in range(size)}
    return dict(enumerate(held))


def play(operation, name, nodes, root, *, nbytes=0, order=None):
    """Proves one algorithm for one set of nodes; gives the expressions of all blocks, and what made them."""
    size = nodes.size
    made = plan(operation, name, nodes, root=root, tree=order, nbytes=nbytes)
    add = Sums(size)
    if operation in ("broadcast", "all_gather"):
        owner = [root] * made.num_blocks if operation == "broadcast" else \
            [block // made.per_shard for block in range(made.num_blocks)]
        held = [[block if rank == owner[block] else None for block in range(made.num_blocks)] for rank in range(size)]
        simulate(lambda rank, _: made.steps(rank), size, held)
        assert held == [list(range(made.num_blocks))] * size
        return set(), add
    held = [[rank] * made.num_blocks for rank in range(size)]
    simulate(lambda rank, _: made.steps(rank), size, held, add)
    found = results(operation, made, size, root, held)
    if operation == "all_reduce":
        assert all(blocks == held[0] for blocks in found.values()), "not all ranks hold the same bits"
    sums = {expression for blocks in found.values() for expression in blocks}
    assert {add.members[expression] for expression in sums} == {(1 << size) - 1}, "a contribution is missing"
    assert sum(map(len, found.values())) == made.num_blocks * (size if operation == "all_reduce" else 1)
    return sums, add


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation, name", ALL)
def test_every_contribution_arrives_exactly_once_and_all_ranks_hold_the_same_sum(operation, name, size):
    for root, nbytes in itertools.product(roots(operation, size), sizes_in_bytes(name, size)):
        play(operation, name, NodeMap((0,) * size), root, nbytes=nbytes)


@pytest.mark.parametrize("nodes", NODE_MAPS, ids=name_of)
@pytest.mark.parametrize("operation, name", ALL)
def test_the_same_holds_over_nodes_of_any_size_and_placement(operation, name, nodes):
    for root in roots(operation, nodes.size):
        play(operation, name, nodes, root)


@pytest.mark.soak
@pytest.mark.parametrize("size", range(1, 65))
def test_the_same_holds_at_every_size_to_64(size):
    shapes = {(0,) * size, tuple(range(size)), *(tuple(rank // width for rank in range(size)) for width in (2, 3, 8)),
              *(tuple(rank % m for rank in range(size)) for m in (2, 3, 5) if m <= size)}
    for (operation, name), shape in itertools.product(ALL, shapes):
        for root in {0, size - 1} if operation in ("broadcast", "reduce") else {0}:
            play(operation, name, NodeMap(shape), root)


@pytest.mark.soak
@pytest.mark.parametrize("operation, name", ALL)
def test_the_same_holds_for_1024_ranks(operation, name):
    size = 1024
    # Sums of numbers this large are equal only if every one is in there once: expressions would need too much memory.
    weights = random.Random(operation + name)
    weight = [weights.getrandbits(60) for _ in range(size)]
    by_nodes = name.startswith(("hierarchical", "leader"))
    for nodes in [NodeMap(tuple(rank // 8 for rank in range(size)))] * by_nodes + [NodeMap((0,) * size)]:
        made = plan(operation, name, nodes, root=1 if operation in ("broadcast", "reduce") else 0)
        if operation in ("broadcast", "all_gather"):
            blocks = range(made.num_blocks)
            source = [1 if operation == "broadcast" else block for block in blocks]
            held = [[block if rank == source[block] else None for block in blocks] for rank in range(size)]
            simulate(lambda rank, _, made=made: made.steps(rank), size, held)
            assert held == [list(range(made.num_blocks))] * size
        else:
            held = [[weight[rank]] * made.num_blocks for rank in range(size)]
            simulate(lambda rank, _, made=made: made.steps(rank), size, held)
            found = results(operation, made, size, 1, held)
            assert {value for blocks in found.values() for value in blocks} == {sum(weight)}


def promised(name, order, nodes):
    """What the docstring of `algorithms` says that the additions depend on."""
    size, num_nodes = nodes.size, len(nodes.nodes)
    world = {"tree": True, "butterfly": size & size - 1 == 0, "halving": size & size - 1 == 0}
    nodes_alone = {
        "hierarchical": True, "leader": True, "hierarchical:halving": num_nodes & num_nodes - 1 == 0,
        "hierarchical:ring": num_nodes <= 2, "hierarchical:circulant": num_nodes <= 2,
    }
    if size <= 2 or name == "pairwise":
        return True
    same = canonical(nodes.nodes) == balanced(range(size))
    return ((order == "world" or same) and world.get(name, False)
            or (order == "canonical" or same) and nodes_alone.get(name, False))


@pytest.mark.parametrize("nodes", [NodeMap((0,) * 5), NodeMap((0,) * 8), *NODE_MAPS], ids=name_of)
@pytest.mark.parametrize("operation, name", SUMMING)
def test_an_algorithm_that_promises_an_order_adds_in_it_at_every_root(operation, name, nodes):
    orders = {"canonical": canonical(nodes.nodes), "world": balanced(range(nodes.size))}
    for root, (order, wanted) in itertools.product(roots(operation, nodes.size), orders.items()):
        if promised(name, order, nodes) or keeps(name, order, nodes):
            sums, add = play(operation, name, nodes, root, order=wanted)
            assert sums == {add.of(wanted)}


@pytest.mark.parametrize("name, nodes", [
    ("ring", (0,) * 3), ("segmented_ring", (0,) * 3), ("circulant", (0,) * 3), ("double_tree", (0,) * 3),
    ("butterfly", (0,) * 5), ("halving", (0,) * 5), ("hierarchical:ring", (0, 1, 2)),
    ("hierarchical:circulant", (0, 1, 2)), ("hierarchical:halving", (0, 1, 2, 3, 4)), ("tree", (0, 1, 0)),
])
def test_the_others_do_not_add_in_the_canonical_order(name, nodes):
    nodes = NodeMap(nodes)
    sums, add = play("all_reduce", name, nodes, 0)
    assert not promised(name, "canonical", nodes) and sums != {add.of(canonical(nodes.nodes))}


def lg(size):
    return (size - 1).bit_length()


def folded(size, times):
    """Rounds of a butterfly that takes `times` for each doubling, and two for the ranks beyond a power of two."""
    return times * (size.bit_length() - 1) + (2 if size & size - 1 else 0)


def of_segments(size, segments):
    return lg(size) + segments - 1 if size > 1 else 0


ROUNDS = {
    ("all_reduce", "tree"): lambda p, s: 2 * lg(p),
    ("all_reduce", "double_tree"): lambda p, s: 2 * of_segments(p, s),
    ("all_reduce", "ring"): lambda p, s: 2 * (p - 1),
    ("all_reduce", "segmented_ring"): lambda p, s: 2 * (p - 1) * s,
    ("all_reduce", "butterfly"): lambda p, s: folded(p, 1),
    ("all_reduce", "halving"): lambda p, s: folded(p, 2),
    ("all_reduce", "circulant"): lambda p, s: 2 * lg(p),
    ("all_reduce", "leader"): lambda p, s: 2 * lg(p),
    ("reduce_scatter", "ring"): lambda p, s: p - 1,
    ("reduce_scatter", "segmented_ring"): lambda p, s: (p - 1) * s,
    ("reduce_scatter", "halving"): lambda p, s: folded(p, 1),
    ("reduce_scatter", "circulant"): lambda p, s: lg(p),
    ("broadcast", "tree"): lambda p, s: lg(p),
    ("broadcast", "double_tree"): of_segments,
    ("broadcast", "circulant"): lambda p, s: 2 * lg(p),
    ("broadcast", "leader"): lambda p, s: lg(p),
}
BACKWARDS = {"reduce_scatter": "all_gather", "broadcast": "reduce"}
ROUNDS |= {(BACKWARDS[operation], name): found for (operation, name), found in ROUNDS.items() if operation in BACKWARDS}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("operation, name", ALL)
def test_the_number_of_rounds_on_one_node_is_that_of_the_docstring(operation, name, size):
    for root, nbytes in itertools.product(roots(operation, size), sizes_in_bytes(name, size)):
        made = plan(operation, name, NodeMap((0,) * size), root=root, nbytes=nbytes)
        segments = made.num_blocks // (2 if name == "double_tree" else size)
        one_way = operation in ("reduce_scatter", "all_gather")
        pairwise = 0 if size == 1 else 1 if one_way else 2         # pairwise and hierarchical: a round each way
        expected = ROUNDS[operation, name](size, segments) if (operation, name) in ROUNDS else pairwise
        assert len(rounds(lambda rank, _, made=made: made.steps(rank), size)) == expected


def sent(made, size, *, through=lambda rank, peer: True):
    """The part of the vector that each rank sends, and receives, over links that count."""
    out, into = Counter(), Counter()
    for rank in range(size):
        for step in made.steps(rank):
            for message in step.send:
                if through(rank, message.peer):
                    out[rank] += len(message.blocks)
                    into[message.peer] += len(message.blocks)
    return out, into


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 12, 31, 32])
def test_each_rank_sends_the_bytes_of_the_docstring(size):
    shard, flat = Fraction(1, size), NodeMap((0,) * size)
    for operation, name in ALL:
        made = plan(operation, name, flat, nbytes=sizes_in_bytes(name, size)[-1])
        out, into = ({Fraction(part, made.num_blocks) for part in side.values()} for side in sent(made, size))
        if operation in ("reduce_scatter", "all_gather") and (name != "halving" or size & size - 1 == 0):
            assert out == into == {1 - shard}
        if operation == "all_reduce" and name in ("ring", "segmented_ring", "circulant", "pairwise", "hierarchical"):
            assert out == into == {2 * (1 - shard)}
        if name == "double_tree":
            both = 2 if operation == "all_reduce" else 1
            assert max(out) <= both and max(into) <= both
        if name == "tree":
            assert max(out | into) == lg(size)      # the root: from its children, or to them


@pytest.mark.parametrize("nodes", NODE_MAPS, ids=name_of)
def test_every_card_carries_the_bound(nodes):
    num_nodes = len(nodes.nodes)

    def cards(operation, name, root=0):
        made = plan(operation, name, nodes, root=root)
        sides = sent(made, nodes.size, through=lambda rank, peer: nodes.node_of[rank] != nodes.node_of[peer])
        return [[sum(side[rank] for rank in ranks) for ranks in nodes.nodes] for side in sides], made.num_blocks

    for name in ("hierarchical", "hierarchical:ring", "hierarchical:circulant", "leader", "hierarchical:halving"):
        if name == "hierarchical:halving" and num_nodes & num_nodes - 1:
            continue
        (out, into), num_blocks = cards("all_reduce", name)
        assert [part * num_nodes for part in out + into] == [2 * (num_nodes - 1) * num_blocks] * 2 * num_nodes
        if name == "leader":
            continue
        (out, _), size = cards("reduce_scatter", name)
        assert out == [size - len(ranks) for ranks in nodes.nodes]
        (_, into), _ = cards("all_gather", name)
        assert into == [size - len(ranks) for ranks in nodes.nodes]
    for name, root in itertools.product(("hierarchical", "leader"), {0, nodes.size // 2, nodes.size - 1}):
        at_home = [node == nodes.node_of[root] for node in range(num_nodes)]
        (_, into), num_blocks = cards("broadcast", name, root)
        assert into == [0 if home else num_blocks for home in at_home]
        (out, _), num_blocks = cards("reduce", name, root)
        assert out == [0 if home else num_blocks for home in at_home]


@pytest.mark.parametrize("size", range(2, 34))
def test_in_the_double_tree_nobody_but_the_root_stands_above_others_in_both_trees(size):
    for root in {0, size // 2, size - 1}:
        above = [Counter(), Counter()]
        for rank in range(size):
            for step in tree.double_broadcast(rank, size, root):
                for message in step.send:
                    for block in message.blocks:
                        above[block][rank] += 1
        assert above[0].keys() & above[1].keys() == {root}
        assert all(children[root] == 1 and max(children.values()) <= 2 for children in above)


def test_in_the_segmented_ring_a_block_leaves_as_many_rounds_after_it_arrived_as_there_are_segments():
    segments = 3
    for schedule in (ring.reduce_scatter, ring.all_gather):
        steps = list(schedule(1, 4, segments))
        for earlier, later in zip(steps, steps[segments:], strict=False):
            assert earlier.recv[0].blocks == later.send[0].blocks


def test_larger_vectors_are_cut_into_more_segments_up_to_a_limit():
    for num_segments in (ring.num_segments, tree.num_segments):
        found = [num_segments(8, nbytes) for nbytes in (0, 1, 2**20, 2**24, 2**28)]
        assert found[:2] == [1, 1] and found == sorted(found) and found[-1] > found[2]
    assert ring.num_segments(2, 2**40) == ring.MOST_SEGMENTS
    assert tree.num_segments(1, 2**40) == 1


def test_no_block_is_smaller_than_its_neighbour_by_more_than_one_element():
    for name, count in itertools.product(SCHEDULES["all_reduce"], (0, 1, 4, 5, 6, 1000)):
        made = plan("all_reduce", name, NodeMap((0, 0, 1, 2, 2)))
        offsets = made.offsets(count)
        parts = [end - start for start, end in itertools.pairwise(offsets)]
        assert len(parts) == made.num_blocks and sum(parts) == count and max(parts) - min(parts) <= 1


def test_blocks_of_shards_follow_each_other_in_shards_of_any_size():
    made = plan("reduce_scatter", "segmented_ring", NodeMap((0,) * 3), nbytes=3 * 2**20)
    assert (made.per_shard, made.num_blocks) == (2, 6)
    assert made.offsets([0, 5, 5, 9]) == [0, 3, 5, 5, 5, 7, 9]
    assert made.offsets(7) == [0, 2, 3, 4, 5, 6, 7]
    assert plan("reduce_scatter", "ring", NodeMap((0,) * 3)).offsets([0, 5, 5, 9]) == [0, 5, 5, 9]
    assert even_offsets(7, 3) == [0, 3, 5, 7]


def test_whole_vectors_are_one_block_and_segments_none_unless_there_are_bytes_to_cut():
    assert plan("all_reduce", "tree", NodeMap((0,) * 4), nbytes=2**30).num_blocks == 1
    assert plan("all_reduce", "double_tree", NodeMap((0,) * 4)).num_blocks == 2
    assert plan("all_reduce", "double_tree", NodeMap((0,) * 4), nbytes=2**30).num_blocks > 2


def test_pairwise_follows_the_tree_it_is_given_and_else_the_canonical_one():
    nodes, other = NodeMap((0, 1, 0, 1)), ((3, 1), (0, 2))
    for operation in ("all_reduce", "reduce_scatter", "reduce"):
        for order, wanted in ((other, other), (None, canonical(nodes.nodes))):
            sums, add = play(operation, "pairwise", nodes, 0, order=order)
            assert sums == {add.of(wanted)}


def test_what_is_not_in_the_table_is_refused_with_the_nearest_name():
    flat = NodeMap((0, 0))
    for arguments, reason in [
        (("all_reduces", "ring"), "did you mean all_reduce?"),
        (("all_reduce", "circulent"), "algorithm='circulent' .* did you mean circulant?"),
        (("broadcast", "ring"), "broadcast: algorithm='ring' is not one of tree,"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            plan(*arguments, flat)
    with pytest.raises(ConfigError, match="root=2"):
        plan("reduce", "tree", flat, root=2)


def test_log_in_these_tests_rounds_up():
    assert all(lg(size) == math.ceil(math.log2(size)) for size in range(1, 100))
