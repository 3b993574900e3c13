"""Which parameters are in which group, and what is refused."""

from __future__ import annotations

import pytest

from hpczero.errors import ConfigError
from hpczero.optim import SGD, AdamW
from hpczero.zero.layout import by_layer, in_buckets
from hpczero.zero.param_groups import ParamGroup, grouped, vectors

SHAPES = {"embed.w": (64, 8), "norm.scale": (8,), "head.w": (8, 64), "head.b": (64,), "temperature": ()}


def test_names_patterns_and_functions_put_parameters_into_groups():
    groups = [ParamGroup("head.[w]", lr=0.5), ParamGroup("*.b", vectors, weight_decay=0.0)]
    found = grouped(SHAPES, AdamW(lr=0.1), groups)
    assert found.group_of == {"embed.w": 0, "norm.scale": 2, "head.w": 1, "head.b": 2, "temperature": 2}
    assert [optimizer.lr for optimizer in found.optimizers] == [0.1, 0.5, 0.1]
    assert [optimizer.weight_decay for optimizer in found.optimizers] == [0.01, 0.01, 0.0]
    assert found.own_lr == (False, True, False)
    assert "head.b" in str(found) and "<" not in str(found), "ranks compare it: no addresses"


@pytest.mark.parametrize(("groups", "said"), [
    ([ParamGroup("haed.w", lr=1)], "did you mean head.w"),
    ([ParamGroup("head.*", "tail.*")], "'tail.\\*' fits no parameter"),
    ([ParamGroup("head.*", lr=1), ParamGroup(vectors, lr=2)], "'head.b' is in two groups"),
    ([ParamGroup("head.*", weight_decy=0)], "did you mean weight_decay"),
    ([ParamGroup("head.*", betas=(0.9, 1.0))], "betas"),
    ([ParamGroup("head.*", amsgrad=True)], "the same states"),
    (ParamGroup("head.*"), "a list of ParamGroup"),
    (["head.*"], "a list of ParamGroup"),
])
def test_what_fits_nothing_or_twice_is_refused_by_name(groups, said):
    with pytest.raises(ConfigError, match=said):
        grouped(SHAPES, AdamW(), groups)


def test_a_group_needs_something_to_match():
    for match in ((), (3,)):
        with pytest.raises(ConfigError, match="patterns of names"):
            ParamGroup(*match, lr=1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_runs_cover_every_element_once_and_are_few(num_ranks):
    shapes = {f"{index}.{kind}": (10,) for index in range(500) for kind in ("w", "b", "s")}
    group_of = grouped(shapes, SGD(), [ParamGroup("*.b", lr=1), ParamGroup("*.s", lr=2)]).group_of
    layers = [[f"{index}.{kind}" for kind in ("w", "b", "s")] for index in range(500)]
    for layout in (in_buckets(shapes, num_ranks, 10**6, group_of), by_layer(shapes, layers, num_ranks, group_of)):
        seen = [-1] * layout.size
        for rank in range(num_ranks):
            runs, position = layout.runs(rank), 0
            for run in runs:
                assert run.position == position      # in the order of the shard vector, without gaps
                position += run.stop - run.start
                assert seen[run.start:run.stop] == [-1] * (run.stop - run.start)
                seen[run.start:run.stop] = [run.group] * (run.stop - run.start)
            assert position == layout.shard_cuts(rank)[-1] and len(runs) <= 3 * len(layout.buckets)
        for name, place in layout.places.items():
            assert set(seen[place.offset:place.offset + place.size]) == {group_of[name]}
        assert sum(run.stop - run.start for run in layout.runs()) == layout.size
