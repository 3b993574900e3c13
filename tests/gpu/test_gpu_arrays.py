"""hpczero.arrays and hpczero.device on a real GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from hpczero import arrays
from hpczero.device import select

pytestmark = pytest.mark.gpu


class Alone:
    """A communicator of one rank; a test process of its own MPI could start no mpirun afterwards."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]


def raise_mine(comm, error):
    if error is not None:
        raise error


@pytest.fixture(scope="module")
def device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpczero.device.raise_together", raise_mine)
        return select("cuda", Alone(), 0)


@cuda.jit
def _add_scaled(x, y, scale):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] += scale * y[i]


@cuda.jit
def _add_one_slowly(x, rounds):
    """Long enough that whoever does not wait for it sees what was there before."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        value = x[i]
        for _ in range(rounds):
            value = value * np.float32(0.5) + np.float32(0.5)
        x[i] = value + np.float32(1)


def test_the_device_is_bound_and_named(device):
    assert device.kind == "cuda" and device.xp.__name__ == "cupy"
    assert device.xp.cuda.runtime.getDevice() == device.index
    assert device.name


@pytest.mark.parametrize("dtype", [
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.uint16,
])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (1000, 1001)])
def test_values_come_back_from_the_device_as_they_went(device, shape, dtype):
    host = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(dtype)
    x = device.xp.empty(shape, dtype)
    assert arrays.is_device(x) and arrays.namespace(x) is device.xp and arrays.from_any(x) is x
    arrays.copy(x, host)
    back = np.empty_like(host)
    arrays.copy(back, x)
    assert np.array_equal(back, host) and np.array_equal(arrays.to_host(x), host)
    assert np.array_equal(arrays.to_host(arrays.as_bits(x)), arrays.as_bits(host))


def test_strided_copies_and_casts_in_both_directions(device):
    host = np.arange(24, dtype=np.float64).reshape(4, 6)
    x = device.xp.zeros((4, 12), np.float32)[:, ::2]
    arrays.copy(x, host)
    back = np.zeros((6, 4)).T
    arrays.copy(back, x)
    assert np.array_equal(back, host)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 100_000, 3_000_001])
def test_a_kernel_visits_every_element_once(device, size):
    x, y = device.xp.arange(size, dtype=np.float32), device.xp.ones(size, np.float32)
    arrays.launch(_add_scaled, size, x, y, np.float32(2))
    assert np.array_equal(arrays.to_host(x), np.arange(size, dtype=np.float32) + 2)


def test_a_kernel_writes_through_views_and_to_bits(device):
    x = device.xp.zeros(10, np.float32)
    arrays.launch(_add_scaled, 3, x[4:7], device.xp.ones(3, np.float32), np.float32(1))
    assert arrays.to_host(x).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    halves = device.xp.zeros(4, ml_dtypes.bfloat16)
    arrays.launch(_add_scaled, 4, arrays.as_bits(halves), device.xp.ones(4, np.uint16), np.uint16(0x3F80))
    assert arrays.to_host(halves).astype(np.float32).tolist() == [1, 1, 1, 1]


def test_synchronize_waits_for_a_kernel_on_a_stream_that_is_not_the_default(device):
    stream = device.xp.cuda.Stream(non_blocking=True)
    with stream:
        x = device.xp.ones(1_000_000, np.float32)
        arrays.launch(_add_one_slowly, x.size, x, 1)        # compiled before the clock counts
        arrays.launch(_add_one_slowly, x.size, x, 200_000)
        assert not stream.done, "the launch waited, or went to another stream"
        arrays.synchronize(x)
        assert stream.done


def test_work_on_the_current_stream_happens_in_order(device):
    with device.xp.cuda.Stream(non_blocking=True):
        x = device.xp.ones(100_000, np.float32)
        arrays.launch(_add_one_slowly, x.size, x, 20_000)   # 2
        x *= 3                                              # 6: CuPy after Numba
        arrays.launch(_add_scaled, x.size, x, device.xp.ones_like(x), np.float32(1))     # 7: Numba after CuPy
        host = np.empty(x.size, np.float32)
        arrays.copy(host, x)
    assert (host == 7).all()


def test_a_pinned_source_may_be_overwritten_right_after_the_copy(device):
    import cupyx

    pinned = cupyx.zeros_pinned(50_000_000, np.float32)
    with device.xp.cuda.Stream(non_blocking=True):
        x = device.xp.empty(pinned.size, np.float32)
        arrays.copy(x, pinned)
        pinned[...] = 1
        assert not arrays.to_host(x).any()


def test_a_device_array_of_numba_becomes_a_cupy_array_over_the_same_memory(device):
    theirs = cuda.to_device(np.arange(4, dtype=np.float32))
    ours = arrays.from_any(theirs)
    assert arrays.namespace(ours) is device.xp
    ours += 1
    arrays.synchronize(ours)
    assert theirs.copy_to_host().tolist() == [1, 2, 3, 4]


def test_asynchronous_copies_arrive_when_their_event_has_been_waited_for(device):
    nbytes = 100_000_000
    there, back = (arrays.pinned(device.xp.empty(1), nbytes) for _ in range(2))
    there[...] = np.arange(nbytes) % 251
    with device.xp.cuda.Stream(non_blocking=True) as stream:
        x = device.xp.empty(nbytes, np.uint8)
        arrays.copy_async(x, there)
        event = arrays.copy_async(back, x)
        assert not stream.done, "the copies waited"
        event.synchronize()
    assert np.array_equal(there, back)
