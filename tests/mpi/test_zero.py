"""ZeRO against one unpartitioned reference, and its stages against each other, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import plain_optimizers
import pytest
from agreement import check_everywhere
from zero_cases import SHAPES, STAGES, OneParameter, Source, build, gradients_of, node_maps, same_bits, values

from hpczero.errors import ConfigError, HpczeroError, MismatchError
from hpczero.optim import LAMB, SGD, Adagrad, Adam, AdamW, Lion
from hpczero.topology import Topology
from hpczero.zero.config import ZeroConfig
from hpczero.zero.engine import Zero3Engine
from hpczero.zero.optimizer import ZeroOptimizer

def trained(stage, topology, optimizer, *, steps=4, shapes=SHAPES, dtype=np.float32, weights=None, **settings):
    """Parameters and reports after some steps with gradients that differ from rank to rank."""
    rank = topology.rank
    zero = build(stage, values(shapes, 0, dtype), optimizer, topology, **settings)
    reports = []
    for step in range(steps):
        weight = 1.0 if weights is None else weights[(rank + step) % len(weights)]
        zero.accumulate(gradients_of(zero.params, 1000 * step + rank, dtype), weight)
        reports.append(zero.step())
    result = zero.full_parameters()
    zero.close()
    return result, reports


def reference(size, optimizer, *, steps=4, shapes=SHAPES, weights=None, clip=0.0):
    """The same in float64, unpartitioned, in plain NumPy."""
    params = values(shapes, 0, np.float64)
    state = {name: {} for name in params}
    for step in range(steps):
        share = [1.0 if weights is None else weights[(rank + step) % len(weights)] for rank in range(size)]
        all_gradients = [gradients_of(params, 1000 * step + rank, np.float64) for rank in range(size)]
        mean = {name: sum(w * g[name] for w, g in zip(share, all_gradients, strict=True)) / sum(share) for name in params}
        norm = np.sqrt(sum(float((g * g).sum()) for g in mean.values()))
        coefficient = clip / norm if clip and norm > clip else 1.0
        for name in params:
            params[name] = plain_optimizers.update(optimizer, params[name], coefficient * mean[name], state[name], step + 1)
    return params


OPTIMIZERS = [AdamW(lr=0.01, weight_decay=0.1), SGD(lr=0.05), SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
              SGD(lr=0.05, momentum=0.9, nesterov=True), AdamW(lr=0.01, amsgrad=True), Adam(lr=0.01, weight_decay=0.1),
              Adam(lr=0.01, amsgrad=True), Lion(lr=0.01, weight_decay=0.1),
              Adagrad(lr=0.05, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5),
              LAMB(lr=0.01, weight_decay=0.1)]


BUCKETS_AND_SHARING = ({}, {"reduce_bucket_size": "1 elements"}, {"reduce_bucket_size": "600 elements"},
                       {"share_parameters": False})
EVERY = list(itertools.product(STAGES, BUCKETS_AND_SHARING))
# On a map of several nodes each setting is tried where it does most: small buckets at 2, none shared at 1 and 3.
SOME = [*((stage, {}) for stage in STAGES), (2, BUCKETS_AND_SHARING[1]), (3, BUCKETS_AND_SHARING[2]),
        (1, BUCKETS_AND_SHARING[3]), (3, BUCKETS_AND_SHARING[3])]


@pytest.mark.time_limit(180)
def test_all_stages_bucket_sizes_and_sharing_give_the_same_bits_and_agree_with_the_reference(comm):
    expected = reference(comm.size, OPTIMIZERS[0])
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology:
            first, _ = trained(1, topology, OPTIMIZERS[0])
            close = all(np.allclose(first[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
            check_everywhere(comm, close, f"differs from the reference on {topology}")
            for stage, settings in EVERY if node_map is None else SOME:
                again, reports = trained(stage, topology, OPTIMIZERS[0], **settings)
                check_everywhere(comm, same_bits(first, again), f"stage {stage} {settings} {topology}")
                check_everywhere(comm, all(report.applied for report in reports), f"{reports}")
            held = comm.allgather({name: value.tobytes() for name, value in first.items()})
            check_everywhere(comm, held == [held[0]] * comm.size, "ranks differ")


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:], ids=repr)
def test_every_optimizer_gives_the_same_bits_at_every_stage(comm, optimizer):
    with Topology(comm) as topology:
        results = [trained(stage, topology, optimizer)[0] for stage in STAGES]
        check_everywhere(comm, all(same_bits(results[0], other) for other in results), f"{optimizer}")


@pytest.mark.parametrize("stage", STAGES)
def test_float64_agrees_with_the_reference_to_rounding(comm, stage):
    with Topology(comm) as topology:
        for optimizer in OPTIMIZERS:
            expected = reference(comm.size, optimizer, steps=20)
            result, _ = trained(stage, topology, optimizer, dtype=np.float64, steps=20)
            for name in expected:
                check_everywhere(comm, np.allclose(result[name], expected[name], rtol=1e-12, atol=1e-13), f"{name}")


@pytest.mark.parametrize("stage", STAGES)
def test_weights_make_uneven_batches_the_mean_over_all_samples(comm, stage):
    weights = [3.0, 1.0, 0.0, 5.0, 2.0]
    with Topology(comm) as topology:
        expected = reference(comm.size, OPTIMIZERS[0], weights=weights, steps=2)
        result, reports = trained(stage, topology, OPTIMIZERS[0], weights=weights, steps=2, dtype=np.float64)
        for name in expected:
            check_everywhere(comm, np.allclose(result[name], expected[name], rtol=1e-12, atol=1e-13), f"{name}")
        check_everywhere(comm, all(report.applied for report in reports), f"{reports}")


def test_clipping_uses_the_global_norm_and_gives_the_same_bits_at_every_stage(comm):
    expected = reference(comm.size, OPTIMIZERS[0], clip=0.5)
    results = []
    for node_map in node_maps(comm.size)[:1]:
        with Topology(comm, node_map) as topology:
            for stage in STAGES:
                for bucket in ("25MiB", "100 elements"):
                    result, reports = trained(stage, topology, OPTIMIZERS[0], gradient_clipping=0.5,
                                              reduce_bucket_size=bucket)
                    results.append((result, [report.grad_norm for report in reports]))
                    check_everywhere(comm, all(report.clip_coef < 1 and abs(report.clipped_norm - 0.5) < 1e-9
                                               for report in reports), f"{reports}")
    same = all(same_bits(results[0][0], other) and norms == results[0][1] for other, norms in results)
    check_everywhere(comm, same, "stages differ under clipping")
    close = all(np.allclose(results[0][0][name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    check_everywhere(comm, close, "differs from the reference")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shapes", [{}, {"a": (0,)}, {"a": ()}, {"a": (1,)}, {"a": (5,)}, {"a": (4, 4), "b": (0, 4)},
                                    {"a": (8,), "b": (0,), "c": (24,)}], ids=str)
def test_any_shape_trains_and_keeps_its_shape(comm, stage, shapes):
    with Topology(comm) as topology:
        result, _ = trained(stage, topology, OPTIMIZERS[0], shapes=shapes, dtype=np.float64)
        expected = reference(comm.size, OPTIMIZERS[0], shapes=shapes)
        fine = result.keys() == shapes.keys() and all(
            result[name].shape == shapes[name] and np.allclose(result[name], expected[name], rtol=1e-12, atol=1e-13)
            for name in shapes)
        check_everywhere(comm, fine, f"{result} for {expected}")


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_pairs_in_any_order_and_several_micro_batches_give_the_mean(comm, stage):
    with Topology(comm) as topology:
        for order in (list(SHAPES), list(reversed(SHAPES)), ["long", "one", "scalar", "five", "none", "matrix", "empty"]):
            zero = build(stage, values(SHAPES, 0, np.float64), SGD(lr=1.0), topology, reduce_bucket_size="50 elements")
            before = zero.full_parameters()
            batches = [[values(SHAPES, 10 * micro + rank, np.float64) for micro in range(3)] for rank in range(comm.size)]
            for micro in range(3):
                mine = batches[comm.rank][micro]
                zero.accumulate(((name, mine[name]) for name in order), weight=micro + 1)
            zero.step()
            mean = {name: sum((micro + 1) * batches[rank][micro][name] for rank in range(comm.size) for micro in range(3))
                    / (6 * comm.size) for name in SHAPES}
            fine = all(np.allclose(zero.params[name], before[name] - mean[name], rtol=1e-12, atol=1e-13) for name in SHAPES)
            check_everywhere(comm, fine, f"stage {stage} order {order}")
            zero.close()


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_a_missing_gradient_counts_as_zero(comm, stage):
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0, np.float64), SGD(lr=1.0), topology)
        before = zero.full_parameters()
        gradients = {"five": np.ones(5)} if comm.rank == 0 else {}
        for _ in range(2):
            zero.accumulate(gradients)
            zero.step()
        expected = before["five"] - 2 / comm.size
        check_everywhere(comm, np.allclose(zero.params["five"], expected, rtol=1e-12), "five")
        untouched = all(np.array_equal(zero.params[name], before[name]) for name in SHAPES if name != "five")
        check_everywhere(comm, untouched, "a parameter without a gradient moved")
        zero.close()


@pytest.mark.parametrize("stage", (0, 1))
def test_gradients_written_by_hand_count_equally_and_are_zeroed_by_step(comm, stage):
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0, np.float64), SGD(lr=1.0), topology)
        before = zero.full_parameters()
        zero.grads["five"][:] = comm.rank
        zero.step()
        expected = before["five"] - sum(range(comm.size)) / comm.size
        check_everywhere(comm, np.allclose(zero.params["five"], expected, rtol=1e-12), "five")
        zero.step()
        check_everywhere(comm, np.allclose(zero.params["five"], expected, rtol=1e-12), "stale gradients were applied")
        zero.close()


def test_stage_2_has_no_whole_gradient_and_says_what_to_do(comm):
    with ZeroOptimizer(values(SHAPES, 0), AdamW(), comm, ZeroConfig(stage=2)) as zero, \
            pytest.raises(ConfigError, match="accumulate"):
        zero.grads  # noqa: B018


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all_without_a_trace(comm, stage, bad):
    with Topology(comm) as topology:
        clean, _ = trained(stage, topology, OPTIMIZERS[0], steps=2)
        zero = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology, gradient_clipping=0.0)
        for step in range(2):
            zero.accumulate(gradients_of(zero.params, 1000 * step + comm.rank, np.float32))
            zero.step()
            poisoned = gradients_of(zero.params, 7, np.float32)
            if comm.rank == comm.size - 1:
                poisoned["matrix"][3, 4] = bad
            zero.accumulate(poisoned)
            report = zero.step()
            check_everywhere(comm, not report.applied and "not finite" in report.reason and report.step == step + 1,
                             f"{report}")
        check_everywhere(comm, same_bits(clean, zero.full_parameters()), "a skipped step left a trace")
        zero.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_samples_is_skipped(comm, stage):
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology)
        zero.accumulate({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, weight=0)
        report = zero.step()
        check_everywhere(comm, not report.applied and "sample" in report.reason, f"{report}")
        zero.close()


def test_rank_zeros_values_are_where_training_starts(comm):
    for stage in STAGES:
        with Topology(comm) as topology:
            zero = build(stage, values(SHAPES, comm.rank), OPTIMIZERS[0], topology)
            check_everywhere(comm, same_bits(values(SHAPES, 0), {name: zero.full_parameters()[name] for name in SHAPES}),
                             f"stage {stage}")
            zero.close()


def test_shared_parameters_are_one_copy_per_node_and_read_only(comm):
    for node_map in node_maps(comm.size):
        with Topology(comm, node_map) as topology, \
                ZeroOptimizer({"w": np.zeros((1000, 50), np.float32)}, AdamW(), topology, ZeroConfig(stage=1)) as zero:
            with pytest.raises(ValueError, match="read-only"):
                zero.params["w"][0, 0] = 1
            expected = 1000 * 50 * 4 / topology.node.size
            check_everywhere(comm, abs(zero.memory["parameters"] - expected) < 0.01 * expected + 512, f"{zero.memory}")


@pytest.mark.parametrize("stage", STAGES)
def test_measured_bytes_are_within_two_percent_of_the_formula_for_ten_million_parameters(comm, stage):
    shapes = {f"w{index}": (1000, 1000) for index in range(9)} | {"b": (999_983,), "small": (17,)}
    zero_values = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for node_map in node_maps(comm.size)[:2]:
        with Topology(comm, node_map) as topology:
            zero = build(stage, zero_values, AdamW(), topology, reduce_bucket_size="8MiB")
            check_everywhere(comm, np.isnan(zero.memory_stats.communication_overhead), "before the first step")
            zero.accumulate(zero_values)
            report = zero.step()
            measured, formula = zero.memory, zero.memory_formula
            total, predicted = sum(measured.values()), sum(formula.values())
            check_everywhere(comm, abs(total - predicted) < 0.02 * predicted, f"{topology} {measured} for {formula}")
            n, ranks = 10_000_000, comm.size
            share = topology.node.size
            stats = zero.memory_stats
            saved = [stats.optimizer_memory_saved, stats.gradient_memory_saved, stats.parameter_memory_saved]
            held = [measured["optimizer_states"], measured["gradients"], measured["parameters"]]
            sums = np.allclose(np.add(saved, held), [8 * n, 4 * n, 4 * n], rtol=1e-12)
            total = stats.total_memory_saved - (sum(saved) - measured["buffers"])
            near = all(abs(getattr(stats, name) - value) < 0.02 * predicted for name, value in stats.formula.items())
            check_everywhere(comm, sums and total == 0 and near and len(stats.formula) == 4, f"{topology} {stats}")
            least = 2 * (ranks - 1) / ranks * 4 * n
            moved = sum(report.bytes_sent.values()) / least if ranks > 1 else 0.0
            check_everywhere(comm, stats.communication_overhead == moved, f"{stats} {report}")
            plain = {0: 16 * n, 1: 4 * n / share + 4 * n + 8 * n / ranks, 2: 4 * n / share + 12 * n / ranks,
                     3: 16 * n / ranks}[stage]
            check_everywhere(comm, abs(sum(formula.values()) - formula["buffers"] - plain) < 1000, f"{formula} {plain}")
            zero.close()


def test_state_dicts_of_all_ranks_hold_every_element_once(comm):
    for stage in STAGES:
        with Topology(comm) as topology:
            zero = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology, reduce_bucket_size="100 elements")
            zero.accumulate(gradients_of(values(SHAPES, 0), comm.rank, np.float32))
            zero.step()
            held = comm.allgather(zero.state_dict())
            whole = zero.full_parameters()
            seen = {name: np.zeros(value.size, int) for name, value in whole.items()}
            for state in held:
                assert state["step"] == 1 and state["stage"] == stage
                for piece in state["pieces"]:
                    name = piece["name"].removesuffix(".w")
                    part = slice(piece["start"], piece["stop"])
                    seen[name][part] += 1
                    assert np.array_equal(piece["parameter"], whole[name].reshape(-1)[part])
                    assert piece["exp_avg"].shape == piece["exp_avg_sq"].shape == piece["parameter"].shape
                    assert np.all(piece["exp_avg"] != 0)
            check_everywhere(comm, all((count == 1).all() for count in seen.values()), f"stage {stage}: {seen}")
            zero.close()


def test_what_differs_between_ranks_is_found_at_construction(comm):
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    cases = [
        (lambda: ZeroOptimizer({"w": np.zeros(5 if odd else 4)}, AdamW(), comm), "w(5,)"),
        (lambda: ZeroOptimizer({"v" if odd else "w": np.zeros(4)}, AdamW(), comm), "v(4,)"),
        (lambda: ZeroOptimizer({"w": np.zeros(4)}, AdamW(lr=0.1 if odd else 0.2), comm), "lr=0.1"),
        (lambda: ZeroOptimizer({"w": np.zeros(4)}, AdamW(), comm, ZeroConfig(stage=1 if odd else 2)), "stage=1"),
    ]
    for case, text in cases:
        try:
            case()
            found = "nothing raised"
        except MismatchError as error:
            found = str(error)
        check_everywhere(comm, text in found, found)


def test_what_cannot_be_trained_is_refused_on_every_rank(comm):
    good = {"w": np.zeros(4, np.float32)}
    odd = comm.rank == comm.size - 1
    cases = [
        lambda: ZeroOptimizer({"w": np.zeros(4, np.int32)} if odd else good, AdamW(), comm),
        lambda: ZeroOptimizer({"w": np.zeros(4, np.float16)} if odd else good, AdamW(), comm),
        lambda: ZeroOptimizer({"w": [1.0, 2.0]} if odd else good, AdamW(), comm),
        lambda: ZeroOptimizer([np.zeros(4)] if odd else good, AdamW(), comm),
        lambda: ZeroOptimizer({"a": np.zeros(4), "b": np.zeros(4, np.float32)}, AdamW(), comm),
        lambda: ZeroOptimizer(good, "adamw", comm),
        lambda: ZeroOptimizer(good, AdamW(), comm, ZeroConfig(stage=3)),
        lambda: ZeroOptimizer(good, AdamW(), comm, ZeroConfig(stage=0, share_parameters=True)),
        lambda: Zero3Engine([], {}, AdamW(), comm, ZeroConfig(stage=2)),
    ]
    for number, case in enumerate(cases):
        try:
            case()
            raised = "nothing"
        except ConfigError as error:
            raised = str(error)
        check_everywhere(comm, raised != "nothing", f"case {number}")


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_a_wrong_gradient_on_one_rank_is_an_error_on_all_and_training_can_go_on(comm, stage):
    odd = comm.rank == comm.size - 1

    def broken():
        yield "long", np.zeros(3001, np.float32)
        if odd:
            raise ZeroDivisionError("in the user's backward pass")

    good = values(SHAPES, 3)
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology, reduce_bucket_size="100 elements")
        for wrong, text in [({"fife": np.zeros(5)}, "did you mean five?"), ({"five": np.zeros(6)}, "shape (6,)"),
                            ({"five": np.zeros(5, complex)}, "gradient of 'five'"),
                            ([("one", np.zeros(1)), ("one", np.zeros(1))], "twice"),
                            (None, "ZeroDivisionError")]:
            try:
                zero.accumulate(broken() if wrong is None else wrong if odd else good)
                found = "nothing raised"
            except ZeroDivisionError:
                found = "ZeroDivisionError" if odd else "on the wrong rank"
            except HpczeroError as error:
                found = str(error)
            check_everywhere(comm, text in found, found)
        for weight in (-1, float("nan"), "3"):
            with pytest.raises(ConfigError, match="weight"):
                zero.accumulate(good, weight=weight)
        zero.accumulate(good)
        zero.step()
        clean = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology)
        clean.accumulate(good)
        clean.step()
        check_everywhere(comm, same_bits(zero.full_parameters(), clean.full_parameters()), "an error left a trace")
        zero.close()
        clean.close()


@pytest.mark.parametrize("stage", STAGES)
def test_unequal_numbers_of_micro_batches_are_a_mismatch_on_every_rank(comm, stage):
    if comm.size == 1:
        return
    topology = Topology(comm)
    zero = build(stage, values({"w": (40,)}, 0), OPTIMIZERS[0], topology)
    gradients = {"w": np.ones(40, np.float32)}
    zero.accumulate(gradients)
    try:
        if stage == 3:
            zero.engine.forward(None)       # gathering is collective: the ranks part afterwards
        if comm.rank == 0:
            zero.step()
        elif stage == 3:
            zero.engine.backward(None)
        else:
            zero.accumulate(gradients)
        found = "nothing raised"
    except MismatchError as error:
        found = str(error)
    check_everywhere(comm, "accumulate()" in found and "step()" in found, found)
    zero.close()
    topology.close()


@pytest.mark.parametrize("stage", STAGES)
def test_learning_rates_that_differ_between_ranks_are_a_mismatch(comm, stage):
    if comm.size == 1:
        return
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology)
        zero.accumulate(values(SHAPES, 1))
        with pytest.raises(MismatchError, match=r"lr=0\.5"):
            zero.step(lr=0.5 if comm.rank == comm.size - 1 else 0.1)
        zero.close()


def test_half_of_the_ranks_train_while_the_others_do_something_else(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    if comm.rank % 2 == 0:
        with ZeroOptimizer(values(SHAPES, 0), AdamW(), half) as zero:
            zero.accumulate(values(SHAPES, 1))
            report = zero.step()
        fine = report.applied
    else:
        fine = half.allreduce(1) == half.size
    check_everywhere(comm, fine, "")
    half.Free()


def test_the_report_counts_the_bytes_of_the_step(comm):
    n = 16 * 60
    with Topology(comm) as topology:
        zero = build(1, {"w": np.zeros(n, np.float32)}, SGD(lr=0.1), topology)
        for _ in range(2):
            zero.accumulate({"w": np.ones(n, np.float32)})
            report = zero.step()
        other = build(0, {"w": np.zeros(n, np.float32)}, SGD(lr=0.1), topology)      # on the same topology, between steps
        zero.accumulate({"w": np.ones(n, np.float32)})
        other.accumulate({"w": np.ones(n, np.float32)})
        other.step()
        report = zero.step()
        other.close()
        read = comm.allreduce(report.bytes_sent["window"])
        # Each element is read from every neighbour's row once, and shared parameters need no copy.
        check_everywhere(comm, read == (comm.size - 1) * n * 4, f"{read}")
        zero.close()


@pytest.mark.parametrize("stage", STAGES)
def test_nan_gradients_of_no_samples_are_not_looked_at(comm, stage):
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0), OPTIMIZERS[0], topology)
        nothing = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
        zero.accumulate(values(SHAPES, 1) if comm.rank == 0 else nothing, weight=float(comm.rank == 0))
        check_everywhere(comm, zero.step().applied, "skipped")
        zero.close()


def test_a_mismatch_that_was_caught_leaves_nothing_behind(comm):
    if comm.size == 1:
        return
    gradients = values(SHAPES, comm.rank)
    with Topology(comm) as topology:
        results = []
        for stumble in (True, False):
            zero = build(1, values(SHAPES, 0), OPTIMIZERS[0], topology)
            if stumble:
                zero.accumulate(gradients)
                with pytest.raises(MismatchError):
                    zero.step() if comm.rank == 0 else zero.accumulate(gradients)
            zero.accumulate(gradients)
            results.append((zero.step().grad_norm, zero.full_parameters()))
            zero.close()
        fine = results[0][0] == results[1][0] and same_bits(results[0][1], results[1][1])
        check_everywhere(comm, fine, f"{results[0][0]} {results[1][0]}")


def test_gradient_views_taken_late_start_at_zero(comm):
    with Topology(comm) as topology:
        zero = build(1, values(SHAPES, 0), SGD(lr=1.0), topology)
        zero.accumulate(values(SHAPES, 1))
        zero.step()
        check_everywhere(comm, not any(view.any() for view in zero.grads.values()), "old sums")
        zero.close()


def test_layers_of_one_name_are_refused(comm):
    layer = OneParameter((3,), Source(), "l")
    with pytest.raises(ConfigError, match="names must differ"):
        Zero3Engine([("l", layer), ("l", layer)], {"l.w": np.zeros(3)}, AdamW(), comm)


def test_a_closed_optimizer_says_so(comm):
    zero = ZeroOptimizer(values(SHAPES, 0), AdamW(), comm)
    zero.close()
    zero.close()
    with pytest.raises(HpczeroError, match="closed"):
        zero.step()
    with pytest.raises(HpczeroError, match="closed"):
        zero.accumulate({})
