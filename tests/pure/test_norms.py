"""Norms that do not depend on how a vector is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.optim.norms import LEAF, NORMS, TWO, GlobalNorm, PartialNorms, Piece, clip_coefficient, norm


def sums_by_parameter(vectors, cuts_of, kind=TWO):
    """The global sums when parameter p is cut at cuts_of[p], each piece on a rank of its own."""
    partials, parts = [], []
    for number, vector in enumerate(vectors):
        cuts = [0, *cuts_of[number], vector.size]
        for start, stop in zip(cuts, cuts[1:], strict=False):
            if start < stop:
                partial = PartialNorms([Piece(number, start, stop, 5)], kind)
                partials.append(partial)
                parts.append(partial.sums(np.concatenate([np.full(5, np.nan, vector.dtype), vector[start:stop]])))
    if not partials:
        return np.zeros(len(vectors))
    together = GlobalNorm([partial.nodes for partial in partials], len(vectors), kind)
    return together.by_parameter(np.concatenate(parts))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=3), st.data())
def test_the_sums_have_the_same_bits_however_the_vector_is_cut(sizes, data):
    rng = np.random.default_rng(sum(sizes))
    vectors = [(rng.standard_normal(size) * 10.0 ** rng.integers(-5, 5, size)).astype(np.float32) for size in sizes]
    kind = data.draw(st.sampled_from(list(NORMS.values())))
    whole = sums_by_parameter(vectors, [[] for _ in sizes], kind)
    cuts = [sorted(set(data.draw(st.lists(st.integers(0, size // LEAF), max_size=6)))) for size in sizes]
    cut = sums_by_parameter(vectors, [[LEAF * place for place in places] for places in cuts], kind)
    assert whole.tobytes() == cut.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1023, 1024, 1025, 4099, 100_003])
def test_the_sum_of_squares_is_right_to_the_rounding_of_float64(size, dtype):
    vector = np.random.default_rng(size).standard_normal(size).astype(dtype)
    found = sums_by_parameter([vector], [[]])[0]
    exact = math.fsum(float(value) ** 2 for value in vector)
    assert abs(found - exact) <= 1e-14 * exact


def test_what_two_owners_send_is_logarithmic():
    partial = PartialNorms([Piece(0, 16 * 3, 16 * 1_000_003, 0)])
    assert len(partial.nodes.levels) <= 2 * 20


@pytest.mark.parametrize("kind", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("place", [0, 17, 2999])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_element_makes_the_norm_bad(bad, place, kind):
    vector = np.ones(3000, np.float32)
    vector[place] = bad
    assert not math.isfinite(norm(sums_by_parameter([np.ones(3, np.float32), vector], [[], [1600]], kind), kind))


@pytest.mark.parametrize("which", NORMS)
def test_norms_are_those_of_numpy(which):
    vectors = [np.random.default_rng(size).standard_normal(size) for size in (1, 4099, 0, 50)]
    found = norm(sums_by_parameter(vectors, [[], [1600, 3200], [], [16]], NORMS[which]), NORMS[which])
    expected = np.linalg.norm(np.concatenate(vectors), np.inf if which == "inf" else which)
    assert abs(found - expected) <= 1e-14 * expected


def test_clipping_never_uses_a_norm_it_need_not():
    assert clip_coefficient(2.0, 1.0) == 0.5
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(10.0, 0.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
