"""Tables of numbers for the MLP: `.csv`, `.npy` and `.npz`, one sample per row.

- Target: the last column; in an `.npz` with arrays `x` and `y` it is `y`. An `.npz` with one array is read like an
  `.npy`. Inputs of more than two dimensions (images) are flattened to one row per sample.
- Task: an integer target means classification, any other regression, unless the caller says otherwise. In a `.csv` a
  target column is integer when all its cells are written so (`3`, not `3.0`). The c-th smallest label is class c.
- Header of a `.csv`: the first line is one when none of its cells is a number. Cells are separated by commas.
- Split: rows are often sorted (by class, by day), so the held-out ones are a random choice, the same in every run.
- Standardisation: every input column, and every regression target, is shifted and scaled to mean 0 and standard
  deviation 1 of the *training* rows; a column that is constant there becomes 0 in them. Stored as float32.

Nothing is ever unpickled: a pickle runs the code it holds. Reading a `.csv` takes about 0.8 s per million cells (save
larger tables as `.npy`) and eight bytes of memory per cell.
"""

from __future__ import annotations

import csv
import math
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpczero.data.sampling import epoch_order
from hpczero.errors import DataError

SUFFIXES = (".csv", ".npy", ".npz")

_WHOLE = re.compile(r"\s*[+-]?\d{1,15}\s*")  # 15 digits: what float64 certainly holds exactly


@dataclass(frozen=True)
class Table:
    """A table as it was read: x (n, f) float64; y (n,) int64 classes if `num_classes`, else (n, k) float64."""

    source: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int


class Rows:
    """Rows of a split table: x (n, f) float32, target (n, k) float32 or, for classes, (n,) int64."""

    def __init__(self, x: np.ndarray, target: np.ndarray) -> None:
        self.x, self.target = x, target

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the rows `indices` ((k,) integers) of x and of the target."""
        indices = np.asarray(indices, np.int64)
        return self.x[indices], self.target[indices]

    def batches(self, indices: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows `indices` in batches of at most `size`."""
        for start in range(0, len(indices), size):
            yield self.batch(indices[start : start + size])


def read(path: str | os.PathLike[str], task: str) -> Table:
    """The table in the file `path`, for `task` "auto", "regression" or "classification"; DataError or OSError."""
    source = os.fspath(path)
    x, y = _read_csv(source) if source.lower().endswith(".csv") else _read_numpy(source)
    if len(x) < 2:
        found = "no rows" if len(x) == 0 else "one row"
        raise DataError(f"{source}: has {found} of data; at least two are needed, one to train on and one to hold out")
    if x.shape[1] == 0:
        raise DataError(f"{source}: has no input columns; each row needs at least one input and a target")
    integer = y.dtype.kind in "iub"
    if task == "classification" or (task == "auto" and integer):
        return Table(source, x, *_classes(source, y))
    return Table(source, x, y.astype(np.float64), 0)


def split(table: Table, validation_fraction: float) -> tuple[Rows, Rows]:
    """Training and held-out rows, standardised.

    round(n * validation_fraction) rows are held out, at least one and never all.
    """
    order = epoch_order(len(table.x), seed=0, epoch=0)
    num_val = min(max(round(len(order) * validation_fraction), 1), len(order) - 1)
    val, train = np.sort(order[:num_val]), np.sort(order[num_val:])  # sorted: rows keep the order of the file
    train_x, val_x = _standardise(table.source, "input", table.x[train], table.x[val])
    if table.num_classes:
        return Rows(train_x, table.y[train]), Rows(val_x, table.y[val])
    train_y, val_y = _standardise(table.source, "target", table.y[train], table.y[val])
    return Rows(train_x, train_y), Rows(val_x, val_y)


def _read_csv(source: str) -> tuple[np.ndarray, np.ndarray]:
    """x (n, f) float64 and y (n, 1), int64 if all its cells are whole numbers, else float64."""
    values, lines = array("d"), array("q")
    names: list[str] = []
    width, first, whole = 0, 0, True
    with open(source, encoding="utf-8-sig", newline="") as file:  # -sig: spreadsheets write a byte order mark
        reader = csv.reader(file, strict=True)
        try:
            for row in reader:
                if len(row) < 2 and not "".join(row).strip():
                    continue
                if not width:
                    width, first = len(row), reader.line_num
                    if not any(_is_number(cell) for cell in row):
                        names = row
                        continue
                if len(row) != width:
                    raise DataError(
                        f"{source}: line {reader.line_num} has {len(row)} cells, but line {first} has {width}; "
                        "every row needs the same columns, separated by commas"
                    )
                try:
                    values.extend(map(_number, row))
                except ValueError:
                    raise _bad_cell(source, row, reader.line_num, names, first) from None
                lines.append(reader.line_num)
                whole = whole and _WHOLE.fullmatch(row[-1]) is not None
        except csv.Error as error:
            raise DataError(f"{source}: line {reader.line_num}: is not well-formed CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{source}: is not UTF-8 text ({error.reason}); save the table as CSV in UTF-8") from error
    if width == 1:
        raise DataError(
            f"{source}: has one column only; each row needs inputs and, last, the target, separated by commas"
        )
    numbers = np.frombuffer(values, np.float64).reshape(len(lines), width) if lines else np.empty((0, max(width, 1)))
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        row, column = bad[0]
        raise DataError(
            f"{source}: line {lines[row]}, {_column(names, column)}: is {numbers[row, column]}, "
            "not a finite number; fill in or remove such rows"
        )
    y = numbers[:, -1:]
    return numbers[:, :-1], y.astype(np.int64) if whole else y


def _number(cell: str) -> float:
    return float(cell.replace("_", "?"))  # Python reads 1_000 as a number, and so would misread the name 2024_05


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _bad_cell(source: str, row: list[str], line: int, names: list[str], first: int) -> DataError:
    column = next(index for index, cell in enumerate(row) if not _is_number(cell))
    cell = row[column].strip()
    found = f"{cell[:40]!r} is not a number" if cell else "the cell is empty"
    hint = "; a first line holds column names only when none of its cells is a number" if line == first else ""
    where = f"{source}: line {line}, {_column(names, column)}"
    return DataError(f"{where}: {found}; every cell must be one, and commas separate cells{hint}")


def _column(names: list[str], column: int) -> str:
    return f"column {column + 1}" + (f" ({names[column].strip()[:40]})" if names else "")


def _read_numpy(source: str) -> tuple[np.ndarray, np.ndarray]:
    """x (n, f) float64 and y (n, k) in its own type, from an `.npy` or `.npz`."""
    arrays = _load(source)
    if arrays.keys() == {"x", "y"}:
        x, y = arrays["x"], arrays["y"]
        for name, values in arrays.items():
            _check_numbers(source, name, values)
            if values.ndim == 0:
                raise DataError(f"{source}: {name} is a single number; it needs one row per sample")
        if len(x) != len(y):
            raise DataError(f"{source}: x has {len(x)} rows and y has {len(y)}; both need one per sample")
        return _flat(x).astype(np.float64), _flat(y)
    ((name, values),) = arrays.items()
    _check_numbers(source, name, values)
    if values.ndim != 2 or values.shape[1] < 2:
        raise DataError(
            f"{source}: {name} has shape {values.shape}; a table has two dimensions and at least two columns, the last "
            "one the target (or save arrays x and y in an .npz)"
        )
    return values[:, :-1].astype(np.float64), values[:, -1:]


def _load(source: str) -> dict[str, np.ndarray]:
    """The arrays that matter: x and y of an `.npz` that has both, else its only one; that of an `.npy` is "array"."""
    with open(source, "rb") as file:  # outside the try: what the system says is no sign of damage
        try:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"array": loaded}
            names = list(loaded.files)
            wanted = ["x", "y"] if {"x", "y"} <= set(names) else names
            arrays = {name: loaded[name] for name in wanted} if len(wanted) == 1 or wanted == ["x", "y"] else {}
        except Exception as error:  # a damaged file makes NumPy, zipfile and zlib raise almost anything
            reason = f"{type(error).__name__}: {str(error)[:200]}; it is damaged or of another format"
            if "pickle" in str(error):  # NumPy's words would advise to trust the file
                reason = "it is of another format, or holds Python objects, and unpickling those can run any code"
            kind = os.path.splitext(source)[1].lower()
            raise DataError(
                f"{source}: cannot be read as {kind}: {reason}; write numeric arrays with numpy.save or numpy.savez"
            ) from error
    if not arrays:
        found = f"the arrays {', '.join(sorted(names)[:8])}" if names else "no arrays"
        raise DataError(
            f"{source}: holds {found}; save x (inputs) and y (targets), or one array whose last column is the target"
        )
    return arrays


def _flat(values: np.ndarray) -> np.ndarray:
    """One row per sample: (n,) becomes (n, 1), and (n, a, b, …) becomes (n, a * b * …)."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _check_numbers(source: str, name: str, values: object) -> None:
    if not isinstance(values, np.ndarray):
        raise DataError(f"{source}: {name} is no array; save x and y with numpy.savez")
    if values.dtype.kind not in "biuf":
        raise DataError(f"{source}: {name} is of type {values.dtype}, not real numbers; save it as float or integer")
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        place = tuple(int(index) for index in bad[0])
        raise DataError(
            f"{source}: {name}[{', '.join(map(str, place))}] is {values[place]}, not a finite number; "
            "fill in or remove such rows"
        )


def _classes(source: str, y: np.ndarray) -> tuple[np.ndarray, int]:
    """Class numbers (n,) int64 from labels (n, 1), and how many classes there are."""
    if y.shape[1] != 1:
        raise DataError(
            f"{source}: the target has {y.shape[1]} columns; a classification needs one class number per row, and a "
            "regression on several targets needs them saved as floating-point numbers"
        )
    y = y[:, 0]
    if y.dtype.kind == "f":
        odd = np.flatnonzero((y != np.floor(y)) | (np.abs(y) >= 2.0**53))
        if odd.size:
            raise DataError(
                f"{source}: data row {odd[0] + 1}: the target {y[odd[0]]} is no class number; write classes as "
                "integers, or train a regression"
            )
    labels, classes = np.unique(y, return_inverse=True)
    if len(labels) < 2:
        raise DataError(f"{source}: every row is of class {labels[0]}; a classification needs at least two classes")
    return classes.astype(np.int64), len(labels)


def _standardise(source: str, what: str, train: np.ndarray, val: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both parts, (n, f) float64, shifted and scaled by mean and standard deviation of `train`, as float32."""
    largest = np.abs(train).max(axis=0)
    unit = np.where(largest > 0, largest, 1.0)  # squares of very large or small values would leave the range of float64
    with np.errstate(all="ignore"):  # what overflows is found below, and named
        train, val = train / unit, val / unit
        mean, scale = train.mean(axis=0), train.std(axis=0)
        # Rounding gives a constant column a tiny deviation, by which held-out values would be blown up.
        constant = train.min(axis=0) == train.max(axis=0)
        mean, scale = np.where(constant, train[0], mean), np.where(constant, 1.0, scale)
        parts = tuple(((part - mean) / scale).astype(np.float32) for part in (train, val))
    for part in parts:
        bad = np.flatnonzero(~np.isfinite(part).all(axis=0))
        if bad.size:
            raise DataError(
                f"{source}: {what} column {bad[0] + 1} cannot be brought to unit scale in float32: its values reach "
                "too far apart or lie too close together; rescale it, or remove outliers"
            )
    return parts
