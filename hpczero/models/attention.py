"""Causal self-attention over several heads: each position mixes the values of itself and those before it.

Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.2: P = softmax(Q K' / sqrt(d)), out = P V, and
the entries above the diagonal of Q K' set to minus infinity.

The softmax is left undivided: E = exp(scores - row maximum) is kept, and the row sums divide the much smaller output,
as in Dao et al., "FlashAttention", NeurIPS 2022, from which the backward formula is too: with g = dout / row sum (by
row) and delta = sum(g * out) (by row), dscores = E * (g V' - delta) and dV = E' g. So the square arrays are passed
over five times forward and twice backward, besides two and four products per head. Memory: one square array per head
and sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hpczero.arrays import Array, namespace


class CausalAttention:
    """(batch, length, 3 width) -> (batch, length, width); the input holds queries, keys and values side by side.

    No parameters: the projections before and after are `Linear` layers. `heads` must divide the width.
    """

    def __init__(self, heads: int):
        self.heads = heads
        self.shapes: dict[str, tuple[int, ...]] = {}

    def init(self, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
        return {}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        xp = namespace(x)
        q, k, v = self._by_head(x, 3)
        e = (q * (1 / math.sqrt(q.shape[-1]))) @ _turned(k)
        e += xp.triu(xp.full(e.shape[-2:], -math.inf, dtype=e.dtype), 1)
        e -= e.max(axis=-1, keepdims=True)
        xp.exp(e, out=e)
        inverse = 1.0 / xp.einsum("...i->...", e)[..., None]
        y = xp.empty((*x.shape[:-1], x.shape[-1] // 3), x.dtype)
        (out,) = self._by_head(y, 1)
        xp.matmul(e, v, out=out)
        out *= inverse
        return y, (x, e, inverse, y)

    def backward(
        self, params: Mapping[str, Array], saved: tuple[Array, ...], dy: Array
    ) -> tuple[Array, dict[str, Array]]:
        x, e, inverse, y = saved
        xp = namespace(x)
        q, k, v = self._by_head(x, 3)
        (out,), (dout,) = self._by_head(y, 1), self._by_head(dy, 1)
        g = dout * inverse
        dscores = g @ _turned(v)
        dscores -= xp.einsum("...i,...i->...", g, out)[..., None]
        dscores *= e
        dx = xp.empty(x.shape, x.dtype)
        dq, dk, dv = self._by_head(dx, 3)
        xp.matmul(dscores, k, out=dq)
        xp.matmul(_turned(dscores), q, out=dk)
        xp.matmul(_turned(e), g, out=dv)
        dx[..., : 2 * y.shape[-1]] *= 1 / math.sqrt(q.shape[-1])
        return dx, {}

    def _by_head(self, x: Array, parts: int) -> list[Array]:
        """Views (batch, heads, length, width of a head) of the `parts` arrays side by side in x's last axis."""
        split = x.reshape(*x.shape[:2], parts, self.heads, x.shape[-1] // (parts * self.heads))
        return [split[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def _turned(x: Array) -> Array:
    """The matrices in the last two axes, transposed."""
    return x.swapaxes(-1, -2)
