"""The stand-in for CuPy is as strict as CuPy where it matters: what passes with it must not fail on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import devicedouble as xp
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def fresh_queue():
    xp.queue.reset()


@pytest.fixture
def x():
    made = xp.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    xp.queue.synchronize()
    return made


def values(x):
    return xp.asnumpy(x).tolist()


@pytest.mark.parametrize("access", [
    np.asarray, memoryview, bytes, lambda x: np.add(x, np.ones(3)), lambda x: np.ones(3) + x, lambda x: x + np.ones(3),
    lambda x: x.__array_interface__, lambda x: x.__dlpack__(), lambda x: x.ctypes, lambda x: xp.matmul(x, np.ones(3)),
    lambda x: x.__setitem__(0, np.ones(3)), lambda x: x.__iadd__(np.ones(3)), lambda x: np.concatenate([x, x]),
    lambda x: xp.block([x]),
])
def test_host_code_and_host_arrays_cannot_be_mixed_with_it(x, access):
    with pytest.raises((TypeError, AttributeError, BufferError)):
        access(x)


def test_views_share_memory_and_writing_through_them_is_seen(x):
    x.reshape(3, 2)[1:].T[...] = 9
    assert values(x) == [[0, 1, 9], [9, 9, 9]]
    x[:, 0] += 1
    x[0] *= np.float32(2)
    assert values(x) == [[2, 2, 18], [10, 9, 9]]


def test_arithmetic_comparison_and_functions_are_numpys(x):
    host = xp.asnumpy(x)
    for ours, theirs in [
        (2.0 - x, 2.0 - host), (np.float32(2) * x, np.float32(2) * host), (-abs(x), -abs(host)), (x > 2, host > 2),
        (x ** 2 / (x + 1), host ** 2 / (host + 1)), (xp.where(x > 2, x, 0.0), np.where(host > 2, host, 0.0)),
        (x @ x.T, host @ host.T),
        (xp.einsum("ij,ij->i", x, x), np.einsum("ij,ij->i", host, host)), (x.argsort(axis=1), host.argsort(axis=1)),
        (xp.take(x, xp.asarray([1, 0]), axis=0), np.take(host, [1, 0], axis=0)), (x[xp.asarray([1]), 2], host[[1], 2]),
        (xp.linalg.norm(x), np.linalg.norm(host)), (xp.concatenate([x, x]), np.concatenate([host, host])),
        (x.astype(np.float64).sum(axis=0), host.astype(np.float64).sum(axis=0)), (np.exp(x), np.exp(host)),
    ]:
        assert isinstance(ours, xp.ndarray)
        assert np.array_equal(xp.asnumpy(ours), theirs) and ours.dtype == theirs.dtype


def test_sums_stay_on_the_device_as_arrays_without_dimensions(x):
    total = x.sum()
    assert isinstance(total, xp.ndarray) and total.shape == () and float(total) == 15.0


def test_results_go_into_out_and_scattered_additions_into_their_target(x):
    out = xp.empty_like(x)
    assert xp.exp(x, out=out).dtype == np.float32
    assert np.array_equal(xp.asnumpy(out), np.exp(xp.asnumpy(x)))
    xp.add.at(x, xp.asarray([0, 0]), 1.0)
    assert values(x)[0] == [2, 3, 4]


@pytest.mark.parametrize("operation", [
    lambda x: x + 1, lambda x: x.__iadd__(1), lambda x: x.fill(0), lambda x: x.__setitem__(0, 1.0), lambda x: x.sum(),
    lambda x: x[xp.asarray([0])], lambda x: x.T.reshape(6), lambda x: xp.exp(x), lambda x: xp.exp(x, out=x),
    lambda x: xp.zeros(3), lambda x: x.copy(), lambda x: x.set(np.zeros((2, 3), np.float32)), lambda x: x < 1,
    lambda x: xp.maximum(x, 0.0),
])
def test_showing_memory_while_anything_is_queued_is_a_failure_that_is_remembered(x, operation):
    operation(x)
    with pytest.raises(AssertionError, match="synchronize first"):
        _ = x.__cuda_array_interface__
    assert len(xp.queue.violations) == 1
    xp.cuda.get_current_stream().synchronize()
    assert x.__cuda_array_interface__["shape"] == (2, 3)
    assert xp.queue.num_synchronized == 2       # one in the fixture


@pytest.mark.parametrize("operation", [
    lambda x: x[0], lambda x: x[:, 1:], lambda x: x.reshape(-1), lambda x: x.T, lambda x: x.view(np.uint32),
    lambda x: xp.reshape(x, (3, 2)), lambda x: xp.empty(3), lambda x: xp.asarray(x), lambda x: x.ravel(),
    lambda x: x.shape, lambda x: len(x), lambda x: x[1:1], lambda x: x[2:].reshape(-1),
])
def test_views_and_questions_queue_nothing(x, operation):
    operation(x)
    assert x.__cuda_array_interface__["version"] == 3


def test_the_interface_points_at_the_memory_and_tells_strides_only_where_they_matter(x):
    row = x[1]
    assert row.__cuda_array_interface__["data"][0] == x.__cuda_array_interface__["data"][0] + 12
    assert x.__cuda_array_interface__["strides"] is None and x.T.__cuda_array_interface__["strides"] == (4, 12)


def test_a_copy_from_the_host_does_not_follow_the_host_array():
    host = np.zeros(3)
    x = xp.asarray(host)
    host[...] = 1
    assert values(x) == [0, 0, 0]


def test_a_copy_to_pinned_memory_arrives_when_someone_waits_for_its_event_and_not_before(x):
    host = np.frombuffer(xp.cuda.alloc_pinned_memory(24), np.float32).reshape(2, 3)
    x.get(out=host, blocking=False)
    event = xp.cuda.Event()
    event.record()
    x += 1
    assert (host.view(np.uint8) == xp.queue.POISON).all()
    event.synchronize()
    assert host.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_event_waits_for_what_was_queued_before_it_alone(x):
    first, second = (np.frombuffer(xp.cuda.alloc_pinned_memory(12), np.float32) for _ in range(2))
    event = xp.cuda.Event()
    x[0].get(out=first, blocking=False)
    event.record()
    x[1].get(out=second, blocking=False)
    event.synchronize()
    assert first.tolist() == [0, 1, 2] and second.tolist() != [3, 4, 5]
    xp.cuda.get_current_stream().synchronize()
    assert second.tolist() == [3, 4, 5]


@pytest.mark.parametrize("early", [True, False])
def test_writing_what_a_queued_copy_still_reads_is_a_failure(x, early):
    host = np.frombuffer(xp.cuda.alloc_pinned_memory(12), np.float32)
    x[0].set(host)
    if early:
        host[1] = 7
    xp.cuda.get_current_stream().synchronize()
    host[2] = 7
    assert len(xp.queue.violations) == early


def test_a_copy_that_shall_not_wait_needs_pinned_memory(x):
    with pytest.raises(TypeError, match="not pinned"):
        x.get(out=np.empty((2, 3), np.float32), blocking=False)


class Bytes:
    """Memory of `runtime.malloc`, as it is shown to CuPy."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


OTHER_PROCESS = """
import sys
import os
import subprocess
import sys

import devicedouble as xp
address = xp.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
print(xp.shared.at(address, 8).tolist(), flush=True)
sys.stdin.readline()
xp.cuda.runtime.ipcCloseMemHandle(address)
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("closes", [True, False])
def test_another_process_sees_what_was_waited_for_and_must_close_the_handle_first(waits, closes):
    address = xp.cuda.runtime.malloc(8)
    there = xp.asarray(Bytes(address, 8))
    there[...] = xp.asarray(np.arange(8, dtype=np.uint8))
    if waits:
        xp.cuda.get_current_stream().synchronize()
    handle = xp.cuda.runtime.ipcGetMemHandle(address)
    assert len(handle) == 64
    with pytest.raises(xp.cuda.CUDARuntimeError):
        xp.cuda.runtime.ipcOpenMemHandle(handle)      # its own
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", OTHER_PROCESS, handle.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env=environment) as other:
        seen = other.stdout.readline()
        if closes:
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "closed\n"
        xp.cuda.runtime.free(address)
        other.communicate("\n\n")
    assert seen.strip() == str(list(range(8)) if waits else [xp.queue.POISON] * 8)
    assert len(xp.queue.violations) == (not closes)
