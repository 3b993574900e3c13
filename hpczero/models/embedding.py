"""Token numbers to vectors, plus a learned vector for each position.

Positions as in Radford et al., "Language models are unsupervised multitask learners" (GPT-2, 2019). The gradient of
the table adds up the rows of `dy` by token. A scatter with atomic additions would add in any order, so it is written
as the product of the tokens' one-hot matrix with `dy`, which is deterministic on CPU and GPU and a BLAS call; it
costs as much as the model's head does forward, in time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpczero.arrays import Array, namespace
from hpczero.errors import ConfigError
from hpczero.models.layer import normal


class Embedding:
    """(batch, length) integers below `vocabulary` -> (batch, length, width); ConfigError above `sequence_length`."""

    def __init__(self, vocabulary: int, sequence_length: int, width: int, std: float):
        self.shapes = {"token": (vocabulary, width), "position": (sequence_length, width)}
        self.std = std

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        return {name: normal(rng, name, shape, self.std, dtype) for name, shape in self.shapes.items()}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Array]:
        longest = self.shapes["position"][0]
        if x.shape[1] > longest:
            raise ConfigError(f"embedding: sequences of {x.shape[1]} tokens, but positions for {longest} only")
        y = params["token"][x]
        y += params["position"][: x.shape[1]]
        return y, x

    def backward(self, params: Mapping[str, Array], x: Array, dy: Array) -> tuple[None, dict[str, Array]]:
        xp = namespace(dy)
        vocabulary, width = self.shapes["token"]
        one_hot = xp.zeros((x.size, vocabulary), dy.dtype)
        one_hot[xp.arange(x.size), x.reshape(-1)] = 1.0
        position = xp.zeros(self.shapes["position"], dy.dtype)
        position[: x.shape[1]] = dy.sum(axis=0)
        return None, {"token": one_hot.T @ dy.reshape(x.size, width), "position": position}
