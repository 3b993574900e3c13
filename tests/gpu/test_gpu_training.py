"""Training on a real GPU: ranks that share it learn what they learn on the CPU, and AdamW runs at memory speed."""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np
import pytest
from launcher import mpirun

from hpczero.optim import AdamW

pytestmark = pytest.mark.gpu

STEPS = 20
SMALL = ["--steps", STEPS, "--batch", "8", "--width", "64", "--sequence-length", "64", "--seed", "3"]


def losses(device, num_ranks, stage, folder):
    """The loss of every step of the default model on the default text, from `python -m hpczero --json`."""
    what = ["--device", device, "--stage", stage, *SMALL, "--out", folder, "--json", "-"]
    done = mpirun(num_ranks, [sys.executable, "-m", "hpczero", *what], timeout=300.0)
    assert done.status == 0, done
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["device"] == device and result["world_size"] == num_ranks
    return np.array(result["losses"])


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return losses("cpu", 2, 0, tmp_path_factory.mktemp("cpu"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_that_share_the_gpu_train_to_the_losses_of_the_cpu(stage, on_cpu, tmp_path):
    on_gpu = losses("cuda", 2, stage, tmp_path)
    assert on_gpu.shape == (STEPS,) and on_cpu[-1] < 0.9 * on_cpu[0]
    assert np.abs(on_gpu - on_cpu).max() < 1e-4, f"{on_gpu} on the GPU, {on_cpu} on the CPU"


def test_adamw_reaches_85_percent_of_the_bandwidth_of_a_copy():
    import cupy

    count = 2**26
    p, g, m, v = (cupy.zeros(count, np.float32) for _ in range(4))
    optimizer = AdamW()

    def copy():
        m[...] = v

    def step():
        optimizer.update(p, g, (m, v), step=1)

    copied, stepped = (bytes_per_s(cupy, work, nbytes) for work, nbytes in ((copy, 8 * count), (step, 28 * count)))
    assert stepped > 0.85 * copied, f"AdamW {stepped / 1e9:.0f} GB/s, copy {copied / 1e9:.0f} GB/s"


def bytes_per_s(cupy, work, nbytes):
    """`nbytes` over the median time of `work`, by the GPU's own clock."""
    times = []
    for _ in range(25):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return nbytes / statistics.median(times[5:])
