"""`python -m hpczero topo`: nodes and ranks, what the links between them cost, who sends what; and all of it on paper.

    mpirun -n 4 python -m hpczero topo                        which rank is on which node
    mpirun -n 4 python -m hpczero topo --measure              costs of the links, from at most a second for each table
    mpirun -n 6 python -m hpczero topo --draw butterfly       the messages of an algorithm, round by round
    python -m hpczero topo --plan 8192x8 --alpha 2us --beta 12GB/s

`--plan` prices every algorithm for so many nodes and ranks per node (`collectives.pricing`). It needs no machine and no
MPI.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from mpi4py import MPI

    from hpczero.collectives.links import Link, Links
    from hpczero.topology import NodeMap

DRAWN = ("ring", "tree", "butterfly", "hierarchical")
MOST_DRAWN, MOST_PLANNED = 64, 2**20
SIZES = tuple(2**power for power in range(6, 31, 3))
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure the links inside the nodes and between them")
    parser.add_argument("--draw", choices=DRAWN, help="show the messages of an all-reduce, round by round")
    parser.add_argument("--plan", metavar="MxL", help="predict the all-reduces of M nodes of L ranks, without MPI")
    parser.add_argument("--alpha", metavar="TIME", help="--plan: cost of a message between nodes: 2us, 2e-6 (seconds)")
    parser.add_argument("--beta", metavar="RATE", help="--plan: and of each byte: 12GB/s, 8.3e-11 (seconds per byte)")
    parser.add_argument("--node-alpha", metavar="TIME", help="--plan: cost inside a node (default: as between nodes)")
    parser.add_argument("--node-beta", metavar="RATE", help="--plan: and of each byte (default: as between nodes)")
    parser.add_argument("--gamma", metavar="RATE", default="0", help="--plan: adding a byte (default: 0, as if free)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def needs_mpi(args: argparse.Namespace) -> bool:
    """Whether the command looks at this machine, or at a `NodeMap`, whose file loads MPI."""
    return args.plan is None or args.draw is not None or args.measure


def run(args: argparse.Namespace, comm: MPI.Comm | None) -> int:
    """Called by every rank; alone and without a communicator where nothing but a plan is asked for."""
    facts: dict[str, Any] = {}
    lines: list[str] = []
    if args.plan is None:
        for name in ("alpha", "beta", "node_alpha", "node_beta"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} belongs to --plan MxL; --measure finds out what is true here")
    elif args.measure:
        raise ConfigError("--measure looks at this machine and --plan at one on paper: ask for one of them")
    else:
        _plan(args, facts, lines)
    if needs_mpi(args):
        _here(args, comm, facts, lines)
    if comm is None or comm.rank == 0:
        print(json.dumps(facts) if args.json else "\n".join(lines), flush=True)
    return 0


def shape(text: str) -> tuple[int, int]:
    """Nodes and ranks per node of a text such as 8192x8."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    num_nodes, per_node = map(int, found.groups()) if found else (0, 0)
    if not 0 < num_nodes * per_node <= MOST_PLANNED:
        raise ConfigError(f"--plan {text!r}: nodes x ranks per node is needed, such as 8192x8, of 1 to {MOST_PLANNED} "
                          "ranks")
    return num_nodes, per_node


def seconds(text: str, flag: str) -> float:
    """A time: 2us, 0.5ms, or a number of seconds."""
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|ns|)", text.strip())
    try:
        return float(found.group(1)) * _SECONDS[found.group(2)]
    except (AttributeError, ValueError):
        raise ConfigError(f"{flag} {text!r}: a time is needed, such as 2us, 0.5ms, or 2e-6 (seconds)") from None


def seconds_per_byte(text: str, flag: str) -> float:
    """The time of a byte: 12GB/s, 800MiB/s, or a number of seconds."""
    from hpczero.settings import Size

    try:
        if text.strip().endswith("/s"):
            return 1 / Size.parse(text.strip().removesuffix("/s")).bytes(1)
        value = float(text)
        if 0 <= value < float("inf"):
            return value
    except ValueError:
        pass
    raise ConfigError(f"{flag} {text!r}: a rate is needed, such as 12GB/s, or 8.3e-11 (seconds per byte)")


def _plan(args: argparse.Namespace, facts: dict[str, Any], lines: list[str]) -> None:
    """Predicted times, and where the cheapest algorithm changes."""
    from hpczero.collectives import pricing
    from hpczero.collectives.links import Links

    num_nodes, per_node = shape(args.plan)
    if args.alpha is None or args.beta is None:
        raise ConfigError("--plan needs --alpha and --beta, what a message and each of its bytes cost between nodes: "
                          "--alpha 2us --beta 12GB/s")
    links = Links.assumed(
        seconds(args.alpha, "--alpha"), seconds_per_byte(args.beta, "--beta"), seconds_per_byte(args.gamma, "--gamma"),
        node_alpha_s=None if args.node_alpha is None else seconds(args.node_alpha, "--node-alpha"),
        node_beta_s=None if args.node_beta is None else seconds_per_byte(args.node_beta, "--node-beta"),
    )
    names = pricing.PREDICTED["all_reduce"]
    times = {name: [pricing.predict("all_reduce", name, num_nodes, per_node, nbytes, links) for nbytes in SIZES]
             for name in names}
    changes = pricing.crossovers("all_reduce", num_nodes, per_node, links)
    facts["plan"] = {
        "nodes": num_nodes, "ranks_per_node": per_node, "operation": "all_reduce", "sizes": SIZES, "seconds": times,
        "estimated": list(pricing.ESTIMATED),
        "crossovers": [{"from_bytes": at, "algorithm": name} for at, name in changes],
    }
    lines.append(f"all_reduce over {num_nodes:,} nodes of {per_node} ranks, {num_nodes * per_node:,} in all; predicted")
    best = [min(column) for column in zip(*times.values(), strict=True)]
    rows = [["", *map(_size, SIZES)]]
    for name, column in times.items():
        marked = name + (" ~" if name in pricing.ESTIMATED else "")
        rows.append([marked, *(_time(value) + ("*" if value == least else " ")
                               for value, least in zip(column, best, strict=True))])
    lines += [_row(row) for row in rows]
    lines.append("* cheapest at this size; ~ an estimate, up to about twice too high")
    for (start, name), end in zip(changes, [*changes[1:], None], strict=True):
        lines.append(f"from {_size(start)}" + (f" to {_size(end[0])}" if end else "") + f": {name}")


def _here(args: argparse.Namespace, comm: MPI.Comm, facts: dict[str, Any], lines: list[str]) -> None:
    """What the ranks of this job can say; every rank takes part."""
    from hpczero.topology import NodeMap, Topology

    with Topology(comm) as topology:
        if args.plan is None:
            nodes = topology.map
            _placed(nodes, facts, lines)
        else:
            num_nodes, per_node = shape(args.plan)
            nodes = NodeMap(tuple(rank // per_node for rank in range(num_nodes * per_node)))
        if args.measure:
            _measured(topology, facts, lines)
    if args.draw:
        _drawn(args.draw, nodes, facts, lines)


def _placed(nodes: NodeMap, facts: dict[str, Any], lines: list[str]) -> None:
    facts["ranks"], facts["nodes"] = nodes.size, [list(ranks) for ranks in nodes.nodes]
    plural = "s" if len(nodes.nodes) > 1 else ""
    lines.append(f"{nodes.size} rank{'s' if nodes.size > 1 else ''} on {len(nodes.nodes)} node{plural}")
    lines += [f"node {node}: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
              for node, ranks in enumerate(nodes.nodes)]


def _measured(topology: Any, facts: dict[str, Any], lines: list[str]) -> None:
    from dataclasses import asdict

    from hpczero.collectives import links as costs
    from hpczero.collectives.node_topology import NodeTopology

    links = costs.measure(topology)
    between = NodeTopology.measure(topology)
    facts["links"], facts["node_topology"] = asdict(links), between.as_dict()
    lines += _links(links)
    if between.num_nodes > 1:
        for title, matrix in (("MB/s between nodes", between.bandwidth), ("latency in ms", between.latency)):
            lines.append(f"{title}:")
            lines.append(_row(["", *(f"node {node}" for node in range(between.num_nodes))]))
            lines += [_row([f"node {node}", *("-" if value == 0 else f"{value:.4g}" for value in row)])
                      for node, row in enumerate(matrix)]
    lines += [f"inside node {node}: {rate:.4g} MB/s, latency {latency:.4g} ms" for node, (rate, latency)
              in enumerate(zip(between.node_bandwidth, between.node_latency, strict=True)) if rate == rate]


def _links(links: Links) -> list[str]:
    lines = []
    for name, link in (("inside a node", links.node), ("between nodes", links.network)):
        if link is None:
            lines.append(f"{name}: no two ranks to measure it with")
        else:
            lines += [f"{name}, {text}" for text in _classes(link)]
    lines += [f"adding {dtype}: {_rate(cost)}" for dtype, cost in links.gamma_s]
    lines += [f"not measured: {text}" for text in links.unreached]
    return lines


def _classes(link: Link) -> list[str]:
    lines, low = [], None
    for part in link.classes:
        span = f"from {_size(low)}" if part.up_to is None else f"up to {_size(part.up_to)}"
        if low is None and part.up_to is None:
            span = "all sizes"
        lines.append(f"{span}: {_time(part.alpha_s)} a message, {_rate(part.beta_s)} alone, "
                     f"{_rate(part.shared_s)} for all at once")
        low = None if part.up_to is None else part.up_to + 1
    return lines


def _drawn(name: str, nodes: NodeMap, facts: dict[str, Any], lines: list[str]) -> None:
    from hpczero.collectives.algorithms import plan
    from hpczero.collectives.schedule import draw

    if nodes.size > MOST_DRAWN:
        raise ConfigError(f"--draw {name}: {nodes.size} ranks do not fit on a page; at most {MOST_DRAWN} do")
    found = plan("all_reduce", name, nodes)
    drawing = draw(lambda rank, size: found.steps(rank), nodes.size)
    facts["drawing"] = {"algorithm": name, "blocks": found.num_blocks, "rounds": drawing.splitlines()}
    lines.append(f"all_reduce by {name}, the vector in {found.num_blocks} block{'s' if found.num_blocks > 1 else ''}; "
                 "peer:blocks of what each rank sends")
    lines.append(drawing if nodes.size > 1 else "nothing is sent")


def _row(cells: list[str]) -> str:
    return f"{cells[0]:<24}" + "".join(f"{cell:>11}" for cell in cells[1:])


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


def _time(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte > 0 else "no time for a byte"
