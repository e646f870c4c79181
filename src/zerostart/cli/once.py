"""Warnings of libraries, each shown once: not at every step again, and not by every rank of a machine.

Python shows a warning once for each line of code, but forgets what it has shown whenever some code changes
the filters (``warnings.catch_warnings``), and torch does so at every step. Every rank is a process with a
memory of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

#: What libraries say to who writes code; the same on all ranks, which run the same code.
_OF_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
#: Seconds that other ranks leave to the first one of their machine to show what it warns of as well.
_PATIENCE = 3.0
#: By the text of a warning the socket whose name says that it has been shown. The kernel frees the name with
#: the process, however that ends, and nothing is left on a disk.
_claims: dict[str, socket.socket] = {}
#: More different warnings than these are shown by each rank: a claim takes an open file.
MOST_CLAIMS = 64
_known: set[str] = set()
_waiting: list[tuple[str, Callable[[], None]]] = []


def show_warnings_once() -> None:
    """From now on show each warning of a library once, by one rank of each machine.

    What a script warns of by itself stays as it is; so does everything where ``-W`` or ``PYTHONWARNINGS``
    says what is to be shown. A warning that the first rank of the machine does not have is shown by another.
    """
    if sys.warnoptions:
        return
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        display = partial(shown, message, category, filename, lineno, file, line)
        if file is not None or not _is_of_library(category, filename):
            display()
            return
        text = f"{category.__name__}: {message}"
        if text in _known:
            return
        _known.add(text)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _claim(text)
            display()
            return
        _waiting.append((text, display))
        if len(_waiting) == 1:
            timer = threading.Timer(_PATIENCE, _show_waiting)
            timer.daemon = True
            timer.start()

    warnings.showwarning = show
    atexit.register(_show_waiting)


def _is_of_library(category: type[Warning], filename: str) -> bool:
    installed = {"site-packages", "dist-packages"}.intersection(Path(filename).parts)
    return issubclass(category, _OF_CODE) or bool(installed)


def _claim(text: str) -> bool:
    """Whether no other rank of this machine has shown that."""
    # Ranks of one launch on one machine have one parent. The name is an abstract one: it lies in no folder.
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()
    if len(_claims) >= MOST_CLAIMS:
        return True
    try:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # no files are left
        return True
    try:
        claim.bind(f"\0zerostart-warned-{os.getppid()}-{digest}")
    except OSError:
        claim.close()
        return False
    _claims[text] = claim
    return True


def _show_waiting() -> None:
    while _waiting:
        # Left in its place until it is shown, so that no second timer is started meanwhile.
        text, display = _waiting[0]
        with contextlib.suppress(OSError, ValueError):  # a stream that is closed
            if _claim(text):
                display()
        del _waiting[0]
