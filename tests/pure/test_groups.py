"""The groups of a rank are those of the schedules that run, for any number of ranks and any nodes."""

from __future__ import annotations

import dataclasses

import pytest

from hpczero.collectives import butterfly, ring, tree
from hpczero.collectives.groups import butterfly_group, groups, ring_group, tree_group
from hpczero.topology import NodeMap

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 31, 64]
STRIPED, UNEQUAL, BLOCKS = NodeMap((0, 1, 0, 1, 2)), NodeMap((0, 0, 1)), NodeMap((0, 0, 0, 0, 1, 1, 1, 1))


@pytest.mark.parametrize("size", SIZES)
def test_parents_and_children_of_the_tree_agree_and_every_rank_hangs_below_the_root(size):
    trees = [tree_group(rank, size) for rank in range(size)]
    assert [rank for rank in range(size) if trees[rank].parent is None] == [0]
    for rank, group in enumerate(trees):
        assert all(trees[child].parent == rank for child in group.children)
        assert group.parent is None or rank in trees[group.parent].children
        assert group.depth == (0 if group.parent is None else trees[group.parent].depth + 1)
    assert {group.height for group in trees} == {max(group.depth for group in trees)}


@pytest.mark.parametrize("size", SIZES)
def test_results_come_down_the_tree_on_which_sums_climbed(size):
    for rank in range(size):
        steps = list(tree.broadcast(rank, size))
        assert [message.peer for step in steps for message in step.recv] == [
            parent for parent in [tree_group(rank, size).parent] if parent is not None]
        assert {message.peer for step in steps for message in step.send} == set(tree_group(rank, size).children)


def test_the_binomial_tree_of_8():
    root, leaf = tree_group(0, 8), tree_group(7, 8)
    assert (root.parent, root.children, root.depth, root.height) == (None, (1, 2, 4), 0, 3)
    assert (leaf.parent, leaf.children, leaf.depth, leaf.height) == (6, (), 3, 3)


@pytest.mark.parametrize("size", SIZES)
def test_the_ring_goes_round_once_and_every_step_keeps_to_it(size):
    seen, rank = [], 0
    for _ in range(size):
        seen.append(rank)
        group = ring_group(rank, size)
        assert ring_group(group.next, size).previous == rank and group.size == size
        for step in ring.all_reduce(rank, size):
            assert (step.send[0].peer, step.recv[0].peer) == (group.next, group.previous)
        rank = group.next
    assert rank == 0 and sorted(seen) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_partners_of_the_butterfly_meet_each_other_equally_often_in_no_more_stages_than_there_are(size):
    found = [butterfly_group(rank, size) for rank in range(size)]
    (stages,) = {group.stages for group in found}
    assert stages == max(len(group.partners) for group in found)
    for rank, group in enumerate(found):
        assert len(group.partners) == len(list(butterfly.all_reduce(rank, size)))
        for partner in group.partners:
            assert found[partner].partners.count(rank) == group.partners.count(partner)


def test_a_power_of_two_takes_as_many_stages_as_its_exponent_and_other_sizes_two_more():
    assert [butterfly_group(0, size).stages for size in (1, 2, 4, 8, 64)] == [0, 1, 2, 3, 6]
    assert [butterfly_group(0, size).stages for size in (3, 5, 6, 7)] == [3, 4, 4, 4]
    assert butterfly_group(3, 8).partners == (2, 1, 7)
    assert butterfly_group(1, 5).partners == (0, 0)      # hands its vector over, and gets the sum


def test_equal_nodes_exchange_between_ranks_at_the_same_place():
    found = groups(5, BLOCKS)
    assert found.node == (4, 5, 6, 7) and found.cross == (1, 5)


def test_a_smaller_node_meets_more_ranks_of_a_larger_one():
    assert [groups(rank, UNEQUAL).node for rank in range(3)] == [(0, 1), (0, 1), (2,)]
    assert [groups(rank, UNEQUAL).cross for rank in range(3)] == [(0, 2), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("nodes", [STRIPED, UNEQUAL, BLOCKS, NodeMap((0,)), NodeMap((0, 1, 2)), NodeMap((0, 0, 0))],
                         ids=str)
def test_nodes_divide_the_ranks_and_crossing_is_mutual_and_reaches_every_other_node(nodes):
    found = [groups(rank, nodes) for rank in range(nodes.size)]
    for rank, group in enumerate(found):
        assert group.node == nodes.nodes[nodes.node_of[rank]]
        others = [peer for peer in group.cross if peer != rank]
        assert all(rank in found[peer].cross for peer in others)
        assert {nodes.node_of[peer] for peer in others} == set(nodes.node_of) - {nodes.node_of[rank]}


def test_groups_cannot_be_changed():
    found = groups(0, STRIPED)
    for part in (found, found.tree, found.ring, found.butterfly):
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)
