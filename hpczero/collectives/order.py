"""The order in which contributions are added, as a tree of ranks.

Floating-point addition is not associative, so "the sum over all ranks" names a result only together with an order. The
canonical order depends on the topology alone: a binary tree over the ranks of each node, whose left part is the largest
power of two that is smaller than the number of ranks, then the same tree over the nodes. Five ranks on one node:

    ((0 + 1) + (2 + 3)) + 4

A `Tree` is a rank, or a pair of trees. `program` flattens one for the reduction kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Tree = int | tuple["Tree", "Tree"]

MERGE, LOAD1, LOAD2, LOAD3, LOAD4 = range(5)
"""Instructions of a fold program: add the two topmost partial sums, or push the sum of one to four rows."""


def balanced(parts: Sequence[Tree]) -> Tree:
    """The canonical tree over `parts`, in their order."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return balanced(parts[:left]), balanced(parts[left:])


def canonical(nodes: Sequence[Sequence[int]]) -> Tree:
    """The tree over the ranks of every node, then over the nodes: `nodes` holds the ranks of each."""
    return balanced([balanced(list(ranks)) for ranks in nodes])


def leaves(tree: Tree) -> Iterator[int]:
    """The ranks of a tree from left to right."""
    if isinstance(tree, int):
        yield tree
    else:
        for part in tree:
            yield from leaves(part)


def program(tree: Tree, row_of: dict[int, int], widest: int = 4) -> np.ndarray:
    """(num_instructions, 5) int64: the tree as instructions for a stack machine over rows; see `kernels.reduce.fold`.

    Each instruction is a code and up to four row numbers. Subtrees of up to four leaves in canonical form become one
    instruction, since reading four rows in one pass is what makes the kernel run at memory speed; `widest=1` keeps to
    single rows, for operations other than the sum.
    """
    instructions: list[list[int]] = []

    def emit(part: Tree) -> None:
        code = _LOADS.get(_shape(part), 5)
        if code <= widest:
            rows = [row_of[rank] for rank in leaves(part)]
            instructions.append([code, *rows, *[0] * (4 - len(rows))])
        else:
            emit(part[0])
            emit(part[1])
            instructions.append([MERGE, 0, 0, 0, 0])

    emit(tree)
    return np.array(instructions, dtype=np.int64)


def depth(instructions: np.ndarray) -> int:
    """How many partial sums a program holds at once."""
    held = most = 0
    for code in instructions[:, 0]:
        held += -1 if code == MERGE else 1
        most = max(most, held)
    return most


def _shape(tree: Tree) -> str:
    return "." if isinstance(tree, int) else f"({_shape(tree[0])}{_shape(tree[1])})"


_LOADS = {".": LOAD1, "(..)": LOAD2, "((..).)": LOAD3, "((..)(..))": LOAD4}
