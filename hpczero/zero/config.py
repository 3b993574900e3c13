"""The settings of ZeRO, under the names that users of other ZeRO libraries know."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpczero.settings import Settings, Size


class ZeroConfig(Settings):
    """What is partitioned, in pieces of what size, and how long to wait. Frozen; unknown keys are refused."""

    stage: Literal[0, 1, 2, 3] = 2
    """What is sharded: 1 optimizer states, 2 also gradients, 3 also parameters."""

    reduce_bucket_size: Size = "25MiB"
    """Gradients are reduced in buckets of about this size: at most so much unless one parameter alone is larger. Stage 2
    holds two of them. A layer is a bucket at stage 3."""

    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    """Gradients are scaled down to this norm over all parameters; 0 leaves them as they are."""

    gradient_clipping_norm: Literal[1, 2, "inf"] = 2
    """Which norm: the sum of absolute values, the root of the sum of squares, or the largest absolute value."""

    max_consecutive_skips: Annotated[int, Field(ge=0)] = 25
    """So many steps in a row may be skipped because gradients are not finite; one more is an error on all ranks, since a run
    that skips every step looks healthy and trains nothing. 0 allows none."""

    share_parameters: bool | Literal["auto"] = "auto"
    """One read-only copy of the parameters per node, in shared memory, instead of one per rank. "auto": on a host at
    stages 1 to 3, never at stage 0 (where every rank writes every element) nor on a device."""

    comm_timeout_ms: Annotated[int, Field(gt=0)] = 600_000
    """How long a rank waits for the others before it says who is missing. Holds for all that use the same topology, from
    the last to set it."""

    @model_validator(mode="after")
    def _clips(self) -> ZeroConfig:
        if self.gradient_clipping_norm != 2 and not self.gradient_clipping:
            raise ValueError(f"gradient_clipping_norm = {self.gradient_clipping_norm!r}: nothing is clipped by it; set "
                             "gradient_clipping too")
        return self
