"""The order of samples: every one once per epoch, the same for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import rank_part, step_indices

sizes = st.integers(1, 300)
batches = st.integers(1, 320)
seeds = st.integers(-(2**63), 2**64)


def epoch(number: int, num_samples: int, batch: int, seed: int) -> list[np.ndarray]:
    steps = -(-num_samples // batch)
    return [step_indices(step, num_samples, batch, seed) for step in range(number * steps, (number + 1) * steps)]


@given(sizes, batches, seeds, st.integers(0, 3))
def test_an_epoch_holds_every_sample_exactly_once(num_samples, batch, seed, number):
    used = np.concatenate(epoch(number, num_samples, batch, seed))
    assert used.dtype == np.int64
    assert sorted(used.tolist()) == list(range(num_samples))


@given(sizes, batches, seeds)
def test_only_the_last_step_of_an_epoch_is_short(num_samples, batch, seed):
    lengths = [len(indices) for indices in epoch(0, num_samples, batch, seed)]
    assert lengths[:-1] == [batch] * (len(lengths) - 1)
    assert lengths[-1] == num_samples - sum(lengths[:-1]) <= batch


@given(sizes, batches, batches, seeds)
def test_the_order_of_an_epoch_does_not_depend_on_the_batch(num_samples, batch, other, seed):
    one, two = (np.concatenate(epoch(1, num_samples, size, seed)) for size in (batch, other))
    assert one.tolist() == two.tolist()


@given(st.integers(0, 40), sizes, batches, seeds, st.integers(1, 9))
def test_the_ranks_parts_joined_are_the_steps_samples_for_any_number_of_ranks(step, num_samples, batch, seed, size):
    indices = step_indices(step, num_samples, batch, seed)
    parts = [rank_part(indices, rank, size) for rank in range(size)]
    assert np.concatenate(parts).tolist() == indices.tolist()


@given(st.integers(0, 100), st.integers(1, 9))
def test_the_first_ranks_take_one_sample_more_and_ranks_may_get_none(count, size):
    lengths = [len(rank_part(np.arange(count), rank, size)) for rank in range(size)]
    assert lengths == [count // size + 1] * (count % size) + [count // size] * (size - count % size)


def test_order_changes_with_the_seed_and_with_the_epoch():
    orders = {tuple(np.concatenate(epoch(number, 50, 7, seed))) for number in range(4) for seed in range(4)}
    assert len(orders) == 16


def test_every_sample_is_equally_likely_at_every_place():
    first = [int(step_indices(step, 4, 4, seed=0)[0]) for step in range(2000)]  # one epoch per step
    assert np.bincount(first).min() > 440  # 500 expected, standard deviation 19


def test_the_order_is_this_one_on_every_machine_and_numpy():
    """A run resumed elsewhere continues in the same order."""
    assert step_indices(0, 10, 10, seed=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert step_indices(3, 10, 5, seed=42).tolist() == [2, 7, 1, 6, 8]


def test_a_caller_cannot_change_the_order_that_later_steps_use():
    with pytest.raises(ValueError, match="read-only"):
        step_indices(0, 10, 5, seed=1)[0] = 3


@pytest.mark.parametrize(("step", "num_samples", "batch"), [(-1, 5, 2), (0, 0, 2), (0, 5, 0)])
def test_numbers_without_meaning_are_refused(step, num_samples, batch):
    with pytest.raises(ValueError, match="at least"):
        step_indices(step, num_samples, batch, seed=0)
