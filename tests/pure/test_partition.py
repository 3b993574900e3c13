"""Cutting a list of arrays into ceil-sized chunks and putting it together again, without MPI."""

from __future__ import annotations

import math
import subprocess
import sys

import devicedouble
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.arrays import is_device, to_host
from hpczero.errors import ConfigError
from hpczero.optim import AdamW
from hpczero.zero.layout import formula_bytes, in_buckets
from hpczero.zero.partition import (
    GradientBuffer,
    ParameterGroup,
    ParameterPartition,
    ZeroState,
    gather_partitions,
    memory_reduction_ratio,
    model_states_of_rank,
    parameter_groups,
    partition_gradients,
    partition_optimizer_states,
    partition_parameters,
    validate_stage,
    validate_world_size,
)

SHAPES = [(), (0,), (0, 4), (1,), (5,), (3, 4), (2, 3, 2)]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64, np.uint8]
WORLD_SIZES = [1, 2, 3, 5, 16]


def counting(shape, dtype=np.float32, start=1):
    """An array in which every element is another number."""
    return np.arange(start, start + math.prod(shape)).astype(dtype).reshape(shape)


def identical(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("partition", [partition_parameters, partition_gradients, partition_optimizer_states])
def test_chunks_have_the_size_rounded_up_and_the_last_ones_are_shorter_or_empty(partition):
    seven, five = np.arange(7.0), np.arange(5)
    assert [[chunk.tolist() for chunk in chunks] for chunks in partition([seven, five], 4)] == [
        [[0.0, 1.0], [0, 1]],
        [[2.0, 3.0], [2, 3]],
        [[4.0, 5.0], [4]],
        [[6.0], []],
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_gives_back_shapes_dtypes_and_bits(world_size, dtype):
    arrays = [counting(shape, dtype) for shape in SHAPES]
    partitions = partition_parameters(arrays, world_size)
    assert len(partitions) == world_size
    for likes in (arrays, SHAPES):
        whole = gather_partitions(partitions, likes)
        assert all(identical(back, array) for back, array in zip(whole, arrays, strict=True))


@given(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=5), st.integers(1, 70))
def test_every_element_is_in_exactly_one_chunk_and_no_chunk_exceeds_the_first(shapes, world_size):
    arrays = [counting(shape, np.int64) for shape in shapes]
    partitions = partition_parameters(arrays, world_size)
    for i, array in enumerate(arrays):
        sizes = [chunks[i].size for chunks in partitions]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == math.ceil(array.size / world_size)
        assert np.concatenate([chunks[i] for chunks in partitions]).tolist() == array.reshape(-1).tolist()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_empty_list_is_cut_into_empty_lists_and_gathered_to_an_empty_list(world_size):
    assert partition_gradients([], world_size) == [[]] * world_size
    assert gather_partitions([[]] * world_size, []) == []


def test_arrays_of_several_dtypes_keep_their_own():
    arrays = [counting((3,), np.float16), counting((2, 2), np.float64), counting((), np.uint8)]
    assert [[chunk.dtype for chunk in chunks] for chunks in partition_optimizer_states(arrays, 3)] == [
        [np.float16, np.float64, np.uint8]
    ] * 3


def test_strided_and_read_only_arrays_are_cut_in_the_order_of_their_elements():
    transposed = counting((3, 4)).T
    transposed.flags.writeable = False
    partitions = partition_parameters([transposed], 5)
    assert partitions[0][0].tolist() == [1, 5, 9]
    assert identical(gather_partitions(partitions, [transposed])[0], transposed)


def test_a_chunk_does_not_keep_the_whole_array_alive():
    array = counting((64,))
    for chunks in partition_parameters([array], 1):
        assert chunks[0].base is None
        assert not np.shares_memory(chunks[0], array)


def test_gathered_arrays_are_new():
    chunks = [counting((4,))]
    assert not np.shares_memory(gather_partitions([chunks], [(2, 2)])[0], chunks[0])


@pytest.mark.parametrize(
    ("partitions", "likes", "words"),
    [
        ([[np.zeros(2)], [np.zeros(2)]], [(3,)], ["array 0", "rank 1", "(1,)", "(2,)"]),
        ([[np.zeros((1, 2))], [np.zeros(1)]], [(3,)], ["rank 0", "(2,)", "(1, 2)"]),
        ([[np.zeros(2)], []], [(3,)], ["rank 1 has 0 chunks", "1 arrays"]),
        ([[np.zeros(2)], [np.zeros(1, np.float32)]], [(3,)], ["array 0", "float64", "float32"]),
        ([[np.zeros(2)], [np.zeros(1)]], [3], ["shape such as", "not 3"]),
        ([[np.zeros(2)], [np.zeros(1)]], [(-3,)], ["shape such as", "(-3,)"]),
        ([], [], ["world_size", "at least 1", "0"]),
    ],
)
def test_chunks_that_do_not_fit_are_refused_by_name(partitions, likes, words):
    with pytest.raises(ConfigError) as caught:
        gather_partitions(partitions, likes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_arrays_on_a_device_are_cut_and_gathered_there(world_size):
    arrays = [counting(shape) for shape in SHAPES]
    partitions = partition_parameters([devicedouble.asarray(array) for array in arrays], world_size)
    assert all(is_device(chunk) for chunks in partitions for chunk in chunks)
    whole = gather_partitions(partitions, SHAPES)
    assert all(is_device(back) for back in whole)
    assert all(identical(to_host(back), array) for back, array in zip(whole, arrays, strict=True))


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match="list"):
        partition_parameters([[1.0, 2.0]], 2)


def test_valid_stages_and_world_sizes_come_back_as_python_ints():
    assert [validate_stage(stage) for stage in range(4)] == [0, 1, 2, 3]
    assert [validate_world_size(size) for size in (1, 2, 4096)] == [1, 2, 4096]
    assert type(validate_stage(np.int64(2))) is int
    assert type(validate_world_size(np.uint8(2))) is int


@pytest.mark.parametrize("stage", [-1, 4, True, False, np.True_, 1.0, np.float32(2), "2", "two", None, [1]])
def test_other_stages_are_refused_with_what_is_allowed(stage):
    with pytest.raises(ConfigError, match="stage must be 0, 1, 2 or 3, not"):
        validate_stage(stage)


def test_a_stage_out_of_range_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="not 7; the nearest is 3"):
        validate_stage(7)
    with pytest.raises(ConfigError, match="not -2; the nearest is 0"):
        validate_stage(-2)


@pytest.mark.parametrize("world_size", [0, -1, True, np.True_, 2.0, "4", None])
def test_other_world_sizes_are_refused_with_what_is_allowed(world_size):
    for refuse in (
        validate_world_size,
        lambda size: partition_parameters([np.zeros(3)], size),
        lambda size: memory_reduction_ratio(1, size),
    ):
        with pytest.raises(ConfigError, match="world_size must be an integer of at least 1, not"):
            refuse(world_size)


@pytest.mark.parametrize("stage", range(4))
def test_a_world_of_one_saves_nothing(stage):
    assert memory_reduction_ratio(stage, 1) == 0.0


@pytest.mark.parametrize("world_size", [2, 3, 4, 64, 4096])
def test_the_memory_reduction_ratio_follows_the_table_of_model_state_bytes(world_size):
    n, p = 12 * world_size, world_size      # bytes a rank holds of n parameters: the formulas for AdamW in fp32
    held = [16 * n, 8 * n + 8 * n / p, 4 * n + 12 * n / p, 16 * n / p]
    for stage in range(4):
        assert memory_reduction_ratio(stage, world_size) == pytest.approx(1 - held[stage] / held[0], rel=1e-15, abs=0)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_the_memory_reduction_ratio_agrees_with_the_formula_of_the_layout(stage, world_size):
    layout = in_buckets({"weight": (1000, 10), "bias": (7,)}, world_size, bucket_elements=4096)

    def model_state_bytes(stage):
        held = formula_bytes(
            layout, stage=stage, itemsize=4, num_states=len(AdamW().state_names), ranks_per_node=world_size, num_nodes=1,
            shared=False,
        )
        return sum(num_bytes for purpose, num_bytes in held.items() if purpose != "buffers")

    saved = 1 - model_state_bytes(stage) / model_state_bytes(0)
    assert memory_reduction_ratio(stage, world_size) == pytest.approx(saved, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_rank_holds_as_many_bytes_as_the_memory_reduction_ratio_says(stage, world_size):
    parameters = [counting((world_size, 4)), counting((3 * world_size,))]
    gradients, states = [p + 1 for p in parameters], [p + k for k in (2, 3) for p in parameters]
    whole = sum(array.nbytes for array in parameters + gradients + states)
    for rank in range(world_size):
        held = model_states_of_rank(ZeroState(stage, world_size, rank), parameters, gradients, states)
        num_bytes = sum(array.nbytes for arrays in held.values() for array in arrays)
        assert num_bytes == round(whole * (1 - memory_reduction_ratio(stage, world_size)))


@pytest.mark.parametrize("stage", range(4))
def test_each_stage_shards_one_purpose_more_and_leaves_the_rest_alone(stage):
    purposes = ("optimizer_states", "gradients", "parameters")
    arrays = {purpose: [counting((5,), start=10 * i)] for i, purpose in enumerate(purposes)}
    state = ZeroState(stage, world_size=3, rank=2)
    held = model_states_of_rank(state, **arrays)
    assert set(state.sharded) == set(purposes[:stage])
    for purpose in purposes[:stage]:
        assert held[purpose][0].tolist() == arrays[purpose][0][4:].tolist()
    for purpose in purposes[stage:]:
        assert held[purpose][0] is arrays[purpose][0]


def test_a_zero_state_counts_its_steps_and_cannot_be_changed_in_place():
    state = ZeroState(stage=2, world_size=4, rank=1)
    assert state.advance().advance() == ZeroState(2, 4, 1, step=2)
    assert state.step == 0
    assert state.memory_reduction_ratio == memory_reduction_ratio(2, 4)
    with pytest.raises(AttributeError):
        state.step = 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 2, 0), "stage must be"),
        ((2, 0, 0), "world_size must be"),
        ((2, 3, 3), "rank must be an integer from 0 to 2, since world_size is 3, not 3"),
        ((2, 3, -1), "rank must be"),
        ((2, 3, True), "rank must be"),
        ((2, 3, 0, -1), "step must be"),
        ((2, 3, 0, 1.0), "step must be"),
    ],
)
def test_a_zero_state_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        ZeroState(*arguments)


def test_a_partition_takes_the_same_chunk_as_the_list_function():
    array = counting((3, 5))
    for world_size in WORLD_SIZES:
        for rank, (chunk,) in enumerate(partition_parameters([array], world_size)):
            part = ParameterPartition.of((3, 5), world_size, rank, name="weight")
            assert identical(part.take(array), chunk)
            assert part.size == part.stop - part.start == chunk.size


def test_a_partition_refuses_an_array_of_another_shape():
    with pytest.raises(ConfigError, match='"weight".*\\(5, 3\\).*\\(3, 5\\)'):
        ParameterPartition.of((3, 5), 2, 0, name="weight").take(np.zeros((5, 3)))


def test_a_partition_for_4096_ranks_needs_no_data():
    group = ParameterGroup("big", ("weight",), ((1 << 20, 1 << 20),), np.dtype(np.float32))
    (last,) = group.partition(4096, 4095)
    assert (last.start, last.stop) == ((1 << 40) - (1 << 28), 1 << 40)


def test_groups_are_by_dtype_in_order_of_first_appearance():
    arrays = [counting((2,)), counting((), np.float16), counting((0, 4))]
    by_place = parameter_groups(arrays)
    assert [(group.name, group.names, group.shapes) for group in by_place] == [
        ("float32", ("0", "2"), ((2,), (0, 4))),
        ("float16", ("1",), ((),)),
    ]
    assert [group.names for group in parameter_groups(arrays, ["a", "b", "c"])] == [("a", "c"), ("b",)]
    assert parameter_groups([]) == ()


def test_a_group_refuses_names_that_do_not_match_its_arrays():
    with pytest.raises(ConfigError, match="1 names for 2 arrays"):
        parameter_groups([np.zeros(1), np.zeros(1)], ["a"])
    with pytest.raises(ConfigError, match='2 arrays are called "a"'):
        parameter_groups([np.zeros(1), np.zeros(1)], ["a", "a"])
    with pytest.raises(ConfigError, match="1 names for 2 shapes"):
        ParameterGroup("g", ("a",), ((1,), (1,)), np.dtype(np.float32))


def test_row_r_of_the_buffer_holds_chunk_r_of_every_array_and_zeros_behind_it():
    arrays = [counting((7,), np.int64), counting((4,), np.int64, start=11)]
    (group,) = parameter_groups(arrays, ["a", "b"])
    buffer = GradientBuffer.zeros(group, world_size=3)
    for name, array in zip(group.names, arrays, strict=True):
        buffer.write(name, array)
    assert buffer.flat.tolist() == [1, 2, 3, 11, 12] + [4, 5, 6, 13, 14] + [7, 0, 0, 0, 0]
    assert buffer["b"].tolist() == [[11, 12], [13, 14], [0, 0]]
    assert np.shares_memory(buffer["b"], buffer.flat)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_gives_back_new_arrays_with_what_was_written(world_size, dtype):
    arrays = [counting(shape, dtype) for shape in SHAPES]
    (group,) = parameter_groups(arrays)
    buffer = GradientBuffer.zeros(group, world_size)
    for name, array in zip(group.names, arrays, strict=True):
        buffer.write(name, array)
    assert buffer.flat.size == world_size * sum(math.ceil(array.size / world_size) for array in arrays)
    for name, array in zip(group.names, arrays, strict=True):
        assert identical(buffer.read(name), array)
        assert not np.shares_memory(buffer.read(name), buffer.flat)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_buffer_can_lie_on_a_device(world_size):
    arrays = [counting(shape) for shape in SHAPES]
    (group,) = parameter_groups(arrays)
    buffer = GradientBuffer.zeros(group, world_size, devicedouble)
    for name, array in zip(group.names, arrays, strict=True):
        buffer.write(name, devicedouble.asarray(array))
    assert all(identical(to_host(buffer.read(name)), array) for name, array in zip(group.names, arrays, strict=True))


def test_importing_the_module_starts_no_mpi():
    code = "import sys, hpczero.zero.partition; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
