"""``python -m zerostart``: a command (``-m zerostart train``), or a script as for ``run``.

So ``-m zerostart SCRIPT ARGS`` and ``-m zerostart -m MODULE ARGS`` are what launchers start.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zerostart.cli import is_command, main


def _is_script(word: str) -> bool:
    return Path(word).is_file() or (Path(word) / "__main__.py").is_file()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    first = arguments[0] if arguments else ""
    named = first in ("-h", "--help", "--version", "--traceback") or (
        is_command(first) and not _is_script(first)
    )
    main(arguments if named else ["run", *arguments])
