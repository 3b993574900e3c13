"""Meeting in shared memory: flags that ranks of one node raise and wait for, and the small reduction built on them.

Every rank owns one line of flags, LINE numbers long: the number of the last call it has come to, and the fingerprints of
that call and of the one before. To meet, a rank writes its fingerprint, raises its call number, and waits until all
numbers have come as far; it then compares fingerprints. A line is written by its owner alone, but for the number at ASKED.

The call number is stored with release and read with acquire order: whoever sees the number sees everything its owner
wrote before, on every processor. An ordinary load would be hoisted out of the loop, and on aarch64 seen out of order.

A rank can be one call ahead of another, never two: to end call k + 1 it has seen everyone come to k + 1, and so leave k.
Hence two fingerprints per line, and two sets of rows for `all_reduce`, used in turn.

No wait is endless here: after SPINS looks the kernels return, and are called again, not `fresh` any more. That changes
nothing that others can see. They return the number of ranks that were seen to have come, or -1 - r if rank r has come with
another fingerprint.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from hpczero.kernels import cpu_loop, half, reduce

CALL, ME, SIZE, SPINS = range(4)
"""What a rank keeps between calls: the call it is in, its line, the number of lines, how often to look."""
ASKED = 8
"""Where in a line its owner is asked for, by anybody; on the other half of the line, as nobody looks at it for long."""
LINE = 16
"""int64 numbers per line: 128 bytes, as processors fetch lines of 64 in pairs."""


@intrinsic
def _load_acquire(typing_context, array, index):
    """array[index] of an int64 array, read before whatever is read after it."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(data, [arguments[1]]), "acquire", 8)

    return types.int64(array, index), generate


@intrinsic
def _store_release(typing_context, array, index, value):
    """array[index] = value in an int64 array, written after whatever was written before it."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store_atomic(arguments[2], builder.gep(data, [arguments[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(array, index, value), generate


@cpu_loop()
def meet(flags, state, mark, fresh):
    """Comes to the next call if `fresh`, else looks again whether all have come to this one.

    Parameters
    ----------
    flags : (size * LINE,) int64
        The lines of all ranks of the node.
    state : (4,) int64
        This rank's own: CALL (counted from 1), ME, SIZE, SPINS.
    mark : int
        The fingerprint of what this rank is about to do.
    """
    if fresh:
        state[CALL] += 1
    call, me, size, spins = state[CALL], state[ME], state[SIZE], state[SPINS]
    flags[LINE * me + 1 + (call & 1)] = mark
    _store_release(flags, LINE * me, call)
    for rank in range(size):
        while _load_acquire(flags, LINE * rank) < call:
            spins -= 1
            if spins <= 0:
                return rank
    for rank in range(size):
        if flags[LINE * rank + 1 + (call & 1)] != mark:
            return -1 - rank
    return size


@cpu_loop()
def all_reduce(flat, rows, instructions, stack, op, flags, state, mark, fresh, leaves):
    """`meet`, with `flat` put into this rank's row before if it `leaves` that, and all rows folded into `flat` after.

    `rows` is (2, size, n or more), both sets; `instructions`, `stack` and `op` are those of `reduce.fold`.
    """
    mine = rows[(state[CALL] + (1 if fresh else 0)) & 1]
    if leaves:
        row = mine[state[ME]]
        for i in range(flat.size):
            row[i] = flat[i]
    seen = meet(flags, state, mark, fresh)
    if seen == state[SIZE]:
        reduce.fold(mine, instructions, stack, op, 0, state[ME], flat, flat)
    return seen


@cpu_loop()
def all_reduce_half(flat, rows, instructions, stack, op, kind, flags, state, mark, fresh, leaves):
    """As `all_reduce`, on the bits of half types; see `half.fold`."""
    mine = rows[(state[CALL] + (1 if fresh else 0)) & 1]
    if leaves:
        row = mine[state[ME]]
        for i in range(flat.size):
            row[i] = flat[i]
    seen = meet(flags, state, mark, fresh)
    if seen == state[SIZE]:
        half.fold(mine, instructions, stack, kind, op, 0, state[ME], flat, flat)
    return seen
