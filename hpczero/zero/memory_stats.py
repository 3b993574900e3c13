"""What partitioning saves and what it costs, beside plain data parallelism, where every rank holds and updates everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpczero.zero.layout import Layout

_PARTS = {"optimizer": "optimizer_states", "gradient": "gradients", "parameter": "parameters"}


@dataclass(frozen=True)
class ZeroMemoryStats:
    """Bytes per rank that are not held, compared with stage 0; measured, and by the formulas. Negative where more is held."""

    optimizer_memory_saved: float
    gradient_memory_saved: float
    parameter_memory_saved: float
    total_memory_saved: float
    """Of all three, less what the buffers take."""
    communication_overhead: float
    """Bytes that this rank has moved in the last step (read from neighbours' memory, or sent), as a multiple of what an
    all-reduce of the gradients sends, 2 (P - 1) / P of them (Rajbhandari et al., "ZeRO", SC 2020, section 7): 1 at stages 0
    to 2 with private parameters, and less than 1.5 at stage 3, where the last layer of the forward pass is not gathered
    again; where a node shares parameters, what need not be moved inside it is missing. NaN before the first step, and 0 on
    one rank."""
    formula: Mapping[str, float] = field(default_factory=dict)
    """The four savings by the formulas of the stage, under the same names."""


def memory_stats(layout: Layout, itemsize: int, num_states: int, measured: Mapping[str, float],
                 formula: Mapping[str, float], bytes_moved: int | None) -> ZeroMemoryStats:
    """From bytes held by purpose, counted and by formula, and the bytes that the last step moved (None before it)."""
    whole = layout.num_elements * itemsize
    full = {"optimizer_states": num_states * whole, "gradients": whole, "parameters": whole}
    found, expected = (_saved(full, held) for held in (measured, formula))
    ranks = layout.num_ranks
    least = 2 * (ranks - 1) / ranks * whole
    overhead = float("nan") if bytes_moved is None else bytes_moved / least if least else 0.0
    return ZeroMemoryStats(**found, communication_overhead=overhead, formula=expected)


def _saved(full: Mapping[str, float], held: Mapping[str, float]) -> dict[str, float]:
    saved = {f"{name}_memory_saved": full[purpose] - held[purpose] for name, purpose in _PARTS.items()}
    return saved | {"total_memory_saved": sum(saved.values()) - held["buffers"]}
