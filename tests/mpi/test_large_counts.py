"""More elements, and more bytes, than an int of C can count."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce_scatter, shard_slice
from hpczero.topology import Topology

PAST = 2**31


@pytest.mark.soak
@pytest.mark.time_limit(900)
def test_vectors_of_more_than_two_to_the_31_elements(comm):
    if comm.size != 2:
        pytest.skip("two vectors of 2 GiB and what the MPI library adds are what 24 GiB have room for")
    for node_map in ([0, 0], [0, 1]):
        with Topology(comm, node_map) as topology:
            names = ["ring", "system", "hierarchical", *(["window"] if node_map == [0, 0] else ["pairwise"])]
            for name in names:
                array = np.full(PAST + 5, comm.rank + 1, np.uint8)
                array[PAST - 2:] = 10 * (comm.rank + 1)
                all_reduce(array, topology, algorithm=name)
                check_everywhere(comm, holds(array, 3, 30), f"all_reduce {name}")
                array[:] = comm.rank + 1
                shard = reduce_scatter(array, topology, algorithm=name)
                check_everywhere(comm, shard.size > PAST // 2 and holds(shard, 3, 3), f"reduce_scatter {name}")
                array[shard_slice(array.size, comm.rank, comm.size)] = 7
                all_gather(array, topology, algorithm=name)
                check_everywhere(comm, holds(array, 7, 7), f"all_gather {name}")
            array[:] = comm.rank
            broadcast(array, topology, root=1, algorithm="tree")
            check_everywhere(comm, holds(array, 1, 1), "broadcast")


def holds(array, value, last):
    """Whether all elements are `value`, and those from PAST - 2 on `last`; without a copy as large as the array."""
    pieces = (array[start:min(start + 2**26, PAST - 2)] for start in range(0, min(array.size, PAST - 2), 2**26))
    return all((piece == value).all() for piece in pieces) and (array[PAST - 2:] == last).all()
