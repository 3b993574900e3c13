"""How a dict of gradients becomes a few vectors. Pure: names, shapes and dtypes only.

The order is that of the names, whatever the order of the dict: dicts are filled in the order in which a backward pass
happens to end, which may differ between ranks. Gradients of one dtype and one kind of memory fill a bucket one behind
the other, since many small messages pay latency many times: A. Sergeev and M. Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", arXiv:1802.05799, "Tensor fusion".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from hpczero.settings import Size


@dataclass(frozen=True, slots=True)
class Entry:
    """One gradient, as far as ranks must agree on it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    on_device: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} on the {'device' if self.on_device else 'host'}"


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: one dtype, one kind of memory, in the order of their names."""

    entries: tuple[Entry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @property
    def dtype(self) -> np.dtype:
        return self.entries[0].dtype

    @property
    def on_device(self) -> bool:
        return self.entries[0].on_device

    @cached_property
    def size(self) -> int:
        """Elements."""
        return sum(entry.size for entry in self.entries)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @cached_property
    def places(self) -> tuple[tuple[Entry, slice], ...]:
        """Each gradient, and where it lies in the bucket's vector."""
        ends = accumulate(entry.size for entry in self.entries)
        return tuple((entry, slice(end - entry.size, end)) for entry, end in zip(self.entries, ends, strict=True))


def in_buckets(entries: Iterable[Entry], bucket_size: Size) -> tuple[Bucket, ...]:
    """The buckets of `entries`: each of at most `bucket_size`, unless one gradient alone is larger.

    A gradient without elements is in none.
    """
    newest: dict[tuple[np.dtype, bool], list[Entry]] = {}
    room: dict[tuple[np.dtype, bool], int] = {}
    filled: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.size == 0:
            continue
        kind = entry.dtype, entry.on_device
        if entry.nbytes > room.get(kind, 0):
            newest[kind] = []
            filled.append(newest[kind])
            room[kind] = max(bucket_size.bytes(entry.dtype.itemsize), entry.nbytes)
        newest[kind].append(entry)
        room[kind] -= entry.nbytes
    return tuple(Bucket(tuple(members)) for members in filled)
