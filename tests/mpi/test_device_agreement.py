"""hpczero.device.select where ranks see different things: all end with one kind of device, or with the same error."""

from __future__ import annotations

import logging
import os
import socket
import sys

import devicedouble
import numba.cuda
import pytest
from agreement import check_everywhere

from hpczero.device import select
from hpczero.errors import ConfigError, DeviceError, HpczeroError


@pytest.fixture
def machine(comm, monkeypatch):
    """A node with a GPU on each rank, under a host name of its own."""
    devicedouble.cuda.runtime.reset()
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia/version")
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{comm.rank}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", devicedouble)
    monkeypatch.setattr(numba.cuda, "is_available", lambda: True)
    return devicedouble.cuda.runtime


def outcome(request, comm, local_rank=0):
    """The device, or the text of the error."""
    try:
        return select(request, comm, local_rank)
    except HpczeroError as error:
        return error


def test_cuda_without_a_gpu_on_the_last_rank_is_an_error_on_every_rank_that_names_it(comm, machine):
    last = comm.size - 1
    machine.num_devices = 0 if comm.rank == last else 1
    error = outcome("cuda", comm)
    expected = f"device 'cuda': rank {last} of {comm.size} on node{last}: the CUDA driver shows no GPU"
    check_everywhere(comm, isinstance(error, DeviceError) and str(error) == expected, repr(error))
    check_everywhere(comm, machine.bound is None, "a GPU was bound for nothing")


def test_auto_takes_gpus_only_if_every_rank_has_one(comm, machine, caplog):
    last = comm.size - 1
    machine.num_devices = 0 if comm.rank == last else 1
    with caplog.at_level(logging.INFO, "hpczero"):
        device = outcome("auto", comm)
    check_everywhere(comm, device.kind == "cpu" and machine.bound is None, repr(device))
    levels = [record.levelname for record in caplog.records]
    expected = [] if comm.rank else ["WARNING" if comm.size > 1 else "INFO"]
    check_everywhere(comm, levels == expected, f"logged {levels}, expected {expected}")
    if comm.rank == 0 and comm.size > 1:
        text = caplog.messages[0]
        ok = f"since node{last} can use no GPU" in text and "while node0" in text
    else:
        ok = True
    check_everywhere(comm, ok, f"does not name the nodes: {caplog.messages}")


def test_auto_takes_gpus_where_every_rank_has_one(comm, machine):
    device = outcome("auto", comm)
    check_everywhere(comm, device.kind == "cuda" and machine.bound == 0, repr(device))


def test_ranks_that_ask_for_different_things_all_learn_so(comm, machine):
    error = outcome("cpu" if comm.rank else "cuda", comm)
    if comm.size == 1:
        assert error.kind == "cuda"
        return
    expected = "device: rank 1 of {} on node1 asks for 'cpu', rank 0 for 'cuda'; all ranks must ask for the same"
    check_everywhere(comm, isinstance(error, ConfigError) and str(error) == expected.format(comm.size), repr(error))


def test_a_gpu_that_fails_on_one_rank_fails_all(comm, machine, monkeypatch):
    def taken():
        raise machine.CUDARuntimeError("cudaErrorDevicesUnavailable: busy")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(machine, "deviceSynchronize", taken)
    error = outcome("cuda", comm)
    check_everywhere(comm, isinstance(error, DeviceError) and "cudaErrorDevicesUnavailable" in str(error), repr(error))


def test_an_unexpected_exception_while_one_rank_looks_hangs_nobody(comm, machine, monkeypatch):
    def broken():
        raise KeyError("a bug")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(machine, "getDeviceCount", broken)
    try:
        select("cuda", comm, 0)
        error = None
    except (KeyError, HpczeroError) as raised:
        error = raised
    check_everywhere(comm, "a bug" in str(error), repr(error))


def test_ranks_of_a_node_that_share_a_gpu_are_warned_once(comm, machine, monkeypatch, caplog):
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{comm.rank // 2}")      # two ranks per node, one GPU each
    with caplog.at_level(logging.INFO, "hpczero"):
        outcome("cuda", comm, comm.rank % 2)
    first_of_a_pair = comm.rank % 2 == 0 and comm.rank + 1 < comm.size
    expected = [f"node{comm.rank // 2}: 2 ranks share 1 GPU,"] if first_of_a_pair else []
    said = [message[: len(expected[0])] if expected else message for message in caplog.messages]
    check_everywhere(comm, said == expected, f"{caplog.messages}, expected {expected}")


def test_ranks_with_a_gpu_each_are_not_warned_even_if_each_sees_only_its_own(comm, machine, monkeypatch, caplog):
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(type(machine), "deviceGetPCIBusId", lambda self, index: f"0000:{comm.rank:02X}:00.0")
    with caplog.at_level(logging.INFO, "hpczero"):
        device = outcome("cuda", comm, comm.rank)
    check_everywhere(comm, device.index == 0 and not caplog.messages, f"{device}, {caplog.messages}")
