"""A real model under every stage: the same bits at every stage, and the losses of an unpartitioned run."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import data
from hpczero.cli import stages
from hpczero.device import select
from hpczero.models import transformer
from hpczero.optim import AdamW
from hpczero.topology import Topology
from hpczero.zero.config import ZeroConfig

SEQUENCE, BATCH, STEPS, SEED = 16, 10, 20, 3
OPTIMIZER = AdamW(lr=3e-3, weight_decay=0.1)
CLIP = 1.0


@pytest.fixture(scope="module")
def dataset():
    return data.load(None, sequence_length=SEQUENCE)


@pytest.fixture(scope="module")
def model(dataset):
    return transformer.build(vocabulary=dataset.num_inputs, sequence_length=SEQUENCE, width=16, depth=2, heads=2)


def batch(dataset, step, rank=0, size=1):
    indices = data.step_indices(step, len(dataset.train), BATCH, SEED)
    return dataset.train.batch(data.rank_part(indices, rank, size))


def trained(model, dataset, topology, stage, dtype, **settings):
    """(losses over the whole batch, final parameters) of a run at this stage."""
    device = select("cpu", topology.world, topology.local_rank)
    config = ZeroConfig(stage=stage, gradient_clipping=CLIP, **settings)
    training = stages.start(model, model.init(SEED, dtype), OPTIMIZER, topology, config, device)
    losses = []
    for step in range(STEPS):
        x, target = batch(dataset, step, topology.rank, topology.size)
        loss, report = training.step(x, target, weight=len(x), lr=OPTIMIZER.lr)
        assert report.applied
        parts = topology.world.allgather((loss * len(x), len(x)))
        losses.append(sum(part[0] for part in parts) / sum(part[1] for part in parts))
    params = training.full_parameters()
    training.close()
    return losses, params


def reference(model, dataset, dtype):
    """The same run in plain NumPy on one process: whole batches, whole parameters, AdamW and clipping by the book."""
    params = model.init(SEED, dtype)
    first = {name: np.zeros(value.shape) for name, value in params.items()}
    second = {name: np.zeros(value.shape) for name, value in params.items()}
    beta1, beta2 = OPTIMIZER.betas
    losses = []
    for step in range(STEPS):
        x, target = batch(dataset, step)
        y, saved = model.forward(params, x)
        loss, dy = model.loss(y, target)
        losses.append(loss)
        grads = {name: grad.astype(np.float64) for name, grad in model.backward(params, saved, dy)}
        norm = np.sqrt(sum(float((grad * grad).sum()) for grad in grads.values()))
        for name, grad in grads.items():
            grad = grad * min(1.0, CLIP / norm)
            first[name] = beta1 * first[name] + (1 - beta1) * grad
            second[name] = beta2 * second[name] + (1 - beta2) * grad * grad
            m, v = first[name] / (1 - beta1 ** (step + 1)), second[name] / (1 - beta2 ** (step + 1))
            decayed = m / (np.sqrt(v) + OPTIMIZER.eps) + OPTIMIZER.weight_decay * params[name]
            params[name] = (params[name] - OPTIMIZER.lr * decayed).astype(dtype)
    return losses


def bits(params):
    return b"".join(params[name].tobytes() for name in sorted(params))


def node_maps(size):
    return {2: [None, [0, 1]], 3: [None, [0, 0, 1]], 5: [None, [0, 0, 1, 1, 2]]}.get(size, [None])


PLAIN = [(0, {}), (1, {}), (2, {}), (3, {})]
# Every combination, though with fewer steps, is in test_zero.py.
SETTINGS = [(2, {"reduce_bucket_size": "100 elements"}), (2, {"share_parameters": False}), (3, {"share_parameters": False})]


@pytest.mark.time_limit(240)
def test_twenty_steps_give_the_same_bits_at_stages_0_to_3_and_on_a_second_run(comm, model, dataset):
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            losses, params = trained(model, dataset, topology, 1, np.float32)
            for stage, settings in PLAIN + SETTINGS if node_map is None else PLAIN:
                again, others = trained(model, dataset, topology, stage, np.float32, **settings)
                check_everywhere(comm, bits(params) == bits(others), f"stage {stage} {settings} on {topology}")
                check_everywhere(comm, losses == again, f"losses of stage {stage} {settings} on {topology}")
            held = comm.allgather(bits(params))
            check_everywhere(comm, held == [held[0]] * comm.size, "ranks hold different parameters")


@pytest.mark.time_limit(240)
@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-9), (np.float32, 1e-3)])
def test_the_loss_curve_is_that_of_an_unsharded_run_with_the_same_global_batch(comm, model, dataset, dtype, bound):
    expected = reference(model, dataset, dtype)
    assert expected[-1] < 0.9 * expected[0]
    with Topology(comm) as topology:
        for stage in (0, 2, 3):
            losses, _ = trained(model, dataset, topology, stage, dtype)
            worst = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
            check_everywhere(comm, worst < bound, f"stage {stage}: {worst:.2e}")
