"""What a training run has to say when it is done: numbers for programs, lines for people, a picture."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpczero.cli.curve import draw

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.cli.stages import Training
    from hpczero.cli.train_settings import TrainSettings
    from hpczero.data import Dataset
    from hpczero.device import Device
    from hpczero.models import Model
    from hpczero.topology import Topology

_UNITS = {  # by task: the unit of the losses that people read, and how the names of baselines in that unit end
    "text": ("bits per byte", "_bits_per_byte"),
    "regression": ("mean squared error", "_mse"),
    "classification": ("cross-entropy in nats", "_cross_entropy"),
}


@dataclass
class History:
    """What the steps were like; the same on every rank but for times."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    skipped: int = 0
    """Steps that were not applied, since a gradient was not finite."""

    def add(self, loss: float, seconds: float, num_tokens: int, applied: bool) -> None:
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.num_tokens.append(num_tokens)
        self.skipped += not applied

    @property
    def tokens_per_s(self) -> float:
        """Without the first step, which loads kernels and touches memory for the first time."""
        first = 1 if len(self.seconds) > 1 else 0
        return sum(self.num_tokens[first:]) / sum(self.seconds[first:])


def headline(settings: TrainSettings, dataset: Dataset, model: Model, device: Device, topology: Topology) -> str:
    """What is about to be trained, and where, in one line."""
    num_params = sum(math.prod(shape) for shape in model.shapes.values())
    ranks = f"{topology.size} rank{'s' if topology.size > 1 else ''}"
    nodes = f"{topology.num_nodes} node{'s' if topology.num_nodes > 1 else ''}"
    return (
        f"{settings.model}, {num_params:,} parameters, stage {settings.stage}, {ranks} on {nodes}, {device.kind}; "
        f"{len(dataset.train):,} {'sequences' if dataset.task == 'text' else 'rows'} to train on"
    )


def result(
    training: Training, dataset: Dataset, settings: TrainSettings, device: Device, comm: MPI.Comm, history: History,
    val_loss: float,
) -> dict[str, Any]:  # fmt: skip
    """What --json prints. Called by every rank; the byte counts are those of the rank that holds most."""
    memory, formula = dict(training.memory), dict(training.memory_formula)
    most, memory, formula = max(comm.allgather((sum(memory.values()), memory, formula)), key=itemgetter(0))
    bits = val_loss / math.log(2) if dataset.task == "text" else None
    return {
        "world_size": comm.size,
        "stage": settings.stage,
        "device": device.kind,
        "steps": settings.steps,
        "train_loss": history.losses[-1],
        "val_loss": val_loss,
        "bits_per_byte": bits,
        "bigram_bits_per_byte": None,
        "trigram_bits_per_byte": None,
        **dataset.baselines,
        "tokens_per_s": history.tokens_per_s,
        "first_step_s": history.seconds[0],
        "skipped_steps": history.skipped,
        "param_sha256": parameter_hash(training.full_parameters()),
        "bytes_per_rank": round(most),
        "formula_bytes_per_rank": round(sum(formula.values())),
        "bytes_by_purpose": memory,
        "formula_bytes_by_purpose": formula,
        "activation_bytes": max(comm.allgather(training.activation_bytes)),
        "losses": history.losses,
    }


def parameter_hash(params: dict[str, np.ndarray]) -> str:
    """SHA-256 over all parameters in the order of their names: name, dtype, shape, bytes."""
    import numpy as np

    content = hashlib.sha256()
    for name in sorted(params):
        value = np.ascontiguousarray(params[name])
        content.update(f"{name} {value.dtype.str} {params[name].shape}\n".encode() + value.tobytes())
    return content.hexdigest()


def tell(
    result: dict[str, Any],
    folder: Path,
    history: History,
    dataset: Dataset,
    settings: TrainSettings,
    json_file: str | None,
) -> None:
    """The picture, and the end of what a user reads. Called by rank 0."""
    per_bit = math.log(2) if dataset.task == "text" else 1.0
    unit, suffix = _UNITS[dataset.task]
    levels = {name.removesuffix(suffix).replace("_", " "): value for name, value in dataset.baselines.items()}
    missing = draw(
        folder / "loss.png", f"{settings.model}, stage {settings.stage}, {result['world_size']} ranks",
        [loss / per_bit for loss in history.losses], result["val_loss"] / per_bit, levels, unit,
    )  # fmt: skip
    beside = "   ".join(f"{name} {value:.3f}" for name, value in levels.items())
    total = sum(history.seconds)
    skipped = f"; {history.skipped} skipped, their gradients were not finite" if history.skipped else ""
    print(
        f"trained {settings.steps} steps in {total:.1f} s, {result['tokens_per_s']:,.0f} "
        f"{'tokens' if dataset.task == 'text' else 'rows'}/s{skipped}\n"
        f"held out: {result['val_loss'] / per_bit:.3f} {unit}   (baselines on the same data: {beside})\n"
        f"bytes per rank: {result['bytes_per_rank']:,}, by formula {result['formula_bytes_per_rank']:,}; "
        f"activations {result['activation_bytes']:,}\n"
        f"left in {folder}: metrics.jsonl, settings.json{'' if missing else ', loss.png'}"
    )
    if missing:
        print(missing)
    if json_file == "-":
        print(as_json(result), flush=True)
    elif json_file is not None:
        Path(json_file).write_text(as_json(result) + "\n")


def as_json(value: dict[str, Any]) -> str:
    """One line of JSON, which has no word for NaN and infinity: they become null."""

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps({key: plain(part) for key, part in value.items()}, allow_nan=False)
