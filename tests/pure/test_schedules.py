"""Every schedule is proven by playing all ranks: each contribution arrives exactly once, in the order that is claimed."""

from __future__ import annotations

from functools import partial

import pytest

from hpczero.collectives import butterfly, hierarchical, pairwise, ring, tree
from hpczero.collectives.order import balanced, canonical, depth, leaves, program
from hpczero.collectives.schedule import Message, Step, draw, exchange, simulate, spans, within
from hpczero.topology import NodeMap

SIZES = range(1, 65)

ALL_REDUCE = {
    "tree": tree.all_reduce,
    "ring": ring.all_reduce,
    "butterfly": butterfly.all_reduce,
    "halving": butterfly.halving_all_reduce,
    "pairwise": pairwise.all_reduce,
}
REDUCE_SCATTER = {
    "ring": ring.reduce_scatter,
    "halving": butterfly.halving_reduce_scatter,
    "pairwise": pairwise.reduce_scatter,
}
ALL_GATHER = {"ring": ring.all_gather, "halving": butterfly.doubling_all_gather, "pairwise": pairwise.all_gather}
NODE_MAPS = [NodeMap(nodes) for nodes in (
    (0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 0), (0, 0, 1, 1, 2), (0, 0, 0, 1), (0, 1, 1, 1, 2, 2),
    (0, 1, 2, 0, 1, 2, 0), (0, 0, 0, 1, 1, 2), tuple(range(7)), (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1),
    tuple(rank // 4 for rank in range(64)), tuple(rank % 5 for rank in range(63)),
)]


def once(rank: int) -> int:
    """Rank's contribution as a digit of its own in a large integer: a sum then counts how often each one arrived."""
    return 1 << 16 * rank


def everyone(size: int) -> int:
    return sum(map(once, range(size)))


def contributions(size: int, blocks: int) -> list[list[int]]:
    return [[once(rank)] * blocks for rank in range(size)]


class Pairs:
    """Numbers every distinct addition (left, right), so that large trees of additions are cheap to compare."""

    def __init__(self, *, commute: bool = False):
        self.commute, self.seen = commute, {}

    def __call__(self, left: int, right: int) -> int:
        key = (min(left, right), max(left, right)) if self.commute else (left, right)
        return self.seen.setdefault(key, 1000 + len(self.seen))

    def tree(self, part) -> int:
        return part if isinstance(part, int) else self(self.tree(part[0]), self.tree(part[1]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_brings_every_contribution_to_every_rank_exactly_once(name, size):
    blocks = butterfly.num_halves(size) if name == "halving" else size
    held = contributions(size, blocks)
    simulate(ALL_REDUCE[name], size, held)
    assert held == [[everyone(size)] * blocks] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REDUCE_SCATTER)
def test_reduce_scatter_leaves_each_rank_its_block_summed_exactly_once_over_every_rank(name, size):
    held = contributions(size, size)
    simulate(REDUCE_SCATTER[name], size, held)
    assert [held[rank][rank] for rank in range(size)] == [everyone(size)] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL_GATHER)
def test_all_gather_brings_every_block_to_every_rank_unchanged(name, size):
    held = [[f"block of {rank}" if block == rank else None for block in range(size)] for rank in range(size)]
    simulate(ALL_GATHER[name], size, held)
    assert held == [[f"block of {block}" for block in range(size)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_reduce_and_broadcast_work_from_every_root(size):
    for root in {0, 1 % size, size // 2, size - 1}:
        for reduce in (tree.reduce, pairwise.reduce):
            held = contributions(size, size)
            simulate(partial(reduce, root=root), size, held)
            assert held[root] == [everyone(size)] * size
        held = [[rank] * size for rank in range(size)]
        simulate(partial(tree.broadcast, root=root), size, held)
        assert held == [[root] * size] * size


@pytest.mark.parametrize("nodes", NODE_MAPS, ids=lambda nodes: "".join(map(str, nodes.node_of[:12])))
def test_hierarchical_works_on_any_node_map_and_crosses_the_network_with_the_fewest_bytes(nodes):
    size, num_nodes = nodes.size, len(nodes.nodes)

    def schedule(rank, _):
        return hierarchical.all_reduce(rank, nodes)

    held = contributions(size, size)
    simulate(schedule, size, held)
    assert held == [[everyone(size)] * size] * size
    for node, ranks in enumerate(nodes.nodes):
        leaving = sum(len(message.blocks) for rank in ranks for step in schedule(rank, size) for message in step.send
                      if nodes.node_of[message.peer] != node)
        # Out: the sums of all blocks owned elsewhere; then the own blocks, once to every other node.
        assert leaving == (size - len(ranks)) + len(ranks) * (num_nodes - 1)


def pairs(size: int, blocks: int) -> list[list]:
    return [[rank] * blocks for rank in range(size)]


@pytest.mark.parametrize("size", [*range(1, 20), 31, 32, 33, 47, 63, 64])
def test_pairwise_and_the_binomial_tree_add_in_the_canonical_order_at_every_size(size):
    for schedule in (pairwise.all_reduce, tree.all_reduce):
        held, add = pairs(size, size), Pairs()
        simulate(schedule, size, held, add)
        assert held == [[add.tree(balanced(range(size)))] * size] * size


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_butterflies_add_in_the_canonical_order_at_powers_of_two(size):
    for name in ("butterfly", "halving"):
        # Addition commutes in IEEE arithmetic, so a pair counts as the same in either order.
        held, add = pairs(size, size), Pairs(commute=True)
        simulate(ALL_REDUCE[name], size, held, add)
        assert held == [[add.tree(balanced(range(size)))] * size] * size


def test_a_folded_butterfly_does_not_add_in_the_canonical_order():
    held, add = pairs(5, 5), Pairs(commute=True)
    simulate(butterfly.all_reduce, 5, held, add)
    assert held[0][0] != add.tree(balanced(range(5)))


@pytest.mark.parametrize("nodes", NODE_MAPS, ids=lambda nodes: "".join(map(str, nodes.node_of[:12])))
def test_hierarchical_adds_in_the_canonical_order_of_its_node_map(nodes):
    held, add = pairs(nodes.size, nodes.size), Pairs()
    simulate(lambda rank, _: hierarchical.all_reduce(rank, nodes), nodes.size, held, add)
    assert held == [[add.tree(canonical(nodes.nodes))] * nodes.size] * nodes.size


def test_the_canonical_tree_has_the_largest_power_of_two_on_its_left():
    assert balanced(range(5)) == (((0, 1), (2, 3)), 4)
    assert balanced(range(7)) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert canonical([[0, 2], [1, 3, 4]]) == ((0, 2), ((1, 3), 4))


@pytest.mark.parametrize("size", [*range(1, 20), 33, 64])
def test_a_fold_program_computes_its_tree(size):
    tree_of_ranks = balanced(range(size))
    instructions = program(tree_of_ranks, {rank: rank for rank in range(size)})
    stack = []
    for code, *rows in instructions.tolist():
        if code == 0:
            right = stack.pop()
            stack.append((stack.pop(), right))
        else:
            stack.append(balanced(rows[:code]))
    assert stack == [tree_of_ranks]
    assert depth(instructions) <= max(1, size.bit_length() - 1)
    assert list(leaves(tree_of_ranks)) == list(range(size))


def test_the_drawings_in_the_docstrings_are_what_runs():
    nodes = NodeMap((0, 0, 1))
    for module, table in [(ring, draw(ring.reduce_scatter, 3)), (tree, draw(tree.broadcast, 5)),
                          (butterfly, draw(butterfly.halving_reduce_scatter, 4)), (pairwise, draw(pairwise.reduce_scatter, 3)),
                          (hierarchical, draw(lambda rank, _: hierarchical.all_gather(rank, nodes), 3))]:
        drawn = [line.strip() for line in table.splitlines()]
        assert all(line in module.__doc__ for line in drawn), "\n".join([module.__name__, *drawn])


def test_spans_are_the_runs_of_consecutive_blocks():
    assert spans([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
    assert spans([]) == []


def test_within_renames_ranks_and_widens_blocks():
    steps = list(within(ring.reduce_scatter(0, 2), [3, 5], [[0, 1], [2, 3]]))
    assert steps == [Step((Message(5, [2, 3]),), (Message(5, [0, 1]),), add=True)]


def test_simulate_finds_a_deadlock_and_a_message_nobody_reads():
    with pytest.raises(RuntimeError, match="never come"):
        simulate(lambda rank, size: [exchange(1 - rank, [], 1 - rank, [0])], 2, pairs(2, 1))
    with pytest.raises(RuntimeError, match="never received"):
        simulate(lambda rank, size: [exchange(1 - rank, [0], 1 - rank, [])], 2, pairs(2, 1))
