"""Groups of parameters with hyperparameters of their own, and scheduled learning rates, at every stage."""

from __future__ import annotations

import numpy as np
import plain_optimizers
import pytest
from agreement import check_everywhere
from zero_cases import SHAPES, STAGES, build, gradients_of, node_maps, same_bits, values

from hpczero.errors import ConfigError, HpczeroError, MismatchError
from hpczero.optim import LAMB, SGD, AdamW, Lion
from hpczero.optim.schedules import WSD, Cosine, Linear
from hpczero.topology import Topology
from hpczero.zero.param_groups import ParamGroup, grouped, vectors

GROUPS = [ParamGroup("matrix", lr=0.03, betas=(0.8, 0.95)), ParamGroup("scalar", "*ne", "five", weight_decay=0.0)]
SCHEDULE = Cosine(steps=6, warmup=2, end=0.1)


def trained(stage, topology, optimizer, groups, schedule, *, steps=5, dtype=np.float32, bad_step=None, **settings):
    zero = build(stage, values(SHAPES, 0, dtype), optimizer, topology, groups=groups, schedule=schedule, **settings)
    reports = []
    for step in range(steps):
        gradients = gradients_of(zero.params, 1000 * step + topology.rank, dtype)
        if step == bad_step:
            gradients["five"] = np.full(5, np.nan, dtype)
        zero.accumulate(gradients)
        reports.append(zero.step())
    result, state = zero.full_parameters(), zero.state_dict()
    zero.close()
    return result, reports, state


def reference(size, optimizer, groups, schedule, steps=5):
    params = values(SHAPES, 0, np.float64)
    grouping = grouped(SHAPES, optimizer, groups)
    state = {name: {} for name in params}
    for step in range(steps):
        gradients = [gradients_of(params, 1000 * step + rank, np.float64) for rank in range(size)]
        for name in params:
            own = grouping.optimizers[grouping.group_of[name]]
            scheduled = type(own)(**(vars(own) | {"lr": own.lr * schedule.factor(step + 1)}))
            mean = sum(each[name] for each in gradients) / size
            params[name] = plain_optimizers.update(scheduled, params[name], mean, state[name], step + 1)
    return params


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.01, weight_decay=0.1), Lion(lr=0.01, weight_decay=0.1),
                                       LAMB(lr=0.01, weight_decay=0.1)], ids=repr)
def test_all_stages_and_buckets_give_the_same_bits_and_agree_with_the_reference(comm, optimizer):
    expected = reference(comm.size, optimizer, GROUPS, SCHEDULE)
    for node_map in node_maps(comm.size)[:2]:
        with Topology(comm, node_map) as topology:
            first, reports, _ = trained(0, topology, optimizer, GROUPS, SCHEDULE)
            for stage in STAGES:
                for settings in ({}, {"reduce_bucket_size": "1 elements"}, {"reduce_bucket_size": "600 elements"}):
                    again, again_reports, _ = trained(stage, topology, optimizer, GROUPS, SCHEDULE, **settings)
                    check_everywhere(comm, same_bits(first, again), f"stage {stage} {settings} {topology}")
                    check_everywhere(comm, [r.lr for r in again_reports] == [r.lr for r in reports], f"stage {stage}")
            exact, _, _ = trained(2, topology, optimizer, GROUPS, SCHEDULE, dtype=np.float64)
            close = all(np.allclose(exact[name], expected[name], rtol=1e-12, atol=1e-13) for name in expected)
            check_everywhere(comm, close, "differs from the reference")
    factor = SCHEDULE.factor(3)
    base = optimizer.lr * factor
    check_everywhere(comm, reports[2].lr == (base, 0.03 * factor, base), f"{reports[2].lr}")


def test_no_decay_on_vectors_in_one_line(comm):
    with Topology(comm) as topology:
        zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        zero = build(2, values(SHAPES, 0, np.float64), SGD(lr=0.5, weight_decay=0.5), topology,
                     groups=[ParamGroup(vectors, weight_decay=0.0)])
        before = zero.full_parameters()
        zero.accumulate(zeros)
        zero.step()
        after = zero.full_parameters()
        zero.close()
    kept = {name for name in SHAPES if np.array_equal(before[name], after[name])}
    check_everywhere(comm, kept == {name for name, shape in SHAPES.items() if len(shape) < 2} | {"empty"}, f"{kept}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_does_not_advance_the_schedule(comm, stage):
    with Topology(comm) as topology:
        result, reports, state = trained(stage, topology, AdamW(lr=1.0), [], Linear(steps=10, warmup=5), bad_step=1)
        check_everywhere(comm, [report.applied for report in reports] == [True, False, True, True, True], "skipped")
        rates = [report.lr for report in reports]
        check_everywhere(comm, rates == [(0.2,), (), (0.4,), (0.6000000000000001,), (0.8,)]
                         or np.allclose([rate[0] for rate in rates if rate], [0.2, 0.4, 0.6, 0.8]), f"{rates}")
        check_everywhere(comm, state["step"] == 4 and state["schedule"]["name"] == "linear", f"{state['schedule']}")


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_not_finite_are_named_and_too_many_skips_in_a_row_end_the_run(comm, stage):
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0), AdamW(lr=0.1), topology, max_consecutive_skips=2)

        def step(*bad):
            gradients = gradients_of(zero.params, comm.rank, np.float32)
            for name in bad if comm.rank == comm.size - 1 else ():
                gradients[name] = np.full(SHAPES[name], np.inf, np.float32)
            zero.accumulate(gradients)
            return zero.step()

        suffix = ".w" if stage == 3 else ""
        first = step("matrix", "five")
        named = tuple(name + suffix for name in ("five", "matrix"))
        check_everywhere(comm, not first.applied and first.non_finite == named and "five" in first.reason, f"{first}")
        check_everywhere(comm, step("long").non_finite == ("long" + suffix,), "the second")
        good = step()
        check_everywhere(comm, good.applied and good.non_finite == () and good.step == 1, f"{good}")
        before = zero.full_parameters()
        step("one")
        step("one")
        for turn in range(2):      # it stays an error
            with pytest.raises(HpczeroError, match=f"{3 + turn} steps in a row were skipped .*one.*max_consecutive_skips=2"):
                step("one")
        check_everywhere(comm, same_bits(before, zero.full_parameters()), "parameters moved")
        check_everywhere(comm, step().applied, "a good step after it")
        zero.close()


@pytest.mark.parametrize("which", [1, 2, "inf"])
def test_clipping_goes_by_the_norm_that_was_asked_for(comm, which):
    mean = {name: sum(gradients_of(values(SHAPES, 0, np.float64), rank, np.float64)[name] for rank in range(comm.size))
            / comm.size for name in SHAPES}
    whole = np.concatenate([value.reshape(-1) for value in mean.values()])
    expected = np.linalg.norm(whole, np.inf if which == "inf" else which)
    results = []
    with Topology(comm) as topology:
        for stage in STAGES:
            zero = build(stage, values(SHAPES, 0, np.float64), SGD(lr=1.0), topology, gradient_clipping=expected / 4,
                         gradient_clipping_norm=which)
            before = zero.full_parameters()
            zero.accumulate(gradients_of({name: before[name] for name in SHAPES}, comm.rank, np.float64))
            report, after = zero.step(), zero.full_parameters()
            zero.close()
            close = all(np.allclose(before[name] - after[name], mean[name] / 4, atol=1e-12) for name in SHAPES)
            check_everywhere(comm, close and np.isclose(report.grad_norm, expected) and np.isclose(report.clip_coef, 0.25),
                             f"stage {stage}: {report}")
            results.append((after, report.grad_norm))
    check_everywhere(comm, all(same_bits(after, results[0][0]) and norm == results[0][1] for after, norm in results), "bits")


def test_a_learning_rate_given_for_a_step_leaves_groups_with_their_own(comm):
    with Topology(comm) as topology:
        zero = build(1, values(SHAPES, 0), SGD(lr=1.0), topology, groups=[ParamGroup("five", lr=0.25)],
                     schedule=WSD(steps=10, decay=2))
        zero.accumulate(gradients_of(zero.params, comm.rank, np.float32))
        report = zero.step(lr=0.125)
        zero.close()
        check_everywhere(comm, report.lr == (0.125, 0.25), f"{report.lr}")


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_wrong_or_differs_on_one_rank_is_raised_on_all(comm, stage):
    last = comm.rank == comm.size - 1
    good = [ParamGroup("five", lr=0.25)]
    cases = [
        (ConfigError, "did you mean five", {"groups": [ParamGroup("fife", lr=1)] if last else good}),
        (ConfigError, "a list of ParamGroup", {"groups": "five" if last else good}),
        (ConfigError, "schedule: None or one of", {"schedule": (lambda step: 1.0) if last else None}),
    ]
    if comm.size > 1:
        cases += [
            (MismatchError, "for five", {"groups": [ParamGroup("five", lr=0.5)] if last else good}),
            (MismatchError, "schedule=", {"schedule": Cosine(steps=5) if last else Cosine(steps=6)}),
        ]
    with Topology(comm) as topology:
        for kind, said, settings in cases:
            with pytest.raises(kind, match=said):
                build(stage, values(SHAPES, 0), SGD(lr=1.0), topology, **settings)
