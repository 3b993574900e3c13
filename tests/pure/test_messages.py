"""Rounds resolved for a vector: which elements travel, in which segments."""

from __future__ import annotations

import pytest

from hpczero.collectives import algorithms, messages
from hpczero.topology import NodeMap

PAST_INT = 3 * 2**31 + 7
"""Elements: more than an int of C can count. Nothing as large is allocated."""


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("operation", list(algorithms.SCHEDULES))
def test_sizes_beyond_an_int_are_cut_without_overflow(operation, size):
    nodes = NodeMap(tuple(rank // 2 for rank in range(size)))
    for name in algorithms.SCHEDULES[operation]:
        plan = algorithms.plan(operation, name, nodes, nbytes=PAST_INT)
        sharded = operation in ("reduce_scatter", "all_gather")
        offsets = plan.offsets(algorithms.even_offsets(PAST_INT, size) if sharded else PAST_INT)
        assert offsets[0] == 0 and offsets[-1] == PAST_INT, name
        for rank in range(size):
            rounds = messages.resolve(plan.steps(rank), offsets, rank, nodes)
            parts = [part for round_ in rounds for part in (*round_.send, *round_.recv)]
            for part in parts:
                assert part.count == sum(hi - lo for lo, hi in part.ranges) <= PAST_INT, name
                assert all(0 <= lo < hi <= PAST_INT for lo, hi in part.ranges), name
            longest = max(parts, key=lambda part: part.count)
            cuts = longest.cuts(1)
            assert cuts[0][0] == 0 and cuts[-1][1] == longest.count, name
            assert all(0 < stop - start <= messages.WHOLE_BYTES[longest.link] for start, stop in cuts), name


def test_a_segment_knows_where_its_elements_lie():
    part = messages.Part(1, "node", ((0, 5), (10, 12), (20, 30)), 17)
    assert part.segment(3, 9).runs == ((0, 3, 5), (2, 10, 12), (4, 20, 22))
    assert part.segment(7, 17).runs == ((0, 20, 30),)
    assert [part.segment(start, start + 1).runs for start in (4, 5, 6)] == [((0, 4, 5),), ((0, 10, 11),), ((0, 11, 12),)]


def test_what_goes_to_one_peer_is_one_queue_in_the_order_of_its_messages(monkeypatch):
    monkeypatch.setattr(messages, "WHOLE_BYTES", {"node": 8, "network": 4})
    monkeypatch.setattr(messages, "SEGMENT_BYTES", {"node": 8, "network": 4})
    parts = (messages.Part(2, "network", ((0, 3),), 3), messages.Part(1, "node", ((3, 7),), 4),
             messages.Part(2, "network", ((7, 8),), 1))
    round_ = messages.Round(0, parts, (), False, (), False)
    queues = dict(round_.traffic(4).queues)
    assert [segment.runs for segment in queues[2]] == [((0, 0, 1),), ((0, 1, 2),), ((0, 2, 3),), ((0, 7, 8),)]
    assert [segment.count for segment in queues[1]] == [2, 2]
    assert round_.traffic(4) is round_.traffic(4), "kept"
