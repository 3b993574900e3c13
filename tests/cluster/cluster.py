"""Several nodes on one machine: network namespaces on a bridge, with links of a given rate between them.

Needs root, `ip`, `tc` and `unshare`, and Open MPI, which sees two nodes where host names differ (MPICH looks through the
walls and uses shared memory). Ranks of one node share memory and the node's link; ranks of different nodes have TCP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from launcher import Result, is_openmpi, mpirun_path, run

SUBNET = "10.77.0"
_NEEDED = ("ip", "tc", "unshare", "mount")


def missing() -> str | None:
    """Why no cluster can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in _NEEDED if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found"
    if mpirun_path() is None or not is_openmpi():
        return "needs Open MPI: MPICH's ranks would share memory across the namespaces"
    probe = f"hz{uuid.uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class Cluster:
    """`with Cluster(2, "1gbit", folder) as cluster: cluster.mpirun(ranks_per_node, argv)`.

    Parameters
    ----------
    num_nodes : int
    rate : str
        Of every node's link, both ways, as `tc` takes it.
    folder : Path
        For the two files that the launch needs.
    """

    def __init__(self, num_nodes: int, rate: str, folder: Path):
        self.num_nodes, self._rate, self._folder = num_nodes, rate, folder
        tag = uuid.uuid4().hex[:5]
        self._switch, self.nodes = f"hz{tag}s", [f"hz{tag}n{index}" for index in range(1, num_nodes + 1)]

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def mpirun(self, per_node: Sequence[int] | int, argv: Sequence[str], timeout: float = 120.0) -> Result:
        """Runs `argv` on so many ranks of each node, numbered node by node."""
        counts = [per_node] * self.num_nodes if isinstance(per_node, int) else list(per_node)
        hosts = ",".join(f"{node}:{count}" for node, count in zip(self.nodes, counts, strict=True))
        launch = [
            mpirun_path(), "--prtemca", "plm_ssh_agent", str(self._folder / "agent.sh"), "--bind-to", "none",
            "--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--host", hosts, "-n", str(sum(counts)), *argv,
        ]  # fmt: skip
        inside = f'mount --bind "{self._folder / "hosts"}" /etc/hosts && hostname {self.nodes[0]} && exec "$@"'
        return run(
            ["ip", "netns", "exec", self.nodes[0], "unshare", "--uts", "--mount", "bash", "-c", inside, "bash", *launch],
            timeout, {"OMPI_MCA_btl": None},
        )

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("link", "add", "br0", "type", "bridge", within=self._switch)
        _ip("link", "set", "br0", "up", within=self._switch)
        for index, node in enumerate(self.nodes, 1):
            inner, outer = f"{node}i", f"{node}o"
            _ip("netns", "add", node)
            _ip("link", "add", inner, "type", "veth", "peer", "name", outer)
            _ip("link", "set", inner, "netns", node)
            _ip("link", "set", outer, "netns", self._switch)
            _ip("link", "set", outer, "master", "br0", within=self._switch)
            _ip("link", "set", outer, "up", within=self._switch)
            _ip("addr", "add", f"{SUBNET}.{index}/24", "dev", inner, within=node)
            _ip("link", "set", inner, "up", within=node)
            _ip("link", "set", "lo", "up", within=node)
            for space, device in ((node, inner), (self._switch, outer)):
                shape = f"tc qdisc add dev {device} root tbf rate {self._rate} burst 1mb latency 100ms"
                _run(["ip", "netns", "exec", space, *shape.split()])
        lines = [f"{SUBNET}.{index} {node}" for index, node in enumerate(self.nodes, 1)]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        agent = self._folder / "agent.sh"
        # Stands in for ssh: runs the command inside the node's network, under the node's name.
        agent.write_text(
            "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nnode=$1; shift\n"
            f'exec ip netns exec "$node" unshare --uts bash -c "hostname $node; export PATH={os.environ["PATH"]}; $*"\n'
        )
        agent.chmod(0o755)

    def _remove(self) -> None:
        for space in (*self.nodes, self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip(*words: str, within: str | None = None) -> None:
    _run(["ip", *(("-n", within) if within else ()), *words])


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True)
