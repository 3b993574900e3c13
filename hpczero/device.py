"""Which device a rank computes on: the host's CPUs, or one CUDA GPU through CuPy and Numba.

`select` honours what the settings ask for (`--device cpu|cuda|auto`) on all ranks alike, or raises on all of them. A
rank takes GPU number `local_rank` modulo the number of GPUs it sees, which serves both habits of clusters: a launcher
that shows every rank all GPUs of its node, and one that shows each rank only its own. The GPU is bound to the calling
thread before anything is allocated; another thread that computes on it calls `Device.bind` first.

`select` costs two or three small pickled `allgather`s and, on a GPU, the creation of its CUDA context (some 0.3 s).
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpczero.errors import ConfigError, DeviceError, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI

Request = Literal["cpu", "cuda", "auto"]

_log = logging.getLogger("hpczero.device")


@dataclass(frozen=True)
class Device:
    """Where a rank's arrays live and its kernels run."""

    kind: Literal["cpu", "cuda"]
    index: int
    """Number of the GPU among those this rank sees; 0 on the host."""
    name: str
    """What to print: the GPU's name, or the host's machine type."""
    xp: ModuleType
    """The array module: `numpy` or `cupy`."""

    def bind(self) -> None:
        """Make this the calling thread's device; CUDA remembers it per thread, and new threads start on GPU 0."""
        if self.kind == "cuda":
            self.xp.cuda.Device(self.index).use()


@dataclass(frozen=True)
class _Finding:
    """What one rank sees before anything is bound; exchanged, so it holds no module."""

    request: str
    host: str
    gpu: str = ""        # tells the GPU that the rank would take from all others of its host; "" where there is none
    gpu_name: str = ""
    index: int = 0
    reason: str = ""     # why there is none


def select(request: Request, comm: MPI.Comm, local_rank: int) -> Device:
    """Choose this rank's device and bind it to the calling thread.

    Called by every rank of `comm`, with the same `request`, before anything else touches a GPU. With "cpu" CuPy is not
    imported.

    Parameters
    ----------
    request : {"cpu", "cuda", "auto"}
        "cuda" takes a GPU on every rank or raises; "auto" takes GPUs if every rank sees one, else CPUs on all of them,
        and rank 0 logs which (as a warning where only some ranks see a GPU).
    local_rank : int
        This rank's place among the ranks of its node.

    Raises
    ------
    ConfigError
        `request` is none of the three, or the ranks do not agree on it. On every rank.
    DeviceError
        A GPU was asked for, or found by "auto" on every rank, and cannot be used. On every rank, with the reason; AMD
        GPUs are refused here.
    """
    mine, failure = None, None
    try:
        mine = _look(request, local_rank)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are about to wait for this one
        failure = error
    raise_together(comm, failure)
    found = comm.allgather(mine)
    kind = _agree(found, comm.rank)
    if kind == "cpu":
        return Device("cpu", 0, platform.machine(), np)
    import cupy

    device = Device("cuda", mine.index, mine.gpu_name, cupy)
    raise_together(comm, _bind(device))
    _warn_of_sharing(found, comm.rank)
    return device


def _look(request: str, local_rank: int) -> _Finding:
    """What this rank sees; nothing is bound and no CUDA context made. With "cpu" it does not look."""
    host = socket.gethostname()
    if request not in ("cuda", "auto"):
        return _Finding(request, host)
    reason = _why_not_before_import(os.environ) or _why_not_after_import()
    if reason:
        return _Finding(request, host, reason=reason)
    import cupy

    runtime = cupy.cuda.runtime
    index = local_rank % runtime.getDeviceCount()
    properties = runtime.getDeviceProperties(index)
    # The bus address alone would make one GPU of the slices of a GPU that MIG has divided.
    gpu = f"{runtime.deviceGetPCIBusId(index)} {properties['uuid']!r}"
    return _Finding(request, host, gpu, properties["name"].decode(), index)


def _why_not_before_import(environment: Mapping[str, str]) -> str:
    """A reason against CUDA that can be seen without importing CuPy, or ""."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it, or list the GPUs to use"
    if os.path.exists("/dev/kfd") and not _nvidia_driver_loaded():
        return _AMD
    return ""


def _why_not_after_import() -> str:
    """A reason why CuPy and Numba cannot use a GPU here, or ""."""
    try:
        import cupy
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "cupy":
            return f"CuPy is installed but cannot be imported: {_first_line(error)}"
        seen = "there is an NVIDIA driver, but " if _nvidia_driver_loaded() else ""
        return f"{seen}CuPy is not installed; pip install 'hpczero[cuda12]' (or cuda13, to match the driver)"
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        return _AMD
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if not _nvidia_driver_loaded():
            return f"no NVIDIA driver is loaded on this host ({_first_line(error)})"
        return f"the CUDA driver does not work with this CuPy ({_first_line(error)}); nvidia-smi shows its version"
    if count == 0:
        return "the CUDA driver shows no GPU"
    from numba import cuda

    if not cuda.is_available():
        return "CuPy sees a GPU, but Numba cannot compile for it: pip install 'hpczero[cuda12]' (or cuda13) brings all"
    return ""


_AMD = "AMD GPUs are not supported: the kernels are compiled for CUDA only; --device cpu works here"


def _nvidia_driver_loaded() -> bool:
    """Whether this host's kernel has the NVIDIA driver (on Linux, or through WSL)."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/dxg")


def _agree(found: Sequence[_Finding], rank: int) -> Literal["cpu", "cuda"]:
    """The same kind on every rank, from what all of them found; pure but for the log of rank 0."""
    requests = [finding.request for finding in found]
    request = requests[0]
    odd = next((r for r, other in enumerate(requests) if other != request), None)
    if odd is not None:
        raise ConfigError(
            f"device: rank {odd} of {len(found)} on {found[odd].host} asks for {requests[odd]!r}, rank 0 for "
            f"{request!r}; all ranks must ask for the same"
        )
    if request not in ("cpu", "cuda", "auto"):
        raise ConfigError(f"device: {request!r} is none of 'cpu', 'cuda', 'auto'")
    without = [r for r, finding in enumerate(found) if finding.reason]
    if request == "cpu":
        return "cpu"
    if request == "cuda" and without:
        first = found[without[0]]
        others = f" (and {len(without) - 1} more ranks)" if len(without) > 1 else ""
        raise DeviceError(f"device 'cuda': rank {without[0]} of {len(found)} on {first.host}{others}: {first.reason}")
    if request == "auto" and rank == 0:
        if not without:
            _log.info("device: cuda (%s)", ", ".join(sorted({finding.gpu_name for finding in found})))
        elif len(without) == len(found):
            _log.info("device: cpu (%s)", found[0].reason)
        else:
            _log.warning(
                "device: cpu on all ranks, since %s can use no GPU (%s), while %s can; 'cuda' would make this an error",
                _hosts(found[r] for r in without), found[without[0]].reason,
                _hosts(finding for finding in found if not finding.reason),
            )
    return "cpu" if without else "cuda"


def _bind(device: Device) -> DeviceError | None:
    """Bind the GPU and make its CUDA context; the error, if that fails, is left for the caller to share."""
    try:
        device.bind()
        device.xp.cuda.runtime.deviceSynchronize()
    except device.xp.cuda.runtime.CUDARuntimeError as error:
        return DeviceError(
            f"GPU {device.index} ({device.name}) cannot be used: {_first_line(error)}; "
            "it may be out of memory, or in exclusive mode and taken by another process"
        )
    return None


def _warn_of_sharing(found: Sequence[_Finding], rank: int) -> None:
    """One warning per node whose ranks share GPUs, from the lowest rank of that node."""
    on_my_host = [r for r, finding in enumerate(found) if finding.host == found[rank].host]
    if rank != on_my_host[0]:
        return
    num_gpus = len({found[r].gpu for r in on_my_host})
    if num_gpus < len(on_my_host):
        _log.warning(
            "%s: %d ranks share %d GPU%s, so each gets a part of its speed and memory; start as many ranks per node as "
            "there are GPUs", found[rank].host, len(on_my_host), num_gpus, "" if num_gpus == 1 else "s",
        )


def _hosts(findings: Iterable[_Finding]) -> str:
    """The hosts of some findings, each once, shortened to four."""
    names = sorted({finding.host for finding in findings})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more hosts" if len(names) > 4 else "")


def _first_line(error: Exception) -> str:
    """The first line of an error's text that holds a word; CuPy's longer ones begin with a ruled line."""
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if any(map(str.isalpha, line))), type(error).__name__)
