"""The loss curve of a run as a picture, for which matplotlib (extra `plot`) is needed and nothing else is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

HOW_TO_GET_IT = "no picture of the loss: pip install 'hpczero[plot]' brings matplotlib"


def draw(
    path: Path, title: str, losses: Sequence[float], held_out: float, levels: Mapping[str, float], unit: str
) -> str:
    """Write a PNG and return "", or return why there is none. Called by rank 0.

    `losses` is per step; `held_out` and the named `levels` (the baselines) are lines; all are in `unit`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return HOW_TO_GET_IT
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")  # without pyplot, which would look for a display
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="#1f5fa8", linewidth=0.9, label="training, per step")
    axes.axhline(held_out, color="#c2410c", linewidth=1.4, label=f"held out, at the end: {held_out:.3f}")
    for (name, level), dash in zip(levels.items(), ("--", ":", "-.", (0, (1, 3))), strict=False):
        axes.axhline(level, color="#555555", linewidth=1.0, linestyle=dash, label=f"{name}: {level:.3f}")
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=150, format="png")
    os.replace(part, path)  # never half a picture
    return ""
