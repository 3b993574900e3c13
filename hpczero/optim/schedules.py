r"""Learning-rate schedules: what the learning rate of every parameter group is multiplied by, step for step.

A schedule is a frozen value and `schedule.factor(step)` a pure function of the step. Nothing is kept between calls: to
resume a run, its settings (`to_dict`, `from_dict`) and the optimizer's own count of steps are enough.

Steps count from 1, the first one applied; a skipped step is not counted. Step 0 is the state before training, where every
curve begins and where nothing is applied. With warmup=10 and warmup_start=0 the factors of steps 1, 2, ..., 10 are
therefore 0.1, 0.2, ..., 1.0, and without a warm-up a linear decay over 10 steps has 0.9, 0.8, ..., `end`. The usual
LambdaLR of PyTorch counts from 0 and is one step behind: the first step of its warm-up from 0 changes nothing.

    factor    1 |    ____ . . . stable (WSD)           peak: exactly 1, at step `warmup`
                |   /    \
                |  /      \
                | /        \________ end               exactly `end`, at step `steps` and ever after
                +------------------------> step
                  warmup   steps

With end=0, the default, step `steps` itself leaves the parameters as they are. Where warmup == steps the run is warm-up
from beginning to end: the peak is its last step, and `end` comes with the step after it.

Ranks must agree on the factor to the last bit, also on nodes of different types. The C library's `cos` does not promise
that: with and without fused multiply-add, glibc 2.36 differs in 87 of 113348 values of cos(pi k / n). So the arithmetic
here is float64 with nothing but + - * / and sqrt, which IEEE 754 rounds in one way only; `**` is the C library's `pow`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, get_args

from hpczero.errors import ConfigError


class _Schedule(ABC):
    """What all schedules share; their settings stand in their own classes."""

    name: ClassVar[str]
    warmup: int

    def factor(self, step: int) -> float:
        """What learning rates are multiplied by at `step`, an int >= 1: at least 0, the same bits on every rank."""
        _whole(self, "step", step, 1)
        step = int(step)                 # NumPy's would overflow, and divide into NumPy's floats
        if step < self.warmup:
            return self._before_peak(step)
        return 1.0 if step == self.warmup else self._after_peak(step)

    def to_dict(self) -> dict[str, Any]:
        """The name and all settings as plain JSON values, for a checkpoint; `from_dict` makes the schedule again."""
        return {"name": self.name} | {field.name: getattr(self, field.name) for field in fields(self)}

    def _before_peak(self, step: int) -> float:
        """Goyal et al., "Accurate, large minibatch SGD" (2017), section 2.2: gradual warm-up."""
        return _to_one(self.warmup_start, step / self.warmup)

    @abstractmethod
    def _after_peak(self, step: int) -> float:
        """The factor at a step beyond `warmup`."""


@dataclass(frozen=True)
class Constant(_Schedule):
    """Warm-up, then the learning rate as it is.

    With w = warmup, w0 = warmup_start and t = step (all times in steps):

        factor = w0 + (1 - w0) t / w    t < w       Goyal et al., "Accurate, large minibatch SGD" (2017), section 2.2
                 1                      t >= w

    >>> [Constant(warmup=10).factor(step) for step in (1, 10, 1000)]
    [0.1, 1.0, 1.0]
    """

    warmup: int = 0
    """Steps until the factor is 1; at least 0."""
    warmup_start: float = 0.0
    """Factor at step 0, from which the warm-up leaves in equal steps; 0 to 1."""

    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        _check_warmup(self)

    def _after_peak(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear(_Schedule):
    """Warm-up, then down to `end` in equal steps.

    With w = warmup, n = steps, e = end and t = step (all times in steps); warm-up as in `Constant`, then

        factor = e + (1 - e) (n - t) / (n - w)    w <= t <= n
                 e                                t >= n

    Devlin et al., "BERT", NAACL 2019; Defazio et al., "Optimal linear decay learning rate schedules and further
    refinements" (2023), which shows why it is hard to beat.

    >>> [Linear(steps=110, warmup=10).factor(step) for step in (5, 85, 110)]
    [0.5, 0.25, 0.0]
    """

    steps: int
    """The whole run, warm-up included; at least 1."""
    warmup: int = 0
    """Steps until the factor is 1; 0 to `steps`."""
    warmup_start: float = 0.0
    """Factor at step 0; 0 to 1."""
    end: float = 0.0
    """Factor at step `steps` and ever after; at least 0."""

    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        _check_steps(self)
        _check_warmup(self, self.steps)
        _number(self, "end")

    def _after_peak(self, step: int) -> float:
        return _to_one(self.end, _linear(_left(step, self.steps), self.steps - self.warmup))


@dataclass(frozen=True)
class Cosine(_Schedule):
    """Warm-up, then half a cosine down to `end`, flat at both ends.

    With w = warmup, n = steps, e = end and t = step (all times in steps); warm-up as in `Constant`, then

        factor = e + (1 - e) (1 + cos(pi (t - w) / (n - w))) / 2    w <= t <= n
                 e                                                  t >= n

    Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without its restarts.

    >>> [Cosine(steps=110, warmup=10, end=0.5).factor(step) for step in (5, 60, 110)]
    [0.5, 0.75, 0.5]
    """

    steps: int
    """The whole run, warm-up included; at least 1."""
    warmup: int = 0
    """Steps until the factor is 1; 0 to `steps`."""
    warmup_start: float = 0.0
    """Factor at step 0; 0 to 1."""
    end: float = 0.0
    """Factor at step `steps` and ever after; at least 0."""

    name: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        _check_steps(self)
        _check_warmup(self, self.steps)
        _number(self, "end")

    def _after_peak(self, step: int) -> float:
        return _to_one(self.end, _cosine(_left(step, self.steps), self.steps - self.warmup))


@dataclass(frozen=True)
class InverseSqrt(_Schedule):
    """Warm-up, then down with the square root of the step, for runs whose length is not known.

    With w = warmup, s = timescale and t = step (all times in steps); warm-up as in `Constant`, then

        factor = sqrt(s / (s + t - w))    t >= w    which is sqrt(w / t) where s is not given, since then s = w

    Vaswani et al., "Attention is all you need", NeurIPS 2017, equation 3, divided by its peak. A timescale of its own, which
    is needed where there is no warm-up: Zhai et al., "Scaling vision transformers", CVPR 2022. There is no end.

    >>> [InverseSqrt(warmup=100).factor(step) for step in (50, 100, 400)]
    [0.5, 1.0, 0.5]
    """

    warmup: int = 0
    """Steps until the factor is 1; at least 0."""
    warmup_start: float = 0.0
    """Factor at step 0; 0 to 1."""
    timescale: int | None = None
    """Three of these after the peak the factor is 1/2; in steps, at least 1; None: the warm-up."""

    name: ClassVar[str] = "inverse_sqrt"

    def __post_init__(self) -> None:
        _check_warmup(self)
        if self.timescale is not None:
            _set_whole(self, "timescale", 1)
        elif not self.warmup:
            raise ConfigError("InverseSqrt: warmup=0 and no timescale; one of them must be a whole number of at least 1, for "
                              "the factor falls as sqrt(warmup / step), or from the first step on with the timescale")

    def _after_peak(self, step: int) -> float:
        scale = self.timescale or self.warmup
        return math.sqrt(scale / (scale + step - self.warmup))


@dataclass(frozen=True)
class WSD(_Schedule):
    """Warm-up, stable, decay: a long run at the full rate that can be ended from any of its checkpoints.

    With n = steps, d = decay, e = end and t = step (all times in steps); warm-up as in `Constant`, 1 until step n - d, then
    with x = (t - (n - d)) / d

        factor = e + (1 - e) f(x)         n - d <= t <= n,    f(x) = 1 - x, (1 + cos(pi x)) / 2 or 1 - sqrt(x)
                 e                        t >= n

    Hu et al., "MiniCPM", COLM 2024, section 4, whose own decay, a power of 1/2, never arrives and is not among the shapes.
    1-sqrt: Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations", NeurIPS 2024.

    >>> [WSD(steps=1000, decay=200, warmup=10).factor(step) for step in (800, 850, 1000)]
    [1.0, 0.5, 0.0]
    """

    steps: int
    """The whole run, warm-up and decay included; at least 1."""
    decay: int
    """The last steps, in which the factor falls to `end`; 1 to steps - warmup. A fifth of the run is usual."""
    warmup: int = 0
    """Steps until the factor is 1; 0 to `steps`."""
    warmup_start: float = 0.0
    """Factor at step 0; 0 to 1."""
    end: float = 0.0
    """Factor at step `steps` and ever after; at least 0."""
    shape: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt"
    """How it falls; 1-sqrt, which falls fastest at first, did best in Hägele et al."""

    name: ClassVar[str] = "wsd"

    def __post_init__(self) -> None:
        _check_steps(self)
        _check_warmup(self, self.steps)
        _set_whole(self, "decay", 1, self.steps - self.warmup, "steps - warmup")
        _number(self, "end")
        if not isinstance(self.shape, str) or self.shape not in _SHAPES:
            raise ConfigError(f"WSD: shape={self.shape!r} is not one of {', '.join(_SHAPES)}{_hint(self.shape, _SHAPES)}")

    def _after_peak(self, step: int) -> float:
        left = min(_left(step, self.steps), self.decay)
        return _to_one(self.end, _SHAPES[self.shape](left, self.decay))


@dataclass(frozen=True)
class OneCycle(_Schedule):
    """Up and down once, on half a cosine each. Only the learning rate: momentum and betas stay as they are.

    With w = warmup, n = steps, s = start, e = end, t = step (all times in steps) and c(x) = (1 + cos(pi x)) / 2

        factor = s + (1 - s) (1 - c(t / w))         t <= w
                 e + (1 - e) c((t - w) / (n - w))   w <= t <= n
                 e                                  t >= n

    Smith and Topin, "Super-convergence", SPIE 11006 (2019): there in straight lines, and with a momentum that runs the other
    way, which is not done here. The cosines are fastai's and PyTorch's, like the default of `start`; theirs for a warm-up is
    0.3 of the steps, here it is given in steps, and with the default of none the factor only falls.

    >>> [OneCycle(steps=100, warmup=30, start=0.5).factor(step) for step in (15, 30, 65)]
    [0.75, 1.0, 0.5]
    """

    steps: int
    """The whole run, warm-up included; at least 1."""
    warmup: int = 0
    """Steps until the factor is 1; 0 to `steps`."""
    start: float = 0.04
    """Factor at step 0, where the way up begins; 0 to 1."""
    end: float = 0.0
    """Factor at step `steps` and ever after; at least 0."""

    name: ClassVar[str] = "one_cycle"

    def __post_init__(self) -> None:
        _check_steps(self)
        _set_whole(self, "warmup", 0, self.steps, "steps")
        _number(self, "start", 1)
        _number(self, "end")

    def _before_peak(self, step: int) -> float:
        return _to_one(self.start, _cosine(step, self.warmup))

    def _after_peak(self, step: int) -> float:
        return _to_one(self.end, _cosine(_left(step, self.steps), self.steps - self.warmup))


Schedule = Constant | Linear | Cosine | InverseSqrt | WSD | OneCycle

SCHEDULES: dict[str, type[Schedule]] = {kind.name: kind for kind in get_args(Schedule)}
"""Name, as on a command line and in a checkpoint -> class."""


def named(name: str, **settings: Any) -> Schedule:
    """The schedule `name` of `SCHEDULES` with these settings; ConfigError for a name or a setting that does not exist.

    >>> named("cosine", steps=100, warmup=10)
    Cosine(steps=100, warmup=10, warmup_start=0.0, end=0.0)
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ConfigError(f"learning-rate schedule {name!r} is not one of {', '.join(SCHEDULES)}{_hint(name, SCHEDULES)}")
    kind = SCHEDULES[name]
    known = {field.name: field.default for field in fields(kind)}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{kind.__name__}: {key}={value!r}: no such setting; settings are "
                              f"{', '.join(known)}{_hint(key, known)}")
    if missing := [key for key, default in known.items() if default is MISSING and key not in settings]:
        raise ConfigError(f"{kind.__name__}: {' and '.join(missing)} must be given, in steps")
    return kind(**settings)


def from_dict(saved: Mapping[str, Any]) -> Schedule:
    """The schedule whose `to_dict` is `saved`; ConfigError for keys that it does not have."""
    if not isinstance(saved, Mapping) or "name" not in saved or not all(isinstance(key, str) for key in saved):
        raise ConfigError(f"learning-rate schedule {saved!r}: a dict with a name, one of {', '.join(SCHEDULES)}, and "
                          "that schedule's settings is needed")
    return named(**saved)


def _to_one(far: float, share: float) -> float:
    """From `far` (share 0) to 1 (share 1): exact at both, and monotone in the share, since each of its roundings is."""
    # The sum below is 1 too for a share of 1, but not where `far` is beyond 2**53.
    return 1.0 if share == 1 else far + (1 - far) * share


def _left(step: int, steps: int) -> int:
    return max(steps - step, 0)


# How much of the way is still to go, 1 to 0, when `left` steps of `total` are. Whole numbers divide with one rounding.
# `total` is 0 where warmup == steps, and then nothing is left.


def _linear(left: int, total: int) -> float:
    return left / total if left else 0.0


def _cosine(left: int, total: int) -> float:
    """(1 - cos(pi left / total)) / 2, as squares of sines where it is flat, so that rounding makes no waves there."""
    x = _linear(left, total)
    if x <= 0.25:
        return _square(_sine(x / 2))
    if x <= 0.75:
        return 0.5 + 0.5 * _sine(x - 0.5)
    return 1 - _square(_sine(_linear(total - left, total) / 2))


def _one_minus_sqrt(left: int, total: int) -> float:
    return 1 - math.sqrt((total - left) / total)


_SHAPES: dict[str, Callable[[int, int], float]] = {"linear": _linear, "cosine": _cosine, "1-sqrt": _one_minus_sqrt}


def _square(x: float) -> float:
    return x * x


def _sine(x: float) -> float:
    """sin(pi x) for |x| <= 1/4: Taylor's series up to the power of 17, whose next term is below 1e-19."""
    x *= math.pi
    square, series = _square(x), 1.0
    for power in range(16, 0, -2):
        series = 1 - square / (power * (power + 1)) * series
    return x * series


def _check_steps(schedule: Any) -> None:
    _set_whole(schedule, "steps", 1)


def _check_warmup(schedule: Any, most: int | None = None) -> None:
    _set_whole(schedule, "warmup", 0, most, "steps")
    _number(schedule, "warmup_start", 1)


def _set_whole(schedule: Any, name: str, least: int, most: int | None = None, most_is: str = "") -> None:
    """Refuses a setting that is no such whole number; one of NumPy's becomes an int, so that `to_dict` is plain JSON."""
    _whole(schedule, name, getattr(schedule, name), least, most, most_is)
    object.__setattr__(schedule, name, int(getattr(schedule, name)))


def _whole(schedule: Any, name: str, value: Any, least: int, most: int | None = None, most_is: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least or most is not None and value > most:
        limit = "" if most is None else f" and at most {most_is} = {most}"
        raise ConfigError(f"{type(schedule).__name__}: {name}={value!r}; a whole number of at least {least}{limit} is needed")


def _number(schedule: Any, name: str, most: float = math.inf) -> None:
    """Refuses a setting that is no finite number from 0 to `most`; it is kept as a float, whatever it came as."""
    value = getattr(schedule, name)
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:                # an int beyond float64
        number = math.inf
    if not math.isfinite(number) or not 0 <= number <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise ConfigError(f"{type(schedule).__name__}: {name}={value!r}; a finite number of at least 0{limit} is needed")
    object.__setattr__(schedule, name, number)


def _hint(name: Any, names: Iterable[str]) -> str:
    from hpczero.settings import nearest      # imports pydantic, which is of use in this one case

    return nearest(name.lower(), names) if isinstance(name, str) else ""
