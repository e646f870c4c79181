"""``zerostart run SCRIPT ARGS``: an existing script as it is, with ``zerostart.enable()`` before it."""

from __future__ import annotations

import atexit
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from zerostart.cli.options import ENABLE_OPTIONS, takes, values_of
from zerostart.errors import ConfigError

if TYPE_CHECKING:
    from zerostart.integrations.adoption import Notice

#: What follows the script's name is the script's.
CONTEXT = {"allow_interspersed_args": False}
_RUNPY = runpy.run_path.__code__.co_filename
#: The script that ``main`` runs after the command line, so that its errors have no context of ours.
pending: list[Script] = []


@takes(*ENABLE_OPTIONS)
def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script gets.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar of each load.")] = True,
    fp32_masters: Annotated[
        bool, typer.Option(help="Have fp32 masters start from the values that are stored.")
    ] = True,
    **given: Any,
) -> None:
    """Run an existing script, its models loaded in shards.

    The script stays as it is; zerostart.enable() comes before it. Also the command of a launcher:
    torchrun --no-python zerostart run SCRIPT, torchrun -m zerostart SCRIPT, accelerate launch -m zerostart
    SCRIPT. Options of zerostart come before the script's name; what follows the name is the script's.
    """
    from zerostart.loading.request import Request
    from zerostart.refit.trl import adoption

    found = Script(script, arguments or [], module)
    try:
        found.check()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    _point_out(found)
    # Before the script is even read: what it imports is to find the libraries as they are taken over.
    adoption.enable(Request(**values_of(given), progress=progress, fp32_masters=fp32_masters))
    _watch()
    pending.append(found)


def _point_out(script: Script) -> None:
    own = {f"--{option.name.replace('_', '-')}" for option in ENABLE_OPTIONS}
    behind = [word for word in script.arguments if word.partition("=")[0] in own]
    if behind:
        named = f"-m {script.name}" if script.module else script.name
        _say(
            f"{' and '.join(behind)} behind the script's name goes to the script; zerostart's own options "
            f"stand before it: zerostart run {behind[0]} ... {named}"
        )


def _watch() -> None:
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
    # At the very end, since a script may load its model at any time.
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


@dataclass(frozen=True)
class Script:
    """A file, or (``module``) a module by its dotted name, and the arguments after it.

    A file may be a directory or a zip file with a ``__main__``.
    """

    name: str
    arguments: Sequence[str]
    module: bool = False

    def check(self) -> None:
        """Raise ConfigError for a file that cannot be run; a module is looked for when it is run."""
        if self.module or Path(self.name).is_file():
            return
        if not Path(self.name).is_dir():
            raise ConfigError(f"no such script: {self.name}; name a file, or a module with -m")
        importer: Any = pkgutil.get_importer(self.name)
        if importer is None or importer.find_spec("__main__") is None:
            raise ConfigError(f"{self.name} has no __main__.py; name the script in it")

    def run(self) -> NoReturn:
        """Run the script, and end the process as ``python`` would."""
        # In place: whoever has imported the list sees the script's arguments.
        sys.argv[:] = [self.name, *self.arguments]
        if not sys.flags.safe_path:
            # In the place of the folder of the command that was typed.
            sys.path[0] = str(Path.cwd()) if self.module else str(Path(self.name).resolve().parent)
        try:
            if self.module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                # Absolute, as the interpreter has ``__file__``.
                runpy.run_path(str(Path(self.name).absolute()), run_name="__main__")
        except SystemExit:
            raise
        except BaseException as error:
            _end(error)
        sys.exit(0)


def _end(error: BaseException) -> NoReturn:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _RUNPY):
        trace = trace.tb_next
    if trace is None and isinstance(error, ImportError):  # raised by runpy: no module that can be run
        print(f"{sys.executable}: {error}", file=sys.stderr)
        sys.exit(1)
    shown = error.with_traceback(trace)
    sys.excepthook(type(shown), shown, trace)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *_: None
        raise error  # the interpreter then ends by the signal
    sys.exit(1)
