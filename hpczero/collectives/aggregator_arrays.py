"""The dict of gradients that a caller passes: as arrays in the order of names, or refused, naming what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from hpczero.arrays import Array, from_any, is_device
from hpczero.collectives.aggregator_buckets import Entry
from hpczero.errors import ConfigError


def as_arrays(gradients: Any) -> dict[str, Array]:
    """The gradients as arrays that share their memory, in the order of their names."""
    if not isinstance(gradients, Mapping):
        raise ConfigError(f"gradients are a dict of names and arrays, not {type(gradients).__name__}")
    if wrong := [name for name in gradients if not isinstance(name, str)]:
        raise ConfigError(f"gradients are named by text, not by {wrong[0]!r}")
    arrays = {}
    for name in sorted(gradients):
        try:
            arrays[name] = from_any(gradients[name])
        except (TypeError, BufferError) as error:
            raise ConfigError(f'gradient "{name}": {error}') from None
    return arrays


def as_entries(arrays: Mapping[str, Array]) -> tuple[Entry, ...]:
    """What ranks must agree on."""
    return tuple(Entry(name, array.shape, array.dtype, is_device(array)) for name, array in arrays.items())


def refuse_unwritable(arrays: Mapping[str, Array]) -> None:
    """ConfigError for a gradient that cannot be overwritten, or that is another one's memory and would count twice."""
    on_host = {name: array for name, array in arrays.items() if not is_device(array) and array.size}
    if fixed := [name for name, array in on_host.items() if not array.flags.writeable]:
        raise ConfigError(f'gradient "{fixed[0]}" is read-only, and is to be overwritten with the sum: pass a copy')
    by_place = sorted(on_host, key=lambda name: on_host[name].__array_interface__["data"][0])
    for one, other in pairwise(by_place):
        if np.may_share_memory(on_host[one], on_host[other]) and np.shares_memory(on_host[one], on_host[other]):
            raise ConfigError(f'gradients "{one}" and "{other}" lie in the same memory: pass it under one name')
