"""Training on device arrays gives, bit for bit, the parameters that the same training on the host gives.

The whole of it: forward and backward on the stand-in for CuPy, gradients reduced by MPI, norms and optimizer kernels in
Numba's CUDA simulator.
"""

from __future__ import annotations

import devicedouble
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.arrays import is_device
from hpczero.cli import stages
from hpczero.device import Device
from hpczero.models import mlp
from hpczero.optim import SGD, AdamW
from hpczero.topology import Topology
from hpczero.zero.config import ZeroConfig

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in scalar:RuntimeWarning")

DEVICE = Device("cuda", 0, "double", devicedouble)
HOST = Device("cpu", 0, "host", np)
STEPS = 3


def train(topology, stage, optimizer, device):
    """Three steps of an MLP with 26 parameters on unequal batches; (parameters, norm of the gradients of each step)."""
    model = mlp.build(num_inputs=3, num_outputs=2, task="regression", width=4, depth=1)
    params = {name: device.xp.asarray(value) for name, value in model.init(1).items()}
    config = ZeroConfig(stage=stage, gradient_clipping=0.5, reduce_bucket_size=64)
    training = stages.start(model, params, optimizer, topology, config, device)
    rng = np.random.default_rng([topology.rank, 2])
    count = topology.rank + 1
    grad_norms = []
    for _ in range(STEPS):
        x, target = (rng.standard_normal((count, width)).astype(np.float32) for width in (3, 2))
        _, report = training.step(device.xp.asarray(x), device.xp.asarray(target), float(count), 0.1)
        grad_norms.append(report.grad_norm)
    found = {name: value.copy() for name, value in training.full_parameters().items()}
    training.close()
    return found, grad_norms


@pytest.mark.parametrize(("stage", "optimizer", "transfer"), [
    *((stage, AdamW(), transfer) for stage in range(4) for transfer in ("staged", "direct")),
    (1, SGD(momentum=0.9), "staged"),
    (3, SGD(), "direct"),
], ids=lambda value: type(value).__name__ if isinstance(value, AdamW | SGD) else str(value))
def test_training_on_a_device_gives_the_bits_of_training_on_the_host(comm, monkeypatch, stage, optimizer, transfer):
    monkeypatch.setenv("HPCZERO_DEVICE_TRANSFER", transfer)
    with Topology(comm) as topology:
        expected, expected_norms = train(topology, stage, optimizer, HOST)
        found, norms = train(topology, stage, optimizer, DEVICE)
    check_everywhere(comm, norms == expected_norms, f"norms {norms}, on the host {expected_norms}")
    check_everywhere(comm, list(found) == list(expected) and not any(map(is_device, found.values())), f"{list(found)}")
    wrong = [name for name in expected if found[name].tobytes() != expected[name].tobytes()]
    check_everywhere(comm, not wrong, f"differ: {wrong}")
