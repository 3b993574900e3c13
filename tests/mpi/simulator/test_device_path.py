"""Collectives on arrays that show nothing but `__cuda_array_interface__` give the bits that they give on the host.

Three times: "staged", where messages pass through host memory, "direct", where MPI is handed the device array itself, and
"ipc", where ranks of a node read each other's device memory. The arrays are the stand-in for CuPy, which also fails a test in
which MPI or another rank sees memory that operations are still queued on.
Few elements: the simulator does about a thousand a second.
"""

from __future__ import annotations

import devicedouble
import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import arrays
from hpczero.collectives import api, direct, ipc, messages
from hpczero.collectives.selection import ALGORITHMS, keeps
from hpczero.collectives.transport import Transport
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


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize(("operation", "algorithm"), CALLS)
def test_every_algorithm_of_every_collective(topology, operation, algorithm, count):
    check_like_host(topology, operation, algorithm, contribution(topology.rank, count))


@pytest.mark.parametrize("transfer", ["staged", "direct", "ipc"], indirect=True)
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


@pytest.fixture
def short_segments(monkeypatch):
    """Messages of a few dozen elements in more segments than are on their way at a time."""
    monkeypatch.setattr(messages, "DEVICE_SEGMENT_BYTES", 12)


@pytest.mark.parametrize("transfer", ["staged", "ipc"], indirect=True)
@pytest.mark.parametrize(("operation", "algorithm"), CALLS)
def test_messages_in_many_segments_that_are_copied_on_their_way(topology, short_segments, operation, algorithm):
    check_like_host(topology, operation, algorithm, contribution(topology.rank, 70))


@pytest.mark.parametrize("transfer", ["direct"], indirect=True)
@pytest.mark.parametrize("algorithm", ["ring", "halving", "pairwise"])
def test_messages_in_many_segments_that_mpi_reads_and_writes(topology, short_segments, algorithm):
    check_like_host(topology, "all_reduce", algorithm, contribution(topology.rank, 70))


@pytest.mark.parametrize("transfer", ["staged", "direct", "ipc"], indirect=True)
def test_blocks_that_lie_apart_travel_in_segments_too(comm, transfer, short_segments):
    with Topology(comm, [rank % 2 for rank in range(comm.size)]) as topology:
        check_like_host(topology, "all_reduce", "hierarchical:circulant", contribution(comm.rank, 70))


def test_staging_uses_pinned_memory_that_is_kept(topology, transfer, monkeypatch):
    allocated = []
    allocate = devicedouble.cuda.alloc_pinned_memory
    monkeypatch.setattr(devicedouble.cuda, "alloc_pinned_memory", lambda size: allocated.append(size) or allocate(size))
    counts = []
    for _ in range(3):
        api.all_reduce(devicedouble.ones(40, np.float32), topology, algorithm="pairwise")
        counts.append(len(allocated))
    staged = transfer == "staged" and topology.size > 1
    check_everywhere(topology.world, (counts[0] > 0) == staged and counts[0] == counts[2], f"allocated {counts}")


def first_call(comm, caplog, environment, monkeypatch):
    """What rank 0 says, and whether memory was handed to MPI, when two topologies meet their first device arrays."""
    monkeypatch.delenv("HPCZERO_DEVICE_TRANSFER", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    direct._say.cache_clear()
    caplog.set_level("INFO", "hpczero")
    read = []
    for _ in range(2):
        with Topology(comm) as topology:
            x = devicedouble.asarray(np.full(5, comm.rank + 1.0))
            api.all_reduce(x, topology, algorithm="pairwise")
            assert arrays.to_host(x).tolist() == [comm.size * (comm.size + 1) / 2] * 5
            read.append(Transport.of(topology).reads(x))
    assert len(set(read)) == 1
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "device" in record.getMessage()]
    return said, read[0]


def test_a_trial_in_a_child_process_finds_out_whether_mpi_reads_device_memory(comm, caplog, monkeypatch):
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    # Both libraries say that they were built without CUDA; the arrays of the double are memory that they can read.
    monkeypatch.setattr(direct, "TRIAL_S", 30.0)
    started = []
    attempt = direct.try_in_child
    monkeypatch.setattr(direct, "try_in_child", lambda *args: started.append(args) or attempt(*args))
    direct._tried.cache_clear()
    said, read = first_call(comm, caplog, {}, monkeypatch)
    expected = [("INFO", "MPI is handed device memory: a trial in a child process got back what it sent")]
    check_everywhere(comm, read and said == (expected if comm.rank == 0 else []), f"{read}, {said}")
    check_everywhere(comm, len(started) == (comm.rank == 0), f"{len(started)} children: one per node is enough")


@pytest.fixture
def failing_trial(monkeypatch, tmp_path):
    (tmp_path / "program.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.setattr(direct.direct_probe, "__file__", str(tmp_path / "program.py"))
    direct._tried.cache_clear()
    yield
    direct._tried.cache_clear()


def test_if_the_trial_fails_ranks_of_a_node_read_each_others_memory(comm, caplog, monkeypatch, failing_trial):
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    said, read = first_call(comm, caplog, {}, monkeypatch)
    fine = not read and [level for level, _ in said] == ["INFO"] * (comm.rank == 0)
    check_everywhere(comm, fine and all("by CUDA IPC, not over MPI" in text for _, text in said), f"{read}, {said}")


@pytest.mark.parametrize("setting", ["auto", "ipc"])
def test_if_that_fails_too_on_one_rank_memory_is_staged_and_rank_0_says_why_once(comm, caplog, monkeypatch, failing_trial,
                                                                                 setting):
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(devicedouble.cuda.runtime, "ipc_failure", "cudaErrorNotSupported: no IPC here\nmore")
    reason = f"CUDA IPC does not work on rank {comm.size - 1}: cudaErrorNotSupported: no IPC here"
    try:
        said, read = first_call(comm, caplog, {"HPCZERO_DEVICE_TRANSFER": setting}, monkeypatch)
    except ConfigError as error:
        check_everywhere(comm, setting == "ipc" and str(error) == f"HPCZERO_DEVICE_TRANSFER=ipc: {reason}", str(error))
        return
    fine = setting == "auto" and not read and [level for level, _ in said] == ["WARNING"] * (comm.rank == 0)
    fine = fine and all("ended by signal 11" in text and reason in text for _, text in said)
    check_everywhere(comm, fine, f"{read}, {said}")


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_what_goes_to_other_nodes_is_staged_and_rank_0_says_so(comm, caplog, monkeypatch, failing_trial, num_nodes):
    if comm.size < num_nodes:
        pytest.skip("not so many ranks")
    nodes = ",".join(str(rank % num_nodes) for rank in range(comm.size))
    said, read = first_call(comm, caplog, {"HPCZERO_NODE_MAP": nodes}, monkeypatch)
    fine = not read and [level for level, _ in said] == ["WARNING"] * (comm.rank == 0)
    check_everywhere(comm, fine and all("on their way to other nodes" in text for _, text in said), f"{read}, {said}")


def test_a_room_that_was_too_small_is_followed_by_a_larger_one(comm, monkeypatch):
    monkeypatch.setenv("HPCZERO_DEVICE_TRANSFER", "ipc")
    monkeypatch.setattr(ipc, "_SMALLEST_BYTES", 64)
    with Topology(comm) as topology:
        for count in (4, 40, 400, 40, 4):
            check_like_host(topology, "all_reduce", "pairwise", contribution(comm.rank, count))


def test_elements_that_go_by_ipc_do_not_go_over_mpi_and_are_counted_all_the_same(comm, monkeypatch):
    monkeypatch.setenv("HPCZERO_DEVICE_TRANSFER", "ipc")
    posted = []
    post = Transport.post
    monkeypatch.setattr(Transport, "post", lambda self, *args: posted.append(args[1].nbytes) or post(self, *args))
    with Topology(comm) as topology:
        api.all_reduce(devicedouble.ones(300, np.float32), topology, algorithm="pairwise")
        sent = Transport.of(topology).bytes_sent["node"]
    # Up to four elements more, since shards differ by one.
    few = max(posted, default=0) <= ipc.TOKEN_BYTES
    check_everywhere(comm, few and abs(sent - 2 * 1200 * (comm.size - 1) / comm.size) <= 16, f"{posted}, {sent}")


@pytest.mark.parametrize("settings", [("direct", "staged"), ("auto", "ipc"), ("no", "auto")])
def test_a_rank_that_is_told_otherwise_is_heard_by_all(comm, caplog, monkeypatch, settings):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    mine = settings[comm.rank == comm.size - 1]
    try:
        said = first_call(comm, caplog, {"HPCZERO_DEVICE_TRANSFER": mine}, monkeypatch)
    except ConfigError as error:
        said = str(error)
    expected = f"{settings[0]} on rank 0, but {settings[1]} on rank {comm.size - 1} of {comm.size}: the ranks must agree"
    if "no" in settings:
        expected = "HPCZERO_DEVICE_TRANSFER='no' is not one of auto, direct, staged"
    check_everywhere(comm, expected in said, said)


def test_nothing_is_looked_for_without_a_device_array(comm, monkeypatch):
    monkeypatch.setattr(direct, "choose", lambda *args: pytest.fail("looked for evidence"))
    with Topology(comm) as topology:
        api.all_reduce(np.ones(5), topology, algorithm="pairwise")


@pytest.mark.parametrize("transfer", ["staged", "direct", "ipc"], indirect=True)
def test_a_handle_on_a_device_array_gives_what_the_call_gives(topology, comm, transfer):
    for operation in ALGORITHMS:
        values = [contribution(comm.rank, 41 + turn) for turn in range(3)]
        expected = [call(operation, value.copy(), topology, "adaptive") for value in values]
        on_device = [devicedouble.array(value) for value in values]
        handles = [call(operation, array, topology, "adaptive", blocking=False) for array in on_device]
        for handle, right in zip(handles, expected, strict=True):
            result = handle.wait()
            same = (result is None and right is None) or np.array_equal(arrays.to_host(result), right)
            check_everywhere(comm, same and handle.test(), f"{operation}: {result} for {right}")
        if operation != "reduce":
            check_everywhere(comm, np.array_equal(arrays.to_host(on_device[0])[:1], expected[0][:1])
                             or operation == "reduce_scatter", f"{operation}: in place")
