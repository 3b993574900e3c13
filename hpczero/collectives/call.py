"""One call of a collective: its arguments looked at, agreed on by all ranks, decided, and run.

What shapes and settings decide (the algorithm, the blocks, the rounds of messages) is a `Decision`, made once and kept for
the next call like it. Ranks that make the same calls keep the same decisions, whatever the layout of their arrays: a rank
may pass a strided view where another passes a whole array.

Agreement comes first (`guard.agree`): inside a node a meeting, over nodes two and a message between them. A call that is
known, on vectors of one node or small ones, agrees in the meetings in which data is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpczero.arrays import Array, copy, from_any, is_device, is_half, namespace
from hpczero.collectives import algorithms, hierarchical, reduction, small, system, window
from hpczero.collectives.costs import Costs
from hpczero.collectives.guard import agree, explain, fingerprint
from hpczero.collectives.messages import Round, resolve
from hpczero.collectives.order import balanced
from hpczero.collectives.selection import Call, choose
from hpczero.collectives.stripes import Stripes
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, HpczeroError
from hpczero.memory import NodeRows
from hpczero.topology import Topology

MOST_DECISIONS = 4096
IN_MEMORY = ("all_reduce", "reduce_scatter", "all_gather")
"""What "hierarchical" does in host memory without messages inside the node."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a call comes to, given shapes and settings."""

    what: str
    """The call in words, for messages; what ranks must agree on."""
    mark: int
    """Its fingerprint."""
    algorithm: str
    small: bool
    """The vector fits into the slots of a node."""
    agrees: bool
    """The ranks agree in the meeting in which they exchange data, once the call is known."""
    offsets: Sequence[int]
    """Where the blocks begin that the algorithm names, and the end of the last."""
    rounds: list[Round] | None
    """What this rank sends and receives, where the algorithm is a schedule."""


class Invocation:
    """One call. Every rank of the topology makes it, with the same settings, shape and dtype.

    Looks at the arguments without raising: an error found on one rank is raised on all by `begin`.

    Attributes
    ----------
    array : the caller's array, or `out` once `begin` has copied into it
    count : int
    shards : list of int
        Where each rank's shard begins, and the end.
    rows : NodeRows or None
        The rows that the array is one of, if it came whole from `topology.empty`, and that matters.
    """

    def __init__(self, operation: str, array: Any, topology: Topology, *, op: str = "sum", algorithm: str = "adaptive",
                 order: str = "any", root: int = 0, counts: Sequence[int] | None = None, out: Any = None,
                 in_place: bool = True):
        self.operation, self.topology, self.op, self.order, self.root = operation, topology, op, order, root
        if topology.closed:
            raise HpczeroError(f"{operation}: the topology was closed; make another one")
        self.transport = Transport.of(topology)
        self._asked, self._counts, self._in_place = algorithm, counts, in_place
        self._original, self._given_out = array, out
        self._error: Exception | None = None
        self.count, self.what, self._key, self.shards = 0, operation, None, [0] * (topology.size + 1)
        self.rows: NodeRows | None = None
        try:
            self._look(array, out)
        except (TypeError, BufferError) as error:
            self._error = ConfigError(f"{operation}: {error}")
        except Exception as error:      # noqa: BLE001 - whatever an argument does when it is looked at: the others must hear
            self._error = error

    def expect(self, name: str, array: Any, shape: tuple[int, ...], *, written: bool) -> None:
        """Notes an error unless `array` is absent or an array of this shape and the call's dtype."""
        if array is None or self._error is not None:
            return
        try:
            array = from_any(array)
        except (TypeError, BufferError) as error:
            self._error = ConfigError(f"{self.operation}: {name}: {error}")
            return
        except Exception as error:      # noqa: BLE001 - as above
            self._error = error
            return
        if array.shape != shape or array.dtype != self.array.dtype:
            self._error = ConfigError(f"{self.operation}: {name} must be {shape} of {self.array.dtype}, not "
                                      f"{array.shape} of {array.dtype}")
        elif written and not is_device(array) and not array.flags.writeable:
            self._error = ConfigError(f"{self.operation}: {name} is read-only")

    def require_writable(self) -> None:
        if self._error is None and not is_device(self.array) and not self.array.flags.writeable:
            instead = "a copy" if self.operation == "broadcast" else "out=, or a copy"
            self._error = ConfigError(f"{self.operation}: the array is read-only; pass {instead}")

    def require_contiguous(self) -> None:
        if self._error is None and not self.array.flags.c_contiguous:
            self._error = ConfigError(f"{self.operation}: a strided array has no shard that is a view; pass out=")

    def begin(self, *, apart: bool = False, replaces: bool = False) -> Array:
        """The vector to work on; a copy if `apart`, or where the array is strided.

        All ranks have agreed, or will in the first meeting of the call: until then nothing of the caller's may change, so
        where the vector is in `out`, or `replaces` what is there, it is a copy then.
        """
        known = self.transport.decisions.get(self._key) if self._error is None else None
        if known is None or not known.agrees:
            agree(self.transport, self.what, self._error, known and known.mark)
        self.decision = known or self._decide()
        agrees_later, source = known is not None and known.agrees, self.array
        if self._given_out is not None:
            if not agrees_later:
                copy(self._out, source)
            self.array = self._out
        self._is_copy = not self.array.flags.c_contiguous or agrees_later and (replaces or self._given_out is not None)
        if apart or self._is_copy:
            return namespace(source).ascontiguousarray(source).reshape(-1).copy()
        return self.array.reshape(-1)

    def run(self, flat: Array) -> None:
        """Moves and combines; what `flat` holds afterwards is said by the operation."""
        decision = self.decision
        if decision.small:
            if not small.WAYS[self.operation](self, flat):
                explain(self.transport, self.what, None)
        elif decision.agrees:
            _STRIPED[self.operation](self, flat, Stripes.of(self.topology))
        elif decision.rounds is not None:
            self.transport.play(decision.rounds, flat, self.op, self.what)
        elif decision.algorithm == "system":
            _SYSTEM[self.operation](self, flat)
        else:
            _IN_MEMORY[self.operation](self, flat)
        if self.operation == "all_reduce":
            if self.op == "mean":
                reduction.divide(flat, self.topology.size)
            settings = self.array.shape, flat.dtype, self.op, self._asked, self.order
            simple = decision.agrees or decision.rounds is not None or decision.algorithm == "system"
            if simple and self.rows is None and not is_device(flat) and settings not in self.transport.made:
                self.transport.made[settings] = again(self.transport, decision, self.op, flat)

    def finish(self, flat: Array) -> Array:
        """The result in the caller's array, or in `out`."""
        if self._is_copy:
            copy(self.array, flat.reshape(self.array.shape))
        return self._original if self._given_out is None else self._given_out

    @property
    def between(self) -> str:
        """What runs between the nodes."""
        return self.decision.algorithm.partition(":")[2] or "pairwise"

    @property
    def writes_late(self) -> bool:
        """The contribution was written after the ranks had met."""
        return self._given_out is not None

    def _look(self, array: Any, out: Any) -> None:
        self.array = from_any(array)
        self.count = self.array.size
        reduction.check(self.array.dtype, self.op)
        size = self.topology.size
        if not isinstance(self.root, (int, np.integer)) or not 0 <= self.root < size:
            raise ConfigError(f"{self.operation}: root={self.root!r} is no rank of 0 to {size - 1}")
        self.shards = shard_offsets(self.count, size) if self._counts is None else self._given_shards()
        if out is not None:
            self._look_at_out(out)
        # A reduction to one rank, or into another array, must not leave partial sums in the rows: no window for it.
        may_share = self.operation != "reduce" and self._in_place
        memory = self._memory(self.array if out is None or not may_share else self._out, may_share)
        counts = None if self._counts is None else tuple(self.shards)
        shape, dtype = self.array.shape, self.array.dtype
        self._key = self.operation, shape, dtype, self.op, self._asked, self.order, self.root, counts, memory
        known = self.transport.decisions.get(self._key)
        if known is not None:
            self.what = known.what
            return
        self._facts = Call(self.operation, self.array.nbytes, self.topology.map, self.order, memory == "device",
                           memory.startswith("window"), is_half(dtype))
        choose(self._facts, self._asked)      # for the error, while it can still be told
        self.what = (f"{self.operation} of {self.count} elements ({'x'.join(map(str, shape)) or 'scalar'}) {dtype} "
                     f"op={self.op} algorithm={self._asked} order={self.order} root={self.root} memory={memory}"
                     + (f" counts={np.diff(self.shards).tolist()}" if counts else ""))

    def _given_shards(self) -> list[int]:
        counts = list(self._counts)
        if len(counts) != self.topology.size or not all(isinstance(count, (int, np.integer)) and count >= 0
                                                        for count in counts):
            raise ConfigError(f"{self.operation}: counts={counts}: one whole number from 0 per rank is needed, "
                              f"{self.topology.size} in all")
        if sum(counts) != self.count:
            raise ConfigError(f"{self.operation}: counts add up to {sum(counts)}, the array has {self.count} elements")
        return [0, *np.cumsum(counts).tolist()]

    def _look_at_out(self, out: Any) -> None:
        self._out = from_any(out)
        self.expect("out", out, self.array.shape, written=True)
        if self._error is not None:
            raise self._error
        if not is_device(self._out) and not is_device(self.array) and np.may_share_memory(self._out, self.array):
            same = self._out.ctypes.data == self.array.ctypes.data and self._out.strides == self.array.strides
            if not same and np.shares_memory(self._out, self.array):
                raise ConfigError(f"{self.operation}: out overlaps the array in part")

    def _memory(self, array: Array, may_share: bool) -> str:
        """"device"; "window 3" for the array that the fourth `topology.empty` gave; else "private". Ranks must agree on it.

        They would otherwise wait for each other in different ways, or read rows that the others do not mean. What goes
        through the slots of a node does so from anywhere.
        """
        if is_device(array):
            return "device"
        shared = self.topology.shared_arrays
        if shared and may_share and array.flags.c_contiguous and not self._fits_into_slots(array.nbytes):
            index, rows = shared.get(array.ctypes.data, (0, None))
            if rows is not None and rows.mine.nbytes == array.nbytes and rows.mine.dtype == array.dtype:
                self.rows = rows
                # Written after the ranks have met, which they must all know of.
                return f"window {index}" + (" late" if self.writes_late else "")
        return "private"

    def _fits_into_slots(self, nbytes: int) -> bool:
        return self.topology.num_nodes == 1 and nbytes <= self.transport.slots.row_bytes

    def _decide(self) -> Decision:
        """The algorithm, from facts that all ranks have agreed on, and what follows from it."""
        facts, nodes = self._facts, self.topology.map
        costs = self._costs()
        name = choose(facts, self._asked, costs, 1.0 if costs is None else costs.tie(facts))
        is_small = name == "window" and self._fits_into_slots(facts.nbytes)
        in_memory = not facts.on_device and self.operation in IN_MEMORY and name.startswith("hierarchical")
        offsets, rounds = self.shards, None
        if small.goes_over_nodes(facts, name):
            is_small, offsets = True, algorithms.even_offsets(self.count, len(nodes.nodes))
            if len(nodes.nodes) > 2:
                steps = hierarchical.among_leaders(self.topology.rank, nodes)
                rounds = resolve(steps, offsets, self.topology.rank, nodes)
        elif in_memory and self.operation == "all_reduce":
            offsets = algorithms.even_offsets(self.count, hierarchical.even(nodes).num_blocks)
        elif not (in_memory or name in ("window", "system")):
            tree = balanced(range(nodes.size)) if self.order == "world" else None
            plan = algorithms.plan(self.operation, name, nodes, root=self.root, tree=tree, nbytes=facts.nbytes)
            offsets = plan.offsets(self.shards if self.operation in ("reduce_scatter", "all_gather") else self.count)
            rounds = resolve(plan.steps(self.topology.rank), offsets, self.topology.rank, nodes)
        decisions = self.transport.decisions
        if len(decisions) >= MOST_DECISIONS:
            decisions.clear()      # on every rank at the same call
            self.transport.made.clear()
        striped = len(nodes.nodes) == 1 and self.rows is None and (name == "window" or in_memory)
        return decisions.setdefault(self._key, Decision(
            self.what, fingerprint(self.what), name, is_small, is_small or striped, offsets, rounds
        ))

    def _costs(self) -> Costs | None:
        """What "adaptive" goes by; None where a rule is as good, or all there is."""
        facts = self._facts
        # Nothing is faster than one meeting.
        one_way = facts.nodes.size == 1 or self._fits_into_slots(facts.nbytes)
        if self._asked != "adaptive" or facts.on_device or one_way:
            return None
        costs = Costs.of(self.topology, self.array.dtype)
        costs.prepare(facts)
        return costs if costs.cover(facts) else None


def again(transport: Transport, decision: Decision, op: str, like: np.ndarray) -> Callable[[np.ndarray], bool]:
    """An all-reduce that is known, by one of the simple ways, ready to be made again on private host memory of the size and
    type of `like`; see `Transport.made`.

    It meets the other ranks as often as the long way does, since some of them may take that.
    """
    topology, mark, what = transport.topology, decision.mark, decision.what
    shared, size = topology.shared_arrays, topology.size
    if decision.small and topology.num_nodes == 1:
        add = transport.slots.adder(like.dtype, reduction.code(op), mark, like.nbytes)

    def run(flat: np.ndarray) -> bool:
        if shared and (not decision.small or topology.num_nodes > 1) and flat.ctypes.data in shared:
            return False
        if decision.small:
            if not (transport.reduce_in_node(flat, add, mark, what) if topology.num_nodes == 1
                    else small.over_nodes(transport, decision, op, flat)):
                explain(transport, what, None)
        elif decision.agrees:
            Stripes.of(topology).all_reduce(flat, decision.offsets, op, mark, what)
        else:
            agree(transport, what, None, mark)
            if decision.rounds is not None:
                transport.play(decision.rounds, flat, op, what)
            else:
                system.all_reduce(flat, transport, op, what)
        if op == "mean":
            reduction.divide(flat, size)
        return True

    return run


def shard_slice(count: int, rank: int, size: int) -> slice:
    """The elements that rank `rank` of `size` owns among `count`: sizes differ by one at most, larger ones first."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def shard_offsets(count: int, size: int) -> list[int]:
    """Where the shards of `shard_slice` begin, and the end of the last: size + 1 numbers."""
    return algorithms.even_offsets(count, size)


def _all_reduce_in_memory(call: Invocation, flat: Array) -> None:
    topology, transport, offsets = call.topology, call.transport, call.decision.offsets
    cut = hierarchical.owned(topology.map) if topology.num_nodes == 1 else hierarchical.even(topology.map)
    rows = call.rows
    if rows is None:
        window.Staging.of(topology).all_reduce(flat, offsets, transport, call.op, call.what, cut, call.between)
    else:
        if call.writes_late:      # else the agreement on the call has shown that all contributions are written
            transport.node_barrier(call.what)
        window.all_reduce(rows, cut, transport, call.op, call.what, between=call.between)


def _reduce_scatter_in_memory(call: Invocation, flat: Array) -> None:
    transport, offsets = call.transport, call.decision.offsets
    rows = call.rows
    if rows is None:
        window.Staging.of(call.topology).reduce_scatter(flat, offsets, transport, call.op, call.what, call.between)
    else:
        window.reduce_scatter(rows, offsets, transport, call.op, call.what, between=call.between)
        transport.node_barrier(call.what)


def _all_gather_in_memory(call: Invocation, flat: Array) -> None:
    transport, offsets = call.transport, call.decision.offsets
    rows = call.rows
    if rows is None:
        window.Staging.of(call.topology).all_gather(flat, offsets, transport, call.what, call.between)
    else:
        window.all_gather(rows, offsets, transport, rows.mine, call.what, between=call.between)
        transport.node_barrier(call.what)


def _broadcast_in_memory(call: Invocation, flat: Array) -> None:
    if call.topology.rank != call.root:
        flat[:] = call.rows.all[call.root, :flat.size]
        call.transport.bytes_sent["window"] += flat.nbytes
    call.transport.node_barrier(call.what)


_IN_MEMORY: dict[str, Callable[[Invocation, Array], None]] = {
    "all_reduce": _all_reduce_in_memory,
    "reduce_scatter": _reduce_scatter_in_memory,
    "all_gather": _all_gather_in_memory,
    "broadcast": _broadcast_in_memory,
}
"""Arrays of `topology.empty`, or several nodes: shared memory inside the node, messages between nodes."""

_STRIPED: dict[str, Callable[[Invocation, Array, Stripes], None]] = {
    "all_reduce": lambda call, flat, stripes: stripes.all_reduce(
        flat, call.decision.offsets, call.op, call.decision.mark, call.what),
    "reduce_scatter": lambda call, flat, stripes: stripes.reduce_scatter(
        flat, call.shards, call.op, call.decision.mark, call.what),
    "all_gather": lambda call, flat, stripes: stripes.all_gather(flat, call.shards, call.decision.mark, call.what),
    "broadcast": lambda call, flat, stripes: stripes.broadcast(flat, call.root, call.decision.mark, call.what),
    "reduce": lambda call, flat, stripes: stripes.reduce(
        flat, call.shards, call.root, call.op, call.decision.mark, call.what),
}
"""Any other array of one node."""

_SYSTEM: dict[str, Callable[[Invocation, Array], None]] = {
    "all_reduce": lambda call, flat: system.all_reduce(flat, call.transport, call.op, call.what),
    "reduce_scatter": lambda call, flat: system.reduce_scatter(flat, call.shards, call.transport, call.op, call.what),
    "all_gather": lambda call, flat: system.all_gather(flat, call.shards, call.transport, call.what),
    "broadcast": lambda call, flat: system.broadcast(flat, call.root, call.transport, call.what),
    "reduce": lambda call, flat: system.reduce(flat, call.root, call.transport, call.op, call.what),
}
