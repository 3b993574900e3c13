"""What a collective algorithm is here: the steps one rank takes, as plain values.

An algorithm is a generator of `Step`s over numbered blocks of a vector. It knows ranks and block numbers, never arrays or
communicators, so the same steps can be run over MPI (`transport`), played for all ranks in one process to prove them
(`simulate`), or printed (`draw`).

In one step a rank sends and receives any number of messages at the same time; a message carries any set of blocks to or
from one peer. What arrives overwrites the blocks, is combined into them (`add`), or is kept apart, one row per sender,
until all of it is there and is then combined in a stated order (`fold`): the order in which floating-point numbers are
added is part of the result.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpczero.collectives.order import Tree, leaves


@dataclass(frozen=True, slots=True)
class Message:
    """The blocks that go to, or come from, one peer, in the order of their numbers."""

    peer: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Step:
    """One round as one rank sees it. All messages of a step are in flight together."""

    send: tuple[Message, ...] = ()
    recv: tuple[Message, ...] = ()
    add: bool = False
    """What arrives is combined into the rank's blocks, message by message in the order of `recv`; else it overwrites."""
    fold: Tree | None = None
    """What arrives, together with the rank's own blocks, is combined in the order of this tree of ranks and replaces the
    blocks. Every message of `recv` then holds the same blocks."""


Schedule = Callable[[int, int], Iterable[Step]]
"""schedule(rank, size): the steps of that rank among `size`."""


def exchange(send_to: int, send: Sequence[int], recv_from: int, recv: Sequence[int], *, add: bool = False) -> Step:
    """One message out and one in; an empty set of blocks means none."""
    return Step(
        (Message(send_to, send),) if len(send) else (),
        (Message(recv_from, recv),) if len(recv) else (),
        add=add,
    )


def within(steps: Iterable[Step], ranks: Sequence[int], blocks: Sequence[Sequence[int]]) -> Iterator[Step]:
    """The same steps played by other ranks on other blocks: rank i becomes ranks[i], block i all of blocks[i]."""

    def renamed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(
            Message(ranks[message.peer], [block for group in message.blocks for block in blocks[group]])
            for message in messages
        )

    for step in steps:
        yield Step(renamed(step.send), renamed(step.recv), step.add, _renamed_tree(step.fold, ranks))


def simulate(schedule: Schedule, size: int, held: list[list[Any]], combine: Callable = operator.add) -> None:
    """Plays all ranks: held[rank][block] is replaced by what that rank holds at the end.

    A message leaves with the values of the moment its step begins, as on a real network that buffers nothing else.
    `combine(mine, arriving)` stands for the sum: counters prove that each contribution arrives once, nested pairs show
    the order of additions. Raises RuntimeError if ranks wait for each other for ever, or if a message is left over.
    """
    programs = [iter(schedule(rank, size)) for rank in range(size)]
    current: list[Step | None] = [None] * size
    wires: dict[tuple[int, int], deque] = {}
    done = [False] * size
    while not all(done):
        progress = False
        for rank in range(size):
            if done[rank]:
                continue
            if current[rank] is None:
                current[rank] = next(programs[rank], None)
                progress = True
                if current[rank] is None:
                    done[rank] = True
                    continue
                for message in current[rank].send:
                    values = [held[rank][block] for block in message.blocks]
                    wires.setdefault((rank, message.peer), deque()).append((tuple(message.blocks), values))
            if _can_receive(current[rank], rank, wires):
                _receive(current[rank], rank, wires, held[rank], combine)
                current[rank] = None
                progress = True
        if not progress:
            stuck = [rank for rank in range(size) if not done[rank]]
            raise RuntimeError(f"ranks {stuck} wait for messages that never come")
    left = [ends for ends, queue in wires.items() if queue]
    if left:
        raise RuntimeError(f"messages {left} (from, to) were sent and never received")


def draw(schedule: Schedule, size: int) -> str:
    """A table of the sends: one line per round, one column per rank, `peer:blocks` in each."""
    rounds = [list(schedule(rank, size)) for rank in range(size)]
    lines = []
    for index in range(max(map(len, rounds), default=0)):
        cells = [_cell(steps[index]) if index < len(steps) else "" for steps in rounds]
        lines.append([f"round {index}", *cells])
    table = [["", *(f"rank {rank}" for rank in range(size))], *lines]
    widths = [max(len(row[column]) for row in table) for column in range(size + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def spans(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of consecutive blocks, as half-open (first, last): blocks 0 1 2 5 give (0, 3), (5, 6)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def _renamed_tree(tree: Tree | None, ranks: Sequence[int]) -> Tree | None:
    if tree is None:
        return None
    return ranks[tree] if isinstance(tree, int) else tuple(_renamed_tree(part, ranks) for part in tree)


def _can_receive(step: Step, rank: int, wires: dict) -> bool:
    waiting: dict[int, int] = {}
    for message in step.recv:
        waiting[message.peer] = waiting.get(message.peer, 0) + 1
    return all(len(wires.get((peer, rank), ())) >= count for peer, count in waiting.items())


def _receive(step: Step, rank: int, wires: dict, mine: list[Any], combine: Callable) -> None:
    arrived: dict[int, list[Any]] = {}
    for message in step.recv:
        blocks, values = wires[message.peer, rank].popleft()
        if blocks != tuple(message.blocks):
            raise RuntimeError(f"rank {rank} expects blocks {list(message.blocks)} of {message.peer}, gets {blocks}")
        if step.fold is not None:
            arrived[message.peer] = values
        else:
            for block, value in zip(blocks, values, strict=True):
                mine[block] = combine(mine[block], value) if step.add else value
    if step.fold is not None:
        blocks = step.recv[0].blocks
        if sorted(leaves(step.fold)) != sorted([rank, *arrived]):
            raise RuntimeError(f"rank {rank} folds {step.fold} but holds the rows of {sorted([rank, *arrived])}")
        for position, block in enumerate(blocks):
            rows = {peer: values[position] for peer, values in arrived.items()} | {rank: mine[block]}
            mine[block] = _folded(step.fold, rows, combine)


def _folded(tree: Tree, rows: dict[int, Any], combine: Callable) -> Any:
    if isinstance(tree, int):
        return rows[tree]
    left, right = tree
    return combine(_folded(left, rows, combine), _folded(right, rows, combine))


def _cell(step: Step) -> str:
    parts = []
    for message in step.send:
        runs = ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans(message.blocks))
        parts.append(f"{message.peer}:{runs}")
    return " ".join(parts) or "-"
