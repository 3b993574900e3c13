"""Links measured on every rank to the same values, in the time allowed; tables stored once, refused if damaged."""

from __future__ import annotations

import dataclasses
import json
import logging
import time

import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.collectives import tuning
from hpczero.collectives.links import SIZES, Links, measure, pairs_of, ping_pong
from hpczero.collectives.node_topology import NodeTopology
from hpczero.collectives.transport import Transport
from hpczero.collectives.tuning import Entry, Table
from hpczero.errors import ConfigError
from hpczero.topology import Topology

BUSY_S = 4.0
"""What a machine with more ranks than cores, busy with something else, may take on top."""
SLOW_S_PER_BYTE = 1e-5


class Slow:
    """A communicator whose sends take 10 microseconds a byte, as on a line of 100 kB/s; remembers the largest."""

    def __init__(self, comm):
        self._comm, self.largest = comm, 0

    def Isend(self, buffer, peer):
        self.largest = max(self.largest, buffer.nbytes)
        time.sleep(buffer.nbytes * SLOW_S_PER_BYTE)
        return self._comm.Isend(buffer, peer)

    def __getattr__(self, name):
        return getattr(self._comm, name)


class SlowWorld(Slow):
    """Its duplicates are slow, too, and the last of them is kept."""

    def Idup(self):
        comm, request = self._comm.Idup()
        self.last = Slow(comm)
        return self.last, request


def node_maps(size):
    maps = {(0,) * size, tuple(range(size)), tuple(rank % 2 for rank in range(size)), (0,) * (size - 1) + (1,),
            tuple(rank // 2 for rank in range(size))}
    return sorted(map(list, maps))


def everywhere_the_same(comm, text):
    check_everywhere(comm, len(set(comm.allgather(text))) == 1, f"differs: {text}")


def test_all_ranks_get_the_same_links_of_any_nodes_in_the_time_allowed(comm):
    with Topology(comm) as topology:
        measure(topology, 0.2)            # kernels are compiled
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            Transport.of(topology)
            start = time.monotonic()
            links = measure(topology, 0.5)
            took_s = time.monotonic() - start
            everywhere_the_same(comm, links.to_json())
            check_everywhere(comm, took_s < 0.5 + BUSY_S, f"{took_s} s for {node_map}")
            for name, link in (("node", links.node), ("network", links.network)):
                there = bool(pairs_of(topology.map, name))
                check_everywhere(comm, (link is not None) == there, f"{name} of {node_map}: {link}")
                if there:
                    check_everywhere(comm, 0 < links.time(8, name) < 1 and links.time(2**20, name) > 0, f"{link}")
            check_everywhere(comm, 0 < links.gamma("float32") < 1e-6 and links.source == "measured", f"{links}")


def test_a_time_of_nothing_is_refused(comm):
    with Topology(comm) as topology:
        for call in (measure, NodeTopology.measure):
            with pytest.raises(ConfigError, match="budget_s"):
                call(topology, 0.0)


def test_on_a_slow_link_large_messages_are_left_out_and_the_time_is_kept(comm):
    if comm.size == 1:
        return
    with Topology(comm, list(range(comm.size))) as topology:
        Transport.of(topology)
        world, topology.world = topology.world, SlowWorld(topology.world)
        start = time.monotonic()
        links = measure(topology, 1.0)
        took_s = time.monotonic() - start
        largest, topology.world = topology.world.last.largest, world
        # All sizes once would take 80 s, 128 KiB alone 1.3 s each way.
        check_everywhere(comm, largest < 64 * 2**10, f"a message of {largest} bytes was sent")
        check_everywhere(comm, took_s < 1.0 + BUSY_S, f"{took_s} s")
        check_everywhere(comm, any("network: messages above" in text for text in links.unreached), f"{links.unreached}")
        rate = links.time(2**20, "network") / 2**20
        check_everywhere(comm, 0.5 * SLOW_S_PER_BYTE < rate < 3 * SLOW_S_PER_BYTE, f"{rate} s per byte")
        everywhere_the_same(comm, links.to_json())


def test_ping_pong_gives_growing_sizes_to_the_rank_that_leads(comm):
    if comm.size > 1 and comm.rank < 2:
        def wait(requests):
            for request in requests:
                while not request.Test():
                    time.sleep(1e-5)

        points = ping_pong(comm, 1 - comm.rank, comm.rank == 0, wait, 2.0)
        sizes = [nbytes for nbytes, _ in points]
        fine = sizes == list(SIZES[:len(sizes)]) and len(sizes) > 4 if comm.rank == 0 else points == []
        fine = fine and all(seconds > 0 for _, seconds in points)
    else:
        fine, points = True, []
    check_everywhere(comm, fine, f"{points}")


def test_node_topology_has_a_number_for_every_pair_of_nodes_the_same_on_all_ranks(comm):
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            Transport.of(topology)
            start = time.monotonic()
            found = NodeTopology.measure(topology, 0.5)
            took_s = time.monotonic() - start
            everywhere_the_same(comm, json.dumps(found.as_dict()))
            check_everywhere(comm, took_s < 0.5 + BUSY_S, f"{took_s} s for {node_map}")
            m = topology.num_nodes
            others = ~np.eye(m, dtype=bool)
            for matrix in (found.adjacency, found.bandwidth, found.latency):
                fine = (matrix.shape == (m, m) and matrix.dtype == np.float64 and (matrix == matrix.T).all()
                        and (matrix[others] > 0).all() and not matrix[~others].any() and not matrix.flags.writeable)
                check_everywhere(comm, fine, f"{node_map}: {matrix}")
            check_everywhere(comm, (found.adjacency[others] == 1).all(), f"{found.adjacency}")
            several = [count > 1 for count in topology.ranks_per_node]
            for vector in (found.node_bandwidth, found.node_latency):
                check_everywhere(comm, [value > 0 for value in vector] == several, f"{node_map}: {vector}")


def test_a_table_is_stored_by_one_rank_and_loaded_by_all(comm, monkeypatch, shared_folder):
    monkeypatch.delenv("HPCZERO_TUNING_TABLE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_folder))
    with Topology(comm) as topology:
        key = tuning.key_of(topology, np.float32)
        everywhere_the_same(comm, json.dumps(key.as_dict()))
        check_everywhere(comm, tuning.load(topology, key) is None, "a table out of nowhere")
        for seconds in (1e-3, 2e-3):            # the second replaces the first
            table = Table.of(key, Links.assumed(1e-6, 1e-9), [Entry("all_reduce", "ring", 1024, "private", seconds)])
            table = dataclasses.replace(table, made=comm.bcast(table.made))
            path = tuning.store(table, topology)
            check_everywhere(comm, tuning.load(topology, key) == table, "what was stored is not what is loaded")
        left = [entry.name for entry in path.parent.iterdir()]
        check_everywhere(comm, left == [path.name], f"beside the table: {left}")
        other = tuning.key_of(topology, np.float64)
        check_everywhere(comm, tuning.load(topology, other) is None, "a table for another type")


def test_a_damaged_or_foreign_file_is_said_once_and_ignored(comm, monkeypatch, shared_folder, caplog):
    path = shared_folder / "table.json"
    monkeypatch.setenv("HPCZERO_TUNING_TABLE", str(path))
    logging.getLogger("hpczero").propagate = True
    with Topology(comm) as topology:
        key = tuning.key_of(topology, np.float32)
        table = Table.of(key, Links.assumed(1e-6, 1e-9), []).to_json()
        foreign = Table.of(dataclasses.replace(key, device="cuda"), Links.assumed(1e-6, 1e-9), []).to_json()
        for content, reason in ((table[:-20], "no tuning table"), (foreign, "made for device 'cuda' instead of 'cpu'"),
                                ("\udcff".encode("utf-8", "surrogateescape"), "decode"), (None, "Is a directory")):
            if comm.rank == 0:
                if content is None:
                    path.unlink()
                    path.mkdir()
                else:
                    path.write_bytes(content if isinstance(content, bytes) else content.encode())
            comm.Barrier()
            caplog.clear()
            with caplog.at_level(logging.WARNING, "hpczero.tuning"):
                nothing = tuning.load(topology, key) is None and tuning.load(topology, key) is None
            said = [record.getMessage() for record in caplog.records]
            fine = len(said) == 1 and reason in said[0] and str(path) in said[0] if comm.rank == 0 else not said
            check_everywhere(comm, nothing and fine, f"{reason}: {said}")


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(comm, monkeypatch, shared_folder):
    (shared_folder / "file").touch()
    monkeypatch.setenv("HPCZERO_TUNING_TABLE", str(shared_folder / "file" / "table.json"))
    with Topology(comm) as topology:
        table = Table.of(tuning.key_of(topology, np.float32), Links.assumed(1e-6, 1e-9), [])
        try:
            tuning.store(table, topology)
            found = "nothing raised"
        except ConfigError as error:
            found = str(error)
        check_everywhere(comm, "HPCZERO_TUNING_TABLE" in found, found)


@pytest.fixture
def shared_folder(comm, tmp_path_factory):
    """One temporary folder for all ranks: rank 0's."""
    from pathlib import Path

    folder = Path(comm.bcast(str(tmp_path_factory.mktemp("tuning")) if comm.rank == 0 else None))
    yield folder
    comm.Barrier()
