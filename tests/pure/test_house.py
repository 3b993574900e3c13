"""The rules of the house that can be read off the source.

Imports point down, importing starts nothing, only the command line speaks and knows COMM_WORLD, every file says what it
is.
"""

from __future__ import annotations

import ast
import configparser
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HOUSE = ROOT / "hpczero"

# From the top down; what stands on one line may import each other, but not in a circle. docs/architecture.md says why.
LAYERS: list[set[str]] = [
    {"__init__", "__main__"},
    {"cli"},
    {"interop"},
    {"models", "data"},
    {"resilience"},
    {"checkpoint"},
    {"zero"},
    {"optim"},
    {"collectives"},
    {"compression"},
    {"kernels"},
    {"topology", "device", "memory", "stats", "arrays", "faults", "settings", "errors", "waiting"},
]
# Models and data know nothing of ranks: of the house, this is all they may use.
ONLY_FROM = {"models": {"models", "arrays", "errors"}, "data": {"data", "arrays", "errors"}}
# Loaded only when a call needs them, so these may import MPI at their top.
MAY_START_MPI = {"collectives", "topology", "memory", "zero/step.py"}
# Modules that come with a dependency of another name.
COMES_WITH = {"annotated_types": "pydantic", "pydantic_core": "pydantic"}

FILES = sorted(HOUSE.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """One imported module, as `a.b.c`; a name imported from a module counts as `module.name`."""

    module: str
    line: int
    when_loaded: bool       # at the top of the file: not inside a function, nor for type checkers only


def imports(file: Path) -> Iterator[Import]:
    def visit(node: ast.AST, when_loaded: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, when_loaded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                package = file.relative_to(ROOT).with_suffix("").parts[: -node.level]
                start = ".".join([*package, *filter(None, [node.module])])
            yield from (Import(f"{start}.{alias.name}", node.lineno, when_loaded) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in ast.iter_child_nodes(node):
                yield from visit(child, False)
        else:
            inside = when_loaded and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    yield from visit(tree_of(file), True)


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def name_of(file: Path) -> str:
    return file.relative_to(HOUSE).as_posix()


def part_of(file: Path) -> str:
    """The part of the house a file belongs to: its first folder, or its own name."""
    return file.relative_to(HOUSE).with_suffix("").parts[0]


def layer_of(part: str) -> int:
    found = [depth for depth, layer in enumerate(LAYERS) if part in layer]
    assert found, f"hpczero/{part} has no place in the list of layers"
    return found[0]


def imported_parts(file: Path) -> Iterator[tuple[Import, str]]:
    """What `file` imports of the house, and which part that is in: `from hpczero import Topology` is in __init__.

    The version counts as a constant of nature.
    """
    for item in imports(file):
        path = item.module.split(".")
        if path[0] == "hpczero" and item.module != "hpczero.__version__":
            exists = len(path) > 1 and ((HOUSE / path[1]).is_dir() or (HOUSE / f"{path[1]}.py").exists())
            yield item, path[1] if exists else "__init__"


def test_the_house_has_files():
    assert len(FILES) > 10


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_down(file):
    own = part_of(file)
    wrong = [
        f"line {item.line} imports {item.module}, which is above"
        for item, part in imported_parts(file)
        if part != own and layer_of(part) < layer_of(own) or part != own and part not in ONLY_FROM.get(own, {part})
    ]
    assert not wrong


def test_no_imports_go_round_in_a_circle():
    needs = {}
    for file in FILES:
        inside = {item.module for item in imports(file) if item.when_loaded and item.module.startswith("hpczero.")}
        needs[module_of(file)] = {module for name in inside for module in (name, name.rpartition(".")[0])}
    # A module that needs nothing of what is left is taken away, again and again; what then remains stands in circles.
    left = {module: needed & needs.keys() - {module} for module, needed in needs.items()}
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in free}
    assert not left, f"among these are circles: {sorted(left)}"


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_mpi_is_imported_at_the_top_only_where_it_is_loaded_late(file):
    at_top = [item.line for item in imports(file) if item.when_loaded and item.module.startswith("mpi4py.MPI")]
    allowed = part_of(file) in MAY_START_MPI or name_of(file) in MAY_START_MPI
    assert allowed or not at_top, f"lines {at_top}: importing this module starts MPI"


def test_importing_the_package_starts_no_mpi_and_loads_no_compiler_and_no_gpu_library():
    code = "import sys, hpczero; print([m for m in ('mpi4py.MPI', 'numba', 'cupy', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_the_command_line_prints(file):
    calls = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    lines = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert part_of(file) in ("cli", "__main__") or not lines, f"print in lines {lines}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_the_command_line_reads_comm_world(file):
    """Its cached attributes aside: MPI keeps limits such as TAG_UB there and nowhere else."""
    nodes = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)]
    asked_for_limits = {node.value for node in nodes if node.attr == "Get_attr"}
    lines = [node.lineno for node in nodes if node.attr == "COMM_WORLD" and node not in asked_for_limits]
    assert part_of(file) in ("cli", "__main__") or not lines, f"COMM_WORLD in lines {lines}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_cuda_kernels_are_only_where_the_test_that_compiles_them_looks(file):
    lines = [node.lineno for node in ast.walk(tree_of(file)) if ast.unparse(node) == "cuda.jit"]
    assert part_of(file) in ("kernels", "optim") or not lines, f"cuda.jit in lines {lines}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_module_says_what_it_is(file):
    assert (ast.get_docstring(tree_of(file)) or "").strip(), "no docstring"


def test_every_folder_of_the_house_is_a_package():
    folders = {file.parent for file in FILES}
    assert not [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_what_is_imported_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {requirement.split(">=")[0] for requirement in project["dependencies"] + extras["plot"]}
    declared |= {"hpczero", "cupy"} | sys.stdlib_module_names        # cupy: by another name in the cuda extras
    foreign = {item.module.split(".")[0]: name_of(file) for file in FILES for item in imports(file)}
    assert not {name: file for name, file in foreign.items() if COMES_WITH.get(name, name) not in declared}


def test_every_mark_says_what_it_means():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    marks = settings["tool:pytest"]["markers"].strip().splitlines()
    assert all(": " in mark for mark in marks)


def test_the_linter_finds_nothing():
    pytest.importorskip("flake8", reason="flake8 is not installed: pip install 'hpczero[test]'")
    # By name: a virtual environment may lie in the checkout too.
    flake8 = [sys.executable, "-m", "flake8", "hpczero", "tests", "benchmarks"]
    done = subprocess.run(flake8, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
