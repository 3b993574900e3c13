"""Training data: text as bytes, and tables of numbers, with a held-out part and simple models to be measured against.

`load` reads a file once, whole, on every rank that calls it, and communicates nothing. Text costs one byte of memory
per byte of file, a table four bytes per number once it is standardised (eight while it is read). What a rank trains on
is decided by sample numbers alone: `step_indices` names the samples of a step, `rank_part` those of one rank.

    data = load("book.txt", sequence_length=128)
    mine = rank_part(step_indices(step, len(data.train), batch, seed), rank, size)
    x, target = data.train.batch(mine)

A failure here is local to the rank (a file may be missing on one node only): callers that share a communicator pass the
`DataError` to `errors.raise_together`.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from hpczero.data import baselines, table, text
from hpczero.data.sampling import rank_part, step_indices
from hpczero.errors import ConfigError, DataError

__all__ = ["Dataset", "Samples", "load", "rank_part", "step_indices"]

Task = Literal["text", "regression", "classification"]


class Samples(Protocol):
    """A numbered collection of samples (`text.Windows` or `table.Rows`)."""

    def __len__(self) -> int:
        """How many samples there are; they are numbered from 0."""

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the samples `indices` ((k,) integers, k may be 0), stacked along axis 0, C-contiguous.

        Text: x and target (k, T) int64, values 0-255, target one byte ahead of x. Tables: x (k, num_inputs) float32;
        target (k, num_outputs) float32 for a regression, (k,) int64 class numbers for a classification.
        """

    def batches(self, indices: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The samples `indices` in batches of at most `size`, for evaluation.

        A mean loss of a batch counts with weight `target.size`: the last held-out window of a text is shorter than the
        others and comes as a batch of its own.
        """


@dataclass(frozen=True)
class Dataset:
    """What `load` returns.

    `num_inputs` and `num_outputs` are the widths of a model's first and last layer: 256 and 256 for text, the numbers
    of input columns and of target columns (or classes) for a table. `baselines` are scores on exactly the targets that
    a walk over `val` meets, keyed `bigram_bits_per_byte` and `trigram_bits_per_byte` (text), `mean_mse` (regression, in
    units of the standardised target), `class_frequency_cross_entropy` (classification, nats).
    """

    train: Samples
    val: Samples
    task: Task
    num_inputs: int
    num_outputs: int
    baselines: dict[str, float]


def load(
    path: str | os.PathLike[str] | None,
    *,
    sequence_length: int,
    task: Literal["auto"] | Task = "auto",
    validation_fraction: float = 0.1,
) -> Dataset:
    """Read the data at `path`, split off a held-out part, and score the baselines on it.

    Parameters
    ----------
    path
        `.npy`, `.npz` and `.csv` are tables (see `table.py`), every other file is text (see `text.py`); None is the
        reference text that comes with Python.
    sequence_length
        Bytes per training window; tables have no use for it.
    task
        "auto" takes text for text, and for a table classification when its target is integer, else regression. "text"
        reads the bytes of any file; "regression" and "classification" say what a table is for.
    validation_fraction
        Part that is held out, between 0 and 1: the end of a text, a fixed random choice of a table's rows; rounded, at
        least one target.

    Raises
    ------
    DataError
        The file cannot be used: says why and what to do.
    ConfigError
        An argument is out of range, or `task` does not fit the kind of file.
    """
    _check_arguments(path, sequence_length, task, validation_fraction)
    if path is None:
        source = "the reference text of Python"
        return _text_dataset(text.reference_text(), source, sequence_length, validation_fraction)
    _check_file(path)
    try:
        if _is_table(path) and task != "text":
            return _table_dataset(path, task, validation_fraction)
        return _text_dataset(text.file_bytes(path), os.fspath(path), sequence_length, validation_fraction)
    except OSError as error:
        raise DataError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error


def _text_dataset(data: np.ndarray, source: str, sequence_length: int, validation_fraction: float) -> Dataset:
    train, val = text.split(data, source, sequence_length, validation_fraction)
    return Dataset(train, val, "text", 256, 256, baselines.text(train.data, val.data))


def _table_dataset(path: str | os.PathLike[str], task: str, validation_fraction: float) -> Dataset:
    rows = table.read(path, task)
    train, val = table.split(rows, validation_fraction)
    if rows.num_classes:
        scores = baselines.classification(train.target, val.target, rows.num_classes)
        return Dataset(train, val, "classification", train.x.shape[1], rows.num_classes, scores)
    scores = baselines.regression(train.target, val.target)
    return Dataset(train, val, "regression", train.x.shape[1], train.target.shape[1], scores)


def _is_table(path: str | os.PathLike[str]) -> bool:
    return os.path.splitext(os.fspath(path))[1].lower() in table.SUFFIXES


def _check_arguments(path: str | os.PathLike[str] | None, sequence_length: int, task: str, fraction: float) -> None:
    known = ("auto", "text", "regression", "classification")
    if task not in known:
        near = difflib.get_close_matches(str(task), known, 1)
        raise ConfigError(f"task: {task!r} is none of {', '.join(known)}" + (f"; {near[0]!r}?" if near else ""))
    if task in ("regression", "classification") and (path is None or not _is_table(path)):
        what = "the text that comes with Python" if path is None else os.fspath(path)
        raise ConfigError(f"task: {task!r} needs a table ({', '.join(table.SUFFIXES)}), but the data are {what}")
    if sequence_length < 1:
        raise ConfigError(f"sequence_length: {sequence_length!r} must be at least 1")
    if not 0 < fraction < 1:
        raise ConfigError(f"validation_fraction: {fraction!r} must lie between 0 and 1, both excluded")


def _check_file(path: str | os.PathLike[str]) -> None:
    """Refuse what cannot be read several times, by several ranks, to a known end."""
    name = os.fspath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise DataError(f"{name}: no such file; check the name, and that every node has it") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(f"{name!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{name}: is a directory; name one file in it")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{name}: is a pipe or a device, which only one rank could read; save its content to a file")
    if status.st_size == 0:
        raise DataError(f"{name}: is empty; name a file with data in it")
