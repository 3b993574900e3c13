"""Whole parameters and optimizer states by name, put together from the ranks that own their parts, and taken apart again.

One exchange for any number of names: every rank writes what it owns into a vector of zeros, as whole numbers of the same
width, and the vectors are added. Each element has one owner, so the sum is that owner's bits, signs of zero and NaN included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from hpczero.arrays import Array, copy, from_any, namespace, to_host
from hpczero.collectives.api import all_reduce
from hpczero.collectives.guard import agree
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError
from hpczero.settings import nearest
from hpczero.topology import Topology
from hpczero.zero.layout import Layout

PARAMETER = "parameter"


class Access:
    """For one training object: where its vectors lie is asked at each call, as memory may move.

    Parameters
    ----------
    parts : dict of str to (vector, in_shard)
        What can be asked for: "parameter" and the names of the optimizer's states. A vector holds this rank's shards, or
        has the layout of the whole.
    """

    def __init__(self, layout: Layout, topology: Topology, parts: Mapping[str, tuple[Array, bool]]):
        self._layout, self._topology, self._parts = layout, topology, parts
        self._names = sorted(layout.places)

    def get(self, names: Any, part: str) -> dict[str, np.ndarray]:
        """Host copies of whole arrays, the same bits on all ranks. Called by every rank, with the same arguments."""
        wanted, error = [], None
        try:
            wanted = self._checked(names, part)
        except Exception as wrong:      # noqa: BLE001 - the other ranks must hear of it, whatever it is
            error = wrong
        agree(Transport.of(self._topology), f"get_full of {part} of {', '.join(wanted)}", error)
        vector, in_shard = self._parts[part]
        sizes = [self._layout.places[name].size for name in wanted]
        begin = dict(zip(wanted, np.cumsum([0, *sizes]).tolist(), strict=False))
        whole = np.zeros(sum(sizes), vector.dtype)
        for piece in self._layout.pieces(self._topology.rank, in_shard=in_shard):
            place = begin.get(self._names[piece.parameter])
            if place is not None:
                count = piece.stop - piece.start
                whole[place + piece.start:place + piece.stop] = to_host(vector[piece.position:piece.position + count])
        all_reduce(whole.view(f"i{vector.dtype.itemsize}"), self._topology, algorithm="hierarchical")
        return {name: whole[begin[name]:begin[name] + size].reshape(self._layout.places[name].shape)
                for name, size in zip(wanted, sizes, strict=True)}

    def set(self, values: Any, part: str) -> None:
        """Writes what this rank keeps of whole arrays, which are the same on every rank; else MismatchError on all."""
        arrays: dict[str, Array] = {}
        error, digest = None, blake2b(digest_size=8)
        try:
            if not isinstance(values, Mapping):
                raise ConfigError(f"set_full: a dict of name to array is needed, not {type(values).__name__}")
            for name in self._checked(list(values), part):
                arrays[name] = self._fitting(name, values[name], part)
                digest.update(np.ascontiguousarray(to_host(arrays[name])).tobytes())
        except Exception as wrong:      # noqa: BLE001 - as above
            error = wrong
        agree(Transport.of(self._topology), f"set_full of {part} of {', '.join(arrays)} with digest {digest.hexdigest()}",
              error)
        vector, in_shard = self._parts[part]
        for piece in self._layout.pieces(self._topology.rank, in_shard=in_shard):
            name, count = self._names[piece.parameter], piece.stop - piece.start
            if name in arrays:
                mine = np.ascontiguousarray(to_host(arrays[name]), vector.dtype).reshape(-1)[piece.start:piece.stop]
                copy(vector[piece.position:piece.position + count], namespace(vector).asarray(mine))

    def _checked(self, names: Any, part: str) -> list[str]:
        if part not in self._parts:
            raise ConfigError(f"part={part!r}: there is no such part{nearest(str(part), self._parts)}; there are "
                              f"{', '.join(self._parts)}")
        if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"names={names!r}: a list of names is needed")
        for name in names:
            if name not in self._layout.places:
                raise ConfigError(f"there is no parameter {name!r}{nearest(name, self._names)}")
        if len(set(names)) < len(names):
            raise ConfigError(f"names={names!r}: a name stands there twice")
        return list(names)

    def _fitting(self, name: str, value: Any, part: str) -> Array:
        array = np.asarray(value) if isinstance(value, (float, np.generic)) else from_any(value)
        shape = self._layout.places[name].shape
        if array.shape != shape or array.dtype.kind not in "fiu":
            raise ConfigError(f"{part} of {name!r}: {shape} numbers are needed, not {array.shape} of {array.dtype}")
        return array
