"""Every CUDA kernel compiles to PTX, which takes a compiler (extra cuda12 or cuda13) but no driver and no device.

A file with kernels says for which argument types: `CUDA_SIGNATURES = {kernel: [(types of one call), ...]}`. A kernel
that its file's table leaves out fails here, so a new one cannot go untested.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType, SimpleNamespace

import pytest

import hpczero

pytestmark = pytest.mark.cuda_compile
PACKAGES = ("hpczero.kernels", "hpczero.optim")
CAPABILITIES = [(8, 0), (9, 0)]     # A100 and H100


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(hpczero.__path__, "hpczero.")
    return [importlib.import_module(info.name) for info in found if info.name.startswith(PACKAGES)]


def kernels(module: ModuleType) -> dict[str, object]:
    """What `cuda.jit` made at the top of `module` and can be launched: no device functions, none made elsewhere."""
    from numba.cuda.dispatcher import CUDADispatcher

    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, CUDADispatcher)
        and not value.targetoptions.get("device")
        and value.py_func.__module__ == module.__name__
    }


@pytest.fixture
def compile_to_ptx(monkeypatch):
    from numba import cuda

    def compile_kernel(kernel, signature, capability) -> str:
        # A kernel that calls a device function asks for the current device, and so for a driver, to compile that one.
        device = SimpleNamespace(compute_capability=capability)
        for name in ("numba.cuda.dispatcher", "numba.cuda.compiler"):
            monkeypatch.setattr(importlib.import_module(name), "get_current_device", lambda: device, raising=False)
        ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=capability)
        return ptx

    return compile_kernel


def test_cupy_can_be_imported():
    import cupy

    assert cupy.ndarray is not None


def test_there_are_kernels():
    assert sum(len(kernels(module)) for module in modules()) >= 2


def test_every_kernel_is_in_the_table_of_its_file():
    for module in modules():
        table = getattr(module, "CUDA_SIGNATURES", {})
        missing = [name for name, kernel in kernels(module).items() if not table.get(kernel)]
        assert not missing, f"{module.__name__}.CUDA_SIGNATURES lacks {missing}"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=["sm_80", "sm_90"])
def test_every_kernel_compiles_for_each_of_its_signatures(subtests, compile_to_ptx, capability):
    for module in modules():
        for kernel, signatures in getattr(module, "CUDA_SIGNATURES", {}).items():
            for signature in signatures:
                with subtests.test(f"{module.__name__}.{kernel.py_func.__name__}({', '.join(map(str, signature))})"):
                    ptx = compile_to_ptx(kernel, signature, capability)
                    assert f".target sm_{capability[0]}{capability[1]}" in ptx
                    assert ".entry" in ptx
