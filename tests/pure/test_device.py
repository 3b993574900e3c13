"""hpczero.device.select on one rank, on machines that are played; on several: tests/mpi/test_device_agreement.py."""

from __future__ import annotations

import logging
import os
import sys

import devicedouble
import numba.cuda
import numpy as np
import pytest

from hpczero.device import Device, select
from hpczero.errors import ConfigError, DeviceError


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]


@pytest.fixture(autouse=True)
def errors_of_this_rank_alone(monkeypatch):
    """In place of `raise_together`, which talks to other ranks through MPI; these tests start none."""
    def raise_mine(comm, error):
        if error is not None:
            raise error

    monkeypatch.setattr("hpczero.device.raise_together", raise_mine)


class Machine:
    """What `select` can see of the machine it runs on. At first: an NVIDIA driver, one GPU, CuPy and Numba in order."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.files = {"/proc/driver/nvidia/version"}
        monkeypatch.setattr(os.path, "exists", lambda path: path in self.files)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setitem(sys.modules, "cupy", devicedouble)
        monkeypatch.setattr(numba.cuda, "is_available", lambda: True)
        self.runtime = devicedouble.cuda.runtime
        self.runtime.reset()

    def without_cupy(self):
        self._monkeypatch.setitem(sys.modules, "cupy", None)

    def broken_cupy(self, text):
        """A CuPy whose import fails for want of something else."""
        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "cupy":
                    raise ImportError(text)

        self._monkeypatch.delitem(sys.modules, "cupy")
        self._monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_cpu_is_numpy_and_does_not_look_for_cupy(monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            assert name.partition(".")[0] != "cupy", "CuPy is being imported"

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    device = select("cpu", Alone(), 3)
    assert (device.kind, device.index, device.xp) == ("cpu", 0, np)
    device.bind()


@pytest.mark.parametrize("request_", ["cuda", "auto"])
def test_a_gpu_that_is_there_is_taken_and_bound(machine, request_):
    device = select(request_, Alone(), 0)
    assert device == Device("cuda", 0, "Double 0", devicedouble)
    assert machine.runtime.bound == 0


@pytest.mark.parametrize(("local_rank", "num_devices", "index"), [(0, 4, 0), (3, 4, 3), (5, 4, 1), (2, 1, 0)])
def test_a_rank_takes_the_gpu_of_its_local_rank_modulo_their_number(machine, local_rank, num_devices, index):
    machine.runtime.num_devices = num_devices
    assert select("cuda", Alone(), local_rank).index == machine.runtime.bound == index


def hide_from_environment(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def hide_by_minus_one(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


def amd_node(machine, monkeypatch):
    machine.files = {"/dev/kfd"}
    machine.without_cupy()


def cupy_for_rocm(machine, monkeypatch):
    machine.runtime.is_hip = True


def no_cupy(machine, monkeypatch):
    machine.without_cupy()


def no_cupy_and_no_driver(machine, monkeypatch):
    machine.files = set()
    machine.without_cupy()


def broken_cupy(machine, monkeypatch):
    machine.broken_cupy("\n=====\nlibnvrtc.so.12: cannot open shared object file\nmore\n")


def no_driver(machine, monkeypatch):
    machine.files = set()
    machine.runtime.failure = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"


def old_driver(machine, monkeypatch):
    machine.runtime.failure = "cudaErrorInsufficientDriver: CUDA driver version is insufficient"


def no_gpu(machine, monkeypatch):
    machine.runtime.num_devices = 0


def no_numba_cuda(machine, monkeypatch):
    monkeypatch.setattr(numba.cuda, "is_available", lambda: False)


OBSTACLES = {
    hide_from_environment: "CUDA_VISIBLE_DEVICES='' hides every GPU",
    hide_by_minus_one: "CUDA_VISIBLE_DEVICES='-1' hides every GPU",
    amd_node: "AMD GPUs are not supported: .* --device cpu works here",
    cupy_for_rocm: "AMD GPUs are not supported: .* --device cpu works here",
    no_cupy: r"there is an NVIDIA driver, but CuPy is not installed; pip install 'hpczero\[cuda12\]' \(or cuda13",
    no_cupy_and_no_driver: r": CuPy is not installed; pip install 'hpczero\[cuda12\]'",
    broken_cupy: "CuPy is installed but cannot be imported: libnvrtc.so.12: cannot open shared object file$",
    no_driver: "no NVIDIA driver is loaded on this host",
    old_driver: r"the CUDA driver does not work with this CuPy \(cudaErrorInsufficientDriver",
    no_gpu: "the CUDA driver shows no GPU",
    no_numba_cuda: "Numba cannot compile for it: ",
}


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda obstacle: obstacle.__name__)
def test_cuda_raises_with_the_reason_where_a_gpu_cannot_be_used(machine, monkeypatch, obstacle):
    obstacle(machine, monkeypatch)
    with pytest.raises(DeviceError, match=r"device 'cuda': rank 0 of 1 on .*" + OBSTACLES[obstacle]):
        select("cuda", Alone(), 0)
    assert machine.runtime.bound is None


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda obstacle: obstacle.__name__)
def test_auto_takes_the_cpu_there_and_says_why_once(machine, monkeypatch, caplog, obstacle):
    obstacle(machine, monkeypatch)
    with caplog.at_level(logging.INFO, "hpczero"):
        device = select("auto", Alone(), 0)
    assert device.kind == "cpu" and machine.runtime.bound is None
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.message.startswith("device: cpu (")


def test_auto_says_which_gpu_it_took(machine, caplog):
    with caplog.at_level(logging.INFO, "hpczero"):
        select("auto", Alone(), 0)
    assert [record.message for record in caplog.records] == ["device: cuda (Double 0)"]


def test_a_gpu_that_cannot_be_bound_is_an_error_and_no_reason_for_auto_to_take_the_cpu(machine, monkeypatch):
    def taken():
        raise machine.runtime.CUDARuntimeError("cudaErrorDevicesUnavailable: all CUDA-capable devices are busy")

    monkeypatch.setattr(machine.runtime, "deviceSynchronize", taken)
    with pytest.raises(DeviceError, match=r"GPU 0 \(Double 0\) cannot be used: cudaErrorDevicesUnavailable.*exclusive"):
        select("auto", Alone(), 0)


@pytest.mark.parametrize("word", ["gpu", "CUDA", "", "rocm"])
def test_any_other_word_is_refused(word):
    with pytest.raises(ConfigError, match=rf"device: '{word}' is none of 'cpu', 'cuda', 'auto'"):
        select(word, Alone(), 0)


def test_an_unexpected_failure_is_not_taken_for_a_missing_gpu(machine, monkeypatch):
    def broken(index):
        raise KeyError("a bug")

    monkeypatch.setattr(machine.runtime, "getDeviceProperties", broken)
    with pytest.raises(KeyError, match="a bug"):
        select("auto", Alone(), 0)
