"""``zerostart run SCRIPT ARGS``: run a script after ``zerostart.enable()``."""

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

from zerostart.cli.options import ENABLE_OPTIONS, add_options, parse_values
from zerostart.errors import ConfigError

if TYPE_CHECKING:
    from zerostart.integrations.adoption import Notice

#: Arguments after the script's name belong to the script.
CONTEXT = {"allow_interspersed_args": False}
_RUNPY = runpy.run_path.__code__.co_filename
#: The script that ``main`` runs last, so that its errors have no context of ours.
pending: list[Script] = []


@add_options(*ENABLE_OPTIONS)
def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar of each load.")] = True,
    fp32_masters: Annotated[bool, typer.Option(help="Start fp32 masters from the stored values.")] = True,
    **values: Any,
) -> None:
    """Run an existing script and load its models in shards.

    The script is unchanged; zerostart.enable() runs before it. Works under launchers: torchrun --no-python
    zerostart run SCRIPT, torchrun -m zerostart SCRIPT, accelerate launch -m zerostart SCRIPT. Options of
    zerostart come before the script's name; arguments after the name belong to the script.
    """
    from zerostart.loading.request import Request
    from zerostart.refit.trl import adoption

    target = Script(script, arguments or [], module)
    try:
        target.check()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    # Before the script runs, so that its imports find the patched libraries.
    adoption.enable(Request(**parse_values(values), progress=progress, fp32_masters=fp32_masters))
    _report_adoption()
    pending.append(target)


def _report_adoption() -> None:
    from zerostart.integrations.adoption import listen

    adopted: list[Notice] = []
    skipped: list[Notice] = []

    def record(notice: Notice) -> None:
        (skipped if notice.how is None else adopted).append(notice)
        if notice.how is not None:
            _print(f"{notice.model} {notice.how}")

    def report() -> None:
        if not adopted:
            _print(f"nothing was taken over: {_explain(skipped)}")

    listen(record)
    # At exit, since a script may load its model at any time.
    atexit.register(report)


def _explain(skipped: list[Notice]) -> str:
    if not skipped:
        return "the script loaded no model with from_pretrained"
    names = ", ".join(dict.fromkeys(notice.model for notice in skipped))
    return (
        f"no sharding was set up when {names} was loaded. Launch the script with a DeepSpeed ZeRO or FSDP2 "
        "configuration, make TrainingArguments or the Accelerator before the model, or name --engine"
    )


def _print(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"zerostart run: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Script:
    """A script to run: a file, a directory, a zip file or a module."""

    name: str
    arguments: Sequence[str]
    module: bool = False

    def check(self) -> None:
        """Raise ConfigError for a file that cannot be run."""
        if self.module or Path(self.name).is_file():
            return
        if not Path(self.name).is_dir():
            raise ConfigError(f"no such script: {self.name}; name a file, or a module with -m")
        importer: Any = pkgutil.get_importer(self.name)
        if importer is None or importer.find_spec("__main__") is None:
            raise ConfigError(f"{self.name} has no __main__.py; name the script in it")

    def run(self) -> NoReturn:
        """Run the script, and end the process as ``python`` would."""
        # In place, since other modules may hold the list.
        sys.argv[:] = [self.name, *self.arguments]
        if not sys.flags.safe_path:
            # Replace the folder of the zerostart command.
            sys.path[0] = str(Path.cwd()) if self.module else str(Path(self.name).resolve().parent)
        try:
            if self.module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                # Absolute, as in Python's own ``__file__``.
                runpy.run_path(str(Path(self.name).absolute()), run_name="__main__")
        except SystemExit:
            raise
        except BaseException as error:
            _raise_or_exit(error)
        sys.exit(0)


def _raise_or_exit(error: BaseException) -> NoReturn:
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
