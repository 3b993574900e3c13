"""`python -m hpczero train`: a model, some data, and ZeRO at the stage asked for.

Leaves in OUT/NAME: settings.json (every value and where it came from), metrics.jsonl (a line per step) and loss.png.
Nothing is written before settings, data, model and memory have proved to be right on every rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hpczero.cli import flags
from hpczero.cli.progress import Progress, terminal
from hpczero.errors import ConfigError, DataError, HpczeroError, raise_together

if TYPE_CHECKING:
    import argparse

    import numpy as np
    from mpi4py import MPI

    from hpczero.cli.report import History
    from hpczero.cli.stages import Training
    from hpczero.cli.train_settings import TrainSettings
    from hpczero.data import Dataset
    from hpczero.device import Device
    from hpczero.models import Model
    from hpczero.settings import Resolved
    from hpczero.zero.optimizer import StepReport

_HERE = Path(__file__).parent
_SOURCES = ((_HERE.parent / "zero" / "config.py", "ZeroConfig"), (_HERE / "train_settings.py", "TrainSettings"))
EVALUATION_BATCH = 32  # sequences at a time on a rank; bounds the memory that evaluation takes

_log = logging.getLogger("hpczero.cli.train")
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE.toml", help="settings, in a table [train]; HPCZERO_TRAIN_<KEY> overrides them"
    )
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-",
        help="the result as one JSON object: into FILE, or as the last line of stdout",
    )  # fmt: skip
    flags.add_settings(parser, *_SOURCES)


def run(args: argparse.Namespace, comm: MPI.Comm) -> int:
    """Train once. Called by every rank."""
    from hpczero import device as devices
    from hpczero.cli import report, stages
    from hpczero.cli.build import build
    from hpczero.topology import Topology

    resolved = together(comm, lambda: _resolve(args), only_rank_0=True)
    settings = resolved.settings
    together(comm, lambda: _check_writable(Path(settings.out), args.json), only_rank_0=True)
    dataset = together(comm, lambda: _load(settings, comm.size))
    model = together(comm, lambda: build(settings, dataset))

    # Closed at the end, and left alone when something fails: closing is collective, and the others may never come.
    topology = Topology(comm)
    device = devices.select(settings.device, comm, topology.local_rank)
    training = stages.start(
        model, _parameters(model, settings, device), _optimizer(settings), topology, settings.zero(), device
    )
    folder = together(comm, lambda: _make_folder(settings, resolved), only_rank_0=True)
    _log.info("%s", report.headline(settings, dataset, model, device, topology))

    history = _train(training, dataset, settings, device, comm, folder)
    if history.skipped == settings.steps:      # the same on every rank
        raise HpczeroError(f"all {settings.steps} steps were skipped, since gradients were not finite: nothing was trained; "
                           "try a smaller --lr, or look at the model and the data")
    val_loss = _evaluate(training, dataset, settings, device, comm)
    result = report.result(training, dataset, settings, device, comm, history, val_loss)
    if comm.rank == 0:
        report.tell(result, folder, history, dataset, settings, args.json)
    training.close()
    topology.close()
    return 0


def together(comm: MPI.Comm, work: Callable[[], T], *, only_rank_0: bool = False) -> T:
    """`work()`, on every rank or on rank 0 for all; an error on one rank is raised on all of them."""
    value, error = None, None
    if comm.rank == 0 or not only_rank_0:
        try:
            value = work()
        except Exception as problem:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = problem
    if only_rank_0:
        value, refusal = comm.bcast((value, error if isinstance(error, ConfigError | DataError) else None), root=0)
        if refusal is not None:
            raise refusal  # on all ranks in the same words
    raise_together(comm, error)
    return value


def _resolve(args: argparse.Namespace) -> Resolved[TrainSettings]:
    """On rank 0 only: other nodes may have another file, and mpirun need not hand on the environment to them."""
    from hpczero.cli import COMMANDS, VARIABLES
    from hpczero.cli.train_settings import TrainSettings
    from hpczero.settings import refuse_unknown_variables, resolve

    refuse_unknown_variables(os.environ, VARIABLES, COMMANDS)
    return resolve(
        TrainSettings,
        "train",
        file=args.config,
        environ=os.environ,
        flags=flags.given(args, *_SOURCES),
        commands=COMMANDS,
    )


def _check_writable(out: Path, json_file: str | None) -> None:
    """ConfigError if a folder cannot be made in `out`, or the JSON file not in its own, without making anything."""
    try:
        exists = next(folder for folder in [out, *out.absolute().parents] if folder.exists())
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name another folder") from None
    if not exists.is_dir():
        raise ConfigError(f"--out {out}: {exists} is a file; name a folder")
    if not os.access(exists, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: no permission to write in {exists.absolute()}; name another folder")
    if json_file not in (None, "-"):
        path = Path(json_file)
        place = path if path.exists() else path.absolute().parent
        if path.is_dir() or not (path.exists() or place.is_dir()) or not os.access(place, os.W_OK):
            raise ConfigError(f"--json {json_file}: cannot be written there; name a file in a folder that exists")


def _load(settings: TrainSettings, size: int) -> Dataset:
    from hpczero import data

    dataset = data.load(settings.data, sequence_length=settings.sequence_length)
    if size > len(dataset.train):
        kind = "sequences" if dataset.task == "text" else "rows"
        raise DataError(
            f"{settings.data or 'the reference text'}: {size} ranks, but only {len(dataset.train)} {kind} to train on; "
            f"start fewer ranks, or take more data{' or shorter sequences' if dataset.task == 'text' else ''}"
        )
    return dataset


def _parameters(model: Model, settings: TrainSettings, device: Device) -> dict[str, Any]:
    return {name: device.xp.asarray(value) for name, value in model.init(settings.seed, settings.dtype).items()}


def _optimizer(settings: TrainSettings) -> Any:
    from hpczero.optim import SGD, AdamW

    if settings.optimizer == "sgd":
        return SGD(lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    return AdamW(lr=settings.lr, weight_decay=settings.weight_decay)


def _make_folder(settings: TrainSettings, resolved: Resolved[TrainSettings]) -> Path:
    """The new folder of this run, with settings.json in it."""
    model = "".join(letter if letter.isalnum() else "-" for letter in settings.model)
    name = settings.name or f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(settings.out, name)
    try:
        for attempt in range(2, 100):
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:
                if settings.name:
                    raise ConfigError(
                        f"name = {name}: {folder} is there already; take another name, or remove it"
                    ) from None
                folder = Path(settings.out, f"{name}-{attempt}")  # two runs in one second
        (folder / "settings.json").write_text(json.dumps(resolved.report(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {settings.out}: {folder} cannot be made: {error.strerror}") from None
    return folder


def _train(
    training: Training, dataset: Dataset, settings: TrainSettings, device: Device, comm: MPI.Comm, folder: Path
) -> History:
    """All steps. Rank 0 shows progress and writes metrics.jsonl."""
    from hpczero.cli.report import History
    from hpczero.data import rank_part, step_indices

    history = History()
    tokens_per_sample = settings.sequence_length if dataset.task == "text" else 1
    bytes_per_rank = max(comm.allgather(sum(training.memory.values())))
    watching = _Watch(settings.steps, bytes_per_rank, folder) if comm.rank == 0 else contextlib.nullcontext()
    with watching as watch:
        for step in range(settings.steps):
            begin = time.perf_counter()
            samples = step_indices(step, len(dataset.train), settings.batch, settings.seed)
            mine = rank_part(samples, comm.rank, comm.size)
            # A rank for which the step has no sample takes the first one along with weight 0: at stage 3 it must take
            # part in gathering the layers, and a user's model need not work on nothing.
            x, target = _place(dataset.train.batch(mine if len(mine) else samples[:1]), device, settings)
            lr = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup_steps))
            loss, report = training.step(x, target, float(len(mine)), lr)
            loss = _mean_over_ranks(comm, loss * len(mine), len(mine))
            history.add(loss, time.perf_counter() - begin, len(samples) * tokens_per_sample, report.applied)
            if watch is not None:
                watch.step(history, lr, report)
    return history


class _Watch:
    """Rank 0's eyes on the training loop: a line of metrics.jsonl per step, and the progress bar."""

    def __init__(self, steps: int, bytes_per_rank: int, folder: Path):
        self._progress = Progress(steps, bytes_per_rank, terminal())
        # Line by line, so that a run that is killed leaves the steps it has done.
        self._file = (folder / "metrics.jsonl").open("w", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._file.close()

    def step(self, history: History, lr: float, report: StepReport) -> None:
        from hpczero.cli.report import as_json

        line = {
            "step": len(history.losses), "loss": history.losses[-1], "lr": lr, "grad_norm": report.grad_norm,
            "applied": report.applied, "seconds": history.seconds[-1],
            "tokens_per_s": history.num_tokens[-1] / history.seconds[-1],
        }  # fmt: skip
        self._file.write(as_json(line) + "\n")
        self._progress.update(len(history.losses), history.losses[-1], history.tokens_per_s)


def _place(batch: tuple[np.ndarray, np.ndarray], device: Device, settings: TrainSettings) -> tuple[Any, Any]:
    """Inputs and targets on the device; numbers that are not integers in the training's dtype."""
    return tuple(
        device.xp.asarray(array if array.dtype.kind in "iu" else array.astype(settings.dtype, copy=False))
        for array in batch
    )


def _mean_over_ranks(comm: MPI.Comm, total: float, weight: float) -> float:
    """Sum of the totals / sum of the weights, added up in rank order, so that every run gives the same bits."""
    import numpy as np

    mine, all_ranks = np.array([total, weight]), np.empty((comm.size, 2))
    comm.Allgather(mine, all_ranks)
    totals, weights = all_ranks.T.tolist()
    return sum(totals) / sum(weights)


def _evaluate(training: Training, dataset: Dataset, settings: TrainSettings, device: Device, comm: MPI.Comm) -> float:
    """The mean loss over everything held out, each rank its part. Called by every rank."""
    import numpy as np

    from hpczero.data import rank_part

    mine = rank_part(np.arange(len(dataset.val)), comm.rank, comm.size)
    batches = list(dataset.val.batches(mine, EVALUATION_BATCH))
    # At stage 3 the ranks gather the layers together, so each must run the model equally often.
    rounds = max(comm.allgather(len(batches)))
    total, count = 0.0, 0
    for index in range(rounds):
        counts = index < len(batches)
        batch = batches[index] if counts else dataset.val.batch(np.arange(1))
        loss = training.loss(*_place(batch, device, settings))
        if counts:
            total, count = total + loss * batch[1].size, count + batch[1].size
    return _mean_over_ranks(comm, total, count)
