"""Tables: what is read, what is refused, and what the model sees of it."""

from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpczero.data import load
from hpczero.errors import DataError


def read(path, **options):
    return load(path, sequence_length=1, **options)


def every_row(data):
    """Input and target of all rows, training first."""
    parts = [part.batch(np.arange(len(part))) for part in (data.train, data.val)]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


@pytest.fixture
def csv_file(tmp_path):
    def write(content: str | bytes):
        path = tmp_path / "table.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def npz_file(tmp_path):
    def write(**arrays):
        path = tmp_path / "table.npz"
        np.savez(path, **arrays)
        return path

    return write


@pytest.fixture
def npy_file(tmp_path):
    def write(values):
        path = tmp_path / "table.npy"
        np.save(path, values)
        return path

    return write


ROWS = "".join(f"{i},{i * i / 7},{i % 3}\n" for i in range(20))


# ---- what is read


def test_a_csv_with_whole_numbers_in_its_last_column_is_a_classification(csv_file):
    data = read(csv_file(ROWS))
    assert (data.task, data.num_inputs, data.num_outputs) == ("classification", 2, 3)
    x, target = every_row(data)
    assert (x.dtype, x.shape, target.dtype, target.shape) == (np.float32, (20, 2), np.int64, (20,))
    assert np.array_equal(np.bincount(target), [7, 7, 6])
    assert list(data.baselines) == ["class_frequency_cross_entropy"]


def test_a_csv_with_a_fraction_in_its_last_column_is_a_regression(csv_file):
    data = read(csv_file(ROWS + "20,3,1.0\n"))
    assert (data.task, data.num_inputs, data.num_outputs) == ("regression", 2, 1)
    _, target = every_row(data)
    assert (target.dtype, target.shape) == (np.float32, (21, 1))
    assert list(data.baselines) == ["mean_mse"]


def test_the_caller_decides_over_the_type_of_the_target(csv_file, npy_file):
    assert read(csv_file(ROWS), task="regression").task == "regression"
    floats = npy_file(np.array([[0.5, 1.0], [1.5, 2.0], [2.5, 1.0], [3.5, 2.0]]))
    assert read(floats).task == "regression"
    data = read(floats, task="classification")
    assert (data.task, data.num_outputs, sorted(every_row(data)[1])) == ("classification", 2, [0, 0, 1, 1])


@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        "a,b,label\n" + ROWS,
        "\ufeffa,b,label\n" + ROWS,
        '"long, name","b\n2",label\n' + ROWS,
        ROWS.replace("\n", "\r\n"),
        ROWS.replace("\n", "\n\n") + "\n  \n",
        ROWS.rstrip("\n"),
        ROWS.replace(",", " , "),
    ],
    ids=["plain", "header", "mark", "quoted", "crlf", "blank lines", "no newline at the end", "spaces"],
)
def test_the_same_table_written_differently_is_the_same(csv_file, tmp_path, content):
    plain = tmp_path / "plain.csv"
    plain.write_text(ROWS)
    for one, two in zip(every_row(read(csv_file(content))), every_row(read(plain)), strict=True):
        assert np.array_equal(one, two)


def test_npy_npz_and_csv_of_the_same_numbers_are_the_same(csv_file, npy_file, npz_file):
    values = np.random.default_rng(0).normal(size=(30, 4))
    text = "".join(",".join(map(repr, row)) + "\n" for row in values.tolist())
    tables = [csv_file(text), npy_file(values), npz_file(x=values[:, :3], y=values[:, 3])]
    one, *others = [every_row(read(path)) for path in tables]
    for other in others:
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_an_npz_with_one_array_is_read_like_an_npy(npy_file, npz_file):
    values = np.arange(40).reshape(10, 4)
    one, two = every_row(read(npz_file(anything=values))), every_row(read(npy_file(values)))
    assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])


def test_images_are_flattened_and_labels_may_be_any_integers(npz_file):
    images, labels = np.random.default_rng(0).integers(0, 256, (12, 4, 5), np.uint8), np.array([-1, 7, 1000] * 4)
    data = read(npz_file(x=images, y=labels))
    assert (data.task, data.num_inputs, data.num_outputs) == ("classification", 20, 3)
    assert set(every_row(data)[1]) == {0, 1, 2}


def test_a_regression_may_have_several_targets(npz_file):
    data = read(npz_file(x=np.arange(10.0), y=np.random.default_rng(0).normal(size=(10, 3))))
    assert (data.task, data.num_inputs, data.num_outputs) == ("regression", 1, 3)


def test_arrays_that_are_not_asked_for_are_not_read(npz_file):
    read(npz_file(x=np.arange(10.0), y=np.arange(10.0), notes=np.array([{"by": "me"}], object)))


def test_a_table_asked_for_as_text_is_its_bytes(csv_file):
    data = read(csv_file(ROWS), task="text")
    assert (data.task, data.num_inputs) == ("text", 256)
    assert bytes(data.train.data) == ROWS.encode()[: len(data.train.data)]


# ---- split and scale


def test_every_row_is_in_one_part_and_the_choice_is_the_same_each_time(npz_file):
    path = npz_file(x=np.zeros(50), y=np.arange(50))  # the class says which row it is
    data = read(path, validation_fraction=0.2)
    assert (len(data.train), len(data.val)) == (40, 10)
    train, val = (part.batch(np.arange(len(part)))[1].tolist() for part in (data.train, data.val))
    assert sorted(train + val) == list(range(50))
    again = read(path, validation_fraction=0.2)
    assert again.val.batch(np.arange(10))[1].tolist() == val


def test_rows_sorted_by_class_are_held_out_from_every_class(npz_file):
    data = read(npz_file(x=np.arange(300.0), y=np.repeat([0, 1, 2], 100)))
    assert set(data.val.batch(np.arange(30))[1]) == {0, 1, 2}


@pytest.mark.parametrize(("count", "fraction", "held_out"), [(2, 0.01, 1), (2, 0.99, 1), (7, 0.1, 1), (10, 0.5, 5)])
def test_both_parts_have_a_row(npz_file, count, fraction, held_out):
    data = read(npz_file(x=np.arange(count), y=np.arange(count) / 2), validation_fraction=fraction)
    assert (len(data.train), len(data.val)) == (count - held_out, held_out)


def test_columns_have_mean_zero_and_deviation_one_over_the_training_rows_alone(npz_file):
    rng = np.random.default_rng(0)
    x, y = rng.normal(5e6, 3, (100, 3)), rng.normal(-7, 1e-3, (100, 2))
    data = read(npz_file(x=x, y=y))
    for part in data.train.batch(np.arange(len(data.train))):
        assert np.allclose(part.mean(axis=0, dtype=np.float64), 0, atol=1e-6)
        assert np.allclose(part.std(axis=0, dtype=np.float64), 1, atol=1e-6)


def test_held_out_values_do_not_move_the_training_values(npz_file):
    index = np.arange(20)
    chosen = read(npz_file(x=np.zeros(20), y=index)).val.batch(np.arange(2))[1]  # class numbers = row numbers
    x = np.random.default_rng(0).normal(size=20)
    before = read(npz_file(x=x, y=index % 2)).train.batch(np.arange(18))[0]
    x[chosen] += 1000
    data = read(npz_file(x=x, y=index % 2))
    assert np.array_equal(data.train.batch(np.arange(18))[0], before)
    assert (data.val.batch(np.arange(2))[0] > 500).all()


def test_a_column_that_is_constant_in_training_becomes_zero(npz_file):
    x = np.stack([np.full(30, 0.1), np.arange(30.0)], axis=1)
    got, _ = every_row(read(npz_file(x=x, y=np.arange(30) % 2)))
    assert (got[:, 0] == 0).all()


@pytest.mark.parametrize("unit", [1e-310, 1e-200, 1e200, 1e307])
def test_very_small_and_very_large_columns_are_brought_to_unit_scale(npz_file, unit):
    x = np.linspace(-9, 9, 60)
    (got, _), (expected, _) = (every_row(read(npz_file(x=values, y=np.arange(60) % 2))) for values in (x * unit, x))
    assert np.allclose(got, expected, rtol=1e-6)


def test_a_held_out_value_beyond_float32_is_refused_with_its_column(npz_file):
    index = np.arange(20)
    chosen = read(npz_file(x=np.zeros(20), y=index)).val.batch(np.arange(2))[1]  # class numbers = row numbers
    x = np.random.default_rng(0).normal(size=(20, 3))
    x[chosen[0], 1] = 1e100
    with pytest.raises(DataError, match="table.npz: input column 2 cannot be brought to unit scale in float32"):
        read(npz_file(x=x, y=index % 2))


def test_the_mean_baseline_is_near_one_in_units_of_the_standardised_target(npz_file):
    rng = np.random.default_rng(0)
    data = read(npz_file(x=rng.normal(size=2000), y=rng.normal(50, 12, 2000)))
    assert data.baselines["mean_mse"] == pytest.approx(1, abs=0.25)


def test_batches_for_evaluation_walk_over_all_rows_once(npz_file):
    data = read(npz_file(x=np.zeros(50), y=np.arange(50)))
    walked = [target for _, target in data.train.batches(np.arange(45), 8)]
    assert [len(target) for target in walked] == [8, 8, 8, 8, 8, 5]
    assert np.array_equal(np.concatenate(walked), data.train.batch(np.arange(45))[1])


def test_a_rank_without_samples_gets_an_empty_batch(npz_file):
    data = read(npz_file(x=np.zeros((50, 3)), y=np.arange(50)))
    x, target = data.train.batch(np.array([], np.int64))
    assert (x.shape, target.shape) == ((0, 3), (0,))


# ---- what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3,4,5\n", "line 3 has 3 cells, but line 1 has 2"),
        ("1,2\n3\n", "line 2 has 1 cells, but line 1 has 2"),
        ("width,b\n1,2\nwide,4\n", r"line 3, column 1 \(width\): 'wide' is not a number"),
        ("1,2\n3,?\n", r"line 2, column 2: '\?' is not a number"),
        ("1,2\n\n3,\n", "line 3, column 2: the cell is empty"),
        ("1,2\n2024_05,3\n", "line 2, column 1: '2024_05' is not a number"),
        ("id,2019\n1,2\n", "line 1, column 1: 'id' is not a number.*a first line holds column names only when"),
        ("a,b\n1,2\n3,nan\n", r"line 3, column 2 \(b\): is nan, not a finite number"),
        ("1,2\n-inf,4\n", "line 2, column 1: is -inf, not a finite number"),
        ("1,2\n1e999,4\n", "line 2, column 1: is inf, not a finite number"),
        ("a;b\n1;2\n", "line 2, column 1 .*commas separate cells"),
        ("1\n2\n3\n", "one column only"),
        ("a,b\n", "no rows of data"),
        ("\n \n", "no rows of data"),
        ("a,b\n1,2\n", "one row of data"),
        ('1,2\n"3,4\n', "not well-formed CSV"),
        (b"1,2\n\xff\xfe,4\n", "not UTF-8 text"),
        ("1,5\n2,5\n", "every row is of class 5"),
    ],
)
def test_a_csv_that_is_no_table_of_numbers_is_refused_with_place_and_reason(csv_file, content, message):
    with pytest.raises(DataError, match=rf"table\.csv: (.|\n)*{message}"):
        read(csv_file(content))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.arange(5.0), r"shape \(5,\); a table has two dimensions and at least two columns"),
        (np.array(3.0), r"shape \(\); a table has two dimensions"),
        (np.zeros((5, 1)), r"shape \(5, 1\); a table has two dimensions and at least two columns"),
        (np.zeros((4, 4, 4)), r"shape \(4, 4, 4\); a table has two dimensions"),
        (np.zeros((0, 3)), "no rows of data"),
        (np.zeros((1, 3)), "one row of data"),
        (np.array([["a", "b"]] * 3), "of type <U1, not real numbers"),
        (np.zeros((3, 2), complex), "of type complex128, not real numbers"),
        (np.zeros((3, 2), "datetime64[s]"), r"of type datetime64\[s\], not real numbers"),
        (np.zeros((3, 2), [("a", "f4")]), "not real numbers"),
        (np.array([[1.0, 2.0], [3.0, np.nan]]), r"array\[1, 1\] is nan, not a finite number"),
        (np.array([[1.0, 2.0], [-np.inf, 1.0]]), r"array\[1, 0\] is -inf, not a finite number"),
    ],
)
def test_an_npy_that_is_no_table_of_numbers_is_refused(npy_file, values, message):
    with pytest.raises(DataError, match=rf"table\.npy: .*{message}"):
        read(npy_file(values))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "holds no arrays; save x"),
        ({"X": np.zeros((5, 2)), "y": np.zeros(5)}, "holds the arrays X, y; save x"),
        ({"x": np.zeros((5, 2)), "y": np.zeros(4)}, "x has 5 rows and y has 4"),
        ({"x": np.zeros((5, 0)), "y": np.zeros(5)}, "no input columns"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "no rows of data"),
        ({"x": np.zeros((1, 2)), "y": np.zeros(1)}, "one row of data"),
        ({"x": np.array(1.0), "y": np.zeros(1)}, "x is a single number"),
        ({"x": np.zeros((5, 2)), "y": np.array(2)}, "y is a single number"),
        ({"x": np.zeros((3, 2)), "y": np.array(list("abc"))}, "y is of type <U1, not real numbers"),
        ({"x": np.zeros((3, 2)), "y": np.array([1.0, np.nan, 2.0])}, r"y\[1\] is nan"),
        ({"x": np.full((3, 2, 2), np.inf), "y": np.zeros(3)}, r"x\[0, 0, 0\] is inf"),
        ({"x": np.zeros((3, 2)), "y": np.eye(3, dtype=int)}, "the target has 3 columns; a classification needs one"),
        ({"x": np.zeros((3, 2)), "y": np.ones(3, int)}, "every row is of class 1"),
    ],
)
def test_an_npz_without_usable_arrays_is_refused(npz_file, arrays, message):
    with pytest.raises(DataError, match=rf"table\.npz: .*{message}"):
        read(npz_file(**arrays))


def test_fractions_are_no_classes(npz_file):
    with pytest.raises(DataError, match="data row 2: the target 1.5 is no class number"):
        read(npz_file(x=np.zeros(3), y=np.array([1.0, 1.5, 2.0])), task="classification")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a file was unpickled",))


@pytest.mark.parametrize("kind", ["npy", "npz", "x of npz", "pickle"])
def test_nothing_is_ever_unpickled(tmp_path, kind):
    bomb = np.array([[Bomb(), 1]], object)
    path = tmp_path / ("table.npy" if kind in ("npy", "pickle") else "table.npz")
    if kind == "npy":
        np.save(path, bomb, allow_pickle=True)
    elif kind == "npz":
        np.savez(path, a=bomb)
    elif kind == "x of npz":
        np.savez(path, x=bomb, y=np.zeros(1))
    else:
        path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=f"cannot be read as {path.suffix}: .*Python objects, and unpickling those"):
        read(path)


def test_an_npz_entry_that_is_no_array_is_refused(tmp_path):
    path = tmp_path / "table.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"hello")
        archive.writestr("y", b"hello")
    with pytest.raises(DataError, match="table.npz: x is no array"):
        read(path)


def saved(kind: str) -> bytes:
    stream = io.BytesIO()
    x, y = np.arange(24.0).reshape(8, 3), np.arange(8) / 3
    if kind == "npy":
        np.save(stream, x)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(stream, x=x, y=y)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore")  # NumPy warns about some damaged headers before it refuses them
@pytest.mark.parametrize("kind", ["npy", "npz", "npz compressed"])
def test_a_file_cut_off_anywhere_is_refused(tmp_path, kind):
    whole = saved(kind)
    path = tmp_path / f"table.{kind[:3]}"
    for length in range(1, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"table\.np[yz]: cannot be read as"):
            read(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["npy", "npz", "npz compressed"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_harmless_but_never_another_error(tmp_path, kind, place, byte):
    damaged = bytearray(saved(kind))
    damaged[place % len(damaged)] = byte
    path = tmp_path / f"table.{kind[:3]}"
    path.write_bytes(damaged)
    try:
        read(path)
    except DataError as error:
        assert str(path) in str(error)
