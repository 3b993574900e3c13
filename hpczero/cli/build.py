"""The model that the settings name: one of hpczero's, or the user's own as `package.module:build`."""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from typing import TYPE_CHECKING

from hpczero import models
from hpczero.errors import ConfigError
from hpczero.settings import nearest

if TYPE_CHECKING:
    from hpczero.cli.train_settings import TrainSettings
    from hpczero.data import Dataset


def build(settings: TrainSettings, dataset: Dataset) -> models.Model:
    """The model of `settings.model` for this data. ConfigError if there is none or it does not fit the data."""
    if settings.model == "transformer":
        if dataset.task != "text":
            raise ConfigError(f"model = transformer: needs text, and {settings.data} is a table; take --model mlp")
        return models.transformer.build(
            vocabulary=dataset.num_inputs, sequence_length=settings.sequence_length, width=settings.width,
            depth=settings.depth, heads=settings.heads,
        )  # fmt: skip
    if settings.model == "mlp":
        if dataset.task == "text":
            what = settings.data or "the reference text of Python"
            raise ConfigError(f"model = mlp: needs a table (--data FILE.csv, .npy or .npz), and {what} is text")
        return models.mlp.build(
            num_inputs=dataset.num_inputs, num_outputs=dataset.num_outputs, task=dataset.task, width=settings.width,
            depth=settings.depth,
        )  # fmt: skip
    return _users(settings, dataset)


def _users(settings: TrainSettings, dataset: Dataset) -> models.Model:
    """The user's own model. What goes wrong inside their code keeps its traceback."""
    module_name, _, name = settings.model.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigError(
            f"model = {settings.model}: there is no module {error.name}; it is looked for in {os.getcwd()} and on "
            "PYTHONPATH"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        what = f"{name} is no function" if hasattr(module, name) else f"has no {name}{nearest(name, vars(module))}"
        raise ConfigError(f"model = {settings.model}: {module.__file__} {what}")
    try:
        inspect.signature(function).bind(dataset, settings)
    except TypeError as error:
        raise ConfigError(f"model = {settings.model}: {name} is called with the data set and the settings; {error}") from None
    model = function(dataset, settings)
    if not isinstance(model, models.Model):
        raise ConfigError(
            f"model = {settings.model}: {name} returned {type(model).__name__}; it must return a "
            "hpczero.Model(layers, loss)"
        )
    return model
