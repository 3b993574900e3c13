"""Link costs and tuning tables as values: fitted, written, read back, and refused where they are damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpczero.collectives import tuning
from hpczero.collectives.links import Link, Links, SizeClass, fit, pairs_of
from hpczero.collectives.node_topology import rounds
from hpczero.collectives.tuning import Entry, Key, Table
from hpczero.errors import ConfigError
from hpczero.topology import NodeMap

LINKS = Links(
    Link((SizeClass(8192, 1e-6, 2e-10, 7e-11), SizeClass(None, 9e-6, 1.1e-10, 8e-11))), None,
    (("float32", 1e-10), ("float64", 2e-10)), "measured", ("network: nothing",), 0.5,
)
KEY = Key("node, some processor, 2 cores", "MPICH 5.0.2", (2, 1), "float32", "cpu")
TABLE = Table.of(KEY, LINKS, [
    Entry("all_reduce", "ring", 1024, "private", 1e-5), Entry("all_reduce", "ring", 4096, "private", 3e-5),
    Entry("all_reduce", "window", 1024, "shared", 1e-6), Entry("broadcast", "tree", 1024, "private", 2e-6),
])


# The fit


def test_a_line_is_found_through_noise_and_one_wild_point():
    sizes = np.array([16384, 32768, 65536, 131072, 262144, 524288])
    seconds = (5e-6 + 2e-10 * sizes) * np.array([1.01, 0.99, 1.0, 8.0, 1.01, 0.99])
    alpha, beta = fit(list(zip(sizes.tolist(), seconds.tolist(), strict=True)))
    assert alpha == pytest.approx(5e-6, rel=0.1) and beta == pytest.approx(2e-10, rel=0.05)


def test_costs_are_never_negative():
    assert fit([(8, 3e-6), (8192, 1e-6)]) == (2e-6, 0.0)
    alpha, beta = fit([(2**20, 2e-3), (2**21, 2e-3), (2**22, 2e-3)])
    assert alpha == 0.0 and beta > 0, "large messages cannot be free"
    alpha, beta = fit([(16384, 1e-6), (32768, 4e-6)])
    assert alpha == 0.0 and beta > 0
    assert fit([(8, 1e-6)]) == (1e-6, 0.0)


# Links


def test_the_class_of_its_size_decides_what_a_message_costs():
    assert LINKS.time(8192, "node") == 1e-6 + 8192 * 2e-10
    assert LINKS.time(8193, "node") == 9e-6 + 8193 * 1.1e-10
    assert LINKS.time(100, "node", at_once=2) == 1e-6 + 100 * 2e-10, "two do not fill the memory yet"
    assert LINKS.time(100, "node", at_once=10) == 1e-6 + 100 * 7e-10


def test_links_that_are_not_there_are_named():
    with pytest.raises(ConfigError, match="all ranks are on one node"):
        LINKS.time(8, "network")
    with pytest.raises(ConfigError, match="no link"):
        LINKS.time(8, "bridge")


def test_a_type_that_was_not_measured_counts_as_float32():
    assert LINKS.gamma("float64") == 2e-10 and LINKS.gamma("int64") == 1e-10 and Links(None, None).gamma() == 0.0


def test_links_survive_json():
    assert Links.from_json(LINKS.to_json()) == LINKS
    assert Links.from_json(Links.assumed(1e-6, 1e-9).to_json()) == Links.assumed(1e-6, 1e-9)


@pytest.mark.parametrize("damage", [
    lambda value: value.pop("node"),
    lambda value: value.update(more=1),
    lambda value: value["node"]["classes"][0].update(alpha_s=-1.0),
    lambda value: value["node"]["classes"][0].update(beta_s=float("nan")),
    lambda value: value["node"]["classes"][0].update(shared_s="fast"),
    lambda value: value["node"]["classes"].clear(),
    lambda value: value["node"]["classes"].reverse(),
    lambda value: value.update(gamma_s=[["floaty", 1.0]]),
    lambda value: value.update(gamma_s=3),
])
def test_damaged_links_are_refused(damage):
    value = json.loads(LINKS.to_json())
    damage(value)
    with pytest.raises(ConfigError, match="no link costs"):
        Links.from_json(json.dumps(value))


def test_pairs_are_disjoint_and_joined_by_their_link():
    nodes = NodeMap((0, 1, 0, 0, 1, 2, 2, 2, 2))
    assert pairs_of(nodes, "node") == [(0, 2), (1, 4), (5, 6), (7, 8)]
    assert pairs_of(nodes, "network") == [(0, 1), (2, 4)]
    assert pairs_of(NodeMap((0,)), "node") == pairs_of(NodeMap((0, 0)), "network") == []


@pytest.mark.parametrize("count", range(1, 12))
def test_in_a_tournament_every_pair_meets_once_and_nobody_twice_in_a_round(count):
    found = list(rounds(count))
    assert len(found) == (count - 1 if count % 2 == 0 else count if count > 1 else 0)
    met = [pair for pairs in found for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in found)


# Tables


def test_a_table_survives_json():
    assert Table.from_json(TABLE.to_json()) == TABLE


def test_times_between_measured_sizes_lie_on_a_line_and_those_far_beyond_are_unknown():
    def seconds(nbytes, algorithm="ring", buffers="private"):
        return TABLE.seconds("all_reduce", algorithm, nbytes, buffers)

    assert seconds(1024) == 1e-5 and seconds(4096) == 3e-5 and seconds(2560) == pytest.approx(2e-5)
    assert seconds(512) == 1e-5 and seconds(8192) == pytest.approx(6e-5)
    assert seconds(511) is None and seconds(8193) is None
    assert seconds(1024, "window") is None and seconds(1024, "window", "shared") == 1e-6
    assert TABLE.algorithms("all_reduce", "private") == ("ring",)


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2],
    lambda text: "",
    lambda text: "[]",
    lambda text: "null",
    lambda text: text.replace("tuning table 1", "tuning table 2"),
    lambda text: text.replace('"private"', '"elsewhere"'),
    lambda text: text.replace('"seconds": 1e-05', '"seconds": -1'),
    lambda text: text.replace('"hosts"', '"guests"'),
    lambda text: text.replace('"alpha_s": 1e-06', '"alpha_s": null'),
    lambda text: text.replace('"entries": [', '"entries": [3,'),
])
def test_a_damaged_table_is_refused(damage):
    damaged = damage(TABLE.to_json())
    assert damaged != TABLE.to_json()
    with pytest.raises(ConfigError, match="no tuning table"):
        Table.from_json(damaged)


def test_any_part_of_the_key_changes_the_file(monkeypatch, tmp_path):
    monkeypatch.delenv("HPCZERO_TUNING_TABLE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [Key("other", *list(KEY.as_dict().values())[1:]), *(
        Key(**(KEY.as_dict() | {"ranks_per_node": (2, 1)} | change)) for change in (
            {"mpi": "Open MPI 5.0.8"}, {"ranks_per_node": (1, 2)}, {"dtype": "float64"}, {"device": "cuda"})
    )]
    paths = {tuning.path_of(key) for key in [KEY, *others]}
    assert len(paths) == 6 and all(path.parent == tmp_path / "hpczero" for path in paths)
    assert tuning.path_of(KEY).name == f"tune-{KEY.digest}.json"


def test_the_file_can_be_named_and_otherwise_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HPCZERO_TUNING_TABLE", str(tmp_path / "mine.json"))
    assert tuning.path_of(KEY) == tmp_path / "mine.json"
    monkeypatch.delenv("HPCZERO_TUNING_TABLE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.path_of(KEY).parent == tmp_path / ".cache" / "hpczero"
