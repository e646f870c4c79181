"""``python -m zerostart SCRIPT ARGS`` and ``-m zerostart -m MODULE ARGS``: the same as ``zerostart run``."""

from __future__ import annotations

import sys

from zerostart.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
