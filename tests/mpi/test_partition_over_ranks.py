"""The list-of-arrays helpers over a communicator: reduce-scatter of gradients, and gathering chunks."""

from __future__ import annotations

import math

import devicedouble
import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.arrays import is_device, to_host
from hpczero.errors import ConfigError, HpczeroError, MismatchError
from hpczero.topology import Topology
from hpczero.zero.partition import (
    all_gather_gradients,
    gather_parameters,
    partition_gradients,
    partition_optimizer_states,
    partition_parameters,
    reduce_scatter_gradients,
)

SHAPES = [(), (0,), (0, 4), (1,), (5,), (3, 4), (2, 3, 2)]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]

needs_two_ranks = pytest.mark.mpi(min_size=2)       # one rank cannot differ from others


def contribution(rank, dtype, shapes=SHAPES):
    """A rank's gradients: small whole numbers, which every dtype adds exactly."""
    return [
        ((np.arange(math.prod(shape)) + i) % 5 + rank).astype(dtype).reshape(shape) for i, shape in enumerate(shapes)
    ]


def summed(size, dtype, shapes=SHAPES):
    parts = [contribution(rank, np.int64, shapes) for rank in range(size)]
    return [np.asarray(sum(part[i] for part in parts)).astype(dtype) for i in range(len(shapes))]


def identical(ones, others):
    return len(ones) == len(others) and all(
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        for one, other in zip(ones, others, strict=True)
    )


def raised(call, *arguments, **named):
    """What a call raises: an error of hpczero, or the TypeError of this rank; None if it returns."""
    try:
        call(*arguments, **named)
    except (HpczeroError, TypeError) as caught:
        return caught
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_r_gets_chunk_r_of_the_sum_of_all_gradients(comm, dtype):
    chunks = reduce_scatter_gradients(contribution(comm.rank, dtype), comm, op="sum")
    expected = partition_gradients(summed(comm.size, dtype), comm.size)[comm.rank]
    check_everywhere(comm, identical(chunks, expected), f"{chunks} instead of {expected}")


def test_the_mean_is_the_default(comm):
    grads = [np.full((2, 3), comm.rank, np.float32), np.array(10.0 * comm.rank)]
    chunks = reduce_scatter_gradients(grads, comm)
    mean = (comm.size - 1) / 2
    whole = [np.full((2, 3), mean, np.float32), np.array(10 * mean)]
    expected = partition_gradients(whole, comm.size)[comm.rank]
    # Halves of small whole numbers are exact, but 1 / size need not be: a rounding apart is still the mean.
    ok = all(np.allclose(one, other, rtol=1e-6, atol=0) for one, other in zip(chunks, expected, strict=True))
    check_everywhere(comm, ok and [c.dtype for c in chunks] == [np.float32, np.float64], f"{chunks}, not {expected}")


def test_the_gradients_that_are_passed_stay_as_they_are_even_when_read_only_or_strided(comm):
    grads = contribution(comm.rank, np.float32) + [contribution(comm.rank, np.float32, [(4, 3)])[0].T]
    for grad in grads:
        grad.flags.writeable = False
    before = [grad.copy() for grad in grads]
    chunks = reduce_scatter_gradients(grads, comm, op="sum")
    check_everywhere(comm, identical(grads, before), "a gradient was changed")
    last = partition_gradients([summed(comm.size, np.float32, [(4, 3)])[0].T], comm.size)[comm.rank]
    check_everywhere(comm, identical(chunks[-1:], last), "a strided gradient was added in another element order")


def test_the_chunks_hold_no_more_memory_than_their_own(comm):
    grads = contribution(comm.rank, np.float32)
    chunks = reduce_scatter_gradients(grads, comm)
    row = sum(math.ceil(grad.size / comm.size) for grad in grads)
    owners = {id(chunk.base): chunk.base.size for chunk in chunks if chunk.base is not None}
    check_everywhere(comm, list(owners.values()) == [row], f"{row} elements expected, held: {list(owners.values())}")


@pytest.mark.parametrize("gather", [all_gather_gradients, gather_parameters])
@pytest.mark.parametrize("dtype", [*DTYPES, np.int32, np.int64, np.uint8])
def test_gathering_the_chunks_gives_every_rank_the_whole_arrays(comm, gather, dtype):
    arrays = contribution(7, dtype)
    chunks = partition_parameters(arrays, comm.size)[comm.rank]
    for likes in (arrays, SHAPES):
        whole = gather(chunks, likes, comm)
        check_everywhere(comm, identical(whole, arrays), f"{whole} instead of {arrays}")


def test_chunks_on_a_device_are_gathered_there(comm):
    arrays = contribution(7, np.float32)
    chunks = [devicedouble.asarray(chunk) for chunk in partition_parameters(arrays, comm.size)[comm.rank]]
    whole = gather_parameters(chunks, SHAPES, comm)
    check_everywhere(comm, all(is_device(array) for array in whole), "an array came back in host memory")
    check_everywhere(comm, identical([to_host(array) for array in whole], arrays), f"{whole} instead of {arrays}")


def test_a_list_on_the_host_and_the_device_is_refused_on_every_rank(comm):
    last = devicedouble.zeros(2) if comm.rank == comm.size - 1 else np.zeros(2)
    caught = raised(reduce_scatter_gradients, [np.zeros(2), last], comm)
    ok = type(caught) is ConfigError and "all from the host or all from a device" in str(caught)
    check_everywhere(comm, ok, f"raised {caught!r}")


def test_reduced_and_gathered_gradients_are_the_sum_on_every_rank(comm):
    grads = contribution(comm.rank, np.float64)
    whole = all_gather_gradients(reduce_scatter_gradients(grads, comm, op="sum"), grads, comm)
    check_everywhere(comm, identical(whole, summed(comm.size, np.float64)), f"{whole}")


def test_lists_of_several_dtypes_keep_order_and_dtypes(comm):
    dtypes = [np.float32, np.float64, np.float16, np.float32, np.float64]
    grads = [contribution(comm.rank, dtype, [(i + 1, 2)])[0] for i, dtype in enumerate(dtypes)]
    total = [summed(comm.size, dtype, [(i + 1, 2)])[0] for i, dtype in enumerate(dtypes)]
    whole = all_gather_gradients(reduce_scatter_gradients(grads, comm, op="sum"), grads, comm)
    check_everywhere(comm, identical(whole, total), f"{whole} instead of {total}")


def test_a_whole_list_takes_one_collective_per_dtype(comm, monkeypatch):
    from hpczero.collectives import api

    calls = []
    for name in ("reduce_scatter", "all_gather"):
        real = getattr(api, name)
        monkeypatch.setattr(
            api, name, lambda *args, _name=name, _real=real, **named: (calls.append(_name), _real(*args, **named))[1]
        )
    grads = [np.ones(3, dtype) for dtype in (np.float32, np.float64) * 20]
    all_gather_gradients(reduce_scatter_gradients(grads, comm), grads, comm)
    check_everywhere(comm, calls == ["reduce_scatter"] * 2 + ["all_gather"] * 2, f"{calls}")


def test_no_arrays_at_all_give_empty_lists(comm):
    results = [reduce_scatter_gradients([], comm), all_gather_gradients([], [], comm), gather_parameters([], [], comm)]
    check_everywhere(comm, results == [[], [], []], f"{results}")


def test_a_topology_serves_several_calls_and_stays_open(comm):
    with Topology(comm) as topology:
        for _ in range(3):
            chunks = reduce_scatter_gradients(contribution(comm.rank, np.float32), topology, op="sum")
            whole = gather_parameters(chunks, SHAPES, topology)
            check_everywhere(topology.world, identical(whole, summed(comm.size, np.float32)), f"{whole}")


def test_half_of_the_ranks_can_use_the_helpers_on_their_own(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    try:
        chunks = reduce_scatter_gradients(contribution(half.rank, np.float32), half, op="sum")
        expected = partition_gradients(summed(half.size, np.float32), half.size)[half.rank]
        check_everywhere(comm, identical(chunks, expected), f"{chunks} instead of {expected}")
    finally:
        half.Free()


def test_a_sharded_sgd_with_momentum_is_the_unsharded_one(comm):
    parameters = [np.linspace(-1, 1, math.prod(shape)).reshape(shape) for shape in SHAPES]
    momenta = partition_optimizer_states([np.zeros(shape) for shape in SHAPES], comm.size)[comm.rank]
    serial, serial_momenta = [p.copy() for p in parameters], [np.zeros(shape) for shape in SHAPES]
    for step in range(3):
        # Powers of two and whole numbers: the mean over the ranks rounds alike in both, or not at all.
        grads = [g * 2.0**-step for g in contribution(comm.rank, np.float64)]
        reduced = reduce_scatter_gradients(grads, comm, op="sum")
        mine = partition_parameters(parameters, comm.size)[comm.rank]
        for p, g, m in zip(mine, reduced, momenta, strict=True):
            m[:] = 0.5 * m + g
            p -= 0.25 * m
        parameters = gather_parameters(mine, parameters, comm)
        for i, g in enumerate(summed(comm.size, np.float64)):
            serial_momenta[i] = np.asarray(0.5 * serial_momenta[i] + g * 2.0**-step)
            serial[i] = np.asarray(serial[i] - 0.25 * serial_momenta[i])
    check_everywhere(comm, identical(parameters, serial), f"{parameters} instead of {serial}")


@needs_two_ranks
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda grads: grads[:-1], ["1 arrays here", "2 arrays on"]),
        (lambda grads: [grads[0], grads[1].T], ["array 1: float32 (3, 2) here", "array 1: float32 (2, 3) on"]),
        (lambda grads: [grads[0].astype(np.float64), grads[1]], ["array 0: float64 (4,) here", "float32"]),
    ],
)
def test_lists_that_differ_are_an_error_on_every_rank_that_names_the_odd_one(comm, change, words):
    grads, odd = [np.ones(4, np.float32), np.ones((2, 3), np.float32)], comm.size - 1
    caught = raised(reduce_scatter_gradients, change(grads) if comm.rank == odd else grads, comm)
    ok = type(caught) is MismatchError and all(
        word in str(caught) for word in [f"rank {odd} of {comm.size}", "reduce_scatter_gradients", *words]
    )
    check_everywhere(comm, ok, f"raised {caught!r}")


@needs_two_ranks
def test_different_operations_or_functions_on_the_ranks_are_an_error_on_every_rank(comm):
    odd, grads = comm.rank == comm.size - 1, [np.ones(1, np.float32)]
    caught = raised(reduce_scatter_gradients, grads, comm, op="sum" if odd else "mean")
    check_everywhere(comm, type(caught) is MismatchError and "op sum here" in str(caught), f"raised {caught!r}")
    chunks = partition_gradients(grads, comm.size)[comm.rank]
    caught = raised(gather_parameters if odd else all_gather_gradients, chunks, grads, comm)
    ok = type(caught) is MismatchError and "gather_parameters" in str(caught) and "all_gather_gradients" in str(caught)
    check_everywhere(comm, ok, f"raised {caught!r}")


def test_what_one_rank_alone_gets_wrong_is_an_error_on_every_rank(comm):
    odd = comm.rank == comm.size - 1
    caught = raised(reduce_scatter_gradients, [[1.0, 2.0]] if odd else [np.ones(2)], comm)
    # A TypeError is the own rank's; elsewhere it arrives as an HpczeroError that quotes it.
    ok = type(caught) is (TypeError if odd else HpczeroError) and "list" in str(caught)
    check_everywhere(comm, ok, f"raised {caught!r}")
    chunks = [np.ones(99)] if odd else partition_parameters([np.ones(4)], comm.size)[comm.rank]
    caught = raised(gather_parameters, chunks, [(4,)], comm)
    ok = type(caught) is ConfigError and "array 0" in str(caught) and "(99,)" in str(caught)
    check_everywhere(comm, ok, f"raised {caught!r}")


@pytest.mark.parametrize("op", ["max", "MEAN", None, 1])
def test_other_operations_are_refused_with_what_is_allowed(comm, op):
    caught = raised(reduce_scatter_gradients, [np.ones(1)], comm, op=op)
    ok = type(caught) is ConfigError and str(caught) == f'op must be "mean" or "sum", not {op!r}'
    check_everywhere(comm, ok, f"raised {caught!r}")


@needs_two_ranks
def test_a_chunk_of_another_rank_is_refused_when_its_size_shows_it(comm):
    chunks = partition_parameters([np.arange(comm.size + 1.0)], comm.size)      # the last ranks' chunks are shorter
    caught = raised(gather_parameters, chunks[(comm.rank + 1) % comm.size], [(comm.size + 1,)], comm)
    check_everywhere(comm, isinstance(caught, ConfigError), f"raised {caught!r}")
