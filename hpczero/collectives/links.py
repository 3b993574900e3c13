"""What a message costs here: measured inside a node and between nodes, in at most a second.

The model is Hockney's (Parallel Computing 20, 1994) with the two corrections that decide between algorithms:

    seconds = alpha + bytes * max(beta, k * shared)        for one of k messages that are under way together

alpha and beta hold for a class of sizes, since MPI libraries send small messages at once (eager), large ones after
asking (rendezvous), and copy in pieces in between; `shared` is what all messages of a node have in common: its network
card, or its memory. gamma is the time to add a byte that arrived, by element type.

`measure` is collective. A pair of ranks plays ping-pong alone, with sizes that grow by no more than what is left of the
time allows; then all pairs exchange in both directions at once. Medians are fitted by least squares on relative errors
in which outliers count less (Huber's weights). What a slow link left no time for is listed, not guessed silently. The
values themselves (`Links`) need no MPI: they are stored by `tuning` and used by `pricing`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.topology import NodeMap, Topology

LinkName = Literal["node", "network"]
LINK_NAMES: tuple[LinkName, ...] = ("node", "network")

SMALL_BYTES = 8 * 2**10
"""Up to here a message is small; every common MPI library sends it without asking first."""
LARGE_BYTES = 2**20
"""From here on a message is large."""

# Above the small ones by factors of two: what the next size will take is then known well enough to be left out in time.
SIZES = (8, 4096, 6144, SMALL_BYTES, *(2**power for power in range(14, 23)))
GAMMA_BYTES = 2**18
MOST_REPEATS = 30


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Messages up to `up_to` bytes (None: of any size)."""

    up_to: int | None
    alpha_s: float
    beta_s: float
    """Seconds per byte for a message alone."""
    shared_s: float
    """Seconds per byte of what the messages of a node share; k messages at once take at least k times that each."""


@dataclass(frozen=True, slots=True)
class Link:
    """The costs of one kind of link, in classes of growing sizes."""

    classes: tuple[SizeClass, ...]

    def time(self, nbytes: float, at_once: int = 1) -> float:
        """Seconds for a message of `nbytes` while `at_once` such messages of its node are under way, it included."""
        for found in self.classes:
            if found.up_to is None or nbytes <= found.up_to:
                break
        beta = found.beta_s if at_once <= 1 else max(found.beta_s, at_once * found.shared_s)
        return found.alpha_s + nbytes * beta


@dataclass(frozen=True, slots=True)
class Links:
    """The costs of a machine's links and additions; the same value on every rank.

    Attributes
    ----------
    node, network : Link or None
        Inside a node, and between nodes; None where there are no two ranks to measure it with.
    gamma_s : tuple of (dtype name, seconds per byte)
        Adding a byte that arrived to one that is here, while all ranks of the node do so.
    source : {"measured", "assumed"}
    unreached : tuple of str
        What was not measured, and why.
    spent_s : float
        How long measuring took.
    """

    node: Link | None
    network: Link | None
    gamma_s: tuple[tuple[str, float], ...] = ()
    source: str = "measured"
    unreached: tuple[str, ...] = ()
    spent_s: float = 0.0

    @classmethod
    def assumed(cls, alpha_s: float, beta_s: float, gamma_s: float = 0.0, *, node_alpha_s: float | None = None,
                node_beta_s: float | None = None) -> Links:
        """One alpha and beta for all sizes: between nodes, whose card one rank can fill, and inside them.

        Inside a node they are those of the network unless given, and messages do not get in each other's way.
        """
        node_alpha_s = alpha_s if node_alpha_s is None else node_alpha_s
        node_beta_s = beta_s if node_beta_s is None else node_beta_s
        return cls(
            Link((SizeClass(None, node_alpha_s, node_beta_s, 0.0),)), Link((SizeClass(None, alpha_s, beta_s, beta_s),)),
            (("float32", gamma_s),), "assumed",
        )

    def link(self, name: str) -> Link:
        """The link of that name; ConfigError where it does not exist."""
        if name not in LINK_NAMES:
            raise ConfigError(f"{name!r} is no link; links are {' and '.join(LINK_NAMES)}")
        found = self.node if name == "node" else self.network
        if found is None:
            where = "no node has two ranks" if name == "node" else "all ranks are on one node"
            raise ConfigError(f"the link {name!r} was not measured: {where}")
        return found

    def time(self, nbytes: float, link: str, at_once: int = 1) -> float:
        """Seconds for one message over `link` ("node" or "network"); see `Link.time`."""
        return self.link(link).time(nbytes, at_once)

    def gamma(self, dtype: Any = "float32") -> float:
        """Seconds per byte added; float32's (or the first known) where the type was not measured."""
        known = dict(self.gamma_s)
        return known.get(str(np.dtype(dtype)), known.get("float32", next(iter(known.values()), 0.0)))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Links:
        """What `to_json` wrote; ConfigError, saying what is wrong, for anything else."""
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"link costs are no JSON: {error}") from None

    @classmethod
    def from_dict(cls, value: Any) -> Links:
        """The same from a dict; ConfigError where it does not hold what it should."""
        try:
            if set(value) != set(cls.__slots__):
                raise ValueError(f"the keys are {', '.join(map(str, value))}")
            gamma = tuple((str(np.dtype(name)), _cost(cost)) for name, cost in value["gamma_s"])
            return cls(
                _link(value["node"]), _link(value["network"]), gamma, str(value["source"]),
                tuple(map(str, value["unreached"])), _cost(value["spent_s"]),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"these are no link costs: {error}") from None


def measure(topology: Topology, budget_s: float = 1.0) -> Links:
    """The costs of the links between the ranks of `topology`, and of adding. Called by every rank, outside other calls.

    Takes at most about `budget_s` seconds whatever the links are; kernels that this machine has never compiled come on
    top. All ranks return rank 0's values. Raises StallError where a rank does not answer.
    """
    from hpczero.collectives.transport import Transport

    if not budget_s > 0:
        raise ConfigError(f"budget_s={budget_s!r}: a time above 0 s is needed to measure anything")
    transport = Transport.of(topology)
    _time_addition("float32")                # a kernel that has to be compiled first must not eat up the time
    comm, request = topology.world.Idup()
    transport.wait([request], "measure links")
    transport.wait([comm.Ibarrier()], "measure links")
    begin = time.monotonic()
    run = _Measurement(topology, comm, lambda requests: transport.wait(requests, "measure links"))
    pairs = {name: found for name in LINK_NAMES if (found := pairs_of(topology.map, name))}
    found: dict[str, Link | None] = {"node": None, "network": None}
    for index, name in enumerate(pairs):
        left_s = 0.85 * budget_s - (time.monotonic() - begin)
        # Networks are slow, and decide more: they get what the node, measured first, leaves.
        found[name] = run.link(name, pairs[name], left_s * (0.4 if index == 0 and len(pairs) > 1 else 1.0))
    gamma = run.gamma(begin + 0.95 * budget_s - time.monotonic())
    links = Links(found["node"], found["network"], gamma, "measured", tuple(run.unreached), time.monotonic() - begin)
    # Clocks and fits of the ranks differ in the last digits, and every rank must make the same choices.
    text = run.broadcast_text(links.to_json())
    comm.Free()
    return Links.from_json(text)


def pairs_of(nodes: NodeMap, name: str) -> list[tuple[int, int]]:
    """Disjoint pairs of ranks joined by the link: neighbours in a node; equal local ranks of neighbouring nodes."""
    if name == "node":
        return [pair for ranks in nodes.nodes for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    return [
        pair for here, there in zip(nodes.nodes[::2], nodes.nodes[1::2], strict=False)
        for pair in zip(here, there, strict=False)
    ]


def ping_pong(comm: MPI.Comm, peer: int, leads: bool, wait: Callable[[list], None], limit_s: float,
              sizes: Sequence[int] = SIZES) -> list[tuple[int, float]]:
    """(size, median seconds one way) for as many of the growing `sizes` as `limit_s` allows. Called by both ranks.

    The rank that leads decides, and gets the list; the other answers and gets an empty one. The first two sizes are
    tried even where time is short, as one point makes no line, but for links so slow that one message takes all of it.
    """
    control = np.zeros(2, np.int64)
    buffer = np.ones(max(sizes), np.uint8)
    if not leads:
        while True:
            wait([comm.Irecv(control, peer)])
            nbytes, count = map(int, control)
            if count == 0:
                return []
            for _ in range(count):
                wait([comm.Irecv(buffer[:nbytes], peer)])
                wait([comm.Isend(buffer[:nbytes], peer)])

    def round_trips(nbytes: int, count: int) -> list[float]:
        control[:] = nbytes, count
        wait([comm.Isend(control, peer)])
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            wait([comm.Irecv(buffer[:nbytes], peer), comm.Isend(buffer[:nbytes], peer)])
            seconds.append(time.perf_counter() - start)
        return seconds

    begin = time.monotonic()
    round_trips(sizes[0], 1)                # the first message of two ranks may have to open a connection
    points: list[tuple[int, float]] = []
    for index, nbytes in enumerate(sizes):
        left_s = limit_s - (time.monotonic() - begin)
        if points:
            last, one_way = points[-1]
            expected_s = 2 * one_way * (nbytes / last if index > 1 else 1.0)
            if left_s < (expected_s if index > 1 else -limit_s):
                break
        seconds = round_trips(nbytes, 1)
        left_s = limit_s - (time.monotonic() - begin)
        repeats = min(MOST_REPEATS, int(left_s / (len(sizes) - index) / seconds[0]))
        if repeats >= 1:
            # The first one met an answering rank that was not ready yet.
            seconds = round_trips(nbytes, repeats)
        points.append((nbytes, float(np.median(seconds)) / 2))
    control[:] = 0
    wait([comm.Isend(control, peer)])
    return points


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(alpha, beta), neither below 0, of the line through (bytes, seconds) with the least relative errors.

    Huber's weights, by repeated least squares: a point far off the line, as a busy machine gives now and then, pulls
    with a bounded force. Where the line falls, it is flat for small messages and goes through nothing for larger
    ones. One point alone gives alpha.
    """
    sizes, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    if len(points) == 1:
        return float(seconds[0]), 0.0
    weights = 1 / seconds
    for _ in range(30):
        rows = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
        alpha, beta = np.linalg.lstsq(rows, seconds * weights, rcond=None)[0]
        off = np.abs(alpha + beta * sizes - seconds) / seconds
        usual = 1.345 * 1.4826 * np.median(off)
        weights = np.sqrt(np.where(off > usual, usual / np.maximum(off, 1e-300), 1.0)) / seconds
    falls = beta * sizes[-1] < 1e-9 * abs(alpha)      # or is flat, but for rounding
    if falls and sizes[-1] <= SMALL_BYTES:
        return float(np.median(seconds)), 0.0
    if falls or alpha < 0:
        return 0.0, float(np.median(seconds / sizes))
    return float(alpha), float(beta)


class _Measurement:
    """One `measure`: every method is called by all ranks."""

    def __init__(self, topology: Topology, comm: MPI.Comm, wait: Callable[[list], None]):
        self.topology, self.comm, self.wait = topology, comm, wait
        self.unreached: list[str] = []

    def link(self, name: str, pairs: list[tuple[int, int]], limit_s: float) -> Link:
        """One pair alone, then all of them at once; at most about `limit_s` seconds."""
        begin, first = time.monotonic(), pairs[0]
        points: list[tuple[int, float]] = []
        if self.comm.rank in first:
            peer = first[self.comm.rank == first[0]]
            points = ping_pong(self.comm, peer, self.comm.rank == first[0], self.wait, 0.6 * limit_s)
        # The rank that led tells the others: its times, and how much of its time is left.
        told = np.zeros(len(SIZES) + 1)
        told[:len(points)] = [seconds for _, seconds in points]
        told[-1] = limit_s - (time.monotonic() - begin)
        self.wait([self.comm.Ibcast(told, first[0])])
        points = [(nbytes, float(seconds)) for nbytes, seconds in zip(SIZES, told, strict=False) if seconds > 0]
        if len(points) < len(SIZES):
            self.unreached.append(f"{name}: messages above {points[-1][0]} bytes, which did not fit into the time")
        return self._with_sharing(name, pairs, points, float(told[-1]))

    def gamma(self, limit_s: float) -> tuple[tuple[str, float], ...]:
        """Seconds per byte added, for every element type there is time for; the slowest rank's."""
        from hpczero.collectives.reduction import DTYPES

        begin = time.monotonic()
        # A type that collectives of this job never see may have to be compiled: last, and as long as there is time.
        names = sorted(map(str, DTYPES), key=lambda name: (name != "float32", name[0] not in "fb", name))
        mine, longest = np.full(len(names), np.nan), 0.0
        for index, name in enumerate(names):
            start = time.monotonic()
            if index and start - begin + longest > limit_s:
                break
            mine[index] = _time_addition(name)
            longest = max(longest, time.monotonic() - start)
        seconds = self._gathered(mine)
        reached = ~np.isnan(seconds).any(axis=0)
        if missing := [name for name, known in zip(names, reached, strict=True) if not known]:
            self.unreached.append(f"additions of {', '.join(missing)}: no time was left")
        return tuple((name, float(seconds[:, index].max())) for index, name in enumerate(names) if reached[index])

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        raw = np.frombuffer(text.encode(), np.uint8).copy()
        length = np.array([raw.size], np.int64)
        self.wait([self.comm.Ibcast(length)])
        if self.comm.rank:
            raw = np.zeros(int(length[0]), np.uint8)
        self.wait([self.comm.Ibcast(raw)])
        return raw.tobytes().decode()

    def _with_sharing(self, name: str, pairs: list[tuple[int, int]], points: list[tuple[int, float]],
                      left_s: float) -> Link:
        """The link with what its messages have in common: measured, for each class, at the largest size of it."""
        bounds = [(0, SMALL_BYTES), (SMALL_BYTES, LARGE_BYTES - 1), (LARGE_BYTES - 1, None)]
        parts = [[point for point in points if low < point[0] and (high is None or point[0] <= high)]
                 for low, high in bounds]
        parts = [part for part in parts if part]
        # A single point beyond a class says more about its slope than about a class of its own.
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [parts[-2] + parts[-1]]
        together = self._at_once(name, pairs)
        classes = []
        for index, part in enumerate(parts):
            alpha, beta = fit(part)
            nbytes, alone_s = part[-1]
            share_s = left_s / len(parts)
            # No exchange takes longer than if its messages went one after the other.
            repeats = min(10, int(share_s / (max(together) * alone_s)) - 1)
            shared = beta
            if max(together) > 1 and repeats >= 1:
                seconds = self._exchange(pairs, nbytes, repeats)
                shared = max(
                    max(0.0, seconds[rank] - alpha) / (together[rank] * nbytes)
                    for rank in range(self.comm.size) if together[rank]
                )
            elif max(together) > 1:
                self.unreached.append(f"{name}: {nbytes} bytes by all pairs at once; taken as one after the other")
            up_to = None if index == len(parts) - 1 else bounds[index][1]
            classes.append(SizeClass(up_to, alpha, beta, shared))
        return Link(tuple(classes))

    def _at_once(self, name: str, pairs: list[tuple[int, int]]) -> list[int]:
        """For every rank, how many messages share its node's memory, or leave by its card, when all pairs exchange."""
        node_of = self.topology.node_of
        busy = [rank for pair in pairs for rank in pair]
        count = {node: sum(node_of[rank] == node for rank in busy) for node in set(node_of)}
        return [count[node_of[rank]] if rank in busy else 0 for rank in range(self.comm.size)]

    def _exchange(self, pairs: list[tuple[int, int]], nbytes: int, repeats: int) -> np.ndarray:
        """(size,) seconds: each rank's median time of exchanging `nbytes` with its partner, all pairs at once."""
        seconds = [0.0]
        peer = next((pair[pair[0] == self.comm.rank] for pair in pairs if self.comm.rank in pair), None)
        self.wait([self.comm.Ibarrier()])
        if peer is not None:
            arriving, leaving = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            for _ in range(repeats + 1):
                start = time.perf_counter()
                self.wait([self.comm.Irecv(arriving, peer), self.comm.Isend(leaving, peer)])
                seconds.append(time.perf_counter() - start)
        return self._gathered(np.array([np.median(seconds[2:] or seconds)]))[:, 0]

    def _gathered(self, values: np.ndarray) -> np.ndarray:
        """(size, k): the (k,) float64 of every rank."""
        found = np.empty((self.comm.size, values.size))
        self.wait([self.comm.Iallgather(values, found)])
        return found


def _time_addition(dtype: str) -> float:
    """Seconds per byte of adding one vector to another on this rank, kernels loaded."""
    from hpczero.collectives import reduction

    found = next(known for known in reduction.DTYPES if str(known) == dtype)
    mine, arrived = (np.ones(GAMMA_BYTES // found.itemsize, found) for _ in range(2))
    reduction.combine(mine, arrived, "sum")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        reduction.combine(mine, arrived, "sum")
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)) / GAMMA_BYTES


def _link(value: Any) -> Link | None:
    if value is None:
        return None
    classes = tuple(
        SizeClass(None if part["up_to"] is None else int(part["up_to"]),
                  *(_cost(part[key]) for key in ("alpha_s", "beta_s", "shared_s")))
        for part in value["classes"]
    )
    if not classes or classes[-1].up_to is not None or any(part.up_to is None for part in classes[:-1]):
        raise ValueError("the last class of sizes, and no other, has no upper end")
    return Link(classes)


def _cost(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no time")
    return float(value)
