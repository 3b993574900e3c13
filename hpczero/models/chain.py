"""Layers made of layers: one after another (`Chain`), and with a path around them (`Residual`).

A chain is itself a layer, so it is what ZeRO stage 3 gathers and releases as a unit: a transformer block is one
chain. Residual paths: He et al., "Deep residual learning for image recognition", CVPR 2016. Cost: one addition each
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpczero.arrays import Array
from hpczero.models.layer import Layer, named, params_of


class Chain:
    """The given layers in the order given; the parameter "weight" of the layer `up` is called "up.weight"."""

    def __init__(self, **layers: Layer):
        self.layers = layers
        self.shapes = {
            f"{name}.{short}": shape for name, layer in layers.items() for short, shape in layer.shapes.items()
        }

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        return {
            f"{name}.{short}": value
            for name, layer in self.layers.items()
            for short, value in layer.init(named(rng, name), dtype).items()
        }

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, list[Any]]:
        saved = []
        for name, layer in self.layers.items():
            x, kept = layer.forward(params_of(layer, name, params), x)
            saved.append(kept)
        return x, saved

    def backward(
        self, params: Mapping[str, Array], saved: list[Any], dy: Array
    ) -> tuple[Array | None, dict[str, Array]]:
        grads = {}
        for (name, layer), kept in zip(reversed(self.layers.items()), reversed(saved), strict=True):
            dy, found = layer.backward(params_of(layer, name, params), kept, dy)
            grads |= {f"{name}.{short}": grad for short, grad in found.items()}
        return dy, grads


class Residual:
    """y = x + inner(x)."""

    def __init__(self, inner: Layer):
        self.inner = inner
        self.shapes = inner.shapes

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        return self.inner.init(rng, dtype)

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        y, saved = self.inner.forward(params, x)
        return x + y, saved

    def backward(self, params: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        dx, grads = self.inner.backward(params, saved, dy)
        return dy + dx, grads
