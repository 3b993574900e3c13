"""Which samples a step trains on, and which of them a rank computes: numbers in, numbers out.

Every sample is used once per epoch. The order depends on (seed, epoch) alone, so that a run can be repeated, resumed at
any step, and continued on another number of ranks with the same samples in every step. Ranks cut a step's samples among
themselves; only that cut depends on their number.

The order comes from the raw output of the Philox counter generator (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), whose stream NumPy promises never to change, unlike that of `Generator.permutation`. It costs one
sort per epoch, and eight bytes per sample.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def step_indices(step: int, num_samples: int, batch: int, seed: int) -> np.ndarray:
    """Sample numbers of training step `step` (from 0) over all ranks, (k,) int64, read-only.

    k = `batch`, but the last step of an epoch takes what is left: the next epoch never begins inside a step. A `batch`
    larger than `num_samples` makes every step a whole epoch.
    """
    if step < 0 or num_samples < 1 or batch < 1:
        raise ValueError(f"step {step} must be at least 0, num_samples {num_samples} and batch {batch} at least 1")
    steps_per_epoch = -(-num_samples // batch)
    epoch, within = divmod(step, steps_per_epoch)
    return epoch_order(num_samples, seed, epoch)[within * batch : (within + 1) * batch]


def rank_part(indices: np.ndarray, rank: int, size: int) -> np.ndarray:
    """What rank `rank` of `size` takes of `indices`: a view of consecutive ones, the first n mod size ranks one more.

    With fewer samples than ranks the last ranks get none.
    """
    each, extra = divmod(len(indices), size)
    start = rank * each + min(rank, extra)
    return indices[start : start + each + (rank < extra)]


@lru_cache(maxsize=1)  # the steps of an epoch share one order, and epochs follow each other
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """All sample numbers in the order of `epoch`, (num_samples,) int64, read-only since it is shared."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(num_samples)
    order = np.argsort(draws, kind="stable")  # stable: equal draws keep their order on every machine
    order.flags.writeable = False
    return order
