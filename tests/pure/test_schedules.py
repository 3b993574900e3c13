"""What schedules are made of: steps, how they are combined, played and drawn, and the forms that other files call.

`test_algorithms` proves every algorithm of the table.
"""

from __future__ import annotations

import textwrap
from functools import partial

import pytest

from hpczero.collectives import butterfly, circulant, hierarchical, pairwise, ring, tree
from hpczero.collectives.order import balanced, canonical, depth, leaves, program
from hpczero.collectives.schedule import Message, Step, draw, exchange, folds, merged, rounds, simulate, spans, within
from hpczero.topology import NodeMap

SIZES = [*range(1, 20), 31, 32, 33, 47, 63, 64]
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
def test_blocks_are_scattered_from_and_gathered_at_every_root(size):
    for root in {*range(min(size, 9)), size - 1}:
        held = [[block if rank == root else None for block in range(size)] for rank in range(size)]
        simulate(partial(tree.scatter, root=root), size, held)
        assert [held[rank][rank] for rank in range(size)] == list(range(size))
        held = [[block if rank == block else None for block in range(size)] for rank in range(size)]
        simulate(partial(tree.gather, root=root), size, held)
        assert held[root] == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_the_binomial_tree_adds_in_the_order_of_all_ranks_whatever_the_root_is(size):
    for root in {*range(min(size, 9)), size // 2, size - 1}:
        held, add = pairs(size, 1), Pairs(commute=True)
        simulate(partial(tree.reduce, root=root, blocks=[0]), size, held, add)
        assert held[root] == [add.tree(balanced(range(size)))]
        assert len(rounds(partial(tree.reduce, root=root), size)) == (size - 1).bit_length()


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
    for schedule in (butterfly.all_reduce, butterfly.halving_all_reduce):
        # Addition commutes in IEEE arithmetic, so a pair counts as the same in either order.
        held, add = pairs(size, size), Pairs(commute=True)
        simulate(schedule, size, held, add)
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


def drawn(module):
    """The tables in a module's docstring, as texts without indent."""
    blocks = textwrap.dedent(module.__doc__.split("\n", 1)[1]).split("\n\n")
    return [textwrap.dedent(block).strip("\n") for block in blocks if "round 0" in block]


def test_the_drawings_in_the_docstrings_are_what_runs():
    three, five = NodeMap((0, 0, 1)), NodeMap((0, 0, 1, 2, 2))
    for module, tables in [
        (ring, [draw(ring.reduce_scatter, 3), draw(partial(ring.reduce_scatter, segments=2), 3)]),
        (tree, [draw(tree.broadcast, 5), draw(partial(tree.double_broadcast, segments=2), 5)]),
        (butterfly, [draw(butterfly.halving_reduce_scatter, 4)]),
        (pairwise, [draw(pairwise.reduce_scatter, 3)]),
        (circulant, [draw(circulant.reduce_scatter, 5)]),
        (hierarchical, [
            draw(lambda rank, _: hierarchical.all_gather(rank, three), 3),
            draw(lambda rank, _: hierarchical.all_reduce(rank, five, hierarchical.even(five)), 5),
            draw(lambda rank, _: hierarchical.leader_all_reduce(rank, five), 5),
        ]),
    ]:
        assert drawn(module) == [textwrap.dedent(table) for table in tables]


def test_spans_are_the_runs_of_consecutive_blocks():
    assert spans([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
    assert spans([]) == []


def test_within_renames_ranks_and_widens_blocks():
    steps = list(within(ring.reduce_scatter(0, 2), [3, 5], [[0, 1], [2, 3]]))
    assert steps == [Step((Message(5, [2, 3]),), (Message(5, [0, 1]),), add=True)]


def test_within_sends_nothing_for_blocks_that_become_none():
    steps = list(within(pairwise.all_gather(0, 3), [7, 8, 9], [[], [4], []]))
    assert steps == [Step((), (Message(8, [4]),))]
    fold = next(within(pairwise.reduce_scatter(0, 3), [7, 8, 9], [[], [4], []]))
    assert fold == Step((Message(8, [4]),))


def test_merged_steps_send_each_peer_one_message():
    first = exchange(1, [0], 2, [1], add=True)
    second = exchange(1, [5], 3, [6], add=True)
    assert merged([first, second]) == Step((Message(1, [0, 5]),), (Message(2, [1]), Message(3, [6])), add=True)
    assert merged([first]) is first


def test_merged_folds_are_taken_apart_again_each_with_the_ranks_that_contribute_to_it():
    first = Step((), (Message(1, [0]), Message(2, [0])), fold=((0, 1), 2))
    second = Step((), (Message(1, [5]), Message(3, [5])), fold=((0, 1), 3))
    both = merged([first, second])
    assert both.fold == ((0, 1), (2, 3))
    assert folds(both, 0) == [([0, 1], ((0, 1), 2)), ([2, 3], ((0, 1), 3))]
    held, add = [[rank] * 6 for rank in range(4)], Pairs()
    sends = [[], [Message(0, [0]), Message(0, [5])], [Message(0, [0])], [Message(0, [5])]]
    simulate(lambda rank, _: [both if rank == 0 else Step(tuple(sends[rank]))], 4, held, add)
    assert (held[0][0], held[0][5], held[0][1]) == (add.tree(((0, 1), 2)), add.tree(((0, 1), 3)), 0)


def test_a_step_is_drawn_in_the_round_in_which_it_can_begin():
    table = rounds(tree.broadcast, 5)
    assert [sorted(rank for rank, step in steps.items() if step.send) for steps in table] == [[0], [0], [0, 2]]


def test_simulate_finds_a_deadlock_and_a_message_nobody_reads():
    with pytest.raises(RuntimeError, match="never come"):
        simulate(lambda rank, size: [exchange(1 - rank, [], 1 - rank, [0])], 2, pairs(2, 1))
    with pytest.raises(RuntimeError, match="never received"):
        simulate(lambda rank, size: [exchange(1 - rank, [0], 1 - rank, [])], 2, pairs(2, 1))


def test_simulate_finds_a_deadlock_that_only_buffers_would_hide():
    def schedule(rank, size):
        yield exchange(1 - rank, [0], 1 - rank, [])      # both send first: MPI keeps no copy of a large message
        yield exchange(1 - rank, [], 1 - rank, [0])

    with pytest.raises(RuntimeError, match="wait for ever"):
        simulate(schedule, 2, pairs(2, 1))


def test_simulate_finds_ends_that_disagree_and_contributions_that_come_twice():
    with pytest.raises(RuntimeError, match="expects blocks"):
        simulate(lambda rank, size: [exchange(1 - rank, [rank], 1 - rank, [rank])], 2, pairs(2, 2))
    twice = [Step((Message(1, [0]), Message(1, [0]))), Step((), (Message(0, [0]),) * 2, fold=(0, 1))]
    with pytest.raises(RuntimeError, match="twice"):
        simulate(lambda rank, size: [twice[rank]], 2, pairs(2, 1))
