"""The patches that docs/patches has for other libraries, and these libraries with them, in this process."""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "patches"
_HEAD = re.compile(r"Subject: (?P<subject>.+)\nAgainst: (?P<against>.+)\nReplaces: (?P<replaces>.+)\n\n")


@dataclass(frozen=True)
class Patch:
    """A file of ``docs/patches``: a head, the reason, and the difference."""

    name: str
    subject: str
    against: str
    replaces: str
    reason: str
    difference: str

    @property
    def library(self) -> str:
        return self.against.partition(" ")[0]

    @property
    def files(self) -> list[str]:
        """The files that it changes, by their paths beside the library's package."""
        return re.findall(r"^\+\+\+ b/(.+)$", self.difference, re.MULTILINE)


def patches(library: str | None = None) -> list[Patch]:
    """All, or those for one library."""
    found = []
    for path in sorted(FOLDER.glob("*.diff")):
        text = path.read_text(encoding="utf-8")
        head = _HEAD.match(text)
        assert head, f"{path}: Subject, Against and Replaces come first"
        reason, _, difference = text[head.end() :].partition("\n--- a/")
        found.append(Patch(path.stem, **head.groupdict(), reason=reason, difference=f"--- a/{difference}"))
    return [patch for patch in found if library in (None, patch.library)]


def applied(chosen: list[Patch], folder: Path) -> dict[str, str]:
    """The text of each module that the patches change, changed; they are applied to copies in ``folder``.

    Raises AssertionError where one does not fit what is installed.
    """
    names = {file: file.removesuffix(".py").replace("/", ".") for patch in chosen for file in patch.files}
    for file in names:
        top = file.partition("/")[0]
        spec = importlib.util.find_spec(top)
        assert spec is not None, f"{top} is not here"
        assert spec.origin is not None
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(spec.origin).parents[1] / file, folder / file)
    for patch in chosen:
        run = subprocess.run(
            ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-d", folder],
            input=patch.difference,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, f"{patch.name}: {run.stdout}{run.stderr}"
    return {name: (folder / file).read_text(encoding="utf-8") for file, name in names.items()}


def use(chosen: list[Patch], folder: Path) -> None:
    """Have the modules of this process, which ends with its test, be those that are patched.

    Each runs once more in its own namespace, and whoever had imported a function or class gets the new one.
    """
    for name, source in applied(chosen, folder).items():
        module = importlib.import_module(name)
        before = dict(vars(module))
        path = folder / f"{name.replace('.', '/')}.py"  # where zerostart looks for the lines of a function
        exec(compile(source, path, "exec"), vars(module))
        new = {
            id(old): vars(module)[key]
            for key, old in before.items()
            if getattr(old, "__module__", None) == name and vars(module)[key] is not old
        }
        for other in list(sys.modules.values()):
            if other.__name__.partition(".")[0] == name.partition(".")[0]:
                for key, value in list(vars(other).items()):
                    if id(value) in new:
                        setattr(other, key, new[id(value)])
