"""What `python -m hpczero tune` can be told. `flags.py` makes the command line from this source text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hpczero.cli.bench_settings import read_sizes, read_words
from hpczero.settings import Settings

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


class TuneSettings(Settings):
    """The settings of a tuning run. The text under a key is its help."""

    operations: str = "all_reduce,reduce_scatter,all_gather,broadcast,reduce"
    """collectives to measure, with commas between"""
    sizes: str = "4KiB:64MiB:4"
    """of the whole vector: SIZE, FROM:TO, FROM:TO:FACTOR (without it 2), or several of these with commas between"""
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"] = "float32"
    """type of the elements; each type has a table of its own"""
    buffers: str = "shared,private"
    """memory of the arrays: shared by the ranks of a node, private, or both"""
    repeats: Annotated[int, Field(ge=3)] = 11
    """timed calls of every algorithm at every size"""

    @field_validator("operations")
    @classmethod
    def _are_operations(cls, text: str) -> str:
        read_words(text, OPERATIONS)
        return text

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
