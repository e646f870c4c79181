"""``zerostart run SCRIPT ARGS``: an existing script as it is, with ``zerostart.enable()`` before it."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.cli.options import takes, values_of
from zerostart.cli.script import Script
from zerostart.errors import ConfigError
from zerostart.loading.arguments import EnabledArguments

if TYPE_CHECKING:
    from zerostart.integrations.adoption import Notice

#: What follows the script's name is the script's.
CONTEXT = {"allow_interspersed_args": False}
#: The script to be run when the command line is through; what it raises is then its own affair.
pending: list[Script] = []


@takes(EnabledArguments)
def command(
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]", help="The script and its arguments.", show_default=False),
    ],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar of each load.")] = True,
    fp32_masters: Annotated[
        bool, typer.Option(help="Have fp32 masters start from the values that are stored.")
    ] = True,
    **given: Any,
) -> None:
    """Run a script as it is, with zerostart.enable() before it.

    Also the command of a launcher: torchrun --no-python zerostart run SCRIPT, torchrun -m zerostart SCRIPT,
    accelerate launch -m zerostart SCRIPT. Options come before the script's name.
    """
    from zerostart.integrations.adoption import enable

    found = Script(script[0], script[1:], module)
    try:
        found.check()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    enable(EnabledArguments(**values_of(given), progress=progress, fp32_masters=fp32_masters))
    _watch()
    pending.append(found)


def _watch() -> None:
    """Say on rank 0 what is taken over, when it is, and at the end if nothing was."""
    from zerostart.integrations.adoption import listen

    taken: list[Notice] = []
    left: list[Notice] = []

    def heard(notice: Notice) -> None:
        (left if notice.how is None else taken).append(notice)
        if notice.how is not None:
            _say(f"{notice.model} {notice.how}")

    def end() -> None:
        if not taken:
            _say(f"nothing was taken over: {_why(left)}")

    listen(heard)
    atexit.register(end)


def _why(left: list[Notice]) -> str:
    if not left:
        return "the script loaded no model with from_pretrained"
    names = ", ".join(dict.fromkeys(notice.model for notice in left))
    return (
        f"no sharding was set up when {names} was loaded. Launch the script with a DeepSpeed ZeRO or FSDP2 "
        "configuration, make TrainingArguments or the Accelerator before the model, or name --engine"
    )


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"zerostart run: {text}", file=sys.stderr, flush=True)
