"""On nodes that are nodes for MPI too: separate networks and host names, with slow links between them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster.cluster import Cluster, missing

PROGRAM = Path(__file__).with_name("every_collective.py")
REASON = missing()

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no cluster here: {REASON}")


@pytest.mark.parametrize("per_node", [(2, 2), (2, 1, 2)], ids=["2+2", "2+1+2"])
def test_every_collective_is_right_on_nodes_and_its_traffic_is_at_the_bound(per_node, tmp_path):
    with Cluster(len(per_node), "1gbit", tmp_path) as cluster:
        done = cluster.mpirun(per_node, [sys.executable, str(PROGRAM), "+".join(map(str, per_node))])
    assert done.status == 0 and f"all right on {per_node}" in done.stdout, done
