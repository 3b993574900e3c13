"""The command line: `python -m hpczero [command] [flags]`, under mpirun, under srun, or alone on one rank.

One file per command, each with `add_arguments(parser)` and `run(args, comm) -> int`. Nothing heavy is imported until
the arguments are read: `--help` and `--version` take about 0.1 s and start no MPI. Everything after that happens inside
`abort.run`, which starts MPI and sees to it that a failure on one rank ends all of them.

Exit status, the same on every rank: 0 done; 1 an exception that is not ours, with its traceback; 2 something was asked
for that cannot be done, with a message; n after `sys.exit(n)`; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from hpczero import __version__
from hpczero.cli import abort, launch
from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

COMMANDS = {
    "train": "train a model with ZeRO; what happens without a command",
    "bench": "time the collectives beside each other and beside the MPI library's own",
    "topo": "show nodes and links, measured; draw algorithms; predict their times on paper",
    "tune": "measure every algorithm on this machine, and keep the times that adaptive goes by",
    "explain": "show which algorithm adaptive takes for a call, and why",
    "doctor": "show what MPI, launcher, cores, devices and kernel cache hpczero finds here",
}

VARIABLES = ("HPCZERO_NODE_MAP", "HPCZERO_DEVICE_TRANSFER", "HPCZERO_MAX_COUNT", "HPCZERO_TUNING_TABLE")
"""What the package itself reads from the environment, beside HPCZERO_<COMMAND>_<KEY>."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return this process's exit status. Called by every rank."""
    argv = list(sys.argv[1:] if argv is None else argv)
    started = launch.read(os.environ)
    try:
        args, error = parse(argv), None
    except ConfigError as refusal:
        # Raised again once MPI is up: then one rank can speak for all, and none leaves before it has.
        args, error = None, refusal
    if args is None and error is None:
        return 0
    if error is None and started.rank is None and _is_on_paper(args):
        try:
            return import_module(f"hpczero.cli.{args.command}").run(args, None)
        except ConfigError as refusal:
            error = refusal
    launch.before_mpi(os.environ, started)

    def command(comm: MPI.Comm) -> int:
        if error is not None:
            raise error
        _log_from(comm)
        launch.share_cores(os.environ, comm)
        launch.kernel_cache(os.environ)
        return import_module(f"hpczero.cli.{args.command}").run(args, comm)

    return abort.run(command, started)


def parse(argv: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of the command that `argv` names; None if it only asked for help or the version, now printed.

    ConfigError for whatever is not understood.
    """
    argv = list(argv)
    named = argv[0] if argv and not argv[0].startswith("-") else None
    if named is not None and named not in COMMANDS:
        raise ConfigError(f"{named!r} is no command{_nearest(named, COMMANDS)}; commands are {', '.join(COMMANDS)}")
    speaks = launch.read(os.environ).rank in (None, 0)
    if "--version" in argv:
        if speaks:
            print(f"hpczero {__version__}")
        return None
    command = named or "train"
    parser = _Parser(
        prog=f"python -m hpczero {named}" if named else "python -m hpczero",
        usage="%(prog)s [flags]" if named else "%(prog)s [command] [flags]",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}." if named else _ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="" if named else _commands(),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this and exit")
    if not named:
        parser.add_argument("--version", action="store_true", help="show the version and exit")
    import_module(f"hpczero.cli.{command}").add_arguments(parser)
    if {"-h", "--help"} & set(argv):
        if speaks:
            parser.print_help()
        return None
    args, rest = parser.parse_known_args(argv[1:] if named else argv)
    if rest:
        raise ConfigError(_unknown(rest[0].partition("=")[0], command, parser))
    args.command = command
    return args


_ABOUT = """\
Trains a model with ZeRO: its parameters, gradients and optimizer states partitioned over the ranks of an MPI job.

  mpirun -n 2 python -m hpczero                     a small transformer on text that ships with Python
  mpirun -n 2 python -m hpczero --data book.txt     on your own text"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def _commands() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["commands:", *lines, "", "The flags above are those of train; `COMMAND --help` shows the others'."]
    )


def _is_on_paper(args: argparse.Namespace) -> bool:
    """Whether the command says that, with these flags, it needs no MPI."""
    needs_mpi = getattr(import_module(f"hpczero.cli.{args.command}"), "needs_mpi", None)
    return needs_mpi is not None and not needs_mpi(args)


def _nearest(name: str, names: Iterable[str]) -> str:
    from hpczero.settings import nearest

    return nearest(name, names)


def _unknown(flag: str, command: str, parser: argparse.ArgumentParser) -> str:
    from hpczero.settings import closest

    if not flag.startswith("-"):
        return f"{flag!r}: {command} takes flags only; --help lists them"
    found = closest(
        flag.lstrip("-"), [text.lstrip("-") for action in parser._actions for text in action.option_strings]
    )
    return f"{flag}: no such flag of {command}; " + (f"did you mean --{found}?" if found else "--help lists all")


def _log_from(comm: MPI.Comm) -> None:
    """Rank 0 reports on stderr; of the others only warnings come through, with their rank."""
    handler = logging.StreamHandler()
    who = "" if comm.rank == 0 else f"rank {comm.rank} of {comm.size}: "
    handler.setFormatter(logging.Formatter(f"hpczero: {who}%(message)s"))
    log = logging.getLogger("hpczero")
    log.addHandler(handler)
    log.setLevel(logging.INFO if comm.rank == 0 else logging.WARNING)
    log.propagate = False
