"""hpczero.arrays on host arrays and on the stand-in for CuPy; kernels are launched in tests/simulator."""

from __future__ import annotations

import array
import sys

import devicedouble
import ml_dtypes
import numpy as np
import pytest

from hpczero import arrays

bfloat16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def fresh_queue():
    devicedouble.queue.reset()


def test_device_arrays_are_told_from_host_arrays_without_touching_their_memory():
    x = devicedouble.zeros(3)       # queued: reading its interface now would raise
    assert arrays.is_device(x)
    assert not devicedouble.queue.violations
    assert not any(map(arrays.is_device, (np.zeros(3), np.float32(1), [1.0], None)))


def test_the_namespace_is_the_root_module_of_the_arrays_type():
    class Subclass(np.ndarray):
        pass

    assert arrays.namespace(np.zeros(2)) is np
    assert arrays.namespace(np.zeros(2).view(Subclass)) is np
    assert arrays.namespace(devicedouble.zeros(2)) is devicedouble


@pytest.mark.parametrize(("dtype", "half"), [
    (np.float16, True), (bfloat16, True), (np.float32, False), (np.float64, False), (np.int32, False),
    (np.uint16, False),
])
def test_exactly_the_half_types_are_seen_as_bits(dtype, half):
    for xp in (np, devicedouble):
        x = xp.ones((2, 3), dtype)
        bits = arrays.as_bits(x)
        assert arrays.is_half(x.dtype) is half
        assert bits.dtype == (np.uint16 if half else dtype)
        bits[0, 0] = 0
        assert arrays.to_host(x)[0, 0] == 0, "a view, not a copy"


@pytest.mark.parametrize("obj", [
    np.arange(6, dtype=np.float32).reshape(2, 3)[:, 1:],
    array.array("d", [1.0, 2.0]),
    bytearray(b"abc"),
    memoryview(bytearray(8)).cast("i"),
    np.zeros(3, bfloat16),
], ids=["ndarray", "array", "bytearray", "memoryview", "bfloat16"])
def test_whatever_shares_host_memory_becomes_a_numpy_array_over_the_same_memory(obj):
    view = arrays.from_any(obj)
    assert type(view) is np.ndarray
    assert view.nbytes == memoryview(obj).nbytes if not isinstance(obj, np.ndarray) else view is obj
    view[...] = 7
    assert np.array_equal(np.asarray(obj), np.full(view.shape, 7, view.dtype))


def test_memory_that_is_read_only_stays_so():
    assert not arrays.from_any(b"abc").flags.writeable


class OnlyDLPack:
    """An array of another library: no buffer protocol, only DLPack, of the given device type."""

    def __init__(self, host, device_type):
        self.host, self.device_type = host, device_type

    def __dlpack__(self, **kwargs):
        return self.host.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.device_type, 0


def test_dlpack_on_the_host_is_viewed_without_a_copy():
    host = np.arange(4.0)
    view = arrays.from_any(OnlyDLPack(host, 1))
    assert np.shares_memory(view, host)


def test_memory_of_an_amd_gpu_is_refused():
    with pytest.raises(TypeError, match="on an AMD GPU"):
        arrays.from_any(OnlyDLPack(np.zeros(2), 10))


def test_a_device_array_is_given_back_as_it_is():
    x = devicedouble.zeros(2)
    assert arrays.from_any(x) is x


class OnlyCudaInterface:
    """A device array of another library, such as a tensor of PyTorch on a GPU."""

    @property
    def __cuda_array_interface__(self):
        return {"version": 3, "shape": (2,), "typestr": "<f4", "data": (0, False)}


def test_device_memory_of_another_library_is_handed_to_cupy(monkeypatch):
    class Cupy:
        @staticmethod
        def asarray(obj):
            return devicedouble.asarray(np.float32([3, 4])) if isinstance(obj, OnlyCudaInterface) else None

    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    assert arrays.to_host(arrays.from_any(OnlyCudaInterface())).tolist() == [3, 4]


def test_device_memory_without_cupy_is_refused_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match=r"CuPy is not installed; pip install 'hpczero\[cuda12\]'"):
        arrays.from_any(OnlyCudaInterface())


class HostTensor:
    """Like a tensor of PyTorch on the host: its type has the CUDA interface, the object has not."""

    def __init__(self, host):
        self.host = host

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("not on a GPU")

    def __dlpack__(self, **kwargs):
        return self.host.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return 1, 0


def test_a_tensor_that_could_be_on_a_gpu_and_is_not_is_viewed_on_the_host():
    host = np.arange(3.0)
    assert np.shares_memory(arrays.from_any(HostTensor(host)), host)


@pytest.mark.parametrize(("obj", "text"), [
    ([1.0, 2.0], "builtins.list: not an array"),
    (3.0, "builtins.float: not an array"),
    ("text", "builtins.str: not an array"),
    (None, "NoneType: not an array"),
    (np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
    (np.zeros(2, ">f4"), ">f4"),
    (np.array([{}]), r"\|O"),
    (np.zeros(2, [("a", "f4")]), "not numbers"),
    (np.array(["a"]), "<U1"),
])
def test_what_is_no_array_of_numbers_is_refused_by_its_type(obj, text):
    with pytest.raises(TypeError, match=text):
        arrays.from_any(obj)


def test_to_host_copies_from_a_device_and_gives_back_host_arrays():
    host = np.arange(3.0)
    assert arrays.to_host(host) is host
    x = devicedouble.asarray(host)
    copied = arrays.to_host(x)
    x[...] = 0
    assert type(copied) is np.ndarray and np.array_equal(copied, host)


LAYOUTS = {
    "contiguous": lambda xp, dtype: xp.zeros((3, 4), dtype),
    "strided": lambda xp, dtype: xp.zeros((3, 8), dtype)[:, ::2],
    "transposed": lambda xp, dtype: xp.zeros((4, 3), dtype).T,
    "empty": lambda xp, dtype: xp.zeros((0, 4), dtype),
    "scalar": lambda xp, dtype: xp.zeros((), dtype),
}


@pytest.mark.parametrize("src_dtype", [np.float32, np.float64, bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("to", [np, devicedouble], ids=["to host", "to device"])
@pytest.mark.parametrize("of", [np, devicedouble], ids=["from host", "from device"])
def test_copy_goes_between_any_places_layouts_and_dtypes(of, to, layout, src_dtype):
    src, dst = LAYOUTS[layout](of, src_dtype), LAYOUTS[layout](to, np.float32)
    src[...] = 1.5
    arrays.copy(dst, src)
    assert np.array_equal(arrays.to_host(dst), np.full(dst.shape, 1.5, np.float32))


def test_copy_between_host_and_device_is_finished_on_return():
    x, host = devicedouble.zeros(3, np.float32), np.ones(3, np.float32)
    arrays.copy(x, host)
    assert not devicedouble.queue.pending
    x += 1.0
    arrays.copy(host, x)
    assert not devicedouble.queue.pending and host.tolist() == [2, 2, 2]


@pytest.mark.parametrize("of", [np, devicedouble])
def test_copy_does_not_broadcast(of):
    with pytest.raises(ValueError, match=r"shape \(1,\) into shape \(3,\)"):
        arrays.copy(np.zeros(3), of.ones(1))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_an_asynchronous_copy_to_the_host_is_there_when_its_event_has_been_waited_for(dtype):
    x = devicedouble.ones(3, dtype)
    host = arrays.pinned(x, x.nbytes).view(dtype)
    event = arrays.copy_async(host, x)
    assert host.astype(np.float32).tolist() != [1, 1, 1]
    event.synchronize()
    assert host.tolist() == [1, 1, 1] and devicedouble.queue.num_synchronized == 0


def test_an_asynchronous_copy_from_the_host_reads_until_its_event_has_been_waited_for():
    x = devicedouble.zeros(3, np.float32)
    host = arrays.pinned(x, x.nbytes).view(np.float32)
    for early in (False, True):
        host[:] = 1
        event = arrays.copy_async(x, host)
        if not early:
            event.synchronize()
        host[:] = 2
        event.synchronize()
        assert arrays.to_host(x).tolist() == [1, 1, 1]
        assert len(devicedouble.queue.violations) == early


def test_an_asynchronous_copy_may_stay_on_the_device():
    x, y = devicedouble.zeros(3, np.float32), devicedouble.ones(3, np.float32)
    arrays.copy_async(x, y).synchronize()
    assert arrays.to_host(x).tolist() == [1, 1, 1]


@pytest.mark.parametrize("nbytes", [0, 1, 1000])
def test_pinned_memory_has_the_size_that_was_asked_for(nbytes):
    memory = arrays.pinned(devicedouble.empty(0), nbytes)
    assert memory.shape == (nbytes,) and memory.dtype == np.uint8 and memory.flags.writeable


def test_synchronize_waits_for_a_device_and_does_nothing_for_the_host():
    arrays.synchronize(np.zeros(3))
    assert devicedouble.queue.num_synchronized == 0
    x = devicedouble.zeros(3)
    arrays.synchronize(x)
    assert devicedouble.queue.num_synchronized == 1 and not devicedouble.queue.pending
