"""arrays.launch: every element once, on the current stream, without waiting."""

from __future__ import annotations

import devicedouble
import numpy as np
import pytest
from numba import cuda

from hpczero import arrays


@cuda.jit
def _add_scaled(x, y, scale):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] += scale * y[i]


@pytest.mark.parametrize("size", [1, 7, 128, 129, 300])
def test_a_kernel_visits_every_element_once(size):
    host = np.arange(size, dtype=np.float32)
    x, y = devicedouble.asarray(host), devicedouble.ones(size, np.float32)
    arrays.launch(_add_scaled, size, x, y, np.float32(2))
    assert np.array_equal(arrays.to_host(x), host + 2)


def test_a_kernel_writes_through_views():
    x = devicedouble.zeros(10, np.float32)
    arrays.launch(_add_scaled, 3, x[4:7], devicedouble.ones(3, np.float32), np.float32(1))
    assert arrays.to_host(x).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_nothing_is_launched_for_no_elements():
    x = devicedouble.empty(0, np.float32)
    arrays.launch(_add_scaled, 0, x, x, np.float32(1))
    assert not devicedouble.queue.pending


def test_a_launch_is_queued_and_does_not_wait():
    x = devicedouble.zeros(3, np.float32)
    arrays.synchronize(x)
    devicedouble.queue.reset()
    arrays.launch(_add_scaled, 3, x, x, np.float32(1))
    assert devicedouble.queue.pending and devicedouble.queue.num_synchronized == 0
    arrays.synchronize(x)
    assert x.__cuda_array_interface__["shape"] == (3,)


def test_a_kernel_goes_to_the_current_stream(monkeypatch):
    taken = []
    monkeypatch.setattr(cuda, "external_stream", lambda ptr: taken.append(ptr) or 0)
    arrays._numba_stream.cache_clear()
    x = devicedouble.zeros(3, np.float32)
    arrays.launch(_add_scaled, 3, x, x, np.float32(1))
    stream = devicedouble.cuda.Stream(non_blocking=True)
    stream.ptr = 0xBEEF
    with stream:
        arrays.launch(_add_scaled, 3, x, x, np.float32(1))
    arrays.launch(_add_scaled, 3, x, x, np.float32(1))
    assert taken == [0, 0xBEEF]     # remembered the second time
    arrays._numba_stream.cache_clear()
