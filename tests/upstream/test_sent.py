"""Apply each patch in docs/patches to the installed library."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from zerostart.upstream.versions import LIBRARIES

PATCHES = sorted((Path(__file__).parents[2] / "docs" / "patches").glob("*.diff"))
HEAD = re.compile(r"Subject: .+\nAgainst: (?P<library>\S+) (?P<version>\S+)\nReplaces: .+\n\n")
LIBRARY = {library.name: library for library in LIBRARIES}


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")
@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_fits_the_installed_library(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head = HEAD.match(text)
    assert head
    assert head["version"] in SpecifierSet(LIBRARY[head["library"]].specifier)
    files = re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)
    assert files
    spec = importlib.util.find_spec(head["library"])
    assert spec is not None
    assert spec.origin is not None
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(spec.origin).parents[1] / file, tmp_path / file)
    command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-d", str(tmp_path)]
    run = subprocess.run(command, input=text[head.end() :], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for file in files:
        compile((tmp_path / file).read_text(encoding="utf-8"), file, "exec")
