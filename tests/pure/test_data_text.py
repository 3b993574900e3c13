"""Text: the split, the windows, and which bytes are targets."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import load, text
from hpczero.errors import DataError


def counting(n: int) -> np.ndarray:
    """Bytes that say where they stand (for n up to 256)."""
    return np.arange(n, dtype=np.uint8)


def targets(samples: text.Windows, size: int = 3) -> list[int]:
    return [int(byte) for _, target in samples.batches(np.arange(len(samples)), size) for byte in target.ravel()]


def test_windows_of_three_over_ten_bytes_are_those_of_the_picture():
    windows = text.Windows(np.frombuffer(b"abcdefghij", np.uint8), 3, keep_rest=False)
    x, target = windows.batch(np.array([2, 0, 1]))
    assert [bytes(row.tolist()) for row in x] == [b"ghi", b"abc", b"def"]
    assert [bytes(row.tolist()) for row in target] == [b"hij", b"bcd", b"efg"]
    assert (x.dtype, target.dtype) == (np.int64, np.int64)
    assert x.flags.c_contiguous and target.flags.c_contiguous


@given(st.integers(1, 200), st.integers(1, 40))
def test_training_takes_each_byte_as_target_at_most_once_and_leaves_out_less_than_a_window(n, length):
    windows = text.Windows(counting(n), length, keep_rest=False)
    assert len(windows) == (n - 1) // length
    assert targets(windows) == list(range(1, 1 + len(windows) * length))


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 9))
def test_held_out_windows_take_every_byte_with_a_predecessor_as_target_exactly_once(n, length, size):
    windows = text.Windows(counting(n), length, keep_rest=True)
    assert targets(windows, size) == list(range(1, n))


@given(st.integers(2, 200), st.integers(1, 40))
def test_every_target_follows_its_input(n, length):
    windows = text.Windows(counting(n), length, keep_rest=True)
    for x, target in windows.batches(np.arange(len(windows)), 4):
        assert x.shape == target.shape
        assert np.array_equal(x + 1, target)


def test_no_more_than_the_asked_number_of_windows_comes_at_a_time_and_the_short_one_comes_alone():
    windows = text.Windows(counting(60), 8, keep_rest=True)  # 59 targets: 7 windows and 3 more
    shapes = [x.shape for x, _ in windows.batches(np.arange(8), 3)]
    assert shapes == [(3, 8), (3, 8), (1, 8), (1, 3)]


def test_the_short_window_mixed_with_others_is_an_error():
    windows = text.Windows(counting(60), 8, keep_rest=True)
    with pytest.raises(IndexError):
        windows.batch(np.array([6, 7]))


def test_a_rank_without_samples_gets_an_empty_batch():
    windows = text.Windows(counting(60), 8, keep_rest=True)
    x, target = windows.batch(np.array([], np.int64))
    assert x.shape == target.shape == (0, 8)
    assert list(windows.batches(np.array([], np.int64), 4)) == []


def test_windows_are_views_of_the_text():
    data = counting(60)
    windows = text.Windows(data, 8, keep_rest=True)
    assert np.shares_memory(windows.data, data)
    data[:] = 7
    assert set(targets(windows)) == {7}


def test_the_end_is_held_out_and_the_parts_join_to_the_whole():
    data = counting(200)
    train, val = text.split(data, "x", 4, 0.1)
    assert (len(train.data), len(val.data)) == (180, 20)
    assert np.array_equal(np.concatenate([train.data, val.data]), data)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 66, 71])
def test_a_text_too_short_for_one_sequence_beside_the_held_out_part_is_refused(n):
    with pytest.raises(DataError, match=rf"book: is too short: of its {n} bytes .* length 64 needs 65"):
        text.split(counting(n), "book", 64, 0.1)


def test_the_shortest_text_that_fits_is_taken():
    train, val = text.split(counting(72), "book", 64, 0.1)
    assert (len(train), len(val), len(val.data)) == (1, 1, 7)


def test_the_reference_text_is_the_same_at_every_call_and_says_nothing_twice():
    data = text.reference_text()
    assert np.array_equal(data, text.reference_text())
    paragraphs = [" ".join(part.split()) for part in bytes(data).decode().split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert data.dtype == np.uint8 and 250_000 < len(data) < 1_000_000


def test_the_reference_text_does_not_depend_on_the_order_of_topics(monkeypatch):
    shuffled = types.ModuleType("pydoc_data.topics")
    shuffled.topics = {"b": "two\n\none\n", "a": "one\n\n   three\n\n\n"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", shuffled)
    assert bytes(text.reference_text()) == b"one\n\n   three\n\ntwo"


def test_a_python_without_the_reference_text_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"pydoc_data\.topics.*name a text file instead"):
        load(None, sequence_length=8)


def test_the_files_bytes_are_taken_as_they_are(tmp_path):
    content = bytes(range(256)) * 2 + b"\r\n\x00\xef\xbb\xbf"
    path = tmp_path / "anything.bin"
    path.write_bytes(content)
    data = load(path, sequence_length=5)
    assert bytes(np.concatenate([data.train.data, data.val.data])) == content
