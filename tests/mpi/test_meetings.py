"""What ranks of a node do in their slots: meet, agree, and add small vectors, call after call; and who waits for whom."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce, reduce_scatter, shard_slice
from hpczero.collectives.slots import slot_bytes
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, HpczeroError, MismatchError, StallError
from hpczero.topology import Topology


@pytest.fixture
def topology(comm):
    with Topology(comm, [0] * comm.size) as made:
        yield made


def test_what_was_written_before_a_meeting_is_read_after_it(comm, topology):
    array, transport = topology.empty(8), Transport.of(topology)
    ((_, rows),) = topology.shared_arrays.values()
    wrong = 0
    for turn in range(300):
        array[:] = turn * 10 + comm.rank
        transport.node_barrier()
        wrong += not (rows.all[:, 0] == turn * 10 + np.arange(comm.size)).all()
        transport.node_barrier()
    check_everywhere(comm, wrong == 0, f"{wrong} of 300 turns read old values")


@pytest.mark.eight_ranks
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_small_sums_one_after_the_other_never_mix(comm, topology, dtype):
    wrong = []
    for turn in range(400):
        array = np.full(1 + turn % 3, turn % 7 + comm.rank, dtype)      # three shapes take turns, known and new ones
        all_reduce(array, topology)
        if not (array == comm.size * (turn % 7) + sum(range(comm.size))).all():
            wrong.append(turn)
    check_everywhere(comm, not wrong, f"turns {wrong[:5]}")


def test_every_small_collective_takes_one_meeting_and_no_message_once_it_is_known(comm, topology):
    transport, count = Transport.of(topology), 60
    shard = shard_slice(count, comm.rank, comm.size)
    calls = [
        lambda: all_reduce(np.ones(count), topology),
        lambda: reduce_scatter(np.ones(count), topology),
        lambda: all_gather(np.ones(shard.stop - shard.start), topology, out=np.empty(count)),
        lambda: broadcast(np.ones(count), topology, root=comm.size - 1),
        lambda: reduce(np.ones(count), topology),
    ]
    for call in calls:
        call()
        before, meetings = dict(transport.bytes_sent), int(transport.slots._state[0])
        call()
        ok = transport.slots._state[0] == meetings + 1 and transport.bytes_sent["node"] == before["node"]
        check_everywhere(comm, ok, f"{transport.slots._state[0] - meetings} meetings")


def test_layouts_may_differ_between_ranks_also_in_calls_that_are_known(comm, topology):
    for turn in range(4):
        whole = np.zeros((6, 10))
        array = whole[:, 1] if (comm.rank + turn) % 2 else np.zeros(6)
        array[:] = comm.rank
        out = np.empty(6) if (comm.rank + turn) % 3 == 1 else None
        result = all_reduce(array, topology, out=out)
        check_everywhere(comm, (result == sum(range(comm.size))).all() and whole[:, 2].sum() == 0, f"turn {turn}")


def test_a_mismatch_in_calls_that_are_known_is_raised_on_all_and_the_next_call_works(comm, topology):
    if comm.size == 1:
        return
    for known in (np.ones(5), np.ones(6), np.ones((5, 1)), np.ones(5, np.float32)):
        all_reduce(known, topology)
    last = comm.rank == comm.size - 1
    for odd in (lambda: np.ones(6), lambda: np.ones((5, 1)), lambda: np.ones(5, np.float32), lambda: np.ones(7)):
        with pytest.raises(MismatchError, match="elements"):
            all_reduce(odd() if last else np.ones(5), topology)
        fixed = np.ones(5)
        fixed.flags.writeable = not last
        with pytest.raises(ConfigError, match="read-only"):
            all_reduce(fixed, topology)
        with pytest.raises(HpczeroError):
            (broadcast if last else all_reduce)(np.ones(5), topology)
        result = all_reduce(np.ones(5), topology)
        check_everywhere(comm, (result == comm.size).all(), f"{result}")


def test_vectors_around_the_size_of_a_slot(comm, topology):
    fits = slot_bytes(comm.size)
    for nbytes in (fits - 4, fits, fits + 4):
        for _ in range(2):
            array = np.full(nbytes // 4, comm.rank, np.float32)
            all_reduce(array, topology, algorithm="window")
            check_everywhere(comm, (array == sum(range(comm.size))).all(), f"{nbytes}")


@pytest.mark.parametrize("spread", [False, True], ids=["one node", "a node each"])
def test_a_long_wait_is_reported_once_with_who_is_missing_and_may_still_end_well(comm, spread, caplog):
    _needs_two_or_three(comm)
    topology = Topology(comm, list(range(comm.size)) if spread else [0] * comm.size)
    transport = Transport.of(topology)
    transport.report_s, transport.timeout_s = 1.2, 30.0
    logging.getLogger("hpczero").propagate = True
    with caplog.at_level(logging.WARNING, "hpczero.collectives"):
        if comm.rank == comm.size - 1:
            time.sleep(4.0)
        result = all_reduce(np.ones(3), topology)
    said = [record.message for record in caplog.records]
    told = comm.gather(said)
    ok = True
    if comm.rank == 0:
        # On its own node the missing rank is asked, and shows where it is.
        *told, missing = told
        told = [text for texts in told for text in texts]
        ok = (len(told) == 1 and f"no word from rank {comm.size - 1}" in told[0] and "all_reduce" in told[0]
              and "test_meetings.py" in told[0])
        ok = ok and (not missing if spread else len(missing) == 1 and "others wait for it" in missing[0]
                     and "time.sleep(4.0)" in missing[0])
        told = told, missing
    check_everywhere(comm, ok and result[0] == comm.size, f"{told}")
    topology.close()


def test_ranks_that_wait_in_different_calls_are_told_where_the_others_are(comm):
    _needs_two_or_three(comm)
    topology = Topology(comm, list(range(comm.size)))
    transport = Transport.of(topology)
    transport.timeout_s = 5.0
    try:
        if comm.rank == 0:
            transport.wait([topology.world.Irecv(bytearray(1), 1, 77)], "a call that nobody else makes")
        else:
            transport.all_gather_small(np.zeros(1), "another call")
        text = "nothing"
    except StallError as error:
        text = str(error)
    expected = "rank 1 is in another call" if comm.rank == 0 else "rank 0 is in a call that nobody else makes"
    check_everywhere(comm, "all ranks wait, for each other" in text and expected in text, text)
    # The topology is left as it is: what nobody finished cannot be closed together.


def _needs_two_or_three(comm):
    if not 2 <= comm.size <= 3:
        pytest.skip("waits for seconds, and two or three ranks show it")
