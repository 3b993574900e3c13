"""Formulas against replays, replays against numbers worked out by hand and against the textbook."""

from __future__ import annotations

import itertools
import math

import pytest

from hpczero.collectives import pricing
from hpczero.collectives.algorithms import SCHEDULES, Plan, plan
from hpczero.collectives.links import Link, Links, SizeClass
from hpczero.collectives.schedule import Message, Step
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap

# Three classes of sizes, cards and memories that several messages fill, additions that take time.
MEASURED = Links(
    Link((SizeClass(8192, 1e-6, 2e-10, 7e-11), SizeClass(2**20 - 1, 3e-6, 1e-10, 6e-11),
          SizeClass(None, 9e-6, 1.1e-10, 8e-11))),
    Link((SizeClass(8192, 2e-5, 3e-9, 2e-9), SizeClass(2**20 - 1, 3e-5, 1e-9, 0.9e-9),
          SizeClass(None, 5e-5, 1.1e-9, 1e-9))),
    (("float32", 1e-10), ("float64", 2e-10)),
)
ALGORITHMS = [(operation, name) for operation, names in SCHEDULES.items() for name in names]
SHAPES = [(1, 1), (1, 2), (1, 5), (1, 8), (2, 1), (3, 1), (7, 1), (8, 1), (2, 2), (2, 3), (3, 2), (4, 4), (5, 3),
          (3, 4)]
QUICK_AT_512 = ("tree", "butterfly", "halving", "circulant", "leader", "hierarchical:circulant")


def equal_nodes(num_nodes: int, per_node: int) -> NodeMap:
    return NodeMap(tuple(node for node in range(num_nodes) for _ in range(per_node)))


def both(operation: str, name: str, num_nodes: int, per_node: int, nbytes: int) -> tuple[float, float]:
    """The replay's seconds and the formula's."""
    nodes = equal_nodes(num_nodes, per_node)
    replayed = pricing.price(plan(operation, name, nodes, nbytes=nbytes), nodes, nbytes, MEASURED)
    return replayed, pricing.predict(operation, name, num_nodes, per_node, nbytes, MEASURED)


def steps_of(*programs: list[Step], num_blocks: int = 1) -> Plan:
    return Plan(lambda rank: programs[rank], num_blocks)


WHOLE = range(1)
LINE = Links.assumed(10.0, 1.0, 0.5)


# Formulas


def test_every_algorithm_has_a_formula():
    assert {operation: set(names) for operation, names in pricing.PREDICTED.items()} == {
        operation: set(names) for operation, names in SCHEDULES.items()
    }


@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize(("operation", "name"), ALGORITHMS)
def test_a_formula_gives_what_a_replay_gives(operation, name, shape):
    for nbytes in (800, 10**6, 64 * 2**20):
        replayed, predicted = both(operation, name, *shape, nbytes)
        if name in pricing.ESTIMATED:
            assert replayed * (1 - 1e-9) <= predicted <= 2.1 * replayed
        else:
            assert predicted == pytest.approx(replayed, rel=1e-9, abs=0)


@pytest.mark.parametrize("name", QUICK_AT_512)
@pytest.mark.parametrize("shape", [(64, 8), (51, 10)], ids="{0[0]}x{0[1]}".format)
def test_at_512_ranks_too(name, shape):
    replayed, predicted = both("all_reduce", name, *shape, 2**20)
    assert predicted == pytest.approx(replayed, rel=1e-9, abs=0)


@pytest.mark.soak
@pytest.mark.parametrize(("operation", "name"), ALGORITHMS)
def test_at_512_ranks_all_of_them(operation, name):
    replayed, predicted = both(operation, name, 64, 8, 2**20)
    assert predicted == pytest.approx(replayed, rel=1.1 if name in pricing.ESTIMATED else 1e-9, abs=0)


@pytest.mark.parametrize("size", [2, 3, 6, 8, 12, 64])
def test_the_textbook_costs_of_one_rank_per_node(size):
    alpha, beta, gamma, nbytes = 3e-6, 1e-9, 2e-10, 10**6
    links = Links.assumed(alpha, beta, gamma)
    lg, part = math.ceil(math.log2(size)), (size - 1) / size * nbytes

    def cost(name: str, operation: str = "all_reduce") -> float:
        return pricing.predict(operation, name, size, 1, nbytes, links)

    binomial = lg * (2 * (alpha + nbytes * beta) + nbytes * gamma)
    if size & (size - 1) == 0:
        assert cost("tree") == pytest.approx(binomial)
    else:               # a message of a smaller subtree comes while the one before it is being added
        assert binomial - lg * nbytes * gamma < cost("tree") < binomial
    assert cost("ring") == pytest.approx(2 * (size - 1) * alpha + 2 * part * beta + part * gamma)
    assert cost("pairwise") == pytest.approx(2 * (size - 1) * alpha + 2 * part * beta + part * gamma)
    assert cost("circulant") == pytest.approx(2 * lg * alpha + 2 * part * beta + part * gamma)
    assert cost("circulant", "reduce_scatter") == pytest.approx(lg * alpha + part * beta + part * gamma)
    if size & (size - 1) == 0:
        assert cost("butterfly") == pytest.approx(lg * (alpha + nbytes * (beta + gamma)))
        assert cost("halving") == pytest.approx(2 * lg * alpha + 2 * part * beta + part * gamma)
    else:
        # Folding hands the whole vector over twice: Rabenseifner's algorithm on the largest power of two, and that.
        q = 2 ** (lg - 1)
        folded = (2 * (lg - 1) + 2) * alpha + (2 * (q - 1) / q + 2) * nbytes * beta + (1 + (q - 1) / q) * nbytes * gamma
        assert cost("halving") == pytest.approx(folded)


def test_hierarchical_keeps_to_the_bound_of_the_card_where_flat_circulant_floods_it():
    links = Links.assumed(0.0, 1e-9, node_beta_s=0.0)           # only the cards cost anything
    nbytes = 2**20
    bound = 2 * 3 / 4 * nbytes * 1e-9                           # 2 (m - 1) / m of the vector by every card
    assert pricing.predict("all_reduce", "hierarchical", 4, 8, nbytes, links) == pytest.approx(bound)
    assert pricing.predict("all_reduce", "halving", 4, 8, nbytes, links) == pytest.approx(bound)
    flooded = pricing.predict("all_reduce", "circulant", 4, 8, nbytes, links)
    assert 8 * bound < flooded < 10 * bound


@pytest.mark.parametrize("name", ["tree", "halving", "circulant", "hierarchical:circulant", "double_tree", "ring"])
def test_65536_ranks_have_a_price(name):
    links = Links.assumed(2e-6, 1e-10)
    seconds = pricing.predict("all_reduce", name, 8192, 8, 2**20, links)
    bound = 2 * (8191 / 8192) * 2**20 * 1e-10           # by each card, whatever happens inside
    assert bound <= seconds < (1.0 if name == "ring" else 0.02)


# Where the cheapest changes


def test_crossovers_are_where_the_cheapest_algorithm_changes():
    found = pricing.crossovers("all_reduce", 6, 1, MEASURED, sizes=(8, 2**26))
    assert found[0][0] == 8 and len(found) >= 2
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(found))
    for (_, before), (at, after) in itertools.pairwise(found):
        assert before != after
        assert pricing.fastest("all_reduce", 6, 1, at, MEASURED)[0] == after
        assert pricing.fastest("all_reduce", 6, 1, at - max(1, at // 40), MEASURED)[0] == before


def test_a_crossover_lies_where_two_costs_meet():
    alpha, beta = 1e-5, 1e-9
    found = pricing.crossovers("all_reduce", 8, 1, Links.assumed(alpha, beta), names=("butterfly", "halving"))
    # 3 (alpha + n beta) = 6 alpha + 7/4 n beta
    assert [name for _, name in found] == ["butterfly", "halving"]
    assert found[1][0] == pytest.approx(3 * alpha / (1.25 * beta), rel=0.03)


def test_one_rank_and_no_bytes_cost_nothing():
    assert pricing.predict("all_reduce", "ring", 1, 1, 10**6, MEASURED) == 0.0
    assert both("all_reduce", "ring", 2, 2, 0) == (0.0, 0.0)


def test_what_has_no_price_is_refused():
    for operation, name in (("all_reduce", "window"), ("reduce", "system"), ("scan", "ring"), ("broadcast", "ring")):
        with pytest.raises(ConfigError, match="no formula"):
            pricing.predict(operation, name, 2, 2, 100, MEASURED)
    with pytest.raises(ConfigError, match="at least one"):
        pricing.predict("all_reduce", "ring", 0, 2, 100, MEASURED)
    alone = Links(MEASURED.node, None)
    with pytest.raises(ConfigError, match="one node"):
        pricing.predict("all_reduce", "tree", 2, 2, 100, alone)
    nodes = equal_nodes(2, 2)
    with pytest.raises(ConfigError, match="one node"):
        pricing.price(plan("all_reduce", "ring", nodes), nodes, 100, alone)


# Replay, by hand: alpha 10, beta 1 and gamma 0.5 per byte; vectors of 4 bytes, so that a message takes 14


def test_a_message_is_under_way_while_its_receiver_is_busy():
    relay = steps_of(
        [Step(send=(Message(1, WHOLE),))],
        [Step(recv=(Message(0, WHOLE),), add=True), Step(recv=(Message(2, WHOLE),), add=True)],
        [Step(send=(Message(1, WHOLE),))],
    )
    nodes = equal_nodes(3, 1)
    # The port takes both, one after the other: 14, then 28; the additions of the first lie beside the second's way.
    assert pricing.price(relay, nodes, 4, LINE) == 28 + 2
    # Where the second leaves later, it is waited for.
    late = steps_of(relay.steps(0), relay.steps(1), [Step(send=(Message(0, WHOLE),)), *relay.steps(2)])
    late = steps_of([*late.steps(0), Step(recv=(Message(2, WHOLE),))], late.steps(1), late.steps(2))
    assert pricing.price(late, nodes, 4, LINE) == 28 + 2


def test_messages_of_one_step_share_the_senders_port():
    spread = steps_of(
        [Step(send=(Message(1, WHOLE), Message(2, WHOLE)))],
        [Step(recv=(Message(0, WHOLE),))],
        [Step(recv=(Message(0, WHOLE),))],
    )
    assert pricing.price(spread, equal_nodes(3, 1), 4, LINE) == 28


def test_ranks_of_a_node_share_its_card_with_those_that_send_in_the_same_round():
    def swap(peers: dict[int, int]) -> Plan:
        def steps(peer: int) -> list[Step]:
            return [Step((Message(peer, WHOLE),), (Message(peer, WHOLE),))]

        return steps_of(*(steps(peers[rank]) if rank in peers else [] for rank in range(4)))

    nodes = equal_nodes(2, 2)
    assert pricing.price(swap({0: 2, 2: 0}), nodes, 4, LINE) == 10 + 4
    assert pricing.price(swap({0: 2, 2: 0, 1: 3, 3: 1}), nodes, 4, LINE) == 10 + 2 * 4
    # Two to one: the card of the receiving node is shared, too.
    fan_in = steps_of([Step(send=(Message(2, WHOLE),))], [], [Step(recv=(Message(0, WHOLE), Message(1, WHOLE)))],
                      [])
    fan_in = steps_of(fan_in.steps(0), [Step(send=(Message(2, WHOLE),))], fan_in.steps(2), [])
    assert pricing.price(fan_in, NodeMap((0, 1, 2, 2)), 4, LINE) == 2 * (10 + 4)


def test_the_type_of_the_elements_decides_what_adding_costs():
    nodes = equal_nodes(2, 1)
    ring = plan("all_reduce", "ring", nodes)
    single, double = (pricing.price(ring, nodes, 10**6, MEASURED, dtype) for dtype in ("float32", "float64"))
    assert double - single == pytest.approx(10**6 / 2 * 1e-10)


def test_nodes_of_unequal_size_and_striped_maps_have_a_price():
    for node_of in ((0, 0, 1, 1, 2), (0, 1, 0, 1), (0, 0, 0, 1)):
        nodes = NodeMap(node_of)
        for name in SCHEDULES["all_reduce"]:
            assert pricing.price(plan("all_reduce", name, nodes, nbytes=10**6), nodes, 10**6, MEASURED) > 0
