"""Collectives on any communicator: parts of the world, beside each other, beside the host program's own messages.

Also what cuts the data unevenly or breaks it into pieces, and calls that do not fit together.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from agreement import check_everywhere
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from hpczero.collectives import selection
from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce, reduce_scatter, shard_slice
from hpczero.errors import ConfigError, HpczeroError, MismatchError
from hpczero.topology import Topology

needs_two_ranks = pytest.mark.mpi(min_size=2)
SIZES = (3, 1000, 20011)      # through the slots of a node, in one message, and in several


def values(rank, count):
    return (np.arange(count) * 7 + rank * 3) % 11.0


def total(size, count):
    return sum(values(rank, count) for rank in range(size))


def wrong_results(topology, sizes=SIZES):
    """What the five collectives, each by the rule of a node and by an algorithm of messages, do wrong on this rank."""
    rank, size, wrong = topology.rank, topology.size, []

    def check(ok, what, count):
        if not ok:
            wrong.append(f"{what} of {count} on rank {rank} of {size}")

    for count, (ring, tree) in product(sizes, (("ring", "tree"), ("hierarchical", "hierarchical"))):
        whole, shard, root = total(size, count), shard_slice(count, rank, size), count % size
        check(np.array_equal(all_reduce(values(rank, count), topology, algorithm=ring), whole), "all_reduce", count)
        mine = reduce_scatter(values(rank, count), topology, algorithm=ring)
        check(np.array_equal(mine, whole[shard]), "reduce_scatter", count)
        gathered = all_gather(whole[shard].copy(), topology, algorithm=ring, out=np.empty(count))
        check(np.array_equal(gathered, whole), "all_gather", count)
        spread = broadcast(values(rank, count), topology, root=root, algorithm=tree)
        check(np.array_equal(spread, values(root, count)), "broadcast", count)
        back = reduce(values(rank, count), topology, root=root, algorithm=tree)
        check(np.array_equal(back, whole) if rank == root else back is None, "reduce", count)
    return wrong


def raised(call):
    """The type and words of what a call raises, or those of nothing."""
    try:
        call()
    except HpczeroError as error:
        return type(error), str(error)
    return type(None), "nothing raised"


def halves(comm):
    """The communicator of this rank's half of the ranks: the even or the odd ones."""
    return comm.Split(comm.rank % 2, comm.rank)


def test_half_of_the_ranks_can_work_while_the_others_do_not_know_of_it(comm):
    half = comm.Split(0 if comm.rank < (comm.size + 1) // 2 else MPI.UNDEFINED, comm.rank)
    wrong = []
    if half != MPI.COMM_NULL:
        for nodes in (None, list(range(half.size))):
            with Topology(half, nodes) as topology:
                wrong += wrong_results(topology)
        half.Free()
    else:
        kind, text = raised(lambda: Topology(half))
        wrong += [] if kind is ConfigError and "COMM_NULL" in text else [text]
    check_everywhere(comm, not wrong, f"{wrong}")


@pytest.mark.eight_ranks
def test_two_halves_work_at_the_same_time_and_make_different_numbers_of_calls(comm):
    half = halves(comm)
    wrong = []
    # The second time with a node per rank: the halves then exchange messages, also with the same tags.
    for nodes in (None, list(range(half.size))):
        with Topology(half, nodes) as topology:
            for turn in range(3 if comm.rank % 2 else 7):
                wrong += wrong_results(topology, (turn + 1, 1000 + turn))
    half.Free()
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


def test_a_rank_may_be_in_several_topologies_and_use_them_in_turns(comm):
    half = halves(comm)
    with Topology(comm) as world, Topology(half) as own, Topology(comm, list(range(comm.size))) as spread:
        wrong = [text for _ in range(2) for topology in (world, own, spread) for text in wrong_results(topology, (1000,))]
    half.Free()
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


def test_ranks_follow_the_communicator_also_where_it_counts_backwards(comm):
    backwards = comm.Split(0, -comm.rank)
    wrong = [] if backwards.rank == comm.size - 1 - comm.rank else ["the split does not count backwards"]
    for nodes in ([0] * comm.size, [rank % 2 for rank in range(comm.size)]):
        with Topology(backwards, nodes) as topology:
            wrong += wrong_results(topology)
            wrong += [] if topology.rank == backwards.rank else [f"{topology}"]
    backwards.Free()
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


def test_a_communicator_of_one_rank_keeps_what_it_has_by_every_algorithm(comm):
    wrong = []
    with Topology(MPI.COMM_SELF) as alone:
        wrong += wrong_results(alone)
        calls = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather,
                 "broadcast": broadcast, "reduce": reduce}
        for operation, call in calls.items():
            for name in ("adaptive", *selection.ALGORITHMS[operation]):
                back = call(values(comm.rank, 1000), alone, algorithm=name)
                wrong += [] if np.array_equal(back, values(comm.rank, 1000)) else [f"{operation} {name}"]
        mean = all_reduce(values(comm.rank, 5), alone, op="mean")
        wrong += [] if np.array_equal(mean, values(comm.rank, 5)) else ["mean"]
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


def test_communicators_with_a_shape_are_taken_as_well(comm):
    grid = comm.Create_cart([comm.size], [True], reorder=False)
    with Topology(grid) as topology:
        wrong = wrong_results(topology, (1000,))
    grid.Free()
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


@needs_two_ranks
def test_an_inter_communicator_is_refused_in_words_and_nothing_hangs(comm):
    half = halves(comm)
    between = half.Create_intercomm(0, comm, 1 - comm.rank % 2, 7)
    kind, text = raised(lambda: Topology(between))
    check_everywhere(comm, kind is ConfigError and "Intracomm" in text and "Intercomm" in text, text)
    merged = between.Merge(high=bool(comm.rank % 2))      # what the words lead to
    with Topology(merged) as topology:
        wrong = wrong_results(topology, (1000,))
    for made in (merged, between, half):
        made.Free()
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


def test_where_errors_are_fatal_ours_come_back_and_the_callers_communicator_stays_fatal(comm):
    strict = comm.Dup()
    strict.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    with Topology(strict) as topology:
        wrong = wrong_results(topology, (1000,))
        for ours in (topology.world, topology.node, topology.cross, topology.machine):
            with pytest.raises(MPI.Exception):
                ours.Send([bytearray(1), MPI.BYTE], ours.size, 1)      # nobody has this rank
        wrong += wrong_results(topology, (1000,))
    wrong += [] if strict.Get_errhandler() == MPI.ERRORS_ARE_FATAL else ["the caller's handler of errors was changed"]
    strict.Free()
    check_everywhere(comm, not wrong, f"{wrong}")


def test_the_callers_messages_with_any_source_and_any_tag_never_meet_ours(comm):
    to, by = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    wrong = []
    for nodes in ([0] * comm.size, list(range(comm.size))):
        with Topology(comm, nodes) as topology:
            taken = np.full(1000, -1.0)
            pending = comm.Irecv(taken, MPI.ANY_SOURCE, MPI.ANY_TAG)      # is there before all of ours
            for count in SIZES:
                wrong += wrong_results(topology, (count,))
                if pending.Test() or comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG):
                    wrong.append("the program sees a message of ours")
            comm.Barrier()      # all have looked
            handle = all_reduce(values(comm.rank, 20011), topology, blocking=False)
            # Sent by the program while ours are under way, and with tags that ours have, too.
            sent = [comm.Isend(np.full(1000, float(comm.rank)), to, tag) for tag in (1, 0, 2)]
            wrong += wrong_results(topology, (1000,))
            wrong += [] if np.array_equal(handle.wait(), total(comm.size, 20011)) else ["all_reduce with a handle"]
            got = [taken, np.empty(1000), np.empty(1000)]
            status = MPI.Status()
            pending.Wait(status)
            tags = [status.tag]
            for array in got[1:]:
                comm.Recv(array, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                tags.append(status.tag)
            MPI.Request.Waitall(sent)
            if tags != [1, 0, 2] or not all((array == by).all() for array in got):
                wrong.append(f"the program's own messages: {tags} {[array[0] for array in got]}")
    check_everywhere(comm, not wrong, f"{wrong[:5]}")


def uneven_mistakes(comm, nodes, counts, dtype):
    """What reduce_scatter and all_gather do wrong with these shards, by every algorithm."""
    ends = np.concatenate([[0], np.cumsum(counts)]).tolist()
    count, shard = ends[-1], slice(*ends[comm.rank:comm.rank + 2])
    whole = total(comm.size, count).astype(dtype)
    wrong = []
    with Topology(comm, nodes) as topology:
        for operation, call in (("reduce_scatter", reduce_scatter), ("all_gather", all_gather)):
            for name in selection.candidates(selection.Call(operation, 0, topology.map, "any")):
                scatters = operation == "reduce_scatter"
                array = values(comm.rank, count).astype(dtype)
                if not scatters:
                    array = np.full(count, -1).astype(dtype)
                    array[shard] = whole[shard]
                back = call(array, topology, counts=counts, algorithm=name)
                ok = np.array_equal(back, whole[shard] if scatters else whole)
                given = values(comm.rank, count).astype(dtype) if scatters else whole[shard].copy()
                kept = given.copy()
                out = np.full(counts[comm.rank] if scatters else count, -1).astype(dtype)
                call(given, topology, counts=tuple(counts), algorithm=name, out=out)
                ok = ok and np.array_equal(out, whole[shard] if scatters else whole) and np.array_equal(given, kept)
                wrong += [] if ok else [f"{operation} {name} {counts} {np.dtype(dtype)} over {topology.map.nodes}"]
    return wrong


@st.composite
def uneven(draw, size):
    """Nodes and shards: some of them empty, or all elements on one rank, or none anywhere."""
    largest = draw(st.sampled_from([0, 1, 5, 3000, 20000]))
    counts = draw(st.lists(st.sampled_from([0, 1, largest // 2, largest]), min_size=size, max_size=size))
    if draw(st.booleans()):
        alone = draw(st.integers(0, size - 1))
        counts = [count if rank == alone else 0 for rank, count in enumerate(counts)]
    nodes = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
    return nodes, counts, draw(st.sampled_from([np.float32, np.float64, np.int32, np.uint8]))


def stay_right(comm, num_examples):
    # No health check: one of them goes by the clock, and would end the test on one rank alone.
    @hypothesis.settings(max_examples=num_examples, suppress_health_check=list(hypothesis.HealthCheck))
    @given(uneven(comm.size))
    def is_right(case):
        wrong = uneven_mistakes(comm, *case)
        check_everywhere(comm, not wrong, "; ".join(wrong[:3]))

    is_right()


@pytest.mark.eight_ranks
def test_shards_of_any_sizes_are_scattered_and_gathered_by_every_algorithm(comm):
    stay_right(comm, 8)


@pytest.mark.soak
@pytest.mark.time_limit(3000)
def test_shards_of_any_sizes_in_many_draws(comm):
    stay_right(comm, 400)


def test_shards_that_do_not_fit_are_refused_on_every_rank_also_where_one_rank_alone_is_wrong(comm):
    size, last = comm.size, comm.rank == comm.size - 1
    good = [3] * size
    bad = {
        "add up to": [4] + good[1:],
        "one whole number": [*good, 0],
        "in all": good[1:],
        "from 0": [-3, *[3] * (size - 1)],
        "whole number from": [3.0] + good[1:],
        "counts": 3 * size,
    }
    for nodes in ([0] * size, list(range(size))):
        with Topology(comm, nodes) as topology:
            for (word, counts), everywhere in product(bad.items(), (True, False)):
                mine = counts if everywhere or last else good
                for call in (reduce_scatter, all_gather):
                    kind, text = raised(lambda: call(np.zeros(3 * size), topology, counts=mine))      # noqa: B023
                    check_everywhere(comm, kind is ConfigError, f"{counts}: {text}")
                    check_everywhere(comm, not everywhere or word in text or word == "counts", f"{counts}: {text}")
                    named = everywhere or size == 1 or f"rank {size - 1} of {size}" in text
                    check_everywhere(comm, named, f"{counts}: {text}")
            back = reduce_scatter(np.ones(3 * size), topology, counts=np.array(good))
            check_everywhere(comm, (back == size).all() and back.size == 3, "the topology is of no use any more")


@needs_two_ranks
def test_shards_that_differ_between_ranks_are_a_mismatch_on_every_rank(comm):
    size, last = comm.size, comm.rank == comm.size - 1
    for nodes in ([0] * size, list(range(size))):
        with Topology(comm, nodes) as topology:
            for call, count in product((reduce_scatter, all_gather), (2 * size, 20000 * size)):
                even = [count // size] * size
                mine = [even[0] + 1, *even[1:-1], even[0] - 1] if last else even
                kind, text = raised(lambda: call(np.zeros(count), topology, counts=mine))      # noqa: B023
                check_everywhere(comm, kind is MismatchError and f"counts={even}" in text, text)
                other = raised(lambda: call(np.zeros(count), topology, counts=None if last else even))      # noqa: B023
                check_everywhere(comm, other[0] is MismatchError, other[1])


@needs_two_ranks
@pytest.mark.parametrize("spread", [False, True], ids=["one node", "a node each"])
def test_calls_that_do_not_fit_together_are_a_mismatch_on_every_rank_and_name_the_odd_one(comm, spread):
    size, last = comm.size, comm.rank == comm.size - 1
    with Topology(comm, list(range(size)) if spread else [0] * size) as topology:
        pairs = [
            (lambda: broadcast(np.zeros(50), topology), lambda: broadcast(np.zeros(51), topology)),
            (lambda: broadcast(np.zeros(50), topology, root=0), lambda: broadcast(np.zeros(50), topology, root=1)),
            (lambda: reduce(np.zeros(50), topology, root=0), lambda: reduce(np.zeros(50), topology, root=1)),
            (lambda: reduce_scatter(np.zeros(50), topology), lambda: reduce_scatter(np.zeros(52), topology)),
            (lambda: all_gather(np.zeros(50), topology), lambda: all_gather(np.zeros(50, np.float32), topology)),
            (lambda: all_reduce(np.zeros(50), topology), lambda: broadcast(np.zeros(50), topology)),
            (lambda: all_reduce(np.zeros((5, 10)), topology), lambda: all_reduce(np.zeros((10, 5)), topology)),
            (lambda: all_reduce(np.zeros(20000), topology), lambda: all_reduce(np.zeros(20001), topology)),
            (lambda: all_reduce(np.zeros(50), topology, order="world"), lambda: all_reduce(np.zeros(50), topology)),
        ]
        for usual, odd in pairs:
            kind, text = raised(odd if last else usual)
            check_everywhere(comm, kind is MismatchError, text)
            check_everywhere(comm, size == 2 or f"rank {size - 1} of {size}" in text, text)
        # The same two calls in another order: each pair that meets is a mismatch, and both ranks are at their end together.
        for count in ((7, 8) if not last else (8, 7)):
            kind, text = raised(lambda: all_reduce(np.zeros(count), topology))      # noqa: B023
            check_everywhere(comm, kind is MismatchError, text)
        wrong = wrong_results(topology, (1000,))
        check_everywhere(comm, not wrong, f"{wrong}")


def test_one_message_limit_holds_for_every_collective(comm, monkeypatch):
    for limit in ("100", "1000"):
        monkeypatch.setenv("HPCZERO_MAX_COUNT", limit)
        for nodes in ([0] * comm.size, list(range(comm.size))):
            with Topology(comm, nodes) as topology:
                wrong = wrong_results(topology, (3, 1000))
                check_everywhere(comm, not wrong, f"{wrong[:5]}")
    for limit in ("0", "-1", "many", str(2**31)):
        monkeypatch.setenv("HPCZERO_MAX_COUNT", limit)
        with Topology(comm) as topology:
            kind, text = raised(lambda: all_reduce(np.zeros(3), topology))
            check_everywhere(comm, kind is ConfigError and "HPCZERO_MAX_COUNT" in text and limit in text, text)


def test_an_output_that_is_a_part_of_the_other_array_at_its_own_place_gives_what_it_should(comm):
    count = 30011
    shard = shard_slice(count, comm.rank, comm.size)
    for nodes in ([0] * comm.size, list(range(comm.size))):
        with Topology(comm, nodes) as topology:
            array = values(comm.rank, count)
            reduce_scatter(array, topology, out=array[shard], algorithm="pairwise")
            expected = values(comm.rank, count)
            expected[shard] = total(comm.size, count)[shard]
            whole = np.full(count, -1.0)
            whole[shard] = values(3, count)[shard]
            all_gather(whole[shard], topology, out=whole, algorithm="pairwise")
            check_everywhere(comm, np.array_equal(array, expected), "reduce_scatter")
            check_everywhere(comm, np.array_equal(whole, values(3, count)), "all_gather")


def test_an_output_of_the_root_that_overlaps_its_input_is_an_error_on_every_rank(comm):
    buffer = np.zeros(20)
    with Topology(comm) as topology:
        kind, text = raised(lambda: reduce(buffer[:12], topology, root=comm.size - 1, out=buffer[5:17]))
        check_everywhere(comm, kind is ConfigError and "overlaps" in text, text)


def held():
    """Open files, and bytes of memory shared with other processes, that this rank has."""
    shared = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access = line.split()[:2]
        start, end = (int(address, 16) for address in addresses.split("-"))
        shared += end - start if access.endswith("s") else 0
    return np.array([len(os.listdir("/proc/self/fd")), shared])


def left_by(comm, num_topologies):
    """Files, and MiB of shared memory, that this rank has more than before, once many topologies were used and closed."""
    before = held()
    for turn in range(num_topologies):
        with Topology(comm, [0] * comm.size if turn % 2 else list(range(comm.size))) as topology:
            topology.empty(200000)
            all_reduce(np.ones(20000), topology, algorithm="hierarchical")
            all_reduce(np.ones(10), topology, algorithm="tree", blocking=False)
    files, nbytes = held() - before
    return files, nbytes / 2**20


def test_topologies_that_were_used_leave_no_file_and_no_shared_memory_behind(comm):
    left_by(comm, 2)      # what is made once stays
    files, mib = left_by(comm, 20)
    check_everywhere(comm, files <= 2 and mib <= 2, f"{files} files, {mib:.1f} MiB")


@pytest.mark.soak
@pytest.mark.time_limit(3000)
def test_two_thousand_topologies_that_were_used_leave_nothing_behind(comm):
    left_by(comm, 2)
    files, mib = left_by(comm, 2000)
    check_everywhere(comm, files <= 2 and mib <= 2, f"{files} files, {mib:.1f} MiB")
