"""Learning-rate schedules against their published formulas, at their corners, and through a checkpoint."""

from __future__ import annotations

import ast
import doctest
import hashlib
import inspect
import json
import math
import re
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.errors import ConfigError
from hpczero.optim import schedules
from hpczero.optim.schedules import SCHEDULES, WSD, Constant, Cosine, InverseSqrt, Linear, OneCycle, Schedule, from_dict, named

EXAMPLES = [Constant(), Constant(warmup=7, warmup_start=0.25), Linear(50), Linear(50, warmup=7, warmup_start=0.1, end=0.2),
            Cosine(50), Cosine(50, warmup=7, end=0.1), InverseSqrt(warmup=7), InverseSqrt(timescale=9),
            InverseSqrt(warmup=7, timescale=20), WSD(50, 10, warmup=7), WSD(50, 43, warmup=7, end=0.1, shape="linear"),
            WSD(50, 20, shape="cosine"), OneCycle(50, warmup=15), OneCycle(50, warmup=15, start=0.5, end=0.01)]


def by_the_book(s, t):
    """The formulas of the papers, in the library's cosine and with no thought for rounding."""
    if t < s.warmup:
        if isinstance(s, OneCycle):
            return s.start + (1 - s.start) * (1 - math.cos(math.pi * t / s.warmup)) / 2
        return s.warmup_start + (1 - s.warmup_start) * t / s.warmup
    if isinstance(s, Constant):
        return 1.0
    if isinstance(s, InverseSqrt):
        scale = s.timescale or s.warmup
        return 1 / math.sqrt((t + scale - s.warmup) / scale)
    first = s.steps - s.decay if isinstance(s, WSD) else s.warmup
    x = min(max(t - first, 0) / (s.steps - first), 1.0)
    shape = {Linear: "linear", Cosine: "cosine", OneCycle: "cosine"}.get(type(s)) or s.shape
    curve = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - math.sqrt(x)}[shape]
    return curve + s.end * (1 - curve)


@st.composite
def ending(draw, most_steps=400, ends=st.floats(0, 1)):
    """Any schedule that has an end, with at least one step after its warm-up."""
    steps = draw(st.integers(1, most_steps))
    settings = {"steps": steps, "warmup": draw(st.integers(0, steps - 1)), "end": draw(ends)}
    name = draw(st.sampled_from(["linear", "cosine", "wsd", "one_cycle"]))
    settings["start" if name == "one_cycle" else "warmup_start"] = draw(st.floats(0, 1))
    if name == "wsd":
        settings |= {"decay": draw(st.integers(1, steps - settings["warmup"])),
                     "shape": draw(st.sampled_from(["linear", "cosine", "1-sqrt"]))}
    return named(name, **settings)


@st.composite
def endless(draw):
    settings = {"warmup": draw(st.integers(0, 400)), "warmup_start": draw(st.floats(0, 1))}
    name = draw(st.sampled_from(["constant", "inverse_sqrt"]))
    if name == "inverse_sqrt" and (not settings["warmup"] or draw(st.booleans())):
        settings["timescale"] = draw(st.integers(1, 10**6))
    return named(name, **settings)


@pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)
def test_factors_are_those_of_the_papers(schedule):
    for step in range(1, 71):
        assert schedule.factor(step) == pytest.approx(by_the_book(schedule, step), rel=1e-13, abs=1e-15)


@given(ending() | endless(), st.integers(1, 1000))
def test_factors_are_those_of_the_papers_for_any_settings(schedule, step):
    assert schedule.factor(step) == pytest.approx(by_the_book(schedule, step), rel=1e-12, abs=1e-15)


def test_the_examples_in_the_docstrings_are_true_and_every_schedule_has_one_of_three_values():
    done = doctest.testmod(schedules)
    assert done.failed == 0 and done.attempted == len(SCHEDULES) + 1
    for kind in get_args(Schedule):
        [example] = doctest.DocTestParser().get_examples(kind.__doc__)
        assert len(ast.literal_eval(example.want)) == 3


@pytest.mark.parametrize("kind", [Constant, Linear, Cosine, InverseSqrt, WSD])
def test_step_k_of_a_warm_up_of_ten_has_k_tenths(kind):
    lengths = {Linear: {"steps": 100}, Cosine: {"steps": 100}, WSD: {"steps": 100, "decay": 20}}
    schedule = kind(warmup=10, **lengths.get(kind, {}))
    assert [schedule.factor(k) for k in range(1, 11)] == [k / 10 for k in range(1, 11)]


def test_a_decay_without_a_warm_up_counts_from_step_zero_too():
    assert [Linear(10).factor(k) for k in range(1, 13)] == [(10 - k) / 10 for k in range(1, 11)] + [0.0, 0.0]


@given(ending(ends=st.floats(0, 1e6)))
def test_the_peak_is_exactly_one_and_the_end_exactly_the_end_for_ever(schedule):
    if schedule.warmup:
        assert schedule.factor(schedule.warmup) == 1.0
    for after in (0, 1, 10, 10**9, 10**400):
        assert schedule.factor(schedule.steps + after) == schedule.end


@given(endless())
def test_the_peak_is_exactly_one_where_there_is_no_end(schedule):
    if schedule.warmup:
        assert schedule.factor(schedule.warmup) == 1.0


@given(ending(ends=st.floats(0, 1e6)) | endless())
def test_the_factor_rises_up_to_the_peak_and_then_only_goes_towards_the_end(schedule):
    factors = [schedule.factor(step) for step in range(1, 500)]
    peak = max(schedule.warmup, 1)
    rise, fall = factors[:peak], factors[peak - 1:]
    assert all(a <= b for a, b in pairwise(rise))
    if getattr(schedule, "end", 0) <= 1:
        assert all(a >= b for a, b in pairwise(fall))
    else:
        assert all(a <= b for a, b in pairwise(fall))
    assert all(type(factor) is float and 0 <= factor <= max(1.0, getattr(schedule, "end", 0)) for factor in factors)


@pytest.mark.parametrize("steps", [10**6, 10**9, 10**12])
@pytest.mark.parametrize("kind", [Linear, Cosine, lambda n: WSD(n, n, shape="1-sqrt")], ids=["linear", "cosine", "1-sqrt"])
def test_a_very_long_decay_has_no_waves_in_it(kind, steps):
    schedule = kind(steps)
    for start in (1, steps // 4, steps // 3, steps // 2, 3 * steps // 4, steps):      # where pieces meet, and where it is flat
        near = [schedule.factor(step) for step in range(max(start - 1000, 1), start + 1000)]
        assert all(a >= b for a, b in pairwise(near))
        assert near[0] <= 1.0 and near[-1] >= 0.0


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_step_one_changes_something_unless_zero_is_where_the_run_ends_at_once(warmup, more):
    for schedule in (Constant(warmup), Linear(warmup + more, warmup), Cosine(warmup + more, warmup), InverseSqrt(warmup + 1),
                     WSD(warmup + more, more, warmup), OneCycle(warmup + more, warmup, start=0.0)):
        assert schedule.factor(1) > 0 or schedule.steps == 1


def test_all_of_a_run_may_be_warm_up_and_the_end_comes_after_it():
    for schedule in (Linear(4, warmup=4, end=0.5), Cosine(4, warmup=4, end=0.5)):
        assert [schedule.factor(step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.5]
    assert [OneCycle(4, 4, end=0.5).factor(step) for step in (4, 5, 6)] == [1.0, 0.5, 0.5]


def test_a_warm_up_that_starts_at_one_is_none():
    assert [Constant(warmup=10, warmup_start=1).factor(step) for step in range(1, 12)] == [1.0] * 11


def test_inverse_sqrt_halves_with_four_times_the_steps():
    assert [InverseSqrt(warmup=100).factor(100 * 4**k) for k in range(6)] == [2.0**-k for k in range(6)]
    assert [InverseSqrt(timescale=100).factor(100 * (4**k - 1)) for k in range(1, 6)] == [2.0**-k for k in range(1, 6)]


def test_wsd_is_at_the_full_rate_until_its_decay_begins_and_a_longer_run_begins_the_same():
    short, long = WSD(1000, 200, warmup=10), WSD(5000, 200, warmup=10)
    assert [short.factor(step) for step in range(1, 801)] == [long.factor(step) for step in range(1, 801)]
    assert {long.factor(step) for step in range(10, 4801)} == {1.0}
    assert short.factor(801) < 1.0 and long.factor(4801) == short.factor(801)


def test_the_cosine_is_the_librarys_to_the_last_places():
    for total in (1, 2, 3, 7, 64, 1000, 99991):
        for left in range(0, total + 1, max(total // 1000, 1)):
            assert abs(schedules._cosine(left, total) - (1 - math.cos(math.pi * left / total)) / 2) <= 2.3e-16


def test_bits_are_the_same_on_every_machine():
    """Found on x86 with glibc 2.36; any other machine must find the same."""
    factors = [schedule.factor(step) for schedule in EXAMPLES + [Cosine(1009), OneCycle(1009, 301)] for step in range(1, 1010)]
    text = "\n".join(factor.hex() for factor in factors)
    assert hashlib.sha256(text.encode()).hexdigest() == "e75b630807b610536731ca3f4c9984070bbd0be7269f09dbe0e68206cca06b13"


@pytest.mark.parametrize("end", [3.3, 1e6 + 0.1, 2.0**53 + 2, 1e17, 1.7e308])
def test_an_end_above_the_peak_however_far_is_approached_from_the_peak_and_never_from_below_it(end):
    for schedule in (Linear(50, warmup=7, end=end), Cosine(50, warmup=7, end=end), OneCycle(50, warmup=7, end=end),
                     WSD(10**6, 10**6 - 60, warmup=7, end=end, shape="linear")):
        factors = [schedule.factor(step) for step in range(7, 100)]
        assert factors[0] == 1.0 == min(factors) and all(a <= b for a, b in pairwise(factors))
        assert max(factors) <= end
    assert {WSD(100, 10, end=end).factor(step) for step in range(1, 91)} == {1.0}
    assert all(Linear(steps, end=end).factor(1) >= 1.0 for steps in (2**53 - 1, 2**53, 10**18))


def test_the_last_steps_of_a_long_cosine_are_small_and_right():
    for left in (1, 2, 3):
        assert Cosine(10**6).factor(10**6 - left) == pytest.approx(math.sin(math.pi * left / 2e6) ** 2, rel=1e-14, abs=0)


def test_of_the_math_library_only_what_every_machine_rounds_alike_is_used():
    source = inspect.getsource(schedules)
    assert set(re.findall(r"\bmath\.(\w+)", source)) == {"pi", "sqrt", "inf", "nan", "isfinite"}
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Pow)]       # the C library's pow


@pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)
def test_a_schedule_has_no_state(schedule):
    steps = list(range(1, 71))
    forwards = [schedule.factor(step) for step in steps]
    before = dict(vars(schedule))
    assert [schedule.factor(step) for step in reversed(steps)] == forwards[::-1]
    assert from_dict(schedule.to_dict()).factor(42) == forwards[41]        # as if resumed there
    assert vars(schedule) == before
    with pytest.raises(FrozenInstanceError):
        schedule.warmup = 3


@given(ending() | endless())
def test_a_schedule_comes_back_from_json_as_it_was(schedule):
    saved = json.loads(json.dumps(schedule.to_dict()))
    assert from_dict(saved) == schedule
    assert from_dict(saved).to_dict() == saved == schedule.to_dict()


def test_what_is_saved_names_the_schedule_and_all_its_settings():
    assert WSD(100, 20, end=0.1).to_dict() == {"name": "wsd", "steps": 100, "decay": 20, "warmup": 0, "warmup_start": 0.0,
                                               "end": 0.1, "shape": "1-sqrt"}
    assert InverseSqrt(warmup=5).to_dict() == {"name": "inverse_sqrt", "warmup": 5, "warmup_start": 0.0, "timescale": None}


def test_numbers_of_numpy_are_taken_and_saved_as_plain_ones():
    schedule = Linear(np.int64(100), warmup=np.int32(10), end=np.float32(0.5))
    assert schedule == Linear(100, warmup=10, end=0.5)
    assert {type(value) for value in schedule.to_dict().values()} == {str, int, float}
    assert type(schedule.factor(np.int64(50))) is float and schedule.factor(np.int64(50)) == schedule.factor(50)


def test_every_schedule_has_a_name():
    assert list(SCHEDULES) == ["constant", "linear", "cosine", "inverse_sqrt", "wsd", "one_cycle"]
    assert set(SCHEDULES.values()) == set(get_args(Schedule))
    for kind in get_args(Schedule):
        assert {"warmup"} <= {field.name for field in fields(kind)}
    assert named("one_cycle", steps=9, warmup=3) == OneCycle(9, warmup=3)


@pytest.mark.parametrize(("make", "says"), [
    (lambda: named("cosin", steps=9), "one of constant, linear, cosine, inverse_sqrt, wsd, one_cycle; did you mean cosine?"),
    (lambda: named("WSD", steps=9), "did you mean wsd?"),
    (lambda: named(3), "3 is not one of constant"),
    (lambda: named("cosine"), "Cosine: steps must be given"),
    (lambda: named("wsd"), "WSD: steps and decay must be given"),
    (lambda: named("cosine", steps=9, warmpu=3), "warmpu=3: no such setting; .*did you mean warmup?"),
    (lambda: named("constant", steps=9), "steps=9: no such setting; settings are warmup, warmup_start"),
    (lambda: from_dict({"name": "cosine", "steps": 9, "restarts": 2}), "restarts=2: no such setting"),
    (lambda: from_dict({"steps": 9}), "a dict with a name, one of constant"),
    (lambda: from_dict({"name": "cosine", "steps": 9, 3: 4}), "a dict with a name"),
    (lambda: from_dict("cosine"), "a dict with a name"),
    (lambda: from_dict({"name": "cosine", "steps": 9.0}), "steps=9.0"),
    (lambda: Cosine(0), "Cosine: steps=0; a whole number of at least 1 is needed"),
    (lambda: Cosine(True), "steps=True"),
    (lambda: Cosine(9.0), "steps=9.0"),
    (lambda: Cosine("9"), "steps='9'"),
    (lambda: Linear(9, warmup=10), "warmup=10; a whole number of at least 0 and at most steps = 9 is needed"),
    (lambda: OneCycle(9, warmup=10), "warmup=10; .* at most steps = 9"),
    (lambda: Constant(warmup=-1), "Constant: warmup=-1; a whole number of at least 0 is needed"),
    (lambda: Constant(warmup=False), "warmup=False"),
    (lambda: Constant(warmup=3, warmup_start=1.5), "warmup_start=1.5; a finite number of at least 0 and at most 1 is needed"),
    (lambda: Constant(warmup_start=None), "warmup_start=None"),
    (lambda: Linear(9, end=-0.1), "end=-0.1; a finite number of at least 0 is needed"),
    (lambda: Cosine(9, end=math.nan), "end=nan"),
    (lambda: WSD(9, 3, end=math.inf), "end=inf"),
    (lambda: WSD(9, 3, end=10**400), "end=1000"),
    (lambda: WSD(9, 3, end=True), "end=True"),
    (lambda: OneCycle(9, start=-0.1), "start=-0.1; a finite number of at least 0 and at most 1"),
    (lambda: OneCycle(9, end="0"), "end='0'"),
    (lambda: WSD(9, 0), "decay=0; a whole number of at least 1 and at most steps - warmup = 9"),
    (lambda: WSD(9, 5, warmup=5), "decay=5; .* at most steps - warmup = 4"),
    (lambda: WSD(9, 3, shape="1-sqr"), "shape='1-sqr' is not one of linear, cosine, 1-sqrt; did you mean 1-sqrt?"),
    (lambda: WSD(9, 3, shape=["linear"]), r"shape=\['linear'\] is not one of"),
    (lambda: InverseSqrt(), "warmup=0 and no timescale"),
    (lambda: InverseSqrt(timescale=0), "timescale=0; a whole number of at least 1"),
    (lambda: InverseSqrt(warmup=3, timescale=2.5), "timescale=2.5"),
    (lambda: Constant().factor(0), "Constant: step=0; a whole number of at least 1 is needed"),
    (lambda: Linear(9).factor(-1), "step=-1"),
    (lambda: Cosine(9).factor(1.0), "step=1.0"),
    (lambda: WSD(9, 3).factor(True), "step=True"),
    (lambda: OneCycle(9).factor("1"), "step='1'"),
    (lambda: InverseSqrt(3).factor(None), "step=None"),
])
def test_what_cannot_be_honoured_is_refused_with_what_is_allowed(make, says):
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        make()
