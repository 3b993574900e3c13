"""Optimizers for flat, partitioned parameters: hyperparameters as frozen values, arithmetic as fused kernels.

An optimizer here has

- `state_names`: the arrays it keeps per parameter element; asked of an optimizer, not of its class, since hyperparameters
  decide;
- `state_starts`: the values that the caller fills arrays with before the first step, by name; what is not named, often
  everything, starts at zero;
- `update(params, grads, state, *, step, scale, lr)`: one step on any contiguous part of the parameters, in place. `step`
  counts from 1; `scale` multiplies the gradients, so that averaging and clipping cost no pass of their own; `lr` takes the
  place of the optimizer's own for this step.

An element's new value depends on that element alone, so any partition of the parameters gives the same bits. Where whole
tensors count too (`by_tensor`), `update` leaves directions in place of the gradients, and `move` takes the step once the
norms of whole tensors are known: see `lamb`.
"""

from __future__ import annotations

from hpczero.optim.adagrad import Adagrad
from hpczero.optim.adam import Adam
from hpczero.optim.adamw import AdamW
from hpczero.optim.lamb import LAMB
from hpczero.optim.lion import Lion
from hpczero.optim.sgd import SGD

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion", "Optimizer"]

Optimizer = LAMB | Adagrad | Adam | AdamW | Lion | SGD
