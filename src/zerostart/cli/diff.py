"""``zerostart diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

from typing import Annotated

import typer

_DIFFERENT = 1


def command(
    a: Annotated[str, typer.Argument(help="A checkpoint: directory, file, or hub id in the local cache.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all names as JSON.")] = False,
) -> None:
    """Compare the tensors of two checkpoints by name, bit by bit; exits 1 where there is a difference."""
    import zerostart
    from zerostart.checkpoint.strict_json import dump_json

    found = zerostart.diff(a, b)
    print(dump_json(found.document(), indent=1) if as_json else found)
    if not found.same:
        raise typer.Exit(_DIFFERENT)
