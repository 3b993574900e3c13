"""Runs a program on several nodes of this one machine: network namespaces with links of a given rate between them.

    python benchmarks/nodes.py 2+2 1gbit benchmarks/all_reduce.py --sizes 64MiB --link 125MB/s

As root, with Open MPI; see tests/cluster/cluster.py for what it needs and does. `2+1+2` are the ranks of each node.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cluster.cluster import Cluster, missing


def main() -> int:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    if reason := missing():
        raise SystemExit(f"no cluster here: {reason}")
    per_node = [int(count) for count in sys.argv[1].split("+")]
    with tempfile.TemporaryDirectory() as folder, Cluster(len(per_node), sys.argv[2], Path(folder)) as cluster:
        done = cluster.mpirun(per_node, [sys.executable, *sys.argv[3:]], timeout=900.0)
    print(done.stdout, done.stderr, sep="", end="")
    return 1 if done.status is None else done.status


if __name__ == "__main__":
    sys.exit(main())
