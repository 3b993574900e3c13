"""`load`: which reader a file gets, and the errors that concern every kind of file."""

from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from hpczero.data import load
from hpczero.errors import ConfigError, DataError


@pytest.fixture(params=["data.txt", "data.csv", "data.npy", "data.npz", "data"])
def path(request, tmp_path):
    return tmp_path / request.param


def test_a_missing_file_is_named(path):
    with pytest.raises(DataError, match=rf"{path.name}: no such file"):
        load(path, sequence_length=4)


def test_a_file_below_a_file_is_named(path):
    path.write_text("x")
    with pytest.raises(DataError, match=f"{path.name}/more.*cannot be read: Not a directory"):
        load(path / "more", sequence_length=4)


def test_an_empty_file_is_refused(path):
    path.touch()
    with pytest.raises(DataError, match=f"{path.name}: is empty"):
        load(path, sequence_length=4)


def test_a_directory_is_refused(path):
    path.mkdir()
    with pytest.raises(DataError, match=f"{path.name}: is a directory; name one file"):
        load(path, sequence_length=4)


def test_a_pipe_is_refused_instead_of_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"{path.name}: is a pipe or a device"):
        load(path, sequence_length=4)


def test_a_name_with_a_null_byte_is_refused():
    with pytest.raises(DataError, match=r"'da\\x00ta': cannot be read: .*null"):
        load("da\0ta", sequence_length=4)


def test_a_link_to_itself_is_refused(path):
    path.symlink_to(path)
    with pytest.raises(DataError, match=f"{path.name}.*cannot be read: Too many levels"):
        load(path, sequence_length=4)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_the_system_does_not_let_us_read_is_refused_with_its_words(path, monkeypatch, number):
    """As root, for whom every file is readable: the refusal is put into `open`."""
    path.write_text("0,1\n" * 9)
    plain = builtins.open

    def refusing(name, *args, **options):
        if os.fspath(name) == os.fspath(path):
            raise OSError(number, os.strerror(number), name)
        return plain(name, *args, **options)

    monkeypatch.setattr(builtins, "open", refusing)
    with pytest.raises(DataError, match=f"{path.name}: cannot be read: {os.strerror(number)}$"):
        load(path, sequence_length=4)


@pytest.mark.parametrize(
    ("name", "task"), [("a.txt", "text"), ("a", "text"), ("a.md", "text"), ("A.CSV", "regression")]
)
def test_the_suffix_chooses_between_table_and_text(tmp_path, name, task):
    path = tmp_path / name
    path.write_text("".join(f"{i},{i / 2}\n" for i in range(100)))
    assert load(path, sequence_length=4).task == task
    assert load(str(path), sequence_length=4).task == task


def test_no_path_means_the_reference_text():
    data = load(None, sequence_length=128)
    assert (data.task, data.num_inputs, data.num_outputs) == ("text", 256, 256)
    assert data.train.batch(np.array([0]))[0].shape == (1, 128)
    assert list(data.baselines) == ["bigram_bits_per_byte", "trigram_bits_per_byte"]


def test_a_file_shorter_than_a_sequence_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("to be or not to be")
    with pytest.raises(DataError, match=r"short\.txt: is too short: of its 18 bytes 16 are left"):
        load(path, sequence_length=16)
    assert len(load(path, sequence_length=15).train) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "regresion"}, "'regresion' is none of auto, text, .*; 'regression'"),
        ({"task": "classification"}, "'classification' needs a table .* the text that comes with Python"),
        ({"sequence_length": 0}, "sequence_length: 0 must be at least 1"),
        ({"validation_fraction": 0.0}, "validation_fraction: 0.0 must lie between"),
        ({"validation_fraction": 1}, "validation_fraction: 1 must lie between"),
        ({"validation_fraction": float("nan")}, "validation_fraction: nan must lie between"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load(None, **{"sequence_length": 4, **options})


def test_a_task_that_needs_a_table_refuses_a_text_file(tmp_path):
    with pytest.raises(ConfigError, match=r"'regression' needs a table \(\.csv, \.npy, \.npz\), but .*novel\.txt"):
        load(tmp_path / "novel.txt", sequence_length=4, task="regression")


def test_importing_the_data_part_starts_no_mpi_and_reads_no_text():
    unwanted = {"mpi4py.MPI", "pydoc_data.topics", "numba", "cupy"}
    code = f"import sys, hpczero.data; print(sorted({unwanted} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "[]\n"
