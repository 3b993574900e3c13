"""What `python -m hpczero explain OPERATION` can be told. `flags.py` makes the command line from this source text."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from hpczero.cli.bench_settings import read_sizes
from hpczero.settings import Settings


class ExplainSettings(Settings):
    """The settings of an explanation. The text under a key is its help."""

    sizes: str = "64KiB,1MiB,16MiB"
    """of the whole vector: SIZE, FROM:TO, FROM:TO:FACTOR (without it 2), or several of these with commas between"""
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"] = "float32"
    """type of the elements"""
    order: Literal["any", "canonical", "world"] = "any"
    """what the order of additions may depend on"""
    buffers: Literal["private", "shared"] = "private"
    """memory of the array"""

    @field_validator("sizes")
    @classmethod
    def _are_sizes(cls, text: str) -> str:
        read_sizes(text, itemsize=1)
        return text
