"""What a collective algorithm is here: the steps one rank takes, as plain values.

An algorithm is a generator of `Step`s over numbered blocks of a vector. It knows ranks and block numbers, never arrays
or communicators, so the same steps can be run over MPI (`transport`), played for all ranks in one process to prove them
(`simulate`), or printed (`draw`). `within` and `merged` make larger algorithms of smaller ones.

In one step a rank sends and receives any number of messages at the same time; a message carries any set of blocks to or
from one peer. What arrives overwrites the blocks, is combined into them (`add`), or is kept apart, one row per sender,
until all of it is there and is then combined in a stated order (`fold`): the order in which floating-point numbers are
added is part of the result.

A schedule must work where nothing is buffered, as MPI sends large messages: a step ends when everything it sends has
been taken by the peer's step and everything it receives is there. `simulate` and `draw` play it so.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hpczero.collectives.order import Tree, balanced


class Message(NamedTuple):
    """The blocks that go to, or come from, one peer; both ends list them in the same order."""

    peer: int
    blocks: Sequence[int]


class Step(NamedTuple):
    """One round as one rank sees it. All messages of a step are in flight together, and leave as the step begins."""

    send: tuple[Message, ...] = ()
    recv: tuple[Message, ...] = ()
    add: bool = False
    """What arrives is combined into the rank's blocks, message by message as in `recv`; else it overwrites them."""
    fold: Tree | None = None
    """What arrives, together with the rank's own blocks, is combined in the order of this tree of ranks and replaces
    the blocks. Messages of `recv` with the same blocks are one fold; ranks that do not contribute to it are left out of
    the tree. `folds` takes such a step apart."""


Schedule = Callable[[int, int], Iterable[Step]]
"""schedule(rank, size): the steps of that rank among `size`."""


def exchange(send_to: int, send: Sequence[int], recv_from: int, recv: Sequence[int], *, add: bool = False) -> Step:
    """One message out and one in; an empty set of blocks means none."""
    return Step(
        (Message(send_to, send),) if len(send) else (),
        (Message(recv_from, recv),) if len(recv) else (),
        add,
    )


def within(steps: Iterable[Step], ranks: Sequence[int],
           blocks: Sequence[Sequence[int]] | None = None) -> Iterator[Step]:
    """The same steps played by other ranks on other blocks: rank i becomes ranks[i], block i all of blocks[i].

    Without `blocks` their numbers stay. Where blocks[i] is empty nothing is sent for it.
    """

    def renamed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if blocks is None:
            return tuple(Message(ranks[peer], numbers) for peer, numbers in messages)
        found = (Message(ranks[peer], [block for group in numbers for block in blocks[group]])
                 for peer, numbers in messages)
        return tuple(message for message in found if message.blocks)

    for step in steps:
        recv = renamed(step.recv)
        yield Step(renamed(step.send), recv, step.add, _renamed_tree(step.fold, ranks) if recv else None)


def merged(steps: Sequence[Step]) -> Step:
    """Steps of one rank and one round that touch different blocks, as one step.

    Messages to one peer become one. Where contributions are folded they stay apart, so that each belongs to one fold;
    ranks that exchange messages then both fold, or both do not.
    """
    if len(steps) == 1:
        return steps[0]
    trees = [step.fold for step in steps if step.fold is not None]
    if trees:
        return Step(tuple(message for step in steps for message in step.send),
                    tuple(message for step in steps for message in step.recv), fold=_merged_tree(trees))
    return Step(_per_peer(message for step in steps for message in step.send),
                _per_peer(message for step in steps for message in step.recv), any(step.add for step in steps))


def folds(step: Step, rank: int) -> list[tuple[list[int], Tree]]:
    """A step with `fold`, taken apart: (which messages of `recv`, the tree over their senders and `rank`) of each fold.

    The messages of one fold hold the same blocks, which are the rank's too.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, message in enumerate(step.recv):
        groups.setdefault(tuple(message.blocks), []).append(index)
    if len(groups) == 1:
        return [(indices, step.fold) for indices in groups.values()]
    return [(indices, _pruned(step.fold, {rank, *(step.recv[index].peer for index in indices)}))
            for indices in groups.values()]


def simulate(schedule: Schedule, size: int, held: list[list[Any]], combine: Callable = operator.add) -> None:
    """Plays all ranks: held[rank][block] is replaced by what that rank holds at the end.

    `combine(mine, arriving)` stands for the sum: counters prove that each contribution arrives once, nested pairs show
    the order of additions. Raises RuntimeError if ranks wait for each other for ever where nothing is buffered, if a
    message is left over, or if the two ends of a message disagree about its blocks. A rank is looked at only when what
    it waits for has come, so the time is that of the messages: some microseconds for each.
    """

    read = [row.__getitem__ for row in held]

    def begin(rank: int, step: Step) -> list[list[Any]]:
        return [list(map(read[rank], blocks)) for _, blocks in step.send]

    def end(rank: int, step: Step, arrived: list[list[Any]]) -> None:
        mine = held[rank]
        if step.fold is not None:
            _fold(rank, step, arrived, mine, combine)
            return
        for (_, blocks), values in zip(step.recv, arrived, strict=True):
            if step.add:
                values = map(combine, map(read[rank], blocks), values)
            for block, value in zip(blocks, values, strict=True):
                mine[block] = value

    _play(schedule, size, begin, end)


def rounds(schedule: Schedule, size: int) -> list[dict[int, Step]]:
    """The steps of all ranks by the round in which they can begin, if every message takes one round: {rank: step} each.

    A rank that has to wait begins its step when the wait begins, so a round in which nobody sends is not there.
    """
    table: list[dict[int, Step]] = []
    clock = [0] * size

    def begin(rank: int, step: Step) -> list[int]:
        now = clock[rank]
        table.extend({} for _ in range(now + 1 - len(table)))
        table[now][rank] = step
        return [now] * len(step.send)

    def end(rank: int, step: Step, sent_in: list[int]) -> None:
        clock[rank] = max(clock[rank], *sent_in) + 1 if sent_in else clock[rank] + 1

    _play(schedule, size, begin, end)
    return table


def draw(schedule: Schedule, size: int) -> str:
    """A table of the sends: one line per round, one column per rank, `peer:blocks` in each; `-` sends nothing."""
    lines = [[f"round {index}", *(_cell(steps.get(rank)) for rank in range(size))]
             for index, steps in enumerate(rounds(schedule, size))]
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


def _play(schedule: Schedule, size: int, begin: Callable[[int, Step], list],
          end: Callable[[int, Step, list], None]) -> None:
    """Runs the steps of all ranks, in some order that is possible where nothing is buffered.

    `begin(rank, step)` gives what each message of `step.send` carries; `end(rank, step, arrived)` gets what the
    messages of `step.recv` brought.
    """
    programs = [iter(schedule(rank, size)) for rank in range(size)]
    current: list[Step | None] = [None] * size
    arrived: list[list] = [[]] * size
    missing = [0] * size                      # messages, both ways, until the current step ends
    sent: dict[int, list] = {}                # from * size + to: (blocks, what they carry) of messages not yet taken
    awaited: dict[int, list] = {}             # likewise: (blocks, place in recv) of messages not yet come
    running, ready = size, deque(range(size))

    # One loop without calls but the two: a ring of 1,024 ranks takes two million steps.
    while ready:
        rank = ready.popleft()
        step = current[rank]
        if step is not None:
            end(rank, step, arrived[rank])
        step = current[rank] = next(programs[rank], None)
        if step is None:
            running -= 1
            continue
        carried, waits = begin(rank, step), 0
        landing = arrived[rank] = [None] * len(step.recv)
        for (peer, blocks), values in zip(step.send, carried, strict=True):
            wire = rank * size + peer
            queue = awaited.get(wire)
            if queue:
                expected, index = queue.pop(0)
                if blocks != expected:
                    _require_same(rank, blocks, peer, expected)
                arrived[peer][index] = values
                missing[peer] -= 1
                if not missing[peer]:
                    ready.append(peer)
            else:
                waits += 1
                if wire in sent:
                    sent[wire].append((blocks, values))
                else:
                    sent[wire] = [(blocks, values)]
        for index, (peer, blocks) in enumerate(step.recv):
            wire = peer * size + rank
            queue = sent.get(wire)
            if queue:
                had, landing[index] = queue.pop(0)
                if had != blocks:
                    _require_same(peer, had, rank, blocks)
                missing[peer] -= 1
                if not missing[peer]:
                    ready.append(peer)
            else:
                waits += 1
                if wire in awaited:
                    awaited[wire].append((blocks, index))
                else:
                    awaited[wire] = [(blocks, index)]
        missing[rank] = waits
        if not waits:
            ready.append(rank)
    if running:
        taken = [divmod(wire, size) for wire, queue in sent.items() if queue]
        come = [divmod(wire, size) for wire, queue in awaited.items() if queue]
        stuck = [rank for rank in range(size) if current[rank] is not None]
        raise RuntimeError(f"ranks {stuck} wait for ever; messages (from, to) that were never received: {taken}, "
                           f"that never come: {come}")


def _require_same(source: int, blocks: Sequence[int], target: int, expected: Sequence[int]) -> None:
    if list(blocks) != list(expected):          # a range and a list of the same numbers are not equal
        raise RuntimeError(f"rank {target} expects blocks {list(expected)} of {source}, gets {list(blocks)}")


def _fold(rank: int, step: Step, arrived: list[list[Any]], mine: list[Any], combine: Callable) -> None:
    own = set()
    for indices, tree in folds(step, rank):
        blocks = step.recv[indices[0]].blocks
        rows = {step.recv[index].peer: arrived[index] for index in indices}
        rows[rank] = [mine[block] for block in blocks]
        if len(rows) != len(indices) + 1 or own & set(blocks):
            raise RuntimeError(f"rank {rank} receives a contribution twice: {step.recv}")
        own |= set(blocks)
        postfix = _postfix(tree, [])
        if {entry for entry in postfix if entry is not None} != rows.keys():
            raise RuntimeError(f"rank {rank} folds {tree} but holds the rows of {sorted(rows)}")
        for position, block in enumerate(blocks):
            stack: list[Any] = []
            for entry in postfix:
                if entry is None:
                    right = stack.pop()
                    stack.append(combine(stack.pop(), right))
                else:
                    stack.append(rows[entry][position])
            mine[block] = stack.pop()


def _postfix(tree: Tree, found: list[int | None]) -> list[int | None]:
    """Appends the leaves of a tree, and None wherever the two parts before are combined."""
    if isinstance(tree, int):
        found.append(tree)
    else:
        _postfix(tree[0], found)
        _postfix(tree[1], found)
        found.append(None)
    return found


def _renamed_tree(tree: Tree | None, ranks: Sequence[int]) -> Tree | None:
    if tree is None:
        return None
    return ranks[tree] if isinstance(tree, int) else tuple(_renamed_tree(part, ranks) for part in tree)


def _merged_tree(trees: Sequence[Tree]) -> Tree:
    """One tree that, cut down to the ranks of any of `trees`, is that one; they have the same shape."""
    if isinstance(trees[0], int):
        return balanced(list(dict.fromkeys(trees)))
    return tuple(_merged_tree(parts) for parts in zip(*trees, strict=True))


def _pruned(tree: Tree, ranks: set[int]) -> Tree | None:
    if isinstance(tree, int):
        return tree if tree in ranks else None
    parts = [part for part in (_pruned(part, ranks) for part in tree) if part is not None]
    return tuple(parts) if len(parts) == 2 else parts[0] if parts else None


def _per_peer(messages: Iterable[Message]) -> tuple[Message, ...]:
    blocks_of: dict[int, list[int]] = {}
    for peer, blocks in messages:
        blocks_of.setdefault(peer, []).extend(blocks)
    return tuple(Message(peer, blocks) for peer, blocks in blocks_of.items())


def _cell(step: Step | None) -> str:
    if step is None:
        return ""
    parts = []
    for message in step.send:
        runs = ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans(message.blocks))
        parts.append(f"{message.peer}:{runs}")
    return " ".join(parts) or "-"
