"""``zerostart verify``: a saved directory against what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[Path, typer.Argument(help="A directory that zerostart has saved.", show_default=False)],
) -> None:
    """Read a saved checkpoint once and compare it with the digests that were saved with it."""
    import zerostart
    from zerostart.cli.inspect import readable
    from zerostart.errors import printable

    found = zerostart.verify(path)
    what = f"{found.files:,} files, {found.tensors:,} tensors, {readable(found.bytes)}"
    print(f"{printable(str(path))}: {what}, all as they were saved")
