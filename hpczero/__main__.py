"""`python -m hpczero`: the command line, see `hpczero.cli`."""

from __future__ import annotations

import sys

from hpczero.cli import main

if __name__ == "__main__":
    sys.exit(main())
