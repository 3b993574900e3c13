"""What each algorithm guarantees, checked by playing it; and that the rule always finds one that may run."""

from __future__ import annotations

import itertools

import pytest

from hpczero.collectives import butterfly, hierarchical, pairwise, ring, tree
from hpczero.collectives.order import balanced, canonical
from hpczero.collectives.schedule import simulate
from hpczero.collectives.selection import ALGORITHMS, ORDERS, Call, choose, keeps, why_not
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap

NODE_MAPS = [NodeMap(nodes) for nodes in (
    (0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2, 2), (0,) * 8,
    (0, 0, 1, 1, 2), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 3, 4, 5, 6),
)]


def order_of(name, nodes):
    """The additions of an all-reduce, as trees in which the two sides of an addition count as one."""
    schedule = {
        "tree": tree.all_reduce, "ring": ring.all_reduce, "butterfly": butterfly.all_reduce,
        "halving": butterfly.halving_all_reduce,
        "pairwise": lambda rank, size: pairwise.all_reduce(rank, size, canonical(nodes.nodes)),
        "hierarchical": lambda rank, size: hierarchical.all_reduce(rank, nodes),
    }[name]
    blocks = butterfly.num_halves(nodes.size) if name == "halving" else nodes.size
    held = [[rank] * blocks for rank in range(nodes.size)]
    simulate(schedule, nodes.size, held, lambda left, right: frozenset((left, right)))
    return set(held[0])


def as_sets(part):
    return part if isinstance(part, int) else frozenset(map(as_sets, part))


@pytest.mark.parametrize("nodes", NODE_MAPS, ids=lambda nodes: "".join(map(str, nodes.node_of)))
@pytest.mark.parametrize("name", ["tree", "ring", "butterfly", "halving", "pairwise", "hierarchical"])
def test_an_algorithm_that_claims_an_order_adds_in_it(name, nodes):
    found = order_of(name, nodes)
    in_canonical, in_world = (found == {as_sets(order)} for order in (canonical(nodes.nodes), balanced(range(nodes.size))))
    assert keeps(name, "any", nodes)
    assert in_canonical or not keeps(name, "canonical", nodes)
    if name != "pairwise":          # which is told the order: the one it was told here is the canonical one
        assert in_world or not keeps(name, "world", nodes)
    if name in ("tree", "ring", "hierarchical"):
        assert keeps(name, "canonical", nodes) == in_canonical


@pytest.mark.parametrize("nodes", NODE_MAPS, ids=lambda nodes: "".join(map(str, nodes.node_of)))
def test_half_types_keep_an_order_only_where_a_sum_is_rounded_once(nodes):
    for name in ("tree", "butterfly", "halving", "ring", "hierarchical"):
        claimed = keeps(name, "canonical", nodes, is_half=True)
        one_level = len(nodes.nodes) in (1, nodes.size)
        assert not claimed or nodes.size <= 2 or (name == "hierarchical" and one_level)
    assert keeps("pairwise", "canonical", nodes, is_half=True)


def test_the_system_promises_no_order():
    assert not keeps("system", "canonical", NODE_MAPS[3])
    assert not keeps("system", "world", NODE_MAPS[3])


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_adaptive_always_finds_an_algorithm_that_can_run_and_keeps_the_order(operation):
    for nodes, order, nbytes, place in itertools.product(NODE_MAPS, ORDERS, (0, 1000, 10**8), ("host", "device", "window")):
        call = Call(operation, nbytes, nodes, order, on_device=place == "device", in_window=place == "window")
        name = choose(call)
        assert name in ALGORITHMS[operation] and why_not(call, name) is None
        assert name != "system"


def test_a_name_that_does_not_exist_cannot_run_or_breaks_the_order_is_refused_with_the_reason():
    two_nodes, five = NodeMap((0, 0, 1)), NodeMap((0,) * 5)
    for call, name, reason in [
        (Call("all_reduce", 8, five, "any"), "rings", "is not one of"),
        (Call("all_reduce", 8, two_nodes, "any"), "window", "one node"),
        (Call("all_reduce", 8, five, "any", on_device=True), "window", "device"),
        (Call("all_reduce", 8, five, "canonical"), "ring", "order='canonical'"),
        (Call("broadcast", 8, five, "any"), "ring", "is not one of"),
        (Call("all_reduce", 8, five, "sorted"), "tree", "order='sorted'"),
        (Call("all_reduce", 8, five, "any", is_half=True), "system", "half types"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            choose(call, name)
