"""What hpczero takes from CuPy and from Numba's CUDA exists there, and the stand-in for CuPy has no more than CuPy.

Importing CuPy needs no GPU, so these run wherever the extra cuda12 or cuda13 is installed.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
from devicedouble import NOT_IN_CUPY
from devicedouble import cuda as double_cuda
from devicedouble.array import NOT_IN_CUPY as ATTRIBUTES_NOT_IN_CUPY

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.cuda_compile


def test_the_array_functions_that_the_code_uses_are_cupys():
    import cupy

    used = {
        node.attr
        for file in (ROOT / "hpczero").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and _is_array_module(node.value)
    }
    assert {"empty", "einsum"} <= used, "the search finds nothing any more"
    assert sorted(name for name in used if not hasattr(cupy, name)) == []


def _is_array_module(node: ast.expr) -> bool:
    """`xp`, `device.xp`, `namespace(...)`: what stands for NumPy or CuPy in hpczero."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "namespace"
    return isinstance(node, ast.Name) and node.id == "xp" or isinstance(node, ast.Attribute) and node.attr == "xp"


def test_the_double_withholds_what_cupy_lacks():
    import cupy

    assert [name for name in NOT_IN_CUPY if hasattr(cupy, name)] == []
    missing = {name for name in dir(np.ndarray) if not name.startswith("_") and not hasattr(cupy.ndarray, name)}
    assert missing <= ATTRIBUTES_NOT_IN_CUPY


def test_the_double_has_no_name_under_cuda_that_cupy_lacks():
    import cupy

    for name in ("Stream", "get_current_stream", "Device", "Event", "alloc_pinned_memory", "runtime"):
        assert hasattr(cupy.cuda, name) and hasattr(double_cuda, name)
    for name in ("record", "synchronize"):
        assert hasattr(cupy.cuda.Event, name) and hasattr(double_cuda.Event, name)
    for name in ("synchronize", "ptr", "__enter__"):
        assert hasattr(cupy.cuda.Stream.null, name) and hasattr(double_cuda.Stream(), name)
    for name in ("get", "set", "item", "tolist", "__cuda_array_interface__"):
        assert hasattr(cupy.ndarray, name)
    for name in ("use", "synchronize"):
        assert hasattr(cupy.cuda.Device, name) and hasattr(double_cuda.Device, name)
    for name in ("CUDARuntimeError", "is_hip", "getDeviceCount", "getDeviceProperties", "deviceGetPCIBusId",
                 "deviceSynchronize", "malloc", "free", "ipcGetMemHandle", "ipcOpenMemHandle", "ipcCloseMemHandle"):
        assert hasattr(cupy.cuda.runtime, name) and hasattr(double_cuda.runtime, name)


def test_the_functions_that_the_double_adds_to_the_simulator_are_in_numba_cuda():
    from numba import cuda

    assert list(inspect.signature(cuda.external_stream).parameters) == ["ptr"]
    assert list(inspect.signature(cuda.as_cuda_array).parameters) == ["obj", "sync"]
