"""Gradients in device memory are fused there, apart from those of the host, and added by name."""

from __future__ import annotations

import devicedouble
import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import arrays
from hpczero.collectives.aggregator import HierarchicalAggregator
from hpczero.collectives.aggregator_config import HierarchicalConfig
from hpczero.errors import MismatchError
from hpczero.topology import Topology


@pytest.mark.parametrize("transfer", ["staged", "direct"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_device_gradients_become_their_sum_or_mean_beside_those_of_the_host(comm, monkeypatch, transfer, op):
    monkeypatch.setenv("HPCZERO_DEVICE_TRANSFER", transfer)
    for node_map in {(0,) * comm.size, tuple(rank % 2 for rank in range(comm.size))}:
        with Topology(comm, node_map) as topology, HierarchicalAggregator(HierarchicalConfig(op=op), topology) as sums:
            square = np.arange(12.0).reshape(3, 4)
            mine = {
                "w": devicedouble.asarray(np.full((3, 4), comm.rank + 1.0)),
                "scalar": devicedouble.asarray(np.array(2.0)),
                "turned": devicedouble.asarray(square).T,
                "half": devicedouble.asarray(np.full(5, comm.rank).astype(ml_dtypes.bfloat16)),
                "host": np.ones(3),
            }
            planned = [(bucket.names, bucket.on_device) for bucket, _ in sums.plan(mine)]
            sums.all_reduce(mine)
            found = {name: arrays.to_host(array).astype(np.float64) for name, array in mine.items()}
            by = comm.size if op == "mean" else 1
            expected = {"w": np.full((3, 4), comm.size * (comm.size + 1) / 2 / by), "scalar": 2.0 * comm.size / by,
                        "turned": square.T * comm.size / by, "half": comm.size * (comm.size - 1) / 2 / by,
                        "host": comm.size / by}
            wrong = [name for name in found if not np.all(found[name] == expected[name])]
            fine = planned == [(("half",), True), (("host",), False), (("scalar", "turned", "w"), True)]
            check_everywhere(comm, fine and not wrong, f"{node_map}: wrong are {wrong}; planned was {planned}")


def test_a_gradient_that_is_on_the_host_of_one_rank_only_is_named(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with HierarchicalAggregator(comm=comm) as sums:
        array = np.ones(3) if comm.rank == 0 else devicedouble.asarray(np.ones(3))
        try:
            sums.all_reduce({"w": array})
            text = "nothing was raised"
        except MismatchError as error:
            text = str(error)
        fine = '"w" is' in text and "(3,) on the host on rank 0" in text and "(3,) on the device on" in text
        check_everywhere(comm, fine, text)
