"""One training step at any ZeRO stage, behind the same few methods, so that the training loop is written once.

Stages 0 to 2 keep whole parameters: the model runs by itself and `ZeroOptimizer` takes its gradients. At stage 3 nobody
has the whole model: `Zero3Engine` runs it layer by layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from hpczero.zero.engine import Zero3Engine
from hpczero.zero.optimizer import StepReport, ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from hpczero.arrays import Array
    from hpczero.device import Device
    from hpczero.models import Model
    from hpczero.topology import Topology
    from hpczero.zero.config import ZeroConfig


def start(
    model: Model, params: dict[str, Array], optimizer: Any, topology: Topology, config: ZeroConfig, device: Device
) -> Training:
    """The training of `model` at stage `config.stage`. Called by every rank."""
    if config.stage == 3:
        return ByLayer(model, Zero3Engine(model.layers, params, optimizer, topology, config, device))
    return Whole(model, ZeroOptimizer(params, optimizer, topology, config, device))


class Training(ABC):
    """What the loop needs. Every method is called by every rank."""

    def __init__(self, model: Model, zero: ZeroOptimizer | Zero3Engine):
        self._model, self._zero = model, zero
        self.activation_bytes = 0
        """Kept from forward to backward in the last step of this rank."""

    @abstractmethod
    def step(self, x: Array, target: Array, weight: float, lr: float) -> tuple[float, StepReport]:
        """One update. Returns this rank's mean loss before it. `weight` is the rank's number of samples."""

    @abstractmethod
    def loss(self, x: Array, target: Array) -> float:
        """The mean loss, without an update."""

    @property
    def memory(self) -> Mapping[str, float]:
        """Purpose -> bytes of this rank, counted (of what its node shares, its part)."""
        return self._zero.memory

    @property
    def memory_formula(self) -> Mapping[str, float]:
        """The same, calculated."""
        return self._zero.memory_formula

    def full_parameters(self) -> dict[str, np.ndarray]:
        """All parameters in host memory, in the order of their names."""
        return self._zero.full_parameters()

    def close(self) -> None:
        """Frees memory that ranks share."""
        self._zero.close()


class Whole(Training):
    """Stages 0 to 2."""

    _zero: ZeroOptimizer

    def step(self, x: Array, target: Array, weight: float, lr: float) -> tuple[float, StepReport]:
        params = self._zero.params
        y, saved = self._model.forward(params, x)
        self.activation_bytes = self._model.activation_bytes(saved)
        loss, dy = self._model.loss(y, target)
        # A generator: at stage 2 a full bucket is reduced before the gradients of the layer below exist.
        self._zero.accumulate(self._model.backward(params, saved, dy), weight=weight)
        return loss, self._zero.step(lr=lr)

    def loss(self, x: Array, target: Array) -> float:
        y, _ = self._model.forward(self._zero.params, x)
        return self._model.loss(y, target)[0]


class ByLayer(Training):
    """Stage 3. A rank gathers a layer together with all others, so each calls `loss` equally often."""

    _zero: Zero3Engine

    def step(self, x: Array, target: Array, weight: float, lr: float) -> tuple[float, StepReport]:
        y = self._zero.forward(x)
        self.activation_bytes = self._model.activation_bytes(self._zero.saved)
        loss, dy = self._model.loss(y, target)
        self._zero.backward(dy, weight=weight)
        return loss, self._zero.step(lr=lr)

    def loss(self, x: Array, target: Array) -> float:
        return self._model.loss(self._zero.forward(x, train=False), target)[0]
