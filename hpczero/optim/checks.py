"""Ranges of hyperparameters: a value that cannot train is refused where it is written, with what is allowed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpczero.errors import ConfigError


def at_least_zero(owner: Any, name: str, value: Any) -> None:
    _require(owner, name, value, lambda number: number >= 0, "at least 0")


def positive(owner: Any, name: str, value: Any) -> None:
    _require(owner, name, value, lambda number: number > 0, "above 0")


def below_one(owner: Any, name: str, value: Any) -> None:
    _require(owner, name, value, lambda number: 0 <= number < 1, "at least 0 and below 1")


def two_betas(owner: Any, betas: Any) -> None:
    """ConfigError unless `betas` are two numbers, each at least 0 and below 1."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"{type(owner).__name__}: betas={betas!r}; two numbers such as (0.9, 0.999) are needed")
    for beta in betas:
        below_one(owner, "betas", beta)


def _require(owner: Any, name: str, value: Any, holds: Any, allowed: str) -> None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not holds(value):
        raise ConfigError(f"{type(owner).__name__}: {name}={value!r}; a number {allowed} is needed")
