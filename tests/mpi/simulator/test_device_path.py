"""Collectives on arrays that show nothing but `__cuda_array_interface__` give the bits that they give on the host.

Twice: "staged", where messages pass through host memory, and "direct", where MPI is handed the device array itself. The
arrays are the stand-in for CuPy, which also fails a test in which MPI sees memory that operations are still queued on.
Few elements: the simulator does about a thousand a second.
"""

from __future__ import annotations

import devicedouble
import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import arrays
from hpczero.collectives import api
from hpczero.collectives.selection import ALGORITHMS, keeps
from hpczero.errors import ConfigError
from hpczero.topology import Topology

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in scalar:RuntimeWarning")

CALLS = [
    (operation, algorithm)
    for operation, names in ALGORITHMS.items() for algorithm in ("adaptive", *names) if algorithm != "window"
]
DTYPES = ["float16", ml_dtypes.bfloat16, "float64", "int32", "int64", "uint8"]


@pytest.fixture(params=["staged", "direct"])
def transfer(request, monkeypatch):
    monkeypatch.setenv("HPCZERO_DEVICE_TRANSFER", request.param)
    return request.param


@pytest.fixture
def topology(comm, transfer):
    with Topology(comm) as made:
        yield made


def contribution(rank, shape, dtype=np.float32):
    rng = np.random.default_rng([rank, 7])
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def call(operation, array, topology, algorithm, **more):
    """The collective in an order as strict as the algorithm can keep, so that host and device must agree in bits."""
    if operation in ("broadcast", "reduce"):
        more["root"] = topology.size - 1
    if operation in ("all_reduce", "reduce_scatter", "reduce"):
        canonical = algorithm == "adaptive" or keeps(algorithm, "canonical", topology.map)
        more.setdefault("order", "canonical" if canonical else "any")
    return getattr(api, operation)(array, topology, algorithm=algorithm, **more)


def check_like_host(topology, operation, algorithm, host, **more):
    """Runs the call on `host` and on a device copy of it: results and leftovers must be the same."""
    x = devicedouble.asarray(host)
    expected, result = (call(operation, array, topology, algorithm, **more) for array in (host, x))
    if expected is None:
        ok, said = result is None and np.array_equal(arrays.to_host(x), host), "changed, and this rank is not root"
    else:
        ok = arrays.is_device(result) and arrays.to_host(result).tobytes() == expected.tobytes()
        said = f"{result!r} instead of {expected!r}"
    check_everywhere(topology.world, ok, said)


@pytest.mark.parametrize("count", [0, 4, 100])
@pytest.mark.parametrize(("operation", "algorithm"), CALLS)
def test_every_algorithm_of_every_collective(topology, operation, algorithm, count):
    check_like_host(topology, operation, algorithm, contribution(topology.rank, count))


@pytest.mark.parametrize("transfer", ["staged", "direct"], indirect=True)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_over_several_nodes_of_unequal_size(comm, transfer, operation):
    with Topology(comm, [rank // 2 for rank in range(comm.size)]) as topology:
        check_like_host(topology, operation, "hierarchical", contribution(comm.rank, 50))


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_and_operation(topology, dtype, op):
    if op == "mean" and np.dtype(dtype).kind in "iu":
        return
    check_like_host(topology, "all_reduce", "pairwise", contribution(topology.rank, 9, dtype), op=op)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_strided_arrays_are_packed_and_written_back(topology, dtype):
    host = contribution(topology.rank, (4, 10), dtype)
    x = devicedouble.asarray(host)
    api.all_reduce(host[:, 1::3], topology, order="canonical")
    api.all_reduce(x[:, 1::3], topology, order="canonical")
    check_everywhere(topology.world, arrays.to_host(x).tobytes() == host.tobytes(), "strided view differs")


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_out_of_place_the_input_stays_as_it_was(topology, operation):
    shard = api.shard_slice(10, topology.rank, topology.size)
    size_in = shard.stop - shard.start if operation == "all_gather" else 10
    size_out = shard.stop - shard.start if operation == "reduce_scatter" else 10
    host = contribution(topology.rank, size_in)
    x, out = devicedouble.asarray(host), devicedouble.zeros(size_out, np.float32)
    expected = call(operation, host.copy(), topology, "adaptive", out=np.zeros(size_out, np.float32))
    result = call(operation, x, topology, "adaptive", out=out)
    check_everywhere(topology.world, result is out, "does not return out")
    check_everywhere(topology.world, np.array_equal(arrays.to_host(out), expected), f"{out!r}, expected {expected!r}")
    check_everywhere(topology.world, np.array_equal(arrays.to_host(x), host), "the input changed")


def test_messages_above_the_largest_count_go_in_parts(comm, transfer, monkeypatch):
    monkeypatch.setenv("HPCZERO_MAX_COUNT", "16")
    with Topology(comm) as topology:
        check_like_host(topology, "all_reduce", "ring", contribution(comm.rank, 50))


def test_the_window_algorithm_is_refused_for_device_memory(topology):
    try:
        api.all_reduce(devicedouble.zeros(3, np.float32), topology, algorithm="window")
        said = "no error"
    except ConfigError as error:
        said = str(error)
    check_everywhere(topology.world, "works on host memory, and the array is on a device" in said, said)
