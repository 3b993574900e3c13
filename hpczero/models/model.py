"""A model: named layers in order, and a loss. Frozen, without arrays; parameters are handed in by name at every call.

`ZeroOptimizer` (stages 0-2) goes with `forward` and `backward` below; `Zero3Engine` takes `layers` and runs them
itself, because it gathers each layer's parameters before use and releases them after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpczero.arrays import Array, is_device, synchronize
from hpczero.errors import ConfigError
from hpczero.models.layer import Layer, named, params_of


@dataclass(frozen=True)
class Model:
    """Layers run one after another, then a loss.

    Parameters
    ----------
    layers : ((name, layer), ...)
        In forward order; names differ. The parameter "weight" of the layer "head" is called "head.weight".
    loss : callable
        (y, target) -> (mean loss over the samples as a float, gradient of that mean by y); see `losses`.
    """

    layers: tuple[tuple[str, Layer], ...]
    loss: Callable[[Array, Array], tuple[float, Array]]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.layers]
        for name in names:
            if (count := names.count(name)) > 1:
                raise ConfigError(f"model: {count} layers are called {name!r}; each needs a name of its own")
        for name, layer in self.layers:
            missing = [part for part in ("shapes", "init", "forward", "backward") if not hasattr(layer, part)]
            if missing:
                raise ConfigError(f"model: layer {name!r} ({type(layer).__name__}) has no {' and no '.join(missing)}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All parameters by full name, in forward order."""
        return {f"{name}.{short}": shape for name, layer in self.layers for short, shape in layer.shapes.items()}

    def init(self, seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        """First values of all parameters, in host memory: the same bits for the same seed, on every rank of any number.

        Every parameter has a generator of its own, from the seed and its name, so adding a layer changes no other.
        ConfigError for a dtype other than float32 and float64.
        """
        dtype = np.dtype(dtype)
        if dtype not in (np.float32, np.float64):
            raise ConfigError(f"model: cannot compute in {dtype}; float32 and float64 are possible")
        rng = np.random.default_rng(seed)
        return {
            f"{name}.{short}": value
            for name, layer in self.layers
            for short, value in layer.init(named(rng, name), dtype).items()
        }

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, list[Any]]:
        """The output of the last layer, and what `backward` needs. `params`: by full name; not written to."""
        saved = []
        for name, layer in self.layers:
            x, kept = layer.forward(params_of(layer, name, params), x)
            saved.append(kept)
        return x, saved

    def backward(self, params: Mapping[str, Array], saved: list[Any], dy: Array) -> Iterator[tuple[str, Array]]:
        """Gradients by full name, in the reverse of the order of `shapes`, each layer's as soon as they exist.

        A generator, so that what the caller does with a layer's gradients (reduce a full bucket) happens before the
        layer below it is run. `params` must still hold the values that `forward` saw. The arrays are the caller's to
        overwrite.
        """
        for (name, layer), kept in zip(reversed(self.layers), reversed(saved), strict=True):
            dy, grads = layer.backward(params_of(layer, name, params), kept, dy)
            if grads.keys() != layer.shapes.keys():
                raise ConfigError(f"model: backward of layer {name!r} gave gradients of {sorted(grads)}, its parameters are "
                                  f"{sorted(layer.shapes)}")
            for short in reversed(layer.shapes):
                yield f"{name}.{short}", grads[short]

    def activation_bytes(self, saved: Any) -> int:
        """Bytes of the buffers that `saved` keeps alive; one that several layers keep, or see a part of, counts once.

        A measurement, not for every step: on a device it waits for what is queued.
        """
        return sum({_address(buffer): buffer.nbytes for buffer in _buffers(saved)}.values())


def _buffers(saved: Any) -> Iterator[Array]:
    """The arrays that own the memory of the arrays in `saved`: in tuples, lists and dicts, to any depth."""
    if isinstance(saved, Mapping):
        saved = tuple(saved.values())
    if isinstance(saved, tuple | list):
        for part in saved:
            yield from _buffers(part)
    elif getattr(saved, "nbytes", 0):
        while hasattr(base := getattr(saved, "base", None), "nbytes"):
            saved = base
        yield saved


def _address(x: Array) -> int:
    """Where the memory of `x` begins."""
    synchronize(x)      # whoever reads a device array's interface is expected to have waited
    interface = x.__cuda_array_interface__ if is_device(x) else x.__array_interface__
    return interface["data"][0]
