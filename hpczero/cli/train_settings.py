"""What `python -m hpczero train` can be told. `flags.py` makes the command line from this source text."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpczero.settings import nearest
from hpczero.zero.config import ZeroConfig


class TrainSettings(ZeroConfig):
    """The settings of a training run, beside those of ZeRO itself. The text under a key is its help.

    The defaults are for the reference text: less than a minute on two cores, to fewer bits per byte than its trigram
    model.
    """

    model: str = "transformer"
    """transformer (text), mlp (tables), or your own as package.module:build, called as build(dataset, settings)"""
    data: str | None = None
    """a text file; or a table, .npy .npz .csv; without it the reference text that ships with Python"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """what computes; auto takes GPUs if every rank has one; cuda is an error where there is none"""
    dtype: Literal["float32", "float64"] = "float32"
    """type of the parameters and of everything computed from them"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """how parameters are updated"""
    lr: Annotated[float, Field(gt=0)] = 6e-3
    """learning rate"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """momentum, for sgd only"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """decay of the parameters, times the learning rate"""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """steps over which the learning rate rises linearly from 0"""
    steps: Annotated[int, Field(ge=1)] = 600
    """steps in total"""
    batch: Annotated[int, Field(ge=1)] = 16
    """sequences (rows of a table) per step, over all ranks"""
    seed: Annotated[int, Field(ge=0)] = 0
    """of the first parameters and of the order of the data"""
    width: Annotated[int, Field(ge=1)] = 96
    """size of the model's layers"""
    depth: Annotated[int, Field(ge=0)] = 2
    """number of transformer blocks, or of hidden layers"""
    heads: Annotated[int, Field(ge=1)] = 3
    """attention heads per transformer block"""
    sequence_length: Annotated[int, Field(ge=1)] = 64
    """bytes per training sequence"""
    out: str = "runs"
    """folder for the folders of the runs"""
    name: str | None = None
    """name of this run's folder; without it the model and the time"""

    @model_validator(mode="after")
    def _fits(self) -> TrainSettings:
        if self.optimizer == "adamw" and self.momentum:
            raise ValueError(
                f"momentum = {self.momentum}: adamw has betas of its own; momentum goes with optimizer = sgd"
            )
        if self.name is not None and not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(f"name = {self.name!r}: must begin with a letter or digit and hold only those and . _ + -")
        if self.model not in ("transformer", "mlp") and not re.fullmatch(r"[\w.]+:\w+", self.model):
            hint = nearest(self.model, ("transformer", "mlp"))
            raise ValueError(f"model = {self.model!r}: allowed is transformer, mlp or package.module:build{hint}")
        return self

    def zero(self) -> ZeroConfig:
        """The part that ZeRO reads."""
        return ZeroConfig(**{key: getattr(self, key) for key in ZeroConfig.model_fields})
