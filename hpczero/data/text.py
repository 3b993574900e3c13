"""Text as a stream of bytes, cut into windows: no vocabulary, nothing to download, any language.

The stream is split once: the end is held out, the beginning is for training. Window i of a part covers T + 1 bytes from
byte i * T on; its first T bytes are the input and its last T the target, so neighbours share one byte and no byte is a
target twice.

    T = 3, ten bytes   a b c d e f g h i j
    window 0           a b c|d               input abc, target bcd
    window 1                 d e f|g         input def, target efg
    window 2                       g h i|j   input ghi, target hij

- Training: the first byte has no predecessor and is no target; the last (n - 1) mod T bytes fill no window and are left
  out.
- Held-out: one shorter window at the end takes those as well, so all bytes but the first of the held-out part are
  targets exactly once. The part is scored as a text of its own: nothing before its first byte is seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hpczero.errors import DataError


class Windows:
    """Windows of one part of a text; `data` is the part, (n,) uint8, and the windows are views into it."""

    def __init__(self, data: np.ndarray, length: int, *, keep_rest: bool) -> None:
        self.data = data
        num_targets = max(len(data) - 1, 0)
        if num_targets >= length:
            self._whole = sliding_window_view(data, length + 1)[::length]
        else:
            self._whole = np.empty((0, length + 1), np.uint8)
        rest = num_targets % length if keep_rest else 0
        self._rest = data[len(data) - rest - 1 :][None] if rest else None  # (1, rest + 1)

    def __len__(self) -> int:
        return len(self._whole) + (self._rest is not None)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Input and target, (k, T) int64 each (the type NumPy indexes with), one byte apart.

        The shorter window at the end of a held-out part, number len(self) - 1, is (1, rest) and must be asked for
        alone, since arrays have no ragged rows; together with others it is an IndexError.
        """
        indices = np.asarray(indices, np.int64)
        alone = self._rest is not None and indices.size == 1 and indices[0] == len(self._whole)
        rows = self._rest if alone else self._whole[indices]
        return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)

    def batches(self, indices: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The windows `indices` in batches of at most `size`, the shorter one, if asked for, in the last by itself."""
        indices = np.asarray(indices, np.int64)
        whole, rest = indices[indices < len(self._whole)], indices[indices >= len(self._whole)]
        for start in range(0, len(whole), size):
            yield self.batch(whole[start : start + size])
        for index in rest:
            yield self.batch(index[None])


def split(data: np.ndarray, source: str, length: int, validation_fraction: float) -> tuple[Windows, Windows]:
    """Training and held-out windows of the text `data`, (n,) uint8; `source` names it in errors.

    The last round(n * validation_fraction) bytes, at least two, are held out. Raises DataError if what remains for
    training does not fill one window.
    """
    num_val = max(round(len(data) * validation_fraction), 2)
    num_train = max(len(data) - num_val, 0)
    if num_train < length + 1:
        raise DataError(
            f"{source}: is too short: of its {len(data)} bytes {num_train} are left for training beside the held-out "
            f"part, and one sequence of length {length} needs {length + 1}; take a longer text or shorter sequences"
        )
    train, val = data[:num_train], data[num_train:]
    return Windows(train, length, keep_rest=False), Windows(val, length, keep_rest=True)


def file_bytes(path: str | os.PathLike[str]) -> np.ndarray:
    """The content of a file, (n,) uint8. Whatever the bytes are: encodings do not matter at this level."""
    with open(path, "rb") as file:
        return np.fromfile(file, dtype=np.uint8)


def reference_text() -> np.ndarray:
    """The language reference behind Python's `help()`, about 370 KB of English with code in it, (n,) uint8.

    Topics in order of their names, every paragraph only once: a fifth of the text is printed again under other topics
    (`for` is a part of `compound`), and held-out text that also stands in the training part would flatter every score.
    The same Python release gives the same bytes everywhere; another release has a slightly edited text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "the reference text of Python (module pydoc_data.topics) is not part of this installation; "
            "name a text file instead, or install Python's full standard library"
        ) from error
    seen = set()
    kept = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                kept.append(paragraph.strip("\n"))
    return np.frombuffer("\n\n".join(kept).encode(), dtype=np.uint8)
