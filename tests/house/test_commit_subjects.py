"""The check of commit subjects finds faults, and knows a history without its base."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "commit_subjects.py"
AREAS = frozenset({"docs", "state", "errors"})


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("commit_subjects", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("state: keep other writers' files", None),
        ("errors: `raise` the first of two errors", None),
        ("state: " + "x" * 65, None),
        ("state: " + "x" * 66, "has 73 characters"),
        ("Keep other writers' files", "is not `area"),
        ("state, docs: keep files", "is not `area"),
        ("transport: keep files", "unknown area 'transport'"),
        ("state: the files of other writers are kept", "no imperative"),
        ("state: keep files.", "no imperative"),
    ],
)
def test_faults_of_subjects_are_named(check, subject, fault):
    answer = check.find_fault(subject, AREAS)
    assert (answer is None) if fault is None else fault in answer


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=n", "-c", "user.email=e", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def test_other_and_shallow_histories(check, tmp_path, monkeypatch, capsys):
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    (origin / "src/zerostart/state").mkdir(parents=True)
    (origin / "src/zerostart/state/save.py").touch()
    git(origin, "init", "--quiet")
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "Old words")
    git(origin, "commit", "--quiet", "--allow-empty", "-m", "state: save files")
    monkeypatch.setattr(check, "ROOT", origin)
    check.main()
    assert "not checked" in capsys.readouterr().out

    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{origin}", str(clone))
    monkeypatch.setattr(check, "ROOT", clone)
    check.main()
    assert "1 subjects of commits, 0 with a fault" in capsys.readouterr().out
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "What is saved")
    with pytest.raises(SystemExit, match="'What is saved' is not"):
        check.main()
