"""Calls that meet each other in unusual ways: mixed links, windows as outputs, full tables of decisions, threads."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero import AdamW, HierarchicalAggregator, ZeroConfig, ZeroOptimizer
from hpczero.collectives import call as calls
from hpczero.collectives import messages
from hpczero.collectives.api import all_reduce, reduce_scatter, shard_slice
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, HpczeroError, MismatchError
from hpczero.topology import Topology


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("whole_bytes", [{"node": 4096, "network": 512}, {"node": 512, "network": 4096}])
def test_a_fold_over_both_kinds_of_links_takes_each_message_as_it_was_sent(comm, monkeypatch, whole_bytes):
    monkeypatch.setattr(messages, "WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(messages, "SEGMENT_BYTES", {"node": 512, "network": 512})
    with Topology(comm, [rank // 2 for rank in range(comm.size)]) as topology:
        for count in (100 * comm.size, 333 * comm.size + 1, 5000):
            array = np.arange(count, dtype=np.float32) % 13 + comm.rank
            all_reduce(array, topology, algorithm="pairwise")
            expected = comm.size * (np.arange(count) % 13) + sum(range(comm.size))
            check_everywhere(comm, np.array_equal(array, expected), f"{count}")


@pytest.mark.parametrize("algorithm", ["window", "adaptive", "ring"])
def test_a_scattered_window_array_stays_as_it_is_where_there_is_an_out(comm, algorithm):
    with Topology(comm, [0] * comm.size) as topology:
        array = topology.empty(300000)
        array[:] = comm.rank + 1
        shard = shard_slice(array.size, comm.rank, comm.size)
        out = reduce_scatter(array, topology, algorithm=algorithm, out=np.empty(shard.stop - shard.start, np.float32))
        ok = (out == sum(range(1, comm.size + 1))).all() and (array == comm.rank + 1).all()
        check_everywhere(comm, ok, f"{out[:3]} {array[:3]}")


def test_layouts_may_differ_also_after_the_decisions_were_forgotten(comm, monkeypatch):
    monkeypatch.setattr(calls, "MOST_DECISIONS", 2)
    with Topology(comm, [0] * comm.size) as topology:
        for turn in range(12):
            count = 3 + turn % 3
            array = np.full(2 * count, 1.0 + comm.rank)[::2] if (comm.rank + turn) % 2 else np.full(count, 1.0 + comm.rank)
            all_reduce(array, topology)
            check_everywhere(comm, (array == sum(range(1, comm.size + 1))).all(), f"turn {turn}: {array}")


def test_a_window_array_that_is_an_out_on_one_rank_alone_is_a_mismatch(comm):
    if comm.size == 1:
        return
    with Topology(comm, [0] * comm.size) as topology:
        array = topology.empty(300000)
        last = comm.rank == comm.size - 1
        with pytest.raises(MismatchError, match="late"):
            all_reduce(np.ones(300000, np.float32) if last else array, topology, algorithm="window",
                       out=array if last else None)
        array[:] = 1
        check_everywhere(comm, (all_reduce(array, topology) == comm.size).all(), "the next call")
        out = all_reduce(np.ones(300000, np.float32), topology, algorithm="window", out=array)
        check_everywhere(comm, (out == comm.size).all(), "an out on all ranks")


def test_what_is_on_its_way_comes_first_whoever_uses_the_topology_next(comm):
    with Topology(comm) as topology:
        for _ in range(5):
            arrays = [np.full(40000, 1.0 + comm.rank) for _ in range(4)]
            handles = [all_reduce(array, topology, blocking=False) for array in arrays[:3]]
            with HierarchicalAggregator(comm=topology) as aggregator:
                aggregator.all_reduce({"w": arrays[3]})
            handles.append(all_reduce(np.ones(40000), topology, blocking=False))
            with ZeroOptimizer({"w": np.ones(50)}, AdamW(), topology) as zero:
                handles.append(all_reduce(np.ones(40000), topology, blocking=False))
                zero.accumulate({"w": np.ones(50)})
                handles.append(all_reduce(np.ones(40000), topology, blocking=False))
                zero.step()
            window = topology.empty(100)
            for handle in handles:
                handle.wait()
            ok = all((array == sum(range(1, comm.size + 1))).all() for array in arrays) and window.size == 100
            check_everywhere(comm, ok, f"{[array[0] for array in arrays]}")


def test_an_array_at_an_odd_address_is_reduced_by_every_algorithm(comm):
    with Topology(comm) as topology:
        for algorithm in ("system", "adaptive", "ring"):
            raw = np.zeros(4 * 1001 + 1, np.uint8)
            array = raw[1:].view(np.float32) if comm.rank == comm.size - 1 else np.zeros(1001, np.float32)
            array[:] = comm.rank
            all_reduce(array, topology, algorithm=algorithm)
            check_everywhere(comm, (array == sum(range(comm.size))).all(), algorithm)


def test_whatever_an_out_does_when_it_is_looked_at_is_raised_on_all_ranks(comm):
    class Trap:
        @property
        def __array_interface__(self):
            raise RuntimeError("do not look at me")

        __cuda_array_interface__ = __array_interface__
        __dlpack__ = __array_interface__

    with Topology(comm) as topology:
        out = Trap() if comm.rank == comm.size - 1 else np.empty(shard_slice(10, comm.rank, comm.size).stop
                                                                 - shard_slice(10, comm.rank, comm.size).start)
        with pytest.raises((HpczeroError, RuntimeError)):
            reduce_scatter(np.ones(10), topology, out=out)
        check_everywhere(comm, all_reduce(np.ones(3), topology)[0] == comm.size, "the next call")


def test_a_barrier_that_meets_a_call_is_a_mismatch_on_both_sides(comm):
    if comm.size == 1:
        return
    with Topology(comm, [0] * comm.size) as topology:
        transport = Transport.of(topology)
        with pytest.raises(MismatchError):
            transport.node_barrier("a barrier") if comm.rank == 0 else all_reduce(np.ones(3), topology)
        check_everywhere(comm, all_reduce(np.ones(3), topology)[0] == comm.size, "the next call")


def test_a_closed_topology_is_named_as_what_is_wrong(comm):
    topology = Topology(comm)
    array = np.ones(3)
    all_reduce(array, topology)
    topology.close()
    for wrong in (lambda: all_reduce(array, topology), lambda: all_reduce(np.ones(200000), topology)):
        with pytest.raises(HpczeroError, match="the topology was closed"):
            wrong()
    with pytest.raises(HpczeroError, match="closed"):
        all_reduce(array, topology, blocking=False)
    with pytest.raises((ConfigError, HpczeroError)):
        reduce_scatter(array, topology)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_leaves_a_call_half_way_costs_one_more_error_and_no_wrong_sum(comm, monkeypatch):
    class Interrupted(Exception):
        pass

    with Topology(comm, [0] * comm.size) as topology:
        array = np.full(300000, 1.0 + comm.rank)
        for _ in range(3):
            all_reduce(array.copy(), topology, algorithm="window")
        transport = Transport.of(topology)
        comm.Barrier()
        if comm.rank == 0:      # has raised its flag, and leaves before it sees the others
            monkeypatch.setattr(transport, "_settle", lambda *_: (_ for _ in ()).throw(Interrupted()))
            meet = transport.slots.meet
            monkeypatch.setattr(transport.slots, "meet", lambda mark, *, fresh: 0 * meet(mark, fresh=fresh))
            with pytest.raises(Interrupted):
                all_reduce(array.copy(), topology, algorithm="window")
            monkeypatch.undo()
        outcomes = []
        for _ in range(4):
            try:
                outcomes.append(float(all_reduce(array.copy(), topology, algorithm="window")[0]))
            except MismatchError:
                outcomes.append("mismatch")
        right = float(sum(range(1, comm.size + 1)))
        check_everywhere(comm, set(outcomes) <= {right, "mismatch"} and outcomes[-1] == right, f"{outcomes}")


def test_room_that_is_missing_once_is_asked_for_again(comm, monkeypatch):
    from hpczero.collectives import stripes
    from hpczero.errors import RoomError

    with Topology(comm, [0] * comm.size) as topology:
        make = stripes.node_rows
        all_reduce(np.ones(200000), topology, algorithm="window")
        monkeypatch.setattr(stripes, "node_rows", lambda *_: (_ for _ in ()).throw(RoomError("no room")))
        with pytest.raises(RoomError):
            all_reduce(np.ones(400000), topology, algorithm="window")
        monkeypatch.setattr(stripes, "node_rows", make)
        for count in (400000, 200000, 400000):
            result = all_reduce(np.ones(count), topology, algorithm="window")
            check_everywhere(comm, (result == comm.size).all(), f"{count}: {result[:3]}")


@pytest.mark.mpi(min_size=2)
def test_names_that_cannot_be_looked_up_and_outs_of_calls_that_mismatch(comm):
    with Topology(comm, [0] * comm.size) as topology:
        for count in (50, 300000):
            kept = np.ones(count)
            all_reduce(kept, topology)
            with pytest.raises(ConfigError, match="op="):
                all_reduce(np.ones(count), topology, op=["sum"] if comm.rank == 0 else "sum")
            out = np.full(count, -7.0)
            all_reduce(np.ones(count + 1), topology)
            with pytest.raises(MismatchError):
                all_reduce(np.ones(count + (comm.rank == 0)), topology,
                           out=np.full(count + (comm.rank == 0), -7.0) if comm.rank == 0 else out)
            check_everywhere(comm, (out == -7).all(), f"{out[:3]}")
            result = all_reduce(np.ones(count), topology, out=out)
            check_everywhere(comm, result is out and (out == comm.size).all(), f"{out[:3]}")


@pytest.mark.mpi(min_size=2)
def test_what_two_nodes_add_has_the_same_bits_on_both_also_where_both_have_a_nan(comm):
    array = np.zeros(16, np.float32)
    array.view(np.uint32)[:] = 0x7FC00000 + comm.rank
    array.view(np.uint32)[8:] |= 0x80000000 * (comm.rank % 2)
    for algorithm, count in (("leader", 16), ("hierarchical", 16), ("leader", 160000)):
        with Topology(comm, [rank * 2 // comm.size for rank in range(comm.size)]) as topology:
            result = all_reduce(np.tile(array, count // 16), topology, algorithm=algorithm)
            held = comm.allgather(result.tobytes())
            check_everywhere(comm, held == [held[0]] * comm.size, algorithm)


def test_a_communicator_where_a_topology_is_needed_and_a_dict_where_a_config_is(comm):
    for call in (lambda: all_reduce(np.ones(3), comm), lambda: reduce_scatter(np.ones(3), comm),
                 lambda: all_reduce(np.ones(3), comm, blocking=False)):
        with pytest.raises(ConfigError, match="hpczero.Topology\\(comm\\)"):
            call()
    with Topology(comm) as topology:
        with pytest.raises(ConfigError, match="a ZeroConfig"):
            ZeroOptimizer({"w": np.ones(3)}, AdamW(), topology, {"stage": 1} if comm.rank == comm.size - 1 else None)
        with pytest.raises(ConfigError, match="did you mean ring"):
            all_reduce(np.ones(3), topology, algorithm="rign")


def test_a_rank_that_closes_while_another_steps_is_a_mismatch_on_both(comm):
    if comm.size == 1:
        return
    with Topology(comm) as topology:
        zero = ZeroOptimizer({"w": np.ones(3)}, AdamW(), topology)
        with pytest.raises(MismatchError, match="close\\(\\)"):
            zero.close() if comm.rank == 0 else zero.step()
        zero.accumulate({"w": np.ones(3)})
        check_everywhere(comm, zero.step().applied, "the next step")
        zero.close()


def test_a_refused_accumulate_is_not_taken_for_gradients_written_by_hand(comm):
    with Topology(comm) as topology:
        zero = ZeroOptimizer({"w": np.ones(3), "b": np.ones(2)}, AdamW(), topology, ZeroConfig(stage=1))
        assert set(zero.grads) == {"w", "b"}
        bad = {"w": np.ones(3), ("c" if comm.rank == 0 else "b"): np.ones(2)}
        with pytest.raises(ConfigError, match="'c'"):
            zero.accumulate(bad)
        report = zero.step()
        check_everywhere(comm, not report.applied and "no rank had a sample" in report.reason, f"{report}")
        zero.close()
    with pytest.raises(ConfigError, match="gradient_clipping too"):
        ZeroConfig(gradient_clipping_norm=1)
