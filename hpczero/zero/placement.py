"""What a placement needs to know about its arguments: parameters as arrays, where they live, whether they are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpczero.arrays import Array, from_any, is_device, is_half, namespace
from hpczero.device import Device
from hpczero.errors import ConfigError
from hpczero.optim import Optimizer
from hpczero.optim.schedules import Schedule
from hpczero.zero.config import ZeroConfig


def refuse_optimizer(optimizer: Any) -> None:
    """ConfigError unless it is an optimizer of `hpczero.optim`."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer: one of hpczero.optim, such as AdamW(lr=1e-3), is needed, not {optimizer!r}")


def refuse_schedule(schedule: Any) -> None:
    """ConfigError unless it is None or a schedule of `hpczero.optim.schedules`."""
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ConfigError(f"schedule: None or one of hpczero.optim.schedules, such as Cosine(steps=1000), is needed, not "
                          f"{schedule!r}")


def as_arrays(params: Any) -> tuple[dict[str, Array], np.dtype]:
    """Parameters without a copy, and their one dtype; float32 if there are none. ConfigError for what cannot be trained."""
    if not isinstance(params, Mapping):
        raise ConfigError(f"params: a dict of name to array is needed, not {type(params).__name__}")
    arrays = {}
    for name, value in params.items():
        if not isinstance(name, str):
            raise ConfigError(f"params: names are strings, not {name!r}")
        try:
            arrays[name] = np.asarray(value) if isinstance(value, np.generic) else from_any(value)
        except TypeError as error:
            raise ConfigError(f"params[{name!r}]: {error}") from None
    kinds = {name: array.dtype for name, array in arrays.items()}
    for name, kind in kinds.items():
        if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ConfigError(f"params[{name!r}] is of {kind}; float32 and float64 can be trained")
        first = next(iter(kinds))
        if kind != kinds[first]:
            raise ConfigError(f"params[{name!r}] is of {kind}, params[{first!r}] of {kinds[first]}: one type for all is "
                              "needed")
    return arrays, next(iter(kinds.values()), np.dtype(np.float32))


def checked_gradient(name: str, gradient: Any, shape: tuple[int, ...]) -> Array:
    """A gradient as an array without a copy; ConfigError unless it has the parameter's shape and a floating type."""
    try:
        array = from_any(np.asarray(gradient) if isinstance(gradient, (float, np.generic)) else gradient)
    except TypeError as error:
        raise ConfigError(f"gradient of {name!r}: {error}") from None
    if array.shape != shape:
        raise ConfigError(f"gradient of {name!r} has shape {array.shape}, the parameter {shape}")
    if array.dtype.kind != "f" and not is_half(array.dtype):
        raise ConfigError(f"gradient of {name!r} is of {array.dtype}; a floating type is needed")
    return array


def device_of(arrays: Mapping[str, Array]) -> Device:
    """Where all of the arrays are; ConfigError if they are in several places."""
    on_device = [name for name, array in arrays.items() if is_device(array)]
    if not on_device:
        return Device("cpu", 0, "host", np)
    on_host = [name for name in arrays if name not in on_device]
    if on_host:
        raise ConfigError(f"params[{on_device[0]!r}] is on a device and params[{on_host[0]!r}] on the host: all in one "
                          "place is needed")
    first = arrays[on_device[0]]
    return Device("cuda", getattr(getattr(first, "device", None), "id", 0), "device of the parameters", namespace(first))


def shares(config: ZeroConfig, device: Device) -> bool:
    """Whether a node keeps one copy of the parameters; ConfigError if it was asked to and cannot."""
    if config.share_parameters == "auto":
        return device.kind == "cpu" and config.stage > 0
    if config.share_parameters and config.stage == 0:
        raise ConfigError("share_parameters=True at stage 0: every rank updates every parameter there, so each needs its "
                          "own copy; take stage 1, or share_parameters='auto'")
    if config.share_parameters and device.kind != "cpu":
        raise ConfigError("share_parameters=True on a device: ranks share host memory only; take 'auto'")
    return config.share_parameters
