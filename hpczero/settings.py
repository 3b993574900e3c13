"""Settings as frozen values, and where each value came from.

A `Settings` class stands beside the code that it steers. `resolve` fills one from four places, later ones winning:
default < TOML file < environment < command line, and keeps the origin of each value. Text means the same in all of
them: a number may be written `1e-3`, `1_000` or `0.001`, in the file, in a variable or behind a flag.

Everything that cannot be honoured is a `ConfigError` naming the key, the value, what is allowed, the nearest name that
exists, and the line, variable or flag it came from. Importing this file imports pydantic (0.2 s), so `--help` does not.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidationInfo, field_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hpczero.errors import ConfigError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_COUNTS = {"": 1, "K": 10**3, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SIZE = re.compile(r"([+-]?[\d._]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*?)\s*(elements?)?")


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of memory: bytes (`25MiB`, `64KB`, `4096`) or elements of whatever type is stored (`4M elements`).

    As the type of a setting it takes such a text, a positive int (bytes) or a `Size`. KB is 1000 bytes, KiB is 1024.
    """

    count: int
    unit: Literal["bytes", "elements"] = "bytes"
    text: str = field(default="", compare=False)
    """What the user wrote; shown again in messages and in settings.json."""

    @classmethod
    def parse(cls, value: object) -> Size:
        """`value` as a Size; ValueError, saying what is allowed, for anything that is none."""
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(value, text=str(value))
        if isinstance(value, str) and (parts := _SIZE.fullmatch(value.strip())):
            amount, prefix, elements = parts.groups()
            factor = _COUNTS.get(prefix) if elements else _UNITS.get(prefix or "B")
            if factor is not None:
                count = number(amount) * factor
                if count > 0 and count == int(count):
                    return cls(int(count), "elements" if elements else "bytes", value.strip())
        raise ValueError(_SIZE_ALLOWED)

    def bytes(self, itemsize: int) -> int:
        """Bytes, where one element takes `itemsize` bytes."""
        return self.count * itemsize if self.unit == "elements" else self.count

    def elements(self, itemsize: int) -> int:
        """Whole elements of `itemsize` bytes that fit, at least one."""
        return self.count if self.unit == "elements" else max(1, self.count // itemsize)

    def __str__(self) -> str:
        return self.text or f"{self.count} {self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


_SIZE_ALLOWED = 'a size above 0, such as "25MiB", "64KB", "4M elements" or a number of bytes'


class Settings(BaseModel):
    """Base of all settings: cannot be changed, takes no unknown key, and turns no text or bool into a number silently.

    Raises ConfigError, one line per problem.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(type(self), error, {}))) from None

    @field_validator("*", mode="before")
    @classmethod
    def _literals_by_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Even in strict mode pydantic takes True where 1 is a choice, since True == 1."""
        kind = cls.model_fields[info.field_name].annotation
        if get_origin(kind) is Literal and type(value) not in {type(choice) for choice in get_args(kind)}:
            raise PydanticCustomError("literal_type", "not one of the choices")
        return value


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: one of the four kinds, and the line, variable or flag ("" for a default)."""

    kind: Literal["default", "file", "environment", "command line"]
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.kind


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """Settings, and the origin of each of their values."""

    settings: S
    origins: dict[str, Origin]

    def report(self) -> dict[str, dict[str, Any]]:
        """For settings.json: name -> value, origin, and the place where there is one."""
        values = self.settings.model_dump(mode="json")
        return {
            name: {"value": values[name], "origin": origin.kind} | ({"place": origin.place} if origin.place else {})
            for name, origin in self.origins.items()
        }


def resolve(
    cls: type[S],
    command: str,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    commands: Collection[str] = (),
) -> Resolved[S]:
    """The settings of `command`: defaults, overridden by the file, by HPCZERO_<COMMAND>_<KEY>, by the command line.

    Parameters
    ----------
    file : path of a TOML file whose keys stand at the top level or in a table named after the command, `[train]`.
        Tables of the other `commands` are left to them, so that one file can serve all.
    environ : variables, normally `os.environ`. A variable with the command's prefix and an unknown key is an error.
    flags : field name -> text, only what was given.

    Raises
    ------
    ConfigError
        All problems at once, one line each.
    """
    given: dict[str, tuple[Any, Origin]] = {}
    if file is not None:
        given |= _from_file(Path(file), command, commands)
    prefix = f"HPCZERO_{command.upper()}_"
    for name, text in (environ or {}).items():
        if name.startswith(prefix):
            given[name.removeprefix(prefix).lower()] = text, Origin("environment", f"variable {name}")
    for name, text in (flags or {}).items():
        given[name] = text, Origin("command line", f"flag --{name.replace('_', '-')}")
    values = {
        name: _read(cls.model_fields[name].annotation, raw) if name in cls.model_fields else raw
        for name, (raw, _) in given.items()
    }
    origins = {name: origin for name, (_, origin) in given.items()}
    try:
        settings = cls(**values)
    except ConfigError as error:  # raised by Settings.__init__, which knows the problems but not the origins
        raise ConfigError("\n".join(_explain(cls, error.__context__, origins))) from None
    return Resolved(settings, {name: origins.get(name, Origin("default")) for name in cls.model_fields})


def number(text: str) -> int | float:
    """The one rule for numbers written as text: decimal, exponent, underscores, 0x; finite. ValueError otherwise.

    Whole numbers without point or exponent stay exact, whatever their size.
    """
    try:
        return int(text, 0)
    except ValueError:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not finite")
    return value


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be: spelt alike, or its initials (learning_rate: lr)."""
    names = list(names)
    initials = "".join(word[:1] for word in re.split(r"[_\W]+", name))
    if initials in names:
        return initials
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def refuse_unknown_variables(environ: Mapping[str, str], known: Iterable[str], commands: Iterable[str]) -> None:
    """ConfigError for a variable HPCZERO_... that is none of `known` and belongs to none of the `commands`."""
    prefixes = [f"HPCZERO_{command.upper()}_" for command in commands]
    for name in sorted(environ):
        if name.startswith("HPCZERO_") and name not in known and not name.startswith(tuple(prefixes)):
            first = name.removeprefix("HPCZERO_").partition("_")
            as_command = [f"{prefix}{first[2]}" for prefix in prefixes if first[2]]
            raise ConfigError(f"{name}: hpczero reads no such variable{nearest(name, [*known, *as_command])}")


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?`, or an empty text."""
    found = closest(name, names)
    return f"; did you mean {found}?" if found else ""


def _read(kind: Any, raw: Any) -> Any:
    """`raw`, a text or a TOML value, as the type of a setting; unchanged where it is none, for validation to refuse."""
    if get_origin(kind) is Annotated:
        return _read(get_args(kind)[0], raw)
    if get_origin(kind) is Literal:
        same = [choice for choice in get_args(kind) if _read(type(choice), raw) == choice]
        # 1 == True in Python, so the choice must also be of the type that the text was read as.
        return next((choice for choice in same if type(_read(type(choice), raw)) is type(choice)), raw)
    if get_origin(kind) in (Union, UnionType):
        read = [_read(part, raw) for part in get_args(kind) if part is not NoneType]
        return next((value for value in read if value is not raw), raw)
    if kind is bool and isinstance(raw, str):
        return {"true": True, "false": False}.get(raw.strip().lower(), raw)
    if kind in (int, float) and isinstance(raw, str | int | float) and not isinstance(raw, bool):
        try:
            value = number(raw) if isinstance(raw, str) else raw
        except ValueError:
            return raw
        if kind is float:
            return float(value)
        return int(value) if math.isfinite(value) and value == int(value) else raw
    return raw


def _from_file(path: Path, command: str, commands: Collection[str]) -> dict[str, tuple[Any, Origin]]:
    """Key -> (value, origin with its line) of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"settings file {path}: cannot be read: {reason}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {path}: not valid TOML: {error}") from None
    lines = _key_lines(text)
    given = {}
    for table, content in ({"": document} | {command: document.get(command, {})}).items():
        if not isinstance(content, dict):
            raise ConfigError(f"settings file {path}: [{command}] must be a table, not {content!r}")
        for key, value in content.items():
            line = lines.get((table, key))
            place = f"{path}, line {line}" if line else str(path)
            if not table and isinstance(value, dict):
                if key != command and key not in commands:
                    hint = nearest(key, {command, *commands})
                    raise ConfigError(f"{place}: [{key}] is not a command{hint} Settings stand in [{command}].")
            elif key in given:
                raise ConfigError(f"{place}: {key} is given twice, also at {given[key][1]}")
            else:
                given[key] = value, Origin("file", place)
    return given


def _key_lines(text: str) -> dict[tuple[str, str], int]:
    """(table, key) -> line number, for messages; tomllib does not tell. Keys of one line each, which settings are."""
    lines, table = {}, ""
    for count, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*[\"']?([\w.-]+)[\"']?\s*\]", line):
            table = header[1]
            lines["", table] = count
        elif key := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*=", line):
            lines.setdefault((table, key[1]), count)
    return lines


def _explain(cls: type[Settings], error: ValidationError, origins: Mapping[str, Origin]) -> list[str]:
    """One line per problem; a key with several (each arm of a union complains) is named once."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        key = str(problem["loc"][0]) if problem["loc"] else ""
        where = f" (from {origins[key]})" if key in origins else ""
        if problem["type"] == "extra_forbidden":
            names = list(cls.model_fields)
            known = nearest(key, names) or f"; settings are {', '.join(names)}"
            lines[key] = f"{key} = {problem['input']!r}: no such setting{where}{known}"
        elif problem["type"] == "missing":
            lines[key] = f"{key}: must be given; allowed is {allowed(cls, key)}"
        elif key:
            lines[key] = _refused(cls, key, problem, where)
        else:
            lines[key] = str(problem.get("ctx", {}).get("error", problem["msg"]))
    return list(lines.values())


def _refused(cls: type[Settings], key: str, problem: Mapping[str, Any], where: str) -> str:
    """The line for a value that the type of its setting, or a validator of the class, refuses."""
    value = problem["input"]
    kind = cls.model_fields[key].annotation
    reason = problem.get("ctx", {}).get("error")
    if isinstance(reason, ValueError) and str(reason) != _SIZE_ALLOWED:
        return f"{key} = {value!r}{where}: {reason}"
    words = [choice for choice in _choices(kind) if isinstance(choice, str)]
    hint = nearest(value, words) if isinstance(value, str) else ""
    return f"{key} = {value!r}{where}: allowed is {allowed(cls, key)}{hint}"


def allowed(cls: type[Settings], key: str) -> str:
    """What setting `key` may be, in words."""
    return _words(cls.model_fields[key].annotation, cls.model_fields[key].metadata)


def _words(kind: Any, bounds: Iterable[Any] = ()) -> str:
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        return _words(kind, bounds)
    if get_origin(kind) is Literal:
        words = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in get_args(kind)]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(part, bounds) for part in get_args(kind) if part is not NoneType)
    if kind is Size:
        return _SIZE_ALLOWED
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, str(kind))
    said = {Gt: ("above", "gt"), Ge: ("of at least", "ge"), Lt: ("below", "lt"), Le: ("of at most", "le")}
    bounds = [bound for outer in bounds for bound in getattr(outer, "metadata", [outer])]  # Field(…) holds several
    limits = [f"{said[type(b)][0]} {getattr(b, said[type(b)][1])}" for b in bounds if type(b) in said]
    return " ".join([name, " and ".join(limits)]).rstrip()


def _choices(kind: Any) -> list[Any]:
    """All literals that a type names, also inside a union."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]
