"""Optimizers for flat, partitioned parameters: hyperparameters as frozen values, arithmetic as fused kernels.

An optimizer here has

- `state_names`: the arrays it keeps per parameter element, zero at the start;
- `update(params, grads, state, *, step, scale, lr)`: one step on any contiguous part of the parameters, in place. `step`
  counts from 1; `scale` multiplies the gradients, so that averaging and clipping cost no pass of their own.

An element's new value depends on that element alone, so any partition of the parameters gives the same bits.
"""

from __future__ import annotations

from hpczero.optim.adamw import AdamW
from hpczero.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Optimizer"]

Optimizer = AdamW | SGD
