"""MPI-native ZeRO: parameters, gradients and optimizer states partitioned over MPI ranks, without a framework.

The public names below are loaded when first used. `import hpczero` alone takes a few milliseconds, starts no MPI and
touches no GPU, so a host program keeps the say over when and how MPI is initialised.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; `_HOMES` says the same to Python
    from hpczero.collectives.aggregator import HierarchicalAggregator
    from hpczero.collectives.aggregator_config import HierarchicalConfig
    from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce, reduce_scatter
    from hpczero.errors import (
        ConfigError,
        DataError,
        DeviceError,
        HpczeroError,
        MismatchError,
        NoCommunicatorError,
        RoomError,
        StallError,
        WorldSizeMismatchError,
    )
    from hpczero.models import Model
    from hpczero.optim import LAMB, SGD, Adagrad, Adam, AdamW, Lion
    from hpczero.settings import Settings, Size
    from hpczero.topology import Topology
    from hpczero.zero.config import ZeroConfig
    from hpczero.zero.engine import Zero3Engine
    from hpczero.zero.memory_stats import ZeroMemoryStats
    from hpczero.zero.optimizer import StepReport, ZeroOptimizer
    from hpczero.zero.param_groups import ParamGroup

# The only place where the version is written: pyproject.toml reads it from here. Asking the installed metadata for it
# could only give the same, or the version of another copy than the one that runs (a source tree on PYTHONPATH).
__version__ = "0.1.0"

_HOMES = {
    "hpczero.collectives.aggregator": ("HierarchicalAggregator",),
    "hpczero.collectives.aggregator_config": ("HierarchicalConfig",),
    "hpczero.collectives.api": ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"),
    "hpczero.errors": (
        "ConfigError", "DataError", "DeviceError", "HpczeroError", "MismatchError", "NoCommunicatorError", "RoomError",
        "StallError", "WorldSizeMismatchError",
    ),
    "hpczero.models": ("Model",),
    "hpczero.optim": ("LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion"),
    "hpczero.settings": ("Settings", "Size"),
    "hpczero.topology": ("Topology",),
    "hpczero.zero.config": ("ZeroConfig",),
    "hpczero.zero.engine": ("Zero3Engine",),
    "hpczero.zero.memory_stats": ("ZeroMemoryStats",),
    "hpczero.zero.optimizer": ("StepReport", "ZeroOptimizer"),
    "hpczero.zero.param_groups": ("ParamGroup",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LAMB", "SGD", "Adagrad", "Adam", "AdamW", "ConfigError", "DataError", "DeviceError", "HierarchicalAggregator",
    "HierarchicalConfig", "HpczeroError", "Lion", "MismatchError", "Model", "NoCommunicatorError", "ParamGroup",
    "RoomError", "Settings", "Size", "StallError", "StepReport", "Topology", "WorldSizeMismatchError", "Zero3Engine",
    "ZeroConfig", "ZeroMemoryStats", "ZeroOptimizer", "__version__", "all_gather", "all_reduce", "broadcast", "reduce",
    "reduce_scatter",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hpczero' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
