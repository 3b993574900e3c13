"""What a layer is: a value that knows the shapes of its parameters and computes forward and backward with given ones.

A layer owns no arrays. Parameters are handed in at every call, because under ZeRO they live in a flat buffer that
many ranks may share (stages 0-2), or exist only between a gather and a release (stage 3). Gradients are written by
hand, so training needs no framework; each layer's docstring names the source of its formulas.

The contract, for the layers here and for a user's own:

- `forward(params, x)` returns `(y, saved)`; `saved` is whatever `backward` will need besides `params`: arrays, or
  tuples, lists and dicts of them. Parameters are never kept in `saved`: at stage 3 that would defeat the release.
- `backward(params, saved, dy)` returns `(dx, grads)`: the gradients of the loss by `x` and by every parameter. `dx`
  is None where `x` has no gradient (token numbers).
- Nothing that is handed in is written to: not `params` (read-only views where several ranks share them), not `x`,
  `dy` or `saved`, which neighbouring layers still hold. Gradients are new arrays, which the receiver may overwrite.
- Shapes come from the arguments, so a batch of zero samples works and gives zero gradients.
- The same arguments give the same bits, always: no atomics, no thread-dependent order.
- Arithmetic is in the dtype of the parameters, on NumPy or CuPy arrays: functions come from `arrays.namespace(x)`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from hpczero.arrays import Array


class Layer(Protocol):
    """See the module's docstring for what implementations promise."""

    shapes: Mapping[str, tuple[int, ...]]
    """The parameters by name, in the order in which `forward` uses them; empty for a layer without parameters."""

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        """First values of all parameters, in host memory. `rng` is this layer's own; see `named`."""

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """The output, and what `backward` needs."""

    def backward(self, params: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array | None, dict[str, Array]]:
        """The gradient by the input, and by each parameter; `dy` has the shape of the output."""


def params_of(layer: Layer, name: str, params: Mapping[str, Array]) -> dict[str, Array]:
    """The parameters of the layer called `name`, under the names that it uses itself ("block0.weight" -> "weight")."""
    return {short: params[f"{name}.{short}"] for short in layer.shapes}


def rows(x: Array) -> Array:
    """`x` with all axes but the last folded into one: a view where x is contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def named(rng: np.random.Generator, name: str) -> np.random.Generator:
    """The generator of the part called `name` below the part that `rng` belongs to.

    It depends on the seed and on the path of names alone, not on how much `rng` has been used: so a layer that is added
    changes the first values of no other. crc32 stands for the name, since `hash` of a string differs between processes.
    """
    parent = rng.bit_generator.seed_seq
    key = (*parent.spawn_key, zlib.crc32(name.encode()))
    return np.random.default_rng(np.random.SeedSequence(parent.entropy, spawn_key=key))


def normal(rng: np.random.Generator, name: str, shape: tuple[int, ...], std: float, dtype: np.dtype) -> np.ndarray:
    """Normally distributed first values of the parameter `name`; float32 holds the rounded values of float64."""
    return (std * named(rng, name).standard_normal(shape)).astype(dtype)
