"""Command-line flags from a settings class, without importing it.

A settings class names each key, its type, its default and, in the text under it, what it means. The flags say the
same, so they are read from the class's source: importing it would load pydantic, and `--help` would take half a second
instead of a tenth. Values stay text here; `settings.resolve` gives them their meaning, the same as in a file or a
variable.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Flag:
    """One key of a settings class as its source has it."""

    key: str
    kind: str
    default: str
    meaning: str


def add_settings(parser: argparse.ArgumentParser, *sources: tuple[Path, str]) -> None:
    """A flag for every key of the classes named by (file, class name); a later class overrides keys of an earlier one.

    The parsed namespace holds what was given, and nothing for what was not.
    """
    found = {flag.key: flag for file, name in sources for flag in read(file, name)}
    for flag in found.values():
        default = f" (default: {flag.default})" if flag.default else ""
        parser.add_argument(
            f"--{flag.key.replace('_', '-')}",
            dest=flag.key,
            help=(flag.meaning + default).replace("%", "%%"),
            metavar=_metavar(flag.kind),
            default=argparse.SUPPRESS,
        )


def given(args: argparse.Namespace, *sources: tuple[Path, str]) -> dict[str, str]:
    """Key -> text, of the flags of these classes that stood on the command line."""
    keys = {flag.key for file, name in sources for flag in read(file, name)}
    return {key: value for key, value in vars(args).items() if key in keys}


def read(file: Path, class_name: str) -> Iterator[Flag]:
    """The annotated assignments of a class, each with the string under it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            meaning = " ".join(below.value.value.split()).rstrip(".") if documented else ""
            yield Flag(node.target.id, _kind(node.annotation), _default(node.value), meaning)


def _kind(annotation: ast.expr) -> str:
    """The annotation as text, without bounds: `Annotated[float, …]` is `float`."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation)


def _default(value: ast.expr) -> str:
    """The default as the user would write it, "" for None; `Field(x, …)` is x."""
    constant = ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)
    if constant is None:
        return ""
    return _text(constant)


def _metavar(kind: str) -> str:
    """What stands behind the flag in the help: the choices, or a word for the type."""
    words = []
    for part in kind.removesuffix(" | None").split(" | "):
        if part.startswith("Literal["):
            words += [_text(choice) for choice in ast.literal_eval(part.removeprefix("Literal"))]
        else:
            words += {"float": ["X"], "int": ["N"], "bool": ["true", "false"], "Size": ["SIZE"]}.get(part, ["TEXT"])
    return words[0] if len(words) == 1 else f"{{{','.join(words)}}}"


def _text(constant: object) -> str:
    return str(constant).lower() if isinstance(constant, bool) else str(constant)
