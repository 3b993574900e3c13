"""Models whose gradients are written by hand, on NumPy or CuPy arrays: no framework is needed to train them.

`mlp.build` for tables, `transformer.build` for text; a model of one's own is a `Model` of objects that keep to
`Layer`.
"""

from __future__ import annotations

from hpczero.models import mlp, transformer
from hpczero.models.layer import Layer
from hpczero.models.losses import cross_entropy, mean_squared_error
from hpczero.models.model import Model

__all__ = ["Layer", "Model", "cross_entropy", "mean_squared_error", "mlp", "transformer"]
