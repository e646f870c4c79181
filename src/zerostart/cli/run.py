"""``zerostart run SCRIPT ARGS``: an existing script as it is, with ``zerostart.enable()`` before it."""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from zerostart.cli.once import show_warnings_once
from zerostart.cli.options import takes, values_of
from zerostart.errors import ConfigError
from zerostart.loading.arguments import EnabledArguments, options

if TYPE_CHECKING:
    from zerostart.integrations.adoption import Notice

#: What follows the script's name is the script's.
CONTEXT = {"allow_interspersed_args": False}
#: The script to be run when the command line is through; what it raises is then its own affair.
pending: list[Script] = []


@takes(EnabledArguments)
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

    from zerostart.refit.trl import adoption

    found = Script(script, arguments or [], module)
    try:
        found.check()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    _point_out(found)
    # Before the script is even read: what it imports is to find the libraries as they are taken over.
    show_warnings_once()
    adoption.enable(EnabledArguments(**values_of(given), progress=progress, fp32_masters=fp32_masters))
    _watch()
    pending.append(found)


def _point_out(script: Script) -> None:
    """Say where an option of ours stands behind the script's name: the script gets it, and we do not."""
    own = {f"--{name.replace('_', '-')}" for name, *_ in options(EnabledArguments)}
    behind = [word for word in script.arguments if word.partition("=")[0] in own]
    if behind:
        named = f"-m {script.name}" if script.module else script.name
        _say(
            f"{' and '.join(behind)} behind the script's name goes to the script; zerostart's own options "
            f"stand before it: zerostart run {behind[0]} ... {named}"
        )


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
        if self._held() is None:
            raise ConfigError(f"{self.name} has no __main__.py; name the script in it")

    def run(self) -> NoReturn:
        """Run the script, and end the process as ``python`` would."""
        # In place: whoever has imported the list sees the script's arguments.
        sys.argv[:] = [self.name, *self.arguments]
        held = None if self.module else self._held()
        if not sys.flags.safe_path:
            # In the place of the folder of the command that was typed.
            sys.path[0] = str(Path.cwd()) if self.module else str(Path(self.name).resolve().parent)
        if held is not None:
            # A directory or a zip file is itself where its modules are, as the interpreter has it: in the
            # place of the entry above, or before all where ``-P`` has left that out.
            sys.path[: not sys.flags.safe_path] = [self._path]
        try:
            code, main = self._found() if self.module else self._read(held)
            # Under that name while it runs: pickle and multiprocessing look its classes up there.
            sys.modules["__main__"] = main
            exec(code, vars(main))
        except SystemExit:
            raise
        except BaseException as error:
            _end(error)
        sys.exit(0)

    @property
    def _path(self) -> str:
        """Absolute, and otherwise as it was typed, as the interpreter has it."""
        return self.name if Path(self.name).is_absolute() else f"{Path.cwd()}/{self.name}"

    def _held(self) -> importlib.machinery.ModuleSpec | None:
        """The ``__main__`` in a directory or a zip file; None where there is none, and for a plain file."""
        importer: Any = pkgutil.get_importer(self._path)
        return None if importer is None else importer.find_spec("__main__")

    def _read(self, held: importlib.machinery.ModuleSpec | None) -> tuple[CodeType, types.ModuleType]:
        """The code of a file, or of the ``__main__`` that it holds, and the module that it runs in."""
        code = None if held is None else _code(held)
        if held is not None and code is not None:
            return code, _of(held)
        with io.open_code(self._path) as file:
            code = compile(file.read(), self._path, "exec", dont_inherit=True)
        loader = importlib.machinery.SourceFileLoader("__main__", self._path)
        given = {"__file__": self._path, "__cached__": None, "__loader__": loader}
        return code, _main(**given, __package__=None, __spec__=None)

    def _found(self) -> tuple[CodeType, types.ModuleType]:
        """The code of a module, or of the ``__main__`` of a package."""
        sys.argv[0] = "-m"  # while packages on the way to it are imported
        spec = _specification(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _specification(f"{self.name}.__main__")
        code = None if spec is None else _code(spec)
        if spec is None or code is None:
            print(f"{sys.executable}: No module named {self.name}, or it cannot be run", file=sys.stderr)
            sys.exit(1)
        sys.argv[0] = str(spec.origin)
        return code, _of(spec)


def _specification(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module is; None where it, or a package on the way to it, is not there."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The module itself or a package on the way; what is missing besides, inside of a package, is its own
        # error.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _code(spec: importlib.machinery.ModuleSpec) -> CodeType | None:
    loader: object = spec.loader
    if not hasattr(loader, "get_code"):
        return None
    code: CodeType | None = loader.get_code(spec.name)
    return code


def _of(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    given = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
    return _main(**given, __package__=spec.parent, __spec__=spec)


def _main(**attributes: object) -> types.ModuleType:
    """A new ``__main__``; ours stays alive with the frames that it has called from."""
    module = types.ModuleType("__main__")
    if "__annotations__" in vars(sys.modules["__main__"]):  # which the interpreter makes, in some versions
        module.__annotations__ = {}
    vars(module).update(attributes)
    return module


def _end(error: BaseException) -> NoReturn:
    """Show what the script raised, from its own first line on, and end as the interpreter ends."""
    trace = error.__traceback__
    # Our own frames are no part of what the script's author has to read.
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    shown = error.with_traceback(trace)
    sys.excepthook(type(shown), shown, trace)
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *_: None
        raise error  # The interpreter then ends by the signal, for whoever waits for it.
    sys.exit(1)
