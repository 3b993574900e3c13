"""What `python -m hpczero bench COLLECTIVE` can be told, and what its lists mean. Pure: no arrays, no ranks.

`flags.py` makes the command line from this source text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from hpczero.settings import Settings, Size, nearest, number


class BenchSettings(Settings):
    """The settings of a benchmark. The text under a key is its help."""

    sizes: str = "1KiB:64MiB"
    """of the whole vector: SIZE, FROM:TO, FROM:TO:FACTOR (without it 2), or several of these with commas between"""
    algorithms: str = "all"
    """names with commas between, or all that can serve, the MPI library's own (system) and adaptive among them"""
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"] = "float32"
    """type of the elements"""
    op: Literal["sum", "mean", "prod", "min", "max"] = "sum"
    """how elements are combined, where they are"""
    order: Literal["any", "canonical", "world"] = "any"
    """what the order of additions may depend on"""
    buffers: str = "shared,private"
    """memory of the arrays: shared by the ranks of a node, private, or both"""
    in_place: str = "yes,no"
    """yes overwrites the input, no leaves it and writes into another array; or both"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the arrays lie; auto takes GPUs if every rank has one; cuda is an error where there is none"""
    warmup: Annotated[int, Field(ge=1)] = 3
    """calls before the timed ones"""
    repeats: Annotated[int, Field(ge=1)] = 20
    """timed calls of every row"""

    @field_validator("sizes")
    @classmethod
    def _are_sizes(cls, text: str) -> str:
        read_sizes(text, itemsize=1)
        return text

    @field_validator("buffers")
    @classmethod
    def _are_buffers(cls, text: str) -> str:
        read_words(text, ("shared", "private"))
        return text

    @field_validator("in_place")
    @classmethod
    def _are_answers(cls, text: str) -> str:
        read_words(text, ("yes", "no"))
        return text


def read_sizes(text: str, itemsize: int) -> tuple[int, ...]:
    """Numbers of elements, ascending and each once, for `1KiB:64MiB:4,100MB`; ValueError, saying what is allowed.

    A range goes from its first size by the factor as far as its last. Sizes are rounded down to whole elements of
    `itemsize` bytes, and up to one.
    """
    counts: set[int] = set()
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ValueError(f"{part!r} is not SIZE, FROM:TO or FROM:TO:FACTOR")
        start = _size(first)
        end = _size(rest[0]) if rest else start
        factor = _factor(rest[1]) if len(rest) == 2 else 2
        if start.bytes(itemsize) > end.bytes(itemsize):
            raise ValueError(f"{part!r} ends before it begins; give the smaller size first")
        nbytes = start.bytes(itemsize)
        while nbytes <= end.bytes(itemsize):
            counts.add(max(1, nbytes // itemsize))
            nbytes *= factor
    return tuple(sorted(counts))


def read_words(text: str, allowed: Collection[str]) -> tuple[str, ...]:
    """The words of a list with commas between, each once, in the order given; ValueError names the one not allowed."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if word not in allowed:
            hint = nearest(word, allowed) if word else ""
            raise ValueError(f"{word!r} is not one of {', '.join(allowed)}{hint}")
    return words


def read_algorithms(text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The algorithms to measure: those named, or with "all" every one of `known` and "adaptive"."""
    everything = (*known, "adaptive")
    return everything if text.strip() == "all" else read_words(text, everything)


def _size(text: str) -> Size:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not {error}") from None


def _factor(text: str) -> int:
    try:
        factor = number(text)
    except ValueError:
        factor = 0
    if not isinstance(factor, int) or factor < 2:
        raise ValueError(f"factor {text!r} is not a whole number of at least 2")
    return factor
