"""Parameter groups: which parameters have hyperparameters of their own.

    groups=[ParamGroup("*.bias", "*norm*", weight_decay=0.0), ParamGroup("head.*", lr=1e-4)]

Groups are given by name, not by position: what a rank, a stage or a resumed run makes of them does not depend on the order
in which parameters or groups are listed. Parameters that no group names form the first group, with the optimizer as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from hpczero.errors import ConfigError
from hpczero.optim import Optimizer
from hpczero.settings import nearest

Match = str | Callable[[str, tuple[int, ...]], bool]


class ParamGroup:
    """The parameters that match, and the hyperparameters they have in place of the optimizer's.

    Parameters
    ----------
    match : str or function of (name, shape), one or more
        Patterns of names (`*` any text, `?` one letter, `[ab]` one of them), or what tells for each parameter whether it
        belongs here. Every rank must come to the same.
    settings
        Hyperparameters of the optimizer, such as lr, weight_decay or betas.

    Raises
    ------
    ConfigError
        Nothing to match. What fits no parameter or no hyperparameter is found when the group is used.
    """

    def __init__(self, *match: Match, **settings: Any):
        if not match or not all(isinstance(each, str) or callable(each) for each in match):
            raise ConfigError(f"ParamGroup{match!r}: patterns of names, or functions of (name, shape), are needed")
        self.match, self.settings = match, settings

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        return any(_fits(each, name, shape) for each in self.match)

    def __repr__(self) -> str:
        parts = [repr(each) if isinstance(each, str) else getattr(each, "__name__", "a function") for each in self.match]
        return f"ParamGroup({', '.join([*parts, *(f'{name}={value!r}' for name, value in self.settings.items())])})"


def vectors(name: str, shape: tuple[int, ...]) -> bool:
    """For `ParamGroup(vectors, weight_decay=0.0)`: biases and norms, and whatever else has fewer than two dimensions."""
    return len(shape) < 2


@dataclass(frozen=True)
class Grouping:
    """Which group each parameter is in, and the optimizer of each group; the first group is everything else."""

    optimizers: tuple[Optimizer, ...]
    own_lr: tuple[bool, ...]
    """Whether each group was given a learning rate of its own."""
    group_of: Mapping[str, int]

    def __str__(self) -> str:
        """What ranks must agree on; no functions, whose text differs between processes."""
        named = [[name for name, group in self.group_of.items() if group == index] for index in range(len(self.optimizers))]
        more = [f"{optimizer} for {', '.join(names)}" for optimizer, names in zip(self.optimizers, named, strict=True)][1:]
        return "; ".join([str(self.optimizers[0]), *more])


def grouped(shapes: Mapping[str, tuple[int, ...]], optimizer: Optimizer, groups: Sequence[ParamGroup]) -> Grouping:
    """Puts every parameter into its group.

    Raises ConfigError: a parameter that two groups name, a group or pattern that names none, a hyperparameter that the
    optimizer does not have or must not be so.
    """
    if isinstance(groups, ParamGroup) or not all(isinstance(group, ParamGroup) for group in groups):
        raise ConfigError(f"groups={groups!r}: a list of ParamGroup(...) is needed")
    found: dict[str, int] = {}
    for index, group in enumerate(groups, 1):
        for each in group.match:
            names = [name for name, shape in shapes.items() if _fits(each, name, shape)]
            if not names:
                some = ", ".join(list(shapes)[:5]) + (", ..." if len(shapes) > 5 else "")
                raise ConfigError(f"{group}: {each if isinstance(each, str) else 'the function'!r} fits no parameter"
                                  + (nearest(each, shapes) if isinstance(each, str) else "")
                                  + f"; there are {some or 'none'} (patterns as of file names: * ? [ab])")
            for name in names:
                if found.setdefault(name, index) != index:
                    raise ConfigError(f"parameter {name!r} is in two groups, {groups[found[name] - 1]} and {group}")
    optimizers = (optimizer, *(_with(optimizer, group) for group in groups))
    own_lr = (False, *("lr" in group.settings for group in groups))
    return Grouping(optimizers, own_lr, {name: found.get(name, 0) for name in shapes})


def _fits(match: Match, name: str, shape: tuple[int, ...]) -> bool:
    return fnmatchcase(name, match) if isinstance(match, str) else bool(match(name, shape))


def _with(optimizer: Optimizer, group: ParamGroup) -> Optimizer:
    known = [field.name for field in fields(optimizer)]
    for name in group.settings:
        if name not in known:
            raise ConfigError(f"{group}: {type(optimizer).__name__} has no {name!r}{nearest(name, known)}; it has "
                              f"{', '.join(known)}")
    changed = replace(optimizer, **group.settings)
    if changed.state_names != optimizer.state_names:
        raise ConfigError(f"{group}: with these settings {type(optimizer).__name__} keeps {changed.state_names}, elsewhere "
                          f"{optimizer.state_names}; groups must keep the same states")
    return changed
