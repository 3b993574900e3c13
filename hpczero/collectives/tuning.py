"""What was measured on this machine, kept on disk: link costs, and the median time of each algorithm at each size.

`tune` stores a `Table`; every later run loads it once: rank 0 reads, the others get its copy, so that all ranks choose
from the same numbers. A table holds for what its `Key` says: the kind of hosts, the MPI library, ranks per node, type
of elements, device. The key's digest is part of the file's name:

    $HPCZERO_TUNING_TABLE, or $XDG_CACHE_HOME/hpczero/tune-<digest>.json, or ~/.cache/hpczero/tune-<digest>.json

A file that is damaged, or holds a table for something else, is refused: rank 0 says so once, and the run goes on as if
there were none. Writing goes to a file beside it, which then takes its place, so a reader never sees half a table.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpczero.collectives.links import Links
from hpczero.errors import ConfigError, gather_texts, raise_together

if TYPE_CHECKING:
    from hpczero.topology import Topology

log = logging.getLogger("hpczero.tuning")

FORMAT = "hpczero tuning table 1"
Buffers = Literal["shared", "private"]


@dataclass(frozen=True)
class Key:
    """What a table holds for; the same on every rank."""

    hosts: str
    """The kind of each node, in order: name without its numbers, processor, cores."""
    mpi: str
    """Name and version of the MPI library."""
    ranks_per_node: tuple[int, ...]
    dtype: str
    device: str

    @cached_property
    def digest(self) -> str:
        return blake2b(json.dumps(self.as_dict()).encode(), digest_size=8).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ranks_per_node": list(self.ranks_per_node)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured time: the median over calls of the slowest rank's seconds."""

    operation: str
    algorithm: str
    nbytes: int
    buffers: Buffers
    seconds: float


@dataclass(frozen=True)
class Table:
    """Measured times, and the link costs that were fitted beside them."""

    key: Key
    links: Links
    entries: tuple[Entry, ...]
    made: str
    """When, as in 2026-01-31T12:00:00+0000."""

    @classmethod
    def of(cls, key: Key, links: Links, entries: Iterable[Entry]) -> Table:
        """A table made now."""
        return cls(key, links, tuple(entries), time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @cached_property
    def _points(self) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
        found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.nbytes):
            points = found.setdefault((entry.operation, entry.algorithm, entry.buffers), [])
            points.append((entry.nbytes, entry.seconds))
        return found

    def algorithms(self, operation: str, buffers: Buffers) -> tuple[str, ...]:
        """The algorithms whose times are known, in the order of their names."""
        return tuple(sorted(name for kind, name, where in self._points if (kind, where) == (operation, buffers)))

    def seconds(self, operation: str, algorithm: str, nbytes: float, buffers: Buffers) -> float | None:
        """The time at this size, or on the line between the two measured sizes around it.

        None where nothing was measured, or the size lies beyond the measured ones by more than a factor of two.
        """
        points = self._points.get((operation, algorithm, buffers))
        if not points or not points[0][0] / 2 <= nbytes <= points[-1][0] * 2:
            return None
        below = [point for point in points if point[0] <= nbytes][-1:] or points[:1]
        above = [point for point in points if point[0] >= nbytes][:1] or points[-1:]
        (low, fast), (high, slow) = below[0], above[0]
        if low < high:
            return fast + (slow - fast) * (nbytes - low) / (high - low)
        # Beyond the ends: small sizes cost what the smallest does, large ones in proportion.
        return fast * max(1.0, nbytes / high) if high else fast

    def to_json(self) -> str:
        return json.dumps({
            "format": FORMAT, "made": self.made, "key": self.key.as_dict(), "links": asdict(self.links),
            "entries": [asdict(entry) for entry in self.entries],
        }, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Table:
        """What `to_json` wrote; ConfigError, saying what is wrong, for anything else."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ValueError(f"it does not begin with the format {FORMAT!r}")
            key = value["key"]
            found = Key(str(key["hosts"]), str(key["mpi"]), tuple(int(count) for count in key["ranks_per_node"]),
                        str(key["dtype"]), str(key["device"]))
            return cls(found, Links.from_dict(value["links"]), tuple(map(_entry, value["entries"])), str(value["made"]))
        except KeyError as error:
            raise ConfigError(f"no tuning table: {error} is missing") from None
        except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            # Broken JSON is a ValueError, and so is a ConfigError.
            raise ConfigError(f"no tuning table: {error}") from None


def key_of(topology: Topology, dtype: Any, device: str = "cpu") -> Key:
    """The key of what runs here now. Called by every rank; one small exchange."""
    import numpy as np
    from mpi4py import MPI

    kinds = gather_texts(topology.world, _kind_of_host())
    hosts = "; ".join(kinds[ranks[0]] for ranks in topology.map.nodes)
    name, version = MPI.get_vendor()
    return Key(hosts, f"{name} {'.'.join(map(str, version))}", topology.ranks_per_node, str(np.dtype(dtype)), device)


def path_of(key: Key) -> Path:
    """The file that holds the table of this key, whether it exists or not."""
    if named := os.environ.get("HPCZERO_TUNING_TABLE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hpczero" / f"tune-{key.digest}.json"


def store(table: Table, topology: Topology) -> Path:
    """Writes the table where `load` will look for it, in one piece. Called by every rank; rank 0 writes.

    Raises ConfigError on every rank where the file cannot be written.
    """
    path, error = None, None
    if topology.rank == 0:
        try:
            path = path_of(table.key)
            _replace(path, table.to_json())
        except RuntimeError:
            error = ConfigError("there is no home folder for the tuning table: name a file with HPCZERO_TUNING_TABLE")
        except OSError as failure:
            error = ConfigError(f"the tuning table cannot be written to {path} ({failure.strerror}): name another file "
                                "with HPCZERO_TUNING_TABLE")
    raise_together(topology.world, error)
    return Path(gather_texts(topology.world, str(path or ""))[0])


def load(topology: Topology, key: Key) -> Table | None:
    """The table for `key`, the same on every rank, or None. Called by every rank; rank 0 reads.

    What is wrong with a file is logged by rank 0, once per file and reason; nothing is raised.
    """
    # Rank 0 speaks last in this exchange only by its text; those of the others are empty.
    text = gather_texts(topology.world, _read(key) if topology.rank == 0 else "")[0]
    return Table.from_json(text) if text else None


def _read(key: Key) -> str:
    """The text of the file if it holds a table for this key, else ""."""
    try:
        path = path_of(key)
    except RuntimeError:      # a user without a home
        return ""
    try:
        text = path.read_text(encoding="utf-8")
        found = Table.from_json(text)
    except FileNotFoundError:
        if os.environ.get("HPCZERO_TUNING_TABLE"):
            _say_once(path, "it does not exist; `tune` makes it")
        return ""
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        _say_once(path, str(error))
        return ""
    if found.key != key:
        odd = [f"{name} {theirs!r} instead of {key.as_dict()[name]!r}"
               for name, theirs in found.key.as_dict().items() if theirs != key.as_dict()[name]]
        _say_once(path, f"it was made for {', '.join(odd)}")
        return ""
    return text


def _say_once(path: Path, reason: str) -> None:
    if (path, reason) not in _SAID:
        _SAID.add((path, reason))
        log.warning("the tuning table %s is not used: %s", path, reason)


_SAID: set[tuple[Path, str]] = set()


def _replace(path: Path, text: str) -> None:
    """`path` holds `text`, or what it held before: never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _entry(value: Any) -> Entry:
    entry = Entry(str(value["operation"]), str(value["algorithm"]), int(value["nbytes"]), value["buffers"],
                  float(value["seconds"]))
    if entry.buffers not in ("shared", "private") or entry.nbytes < 0 or not 0 < entry.seconds < float("inf"):
        raise ValueError(f"{value} is no measured time")
    return entry


def _kind_of_host() -> str:
    """What makes two hosts alike here: a name without its numbers (node017 and node018), processor, cores."""
    import platform

    name = platform.node().split(".")[0]
    # Containers are called by twelve random hexadecimal digits.
    name = "container" if re.fullmatch("[0-9a-f]{12}", name) else re.sub(r"\d+", "", name)
    return f"{name}, {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    import platform

    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()
