"""Baselines against slow, plain versions of the same definitions."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.data import baselines, text


class PlainWittenBell:
    """P(w | h) as the book has it, one byte at a time, from dictionaries."""

    def __init__(self, train: bytes, order: int) -> None:
        self.order = order
        self.runs = [Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in range(order + 1)]

    def probability(self, context: bytes, byte: int) -> float:
        context = context[-(self.order - 1) :] if self.order > 1 else b""
        followers = {w: c for w in range(256) if (c := self.runs[len(context) + 1][context + bytes([w])])}
        shorter = 1 / 256 if not context else PlainWittenBell.probability(self, context[1:], byte)
        if not followers:
            return shorter
        seen, distinct = sum(followers.values()), len(followers)
        return (followers.get(byte, 0) + distinct * shorter) / (seen + distinct)

    def bits_per_byte(self, val: bytes) -> float:
        bits = [-math.log2(self.probability(val[:i], val[i])) for i in range(1, len(val))]
        return sum(bits) / len(bits)


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def check(train: bytes, val: bytes) -> None:
    scores = baselines.text(as_array(train), as_array(val))
    assert scores["bigram_bits_per_byte"] == pytest.approx(PlainWittenBell(train, 2).bits_per_byte(val), rel=1e-12)
    assert scores["trigram_bits_per_byte"] == pytest.approx(PlainWittenBell(train, 3).bits_per_byte(val), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(b"abcd\x00\xff"), min_size=2, max_size=60).map(bytes),
    st.lists(st.sampled_from(b"abcde\x00"), min_size=2, max_size=12).map(bytes),
)
def test_both_models_agree_with_a_plain_version(train, val):
    check(train, val)


def test_both_models_agree_with_a_plain_version_on_english():
    data = bytes(text.reference_text()[:6000])
    check(data[:5700], data[5700:])


def test_counts_taken_in_chunks_are_the_counts_of_the_whole(monkeypatch):
    data = text.reference_text()[:20_000]
    whole = baselines.text(data[:18_000], data[18_000:])
    monkeypatch.setattr(baselines, "_CHUNK", 777)
    assert baselines.text(data[:18_000], data[18_000:]) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("context", [b"ab", b"ba", b"zz", b"az"])
def test_probabilities_after_any_context_sum_to_one(context):
    train = as_array(b"abracadabra, abba")
    totals = dict.fromkeys(("bigram_bits_per_byte", "trigram_bits_per_byte"), 0.0)
    for byte in range(256):
        one, two = baselines.text(train, as_array(context)), baselines.text(train, as_array(context + bytes([byte])))
        for name in totals:
            totals[name] += 2 ** -(2 * two[name] - one[name])  # bits of the third byte alone
    assert totals == pytest.approx(dict.fromkeys(totals, 1.0), rel=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 150), st.integers(1, 30))
def test_scored_bytes_are_exactly_the_targets_of_the_held_out_windows(num_val, length):
    rng = np.random.default_rng(num_val * 31 + length)
    data = rng.choice(np.frombuffer(b"aab", np.uint8), 200 + num_val)
    train, val = data[:200], data[200:]
    model = PlainWittenBell(bytes(train), 2)
    windows = text.Windows(val, length, keep_rest=True)
    bits = [
        -math.log2(model.probability(bytes([before]), int(after)))
        for x, target in windows.batches(np.arange(len(windows)), 7)
        for before, after in zip(x.ravel().tolist(), target.ravel().tolist(), strict=True)
    ]
    assert baselines.text(train, val)["bigram_bits_per_byte"] == pytest.approx(sum(bits) / len(bits), rel=1e-12)
    assert len(bits) == num_val - 1


def test_english_is_told_apart_from_noise_and_more_context_helps():
    data = text.reference_text()
    scores = baselines.text(data[:-30_000], data[-30_000:])
    assert 1.5 < scores["trigram_bits_per_byte"] < scores["bigram_bits_per_byte"] - 0.3 < 4
    noise = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)
    assert baselines.text(noise[:180_000], noise[180_000:])["bigram_bits_per_byte"] > 8


def test_a_megabyte_of_text_takes_less_than_a_second():
    data = np.tile(text.reference_text(), 4)[:1_000_000]
    start = time.process_time()  # processor time: the machine may be shared
    baselines.text(data[:900_000], data[900_000:])
    assert time.process_time() - start < 1


def test_the_mean_predictor_scores_the_variance_around_the_training_mean():
    train = np.array([[1.0, 10.0], [3.0, 10.0]], np.float32)
    val = np.array([[2.0, 13.0], [4.0, 10.0]], np.float32)
    assert baselines.regression(train, val) == {"mean_mse": (0 + 9 + 4 + 0) / 4}


def test_class_frequencies_are_those_of_training_with_one_added():
    scores = baselines.classification(np.array([0, 0, 0, 1]), np.array([0, 1, 2]), 3)
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert scores == {"class_frequency_cross_entropy": pytest.approx(expected, rel=1e-12)}
