"""ZeRO on a plain list of arrays: cut it into one part per rank, gather the parts back, count what that saves.

The helpers that users of other ZeRO libraries know, for scripts, teaching and data that `ZeroOptimizer` does not hold.
The optimizers of this package do not use them: they shard whole flat buffers (`layout.py`), while here every array is
cut by itself. Rajbhandari et al., "ZeRO", SC 2020, section 5. An array of n elements over p ranks is cut into chunks of
ceil(n / p) elements; the last chunks are shorter or empty:

    7 elements, 3 ranks    rank 0: 0 1 2    rank 1: 3 4 5    rank 2: 6
    5 elements, 4 ranks    rank 0: 0 1      rank 1: 2 3      rank 2: 4      rank 3: nothing

The first half of the file is pure. The second half communicates: the whole list travels as one flat buffer per dtype,
in which row r holds every array's chunk r. All rows are equally long, the gaps are zeros, so that row r is exactly what
a reduce-scatter leaves on rank r (here the 7 elements above and an array of 4, two columns wide):

    row 0    a0 a1 a2 | b0 b1
    row 1    a3 a4 a5 | b2 b3
    row 2    a6  0  0 |  0  0

Cost: one collective per dtype, (p - 1) / p of the list sent by each rank, one copy of the list in the buffer, and a
comparison of 8 bytes per rank beforehand, so that lists which differ between ranks are an error and not a hang.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpczero.arrays import Array, from_any, namespace
from hpczero.errors import ConfigError, MismatchError, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.topology import Topology

Shape = tuple[int, ...]

# Bytes per element with fp32 AdamW (4 each for parameter, gradient, m and v), and the first stage that shards them.
_MODEL_STATES = {"parameters": (4, 3), "gradients": (4, 2), "optimizer_states": (8, 1)}


# ---- what is allowed -------------------------------------------------------------------------------------------------


def validate_stage(stage: int) -> int:
    """`stage` as an int if it is 0, 1, 2 or 3; bools, floats and strings are refused with a ConfigError."""
    number = _integer("stage", stage, "0, 1, 2 or 3")
    if number not in (0, 1, 2, 3):
        raise ConfigError(f"stage must be 0, 1, 2 or 3, not {number}; the nearest is {min(max(number, 0), 3)}")
    return number


def validate_world_size(world_size: int) -> int:
    """`world_size` as an int if it is at least 1; bools, floats and strings are refused with a ConfigError."""
    number = _integer("world_size", world_size, "an integer of at least 1")
    if number < 1:
        raise ConfigError(f"world_size must be an integer of at least 1, not {number}")
    return number


def _validate_rank(rank: int, world_size: int) -> int:
    allowed = f"an integer from 0 to {world_size - 1}, since world_size is {world_size}"
    number = _integer("rank", rank, allowed)
    if not 0 <= number < world_size:
        raise ConfigError(f"rank must be {allowed}, not {number}")
    return number


def _integer(name: str, value: object, allowed: str) -> int:
    # bool is an int to Python, but a stage of True is a slip; operator.index takes NumPy's integers and refuses 2.0.
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be {allowed}, not {value!r} ({type(value).__name__})") from None


# ---- the values ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterPartition:
    """The chunk of one array that one rank owns: elements `start` to `stop` (exclusive) of the flattened array."""

    name: str
    shape: Shape
    rank: int
    world_size: int
    start: int
    stop: int

    @classmethod
    def of(cls, shape: Shape, world_size: int, rank: int, name: str = "") -> ParameterPartition:
        """The chunk of `rank` when an array of `shape` is cut into `world_size` chunks of equal size, rounded up."""
        world_size = validate_world_size(world_size)
        rank = _validate_rank(rank, world_size)
        total = math.prod(shape)
        chunk = _chunk_size(shape, world_size)
        return cls(name, tuple(shape), rank, world_size, min(rank * chunk, total), min((rank + 1) * chunk, total))

    @property
    def size(self) -> int:
        """Elements in this chunk; the ranks after the end of the array have 0."""
        return self.stop - self.start

    def take(self, array: Array) -> Array:
        """A copy of this chunk of `array`, 1-D, same dtype. A view would keep the whole array alive: nothing saved."""
        if tuple(array.shape) != self.shape:
            raise ConfigError(f'array "{self.name}" has the shape {tuple(array.shape)}, its partition {self.shape}')
        return array.reshape(-1)[self.start : self.stop].copy()


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Arrays of one dtype that travel together: their names and shapes, in order. Holds no data."""

    name: str
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ConfigError(f'group "{self.name}": {len(self.names)} names for {len(self.shapes)} shapes')
        for name, count in Counter(self.names).items():
            if count > 1:
                raise ConfigError(f'group "{self.name}": {count} arrays are called "{name}"; give each its own name')

    def partition(self, world_size: int, rank: int) -> tuple[ParameterPartition, ...]:
        """What `rank` owns of every array of the group, in order."""
        return tuple(
            ParameterPartition.of(shape, world_size, rank, name)
            for name, shape in zip(self.names, self.shapes, strict=True)
        )

    def columns(self, world_size: int) -> dict[str, slice]:
        """Where in a row of the flat buffer each array's chunk stands: a slice as long as the array's first chunk."""
        columns, end = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            start, end = end, end + _chunk_size(shape, world_size)
            columns[name] = slice(start, end)
        return columns


def parameter_groups(arrays: Sequence[Array], names: Sequence[str] | None = None) -> tuple[ParameterGroup, ...]:
    """One group per dtype, named after it, in the order in which the dtypes first appear.

    Without `names` an array is called by its place in the list: "0", "1", ….
    """
    names = [str(place) for place in range(len(arrays))] if names is None else list(names)
    if len(names) != len(arrays):
        raise ConfigError(f"{len(names)} names for {len(arrays)} arrays")
    members: dict[np.dtype, list[tuple[str, Shape]]] = {}
    for name, array in zip(names, arrays, strict=True):
        members.setdefault(np.dtype(array.dtype), []).append((name, tuple(array.shape)))
    return tuple(
        ParameterGroup(dtype.name, tuple(n for n, _ in pairs), tuple(s for _, s in pairs), dtype)
        for dtype, pairs in members.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class GradientBuffer:
    """A whole group in one flat buffer, row r holding every array's chunk r (the picture is at the top of the file).

    `buffer[name]` is a view of shape (world_size, chunk size): row r belongs to rank r. What lies past an array's end
    is padding, zero in a buffer made by `zeros`. Parameters that are gathered use the same buffer.
    """

    group: ParameterGroup
    world_size: int
    flat: Array
    """(world_size * row length,) of the group's dtype."""
    columns: Mapping[str, slice] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self.group.columns(self.world_size))

    @classmethod
    def zeros(cls, group: ParameterGroup, world_size: int, xp: Any = np) -> GradientBuffer:
        """A buffer of zeros, allocated by the array module `xp` (numpy or cupy)."""
        world_size = validate_world_size(world_size)
        row = sum(_chunk_size(shape, world_size) for shape in group.shapes)
        return cls(group, world_size, xp.zeros(world_size * row, dtype=group.dtype))

    def __getitem__(self, name: str) -> Array:
        # The row length is stated because -1 cannot be inferred for a buffer without elements.
        return self.flat.reshape(self.world_size, self.flat.size // self.world_size)[:, self.columns[name]]

    def write(self, name: str, array: Array) -> None:
        """Copy `array` into its chunks; the padding behind it stays as it is."""
        rows, flat = self[name], array.reshape(-1)
        chunk = rows.shape[1]
        full = flat.size // chunk if chunk else 0
        rows[:full] = flat[: full * chunk].reshape(full, chunk)
        if full * chunk < flat.size:
            rows[full, : flat.size - full * chunk] = flat[full * chunk :]

    def read(self, name: str) -> Array:
        """A new array with what `write` put in, in the array's own shape."""
        shape = self.group.shapes[self.group.names.index(name)]
        # The copy first: the reshape of a strided view copies anyway, except when it is whole, and then it must, too.
        return self[name].copy().reshape(-1)[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True, slots=True)
class ZeroState:
    """Where one rank stands: its stage, its place among the ranks, and how many optimizer steps it has made."""

    stage: int
    world_size: int
    rank: int
    step: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", validate_stage(self.stage))
        object.__setattr__(self, "world_size", validate_world_size(self.world_size))
        object.__setattr__(self, "rank", _validate_rank(self.rank, self.world_size))
        object.__setattr__(self, "step", _integer("step", self.step, "an integer of at least 0"))
        if self.step < 0:
            raise ConfigError(f"step must be an integer of at least 0, not {self.step}")

    @property
    def sharded(self) -> tuple[str, ...]:
        """Which of "parameters", "gradients" and "optimizer_states" are cut over the ranks; the rest is replicated."""
        return tuple(purpose for purpose, (_, first) in _MODEL_STATES.items() if self.stage >= first)

    @property
    def memory_reduction_ratio(self) -> float:
        """See `memory_reduction_ratio`."""
        return memory_reduction_ratio(self.stage, self.world_size)

    def advance(self) -> ZeroState:
        """The state after one more optimizer step."""
        return replace(self, step=self.step + 1)


# ---- pure: cut and put together --------------------------------------------------------------------------------------


def memory_reduction_ratio(stage: int, world_size: int) -> float:
    """The part of a rank's model-state bytes that `stage` saves against stage 0, for AdamW in fp32.

    Stage 0 holds 16 bytes per parameter; a sharded purpose keeps 1 / world_size of its own. Stage 1 at 4 ranks: 0.375.
    Always 0.0 for a world of one. Padding, buckets and activations are left out.
    """
    stage, world_size = validate_stage(stage), validate_world_size(world_size)
    sharded = sum(num_bytes for num_bytes, first in _MODEL_STATES.values() if stage >= first)
    return sharded / sum(num_bytes for num_bytes, _ in _MODEL_STATES.values()) * (world_size - 1) / world_size


def partition_parameters(arrays: Sequence[Array], world_size: int) -> list[list[Array]]:
    """Cut every array into `world_size` chunks: `result[rank][i]` is the rank's chunk of `arrays[i]`.

    A chunk is 1-D, a copy, and of the array's dtype. The arrays may be of any shapes and dtypes, on the host or on a
    device. No communication: one rank alone can call it, and so can a program without MPI. Who only wants one rank's
    chunks takes them with `ParameterPartition.of(shape, world_size, rank).take(array)`.
    """
    world_size = validate_world_size(world_size)
    flats = [from_any(array).reshape(-1) for array in arrays]       # strided arrays are packed here, once for all ranks
    return [
        [ParameterPartition.of(flat.shape, world_size, rank, str(i)).take(flat) for i, flat in enumerate(flats)]
        for rank in range(world_size)
    ]


def partition_gradients(grads: Sequence[Array], world_size: int) -> list[list[Array]]:
    """`partition_parameters` for gradients. They are cut as they are, not reduced: see `reduce_scatter_gradients`."""
    return partition_parameters(grads, world_size)


def partition_optimizer_states(states: Sequence[Array], world_size: int) -> list[list[Array]]:
    """`partition_parameters` for optimizer states, such as all m followed by all v of AdamW.

    A state of its parameter's shape is cut at the same places as the parameter, so a rank can update its chunks alone.
    """
    return partition_parameters(states, world_size)


def gather_partitions(partitions: Sequence[Sequence[Array]], likes: Sequence[Array | Shape]) -> list[Array]:
    """Put together what a `partition_…` function cut: `partitions[rank][i]` is rank's chunk of array i.

    `likes` gives the shape of every array: an array (only its shape is read) or a tuple. The dtype is that of the
    chunks. Raises ConfigError where a chunk does not fit, naming it.
    """
    world_size = validate_world_size(len(partitions))
    shapes = [_shape_of(like) for like in likes]
    pieces = [_checked_chunks(chunks, shapes, world_size, rank) for rank, chunks in enumerate(partitions)]
    whole = []
    for i, shape in enumerate(shapes):
        column = [chunks[i] for chunks in pieces]
        dtypes = list(dict.fromkeys(str(chunk.dtype) for chunk in column))
        if len(dtypes) > 1:
            raise ConfigError(f"array {i}: its chunks are of {len(dtypes)} dtypes, {', '.join(dtypes)}")
        whole.append(namespace(column[0]).concatenate(column).reshape(shape))
    return whole


def model_states_of_rank(
    state: ZeroState, parameters: Sequence[Array], gradients: Sequence[Array], optimizer_states: Sequence[Array]
) -> dict[str, list[Array]]:
    """What the rank of `state` keeps at its stage: its chunks of what is sharded, and the rest as it was passed.

    Returns the lists under "parameters", "gradients" and "optimizer_states". Pure.
    """
    held = {"parameters": parameters, "gradients": gradients, "optimizer_states": optimizer_states}
    return {
        purpose: _chunks_of_rank(arrays, state) if purpose in state.sharded else list(arrays)
        for purpose, arrays in held.items()
    }


def _chunks_of_rank(arrays: Sequence[Array], state: ZeroState) -> list[Array]:
    taken = []
    for i, array in enumerate(arrays):
        array = from_any(array)
        taken.append(ParameterPartition.of(array.shape, state.world_size, state.rank, str(i)).take(array))
    return taken


def _chunk_size(shape: Shape, world_size: int) -> int:
    return -(-math.prod(shape) // world_size)


def _shape_of(like: Array | Shape) -> Shape:
    try:
        shape = tuple(operator.index(extent) for extent in getattr(like, "shape", like))
    except TypeError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise ConfigError(f"expected an array or a shape such as (2, 3), not {like!r}")
    return shape


def _checked_chunks(chunks: Sequence[Array], shapes: Sequence[Shape], world_size: int, rank: int) -> list[Array]:
    """The chunks as arrays, after a look whether `rank` has one of the right size for every shape."""
    if len(chunks) != len(shapes):
        raise ConfigError(f"rank {rank} has {len(chunks)} chunks, but there are {len(shapes)} arrays to gather")
    chunks = [from_any(chunk) for chunk in chunks]
    for i, (chunk, shape) in enumerate(zip(chunks, shapes, strict=True)):
        expected = ParameterPartition.of(shape, world_size, rank).size
        if tuple(chunk.shape) != (expected,):
            raise ConfigError(
                f"array {i} of shape {shape} over {world_size} ranks: "
                f"the chunk of rank {rank} has the shape ({expected},), not {tuple(chunk.shape)}"
            )
    return chunks


# ---- over a communicator ---------------------------------------------------------------------------------------------


def reduce_scatter_gradients(grads: Sequence[Array], comm: MPI.Comm | Topology, op: str = "mean") -> list[Array]:
    """Add up the gradients of all ranks, array by array, and return this rank's chunks of the result.

    Called by every rank of `comm`, each with its own gradients of the same shapes and dtypes in the same order.

    Parameters
    ----------
    grads : list of arrays of any shape; NumPy, CuPy, or what `arrays.from_any` can view
        Read only. All on the host, or all on a device.
    comm : MPI.Comm or Topology
        A communicator is split into nodes and freed again on every call: in a loop make one `Topology` and pass that.
    op : {"mean", "sum"}

    Returns
    -------
    list of 1-D arrays
        Chunk r of every array on rank r, as `partition_gradients` would cut it; views of one buffer that holds no more.

    Raises
    ------
    MismatchError, ConfigError
        The lists or `op` differ between ranks; something cannot be used. Raised on every rank, naming the odd one.
    """
    from hpczero.collectives.api import reduce_scatter

    with _topology(comm) as topology:
        arrays, groups, _ = _agree(topology, "reduce_scatter_gradients", lambda: _described_gradients(grads, op))
        chunks: dict[str, Array] = {}
        for group in groups:
            buffer = GradientBuffer.zeros(group, topology.size, namespace(arrays[0]))
            for name in group.names:
                buffer.write(name, arrays[int(name)])
            # Copied, since the row comes back as a view of the buffer and would keep all of it alive.
            row = reduce_scatter(buffer.flat, topology, op=op, order="canonical").copy()
            for part in group.partition(topology.size, topology.rank):
                start = buffer.columns[part.name].start
                chunks[part.name] = row[start : start + part.size]
    return [chunks[str(i)] for i in range(len(arrays))]


def all_gather_gradients(
    chunks: Sequence[Array], likes: Sequence[Array | Shape], comm: MPI.Comm | Topology
) -> list[Array]:
    """Gather everybody's chunks of the gradients: each rank gets all of them, whole.

    Called by every rank of `comm` with its own chunks, as `reduce_scatter_gradients` or `partition_gradients` gives
    them, and with the same `likes`. Every rank returns the same new arrays, of the chunks' dtypes.

    Parameters
    ----------
    chunks : list of 1-D arrays
        This rank's chunk of every array. Read only. All on the host, or all on a device.
    likes : list of arrays or shapes
        The shape of every whole array; of an array only the shape is read.
    comm : MPI.Comm or Topology
        A communicator is split into nodes and freed again on every call: in a loop make one `Topology` and pass that.

    Raises
    ------
    MismatchError, ConfigError
        Shapes or dtypes differ between ranks; a chunk has the wrong size. Raised on every rank, naming the odd one.
    """
    return _gather("all_gather_gradients", chunks, likes, comm)


def gather_parameters(
    chunks: Sequence[Array], likes: Sequence[Array | Shape], comm: MPI.Comm | Topology
) -> list[Array]:
    """Gather everybody's chunks of the parameters, after each rank has updated its own; as `all_gather_gradients`."""
    return _gather("gather_parameters", chunks, likes, comm)


def _gather(
    caller: str, chunks: Sequence[Array], likes: Sequence[Array | Shape], comm: MPI.Comm | Topology
) -> list[Array]:
    from hpczero.collectives.api import all_gather

    with _topology(comm) as topology:
        chunks, groups, _ = _agree(topology, caller, lambda: _described_chunks(chunks, likes, topology))
        whole: dict[str, Array] = {}
        for group in groups:
            buffer = GradientBuffer.zeros(group, topology.size, namespace(chunks[0]))
            for name in group.names:
                chunk = chunks[int(name)]
                buffer[name][topology.rank, : chunk.size] = chunk
            all_gather(buffer.flat, topology)       # in place: every rank has filled its own row
            for name in group.names:
                whole[name] = buffer.read(name)
    return [whole[str(i)] for i in range(len(chunks))]


@contextmanager
def _topology(comm: MPI.Comm | Topology) -> Iterator[Topology]:
    """The caller's topology as it is, or one for this call alone."""
    from hpczero.topology import as_topology

    topology, made_here = as_topology(comm)
    yield topology
    if made_here:       # not after an error: other ranks may never come to the collective close
        topology.close()


class _Local(NamedTuple):
    """What one rank brings to a collective, and the lines in which the ranks must agree about it."""

    arrays: list[Array]
    groups: tuple[ParameterGroup, ...]
    lines: tuple[str, ...]


def _described_gradients(grads: Sequence[Array], op: str) -> _Local:
    if op not in ("mean", "sum"):
        raise ConfigError(f'op must be "mean" or "sum", not {op!r}')
    arrays = [from_any(grad) for grad in grads]
    _require_one_kind(arrays)
    return _Local(arrays, parameter_groups(arrays), (f"op {op}", *_lines([a.shape for a in arrays], arrays)))


def _described_chunks(chunks: Sequence[Array], likes: Sequence[Array | Shape], topology: Topology) -> _Local:
    shapes = [_shape_of(like) for like in likes]
    chunks = _checked_chunks(chunks, shapes, topology.size, topology.rank)
    _require_one_kind(chunks)
    # Grouped by the chunks' dtypes, with the whole arrays' shapes.
    groups = tuple(
        replace(group, shapes=tuple(shapes[int(name)] for name in group.names)) for group in parameter_groups(chunks)
    )
    return _Local(chunks, groups, _lines(shapes, chunks))


def _lines(shapes: Sequence[Shape], arrays: Sequence[Array]) -> tuple[str, ...]:
    described = (f"array {i}: {array.dtype} {tuple(shape)}" for i, (shape, array) in enumerate(zip(shapes, arrays)))
    return (f"{len(arrays)} arrays", *described)


def _require_one_kind(arrays: Sequence[Array]) -> None:
    kinds = sorted({namespace(array).__name__ for array in arrays})
    if len(kinds) > 1:
        raise ConfigError(f"the arrays are of {' and '.join(kinds)}; pass them all from the host or all from a device")


def _agree(topology: Topology, caller: str, describe: Callable[[], _Local]) -> _Local:
    """Look at the local arguments, and make sure that all ranks saw the same, before anybody enters a collective.

    With different dtypes the number of collectives would differ, and the ranks would wait for each other for ever; with
    two shapes swapped the sizes would agree and the result would be wrong. Costs 8 bytes per rank when all is well.
    """
    from hpczero.collectives.transport import Transport

    error, local = None, _Local([], (), ())
    try:
        local = describe()
    except Exception as wrong:      # noqa: BLE001 - whatever it is, it becomes an error of all ranks below
        error = wrong
    lines = (caller, *local.lines)
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    mine = np.array([-1 if error else int.from_bytes(digest, "little") >> 1], dtype=np.int64)
    digests = Transport.of(topology).all_gather_small(mine, caller)
    if (digests == -1).any():
        raise_together(topology.world, error)
    if (digests != digests[0]).any():
        raise_together(topology.world, _difference(topology.rank, topology.world.allgather(lines)))
    return local


def _difference(rank: int, lines: Sequence[tuple[str, ...]]) -> MismatchError | None:
    """What sets `rank` apart from most ranks; None if it is one of them. Of two equal camps, rank 0's is right."""
    common, votes = Counter(lines).most_common(1)[0]
    if lines[rank] == common:
        return None
    here, there = next((h, t) for h, t in zip(lines[rank], common, strict=False) if h != t)
    return MismatchError(f"{lines[rank][0]}: {here} here, {there} on {votes} of {len(lines)} ranks")
