"""The array type, and how functions and methods of NumPy are lent to it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

from devicedouble import queue, shared

# Attributes of NumPy's arrays that CuPy's lack.
NOT_IN_CUPY = {"ctypes", "data", "getfield", "resize", "setfield", "setflags", "to_device"}

# What allocates without writing: nothing is queued.
_WRITES_NOTHING = {"empty", "empty_like", "shape", "ndim", "size", "result_type", "promote_types", "can_cast",
                   "broadcast_shapes", "issubdtype", "isscalar", "finfo", "iinfo", "dtype", "may_share_memory",
                   "shares_memory"}

# What usually gives another look at the same memory; nothing is queued unless it had to copy after all.
_VIEWS = {"array_split", "ascontiguousarray", "atleast_1d", "atleast_2d", "broadcast_to", "diagonal", "expand_dims",
          "moveaxis", "ravel", "reshape", "split", "squeeze", "swapaxes", "transpose", "view"}


class ndarray:
    """Device memory that is really `_host`, a NumPy array; never hand `_host` to code under test."""

    __slots__ = ("_host",)
    __hash__ = None

    def __init__(self, host: numpy.ndarray):
        self._host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        queue.check()
        host = self._host.__array_interface__
        return {"version": 3, "strides": None if self._host.flags.c_contiguous else self._host.strides} | {
            key: host[key] for key in ("shape", "typestr", "data")
        }

    def __array__(self, *args: Any, **kwargs: Any) -> numpy.ndarray:
        raise TypeError("Implicit conversion of a device array to a NumPy array is not allowed")

    def __array_function__(self, *args: Any) -> Any:
        raise TypeError("a function of NumPy was given a device array; use that of arrays.namespace(x)")

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return forward(getattr(ufunc, method), ufunc.__name__)(*inputs, **kwargs)

    def get(self, stream: Any = None, order: str = "C", out: numpy.ndarray | None = None, blocking: bool = True):
        """A host copy; into `out` only with the same dtype and shape, contiguous, as in CuPy.

        Not blocking, it is queued; only into pinned memory, since into any other a GPU's copy would block all the same.
        """
        if blocking:
            queue.clear()
        if out is None:
            return self._host.copy(order)
        if out.dtype != self.dtype or out.shape != self.shape or not out.flags.forc:
            raise TypeError(f"get: {self.dtype}{self.shape} into {out.dtype}{out.shape}, or not contiguous")
        if blocking:
            out[...] = self._host
        elif not is_pinned(out):
            raise TypeError("get: a copy that shall not block, into memory that is not pinned")
        else:
            queue.copy_to_host(out, self._host)
        return out

    def set(self, arr: numpy.ndarray, stream: Any = None) -> None:
        """Copy from the host, with the same dtype and shape, into a contiguous array, as in CuPy."""
        if not isinstance(arr, numpy.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"set: {self.dtype}{self.shape} from {type(arr)}")
        if not self._host.flags.forc:
            raise RuntimeError("set: not contiguous")
        queue.mark()
        self._host[...] = arr
        if is_pinned(arr):
            queue.copy_from_host(arr)

    @property
    def device(self) -> Any:
        from devicedouble.cuda import Device

        return Device(0)

    def item(self) -> Any:
        queue.clear()
        return self._host.item()

    def tolist(self) -> Any:
        queue.clear()
        return self._host.tolist()

    def __getitem__(self, key: Any) -> ndarray:
        part = self._host[_unwrap_key(key)]
        if not _is_view(part, self._host):      # gathered, by a queued kernel
            queue.mark()
        return wrap(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_host(value)
        queue.mark()
        values = unwrap(value)
        if isinstance(values, numpy.ndarray) and shared.is_opened(values):
            queue.copy_from_host(values)
        if shared.is_owned(self._host):
            queue.copy_to_host(self._host[_unwrap_key(key)], values)
        else:
            self._host[_unwrap_key(key)] = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in NOT_IN_CUPY:
            raise AttributeError(f"{name!r}: device arrays do not have it")
        value = getattr(self._host, name)
        if not callable(value):
            return wrap(value)
        return forward(value, name, owner=self._host)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._waited())

    def __int__(self) -> int:
        return int(self._waited())

    def __float__(self) -> float:
        return float(self._waited())

    def __repr__(self) -> str:
        return f"devicedouble.{self._waited()!r}"

    def _waited(self) -> numpy.ndarray:
        queue.clear()
        return self._host


class Pinned(bytearray):
    """Host memory that copies go to and come from without waiting."""


def is_pinned(host: Any) -> bool:
    """Whether the memory of a NumPy array is part of a `Pinned`."""
    while isinstance(host, numpy.ndarray):
        host = host.base
    return isinstance(host.obj if isinstance(host, memoryview) else host, Pinned)


def wrap(value: Any) -> Any:
    """NumPy arrays and scalars, also inside tuples and lists, as device arrays; anything else as it is."""
    if isinstance(value, numpy.ndarray):
        return ndarray(value)
    if isinstance(value, numpy.generic):
        return ndarray(numpy.asarray(value))
    if isinstance(value, (tuple, list)) and any(isinstance(part, (numpy.ndarray, numpy.generic)) for part in value):
        return type(value)(map(wrap, value)) if type(value) in (tuple, list) else tuple(map(wrap, value))
    return value


def unwrap(value: Any) -> Any:
    """The inverse of `wrap`, for the double's own use and for tests that look at results."""
    if isinstance(value, ndarray):
        return value._host
    if type(value) in (tuple, list):
        return type(value)(map(unwrap, value))
    return value


def forward(value: Any, name: str, owner: numpy.ndarray | None = None) -> Any:
    """`value` of NumPy for use with device arrays: functions (also in modules) take and give them, the rest stays."""
    if isinstance(value, ModuleType):
        return _Module(value)
    if isinstance(value, type) or not callable(value):
        return value
    return _Function(value, name, owner)


class _Module:
    """A submodule of NumPy (`linalg`) whose functions work on device arrays."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return forward(getattr(self._module, name), name)


class _Function:
    """A function, a ufunc or a bound method of NumPy that takes and gives device arrays, and refuses host arrays."""

    def __init__(self, function: Callable, name: str, owner: numpy.ndarray | None):
        self._function, self._name, self._owner = function, name, owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_host([*args, *kwargs.values()])
        args = unwrap(args)
        result = self._function(*args, **{key: unwrap(value) for key, value in kwargs.items()})
        of = args[0] if self._owner is None and args else self._owner
        if self._name not in _WRITES_NOTHING and not (self._name in _VIEWS and _is_view(result, of)):
            queue.mark()
        return wrap(result)

    def __getattr__(self, name: str) -> Any:    # add.at, add.reduce, maximum.accumulate
        return forward(getattr(self._function, name), name)


def _is_view(result: Any, of: Any) -> bool:
    """Whether `result`, an array or a list of arrays, is nothing but another look at the memory of `of`."""
    parts = result if isinstance(result, (list, tuple)) else [result]
    return all(part.size == 0 or numpy.may_share_memory(part, of) for part in parts)


def _refuse_host(value: Any) -> None:
    if isinstance(value, numpy.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>: host and device arrays do not mix")
    if type(value) in (tuple, list):
        for part in value:
            _refuse_host(part)


def _unwrap_key(key: Any) -> Any:
    """An index: device arrays in it are read (CuPy does it on the device), host arrays are allowed, as in CuPy."""
    return tuple(map(unwrap, key)) if isinstance(key, tuple) else unwrap(key)


def _binary(function: Callable, *, swapped: bool = False) -> Callable:
    def method(self: ndarray, other: Any) -> Any:
        _refuse_host(other)
        if not isinstance(other, (ndarray, numpy.generic, int, float, complex)):
            return NotImplemented
        queue.mark()
        left, right = (unwrap(other), self._host) if swapped else (self._host, unwrap(other))
        return wrap(function(left, right))
    return method


def _in_place(function: Callable) -> Callable:
    def method(self: ndarray, other: Any) -> ndarray:
        _refuse_host(other)
        queue.mark()
        function(self._host, unwrap(other))     # the array's own in-place operator: writes into it, or raises
        return self
    return method


def _unary(function: Callable) -> Callable:
    def method(self: ndarray) -> ndarray:
        queue.mark()
        return wrap(function(self._host))
    return method


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
):
    _plain = getattr(operator, f"__{_name}__")
    setattr(ndarray, f"__{_name}__", _binary(_plain))
    setattr(ndarray, f"__r{_name}__", _binary(_plain, swapped=True))
    setattr(ndarray, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(ndarray, f"__{_name}__", _binary(getattr(operator, f"__{_name}__")))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(ndarray, f"__{_name}__", _unary(getattr(operator, f"__{_name}__")))
