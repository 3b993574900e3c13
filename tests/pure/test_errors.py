"""The error types. How they reach every rank is tested in tests/mpi/test_errors.py."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from hpczero import errors
from hpczero.errors import (
    ConfigError,
    DataError,
    DeviceError,
    HpczeroError,
    MismatchError,
    NoCommunicatorError,
    RoomError,
    StallError,
    WorldSizeMismatchError,
)

BUILTIN_OF = {
    ConfigError: ValueError,
    DataError: ValueError,
    MismatchError: ValueError,
    DeviceError: RuntimeError,
    RoomError: RuntimeError,
    StallError: TimeoutError,
    NoCommunicatorError: RuntimeError,
    WorldSizeMismatchError: ValueError,
}


@pytest.mark.parametrize("kind", BUILTIN_OF)
def test_an_error_can_be_caught_as_an_hpczero_error_and_as_the_builtin_that_fits(kind):
    for catchable in (HpczeroError, BUILTIN_OF[kind]):
        with pytest.raises(catchable) as caught:
            raise kind("the file is empty")
        assert type(caught.value) is kind


@pytest.mark.parametrize("kind", [HpczeroError, *BUILTIN_OF])
def test_an_error_keeps_type_and_text_on_its_way_through_pickle(kind):
    back = pickle.loads(pickle.dumps(kind("the file is empty")))
    assert (type(back), str(back)) == (kind, "the file is empty")


def test_this_file_knows_every_error_type():
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HpczeroError)}
    assert defined == {HpczeroError, *BUILTIN_OF}


def test_importing_the_errors_starts_no_mpi():
    code = "import sys, hpczero.errors; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
