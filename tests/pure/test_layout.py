"""The plan of ZeRO's memory, for any shapes and up to thousands of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.zero.layout import ALIGNMENT, by_layer, formula_bytes, in_buckets

SHAPES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    max_size=12,
)
RANKS = st.sampled_from([1, 2, 3, 5, 7, 8, 64, 4096])


@given(SHAPES, RANKS, st.sampled_from([1, 16, 100, 10**9]))
def test_every_element_has_one_owner_and_every_parameter_one_place(shapes, num_ranks, bucket_elements):
    layout = in_buckets(shapes, num_ranks, bucket_elements)
    assert list(layout.places) == list(reversed(shapes))
    assert layout.num_elements == sum(map(math.prod, shapes.values()))
    end = 0
    for place in layout.places.values():
        assert place.offset == -(-end // ALIGNMENT) * ALIGNMENT
        end = place.offset + place.size
    for index, bucket in enumerate(layout.buckets):
        cuts = layout.cuts(index)
        assert cuts[0] == bucket.start and cuts[-1] == bucket.stop and cuts == sorted(cuts)
        assert all(cut % ALIGNMENT == 0 for cut in cuts) and len(cuts) == num_ranks + 1
        sizes = np.diff(cuts)
        assert sizes.max() - sizes.min() <= ALIGNMENT and sizes.max() <= layout.largest_shard


@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 16, 100, 10**9]))
def test_pieces_of_all_ranks_cover_each_parameter_once_at_cuts_that_norms_allow(shapes, num_ranks, bucket_elements):
    layout = in_buckets(shapes, num_ranks, bucket_elements)
    names = sorted(layout.places)
    seen = {name: np.zeros(math.prod(shape), int) for name, shape in shapes.items()}
    for rank in range(num_ranks):
        whole, shard = layout.pieces(rank, in_shard=False), layout.pieces(rank, in_shard=True)
        taken = np.zeros(layout.shard_cuts(rank)[-1], int)
        for in_whole, in_shard in zip(whole, shard, strict=True):
            place = layout.places[names[in_whole.parameter]]
            assert in_whole.start % ALIGNMENT == 0
            assert in_whole.position == place.offset + in_whole.start
            seen[place.name][in_whole.start:in_whole.stop] += 1
            taken[in_shard.position:in_shard.position + in_shard.stop - in_shard.start] += 1
        assert taken.max(initial=0) <= 1
    assert all((count == 1).all() for count in seen.values())


def test_buckets_close_before_they_grow_too_large_and_a_large_parameter_has_its_own():
    shapes = {"a": (16,), "large": (100,), "b": (16,), "c": (16,), "d": (16,)}
    layout = in_buckets(shapes, 2, 32)
    assert [bucket.names for bucket in layout.buckets] == [("d", "c"), ("b",), ("large",), ("a",)]


def test_a_hundred_small_parameters_make_as_many_buckets_as_their_size_asks_for():
    layout = in_buckets({f"p{index}": (64,) for index in range(100)}, 4, 640)
    assert len(layout.buckets) == 10


def test_odd_units_of_small_buckets_go_round_the_ranks():
    layout = in_buckets({f"p{index}": (16,) for index in range(8)}, 4, 1)
    assert [layout.shard_cuts(rank)[-1] for rank in range(4)] == [32, 32, 32, 32]


def test_layers_are_buckets_and_layers_without_parameters_have_none():
    shapes = {"one.w": (5,), "three.w": (4, 4), "three.b": (4,)}
    layout = by_layer(shapes, [["one.w"], [], ["three.w", "three.b"]], 2)
    assert [bucket.names for bucket in layout.buckets] == [("three.b", "three.w"), ("one.w",)]


def test_a_plan_for_4096_ranks_takes_no_array():
    layout = in_buckets({"w": (10**9,), "b": (3,)}, 4096, 10**8)
    assert layout.shard_cuts(4095)[-1] - layout.shard_cuts(0)[-1] in (-16, 0, 16)


@pytest.mark.parametrize(("stage", "per_parameter"), [(0, 16), (1, 8 + 8 / 4), (2, 4 + 12 / 4), (3, 16 / 4)])
def test_the_formulas_are_those_of_the_paper_for_float32_adamw(stage, per_parameter):
    layout = in_buckets({"w": (1000, 1000)}, 4, 10**9)
    found = formula_bytes(layout, stage=stage, itemsize=4, num_states=2, ranks_per_node=4, num_nodes=1, shared=False)
    assert sum(found.values()) - found["buffers"] == per_parameter * 10**6


def test_shared_parameters_count_once_per_node():
    layout = in_buckets({"w": (1000, 1000)}, 8, 10**9)
    found = formula_bytes(layout, stage=1, itemsize=4, num_states=2, ranks_per_node=4, num_nodes=2, shared=True)
    assert found["parameters"] == 10**6 and found["gradients"] == 4 * 10**6 and found["optimizer_states"] == 10**6
