"""The ``zerostart`` command.

The modules of its commands import torch and transformers inside functions, so that ``--help`` and usage
errors answer at once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from zerostart.cli import run
from zerostart.errors import ZerostartError

__all__ = ["application", "main"]

#: Commands in the order of ``--help``, with the examples in the help of each.
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "inspect": ("inspect Qwen/Qwen3-0.6B", "inspect checkpoints/step-100 --json"),
    "plan": (
        "plan Qwen/Qwen3-30B-A3B --world-size 8 --device-memory 80GB",
        "plan checkpoints/step-100 --world-size 64 --engine fsdp2 --json",
    ),
    "load": ("load Qwen/Qwen3-0.6B --nproc 2 --verify",),
    "train": ("train run.yaml --nproc 2", "train run.yaml train.steps=10 resume=auto"),
    "cache": ("cache run.yaml --nproc 2",),
    "config": ("config qwen-image run.yaml", "config wan run.yaml --engine fsdp2 --lora"),
    "run": (
        "run --engine fsdp2 train.py --epochs 3",
        "run -m package.train --epochs 3",
    ),
    "export": ("export runs/demo/checkpoints/step-100 exported --dtype bfloat16",),
    "convert": (
        "convert checkpoints/step-100 weights --to dcp",
        "convert runs/zero-3 model --to original --dtype bfloat16",
    ),
    "synth": ("synth qwen3_moe tiny-moe --size tiny", "synth config.json big --sparse"),
    "verify": ("verify runs/demo/final",),
    "diff": ("diff checkpoints/step-100 checkpoints/step-200",),
    "env": ("env", "env --check"),
}
#: Modules that several commands share, as functions of their names; elsewhere it is ``command``.
_MODULES = {"verify": "inspect", "diff": "inspect", "inspect": "inspect"}
_MODULES |= {"convert": "convert", "export": "convert"}
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def application() -> typer.Typer:
    """Build the command line, without importing torch."""
    app = typer.Typer(
        name="zerostart",
        help="Pretrained checkpoints straight into sharded, ready-to-train models.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},  # of the commands, too
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_global_options)
    for name, examples in _COMMANDS.items():
        module = importlib.import_module(f"zerostart.cli.{_MODULES.get(name, name)}")
        command = getattr(module, name if name in _MODULES else "command")
        settings = getattr(module, "CONTEXT", None)
        register = app.command(name, epilog=_format_examples(examples), context_settings=settings)
        register(_guard(command))
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv`` (default: this process's) and exit.

    Exit codes: 0, or 1 with one line ``error: ...`` for a :class:`ZerostartError`, 2 for a usage error,
    130 when interrupted. Tracebacks appear with ``--traceback`` or ``ZEROSTART_TRACEBACK=1``.
    """
    app = application()
    try:
        # The name also for ``python -m zerostart``.
        app(None if argv is None else list(argv), prog_name="zerostart")
    except SystemExit as done:
        # Raised below: a pending script runs first, outside of ``except``, so that its errors have no
        # context.
        exit_status = done
    # A script of ``zerostart run`` ends the process itself.
    for script in run.pending:
        script.run()
    raise exit_status


def is_command(word: str) -> bool:
    """Return True if ``word`` is the name of a command."""
    return word in _COMMANDS


def _format_examples(examples: Sequence[str]) -> str:
    title = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  zerostart {example}" for example in examples)])


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"zerostart {importlib.metadata.version('zerostart')}")
        raise typer.Exit


def _global_options(
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if show_traceback:
        os.environ["ZEROSTART_TRACEBACK"] = "1"  # in the environment, so that local ranks see it too


def _guard(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``command`` so that it prints a ZerostartError as one line."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ZerostartError as error:
            if os.environ.get("ZEROSTART_TRACEBACK"):
                traceback.print_exc()
            print(f"error: {_join_lines(error)}", file=sys.stderr)
            # Logs and programs get one line; a person at a terminal also gets a link.
            if sys.stderr.isatty():
                print(f"see {error.help_url}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from None

    return run


def _join_lines(error: ZerostartError) -> str:
    return " ".join(str(error).split())
