"""Warnings of libraries: each once, whatever Python has forgotten, and however many ranks have it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
import warnings

def step(rank):
    with warnings.catch_warnings():  # Python forgets what it has shown
        warnings.simplefilter("ignore")
    warnings.warn("all_gather is deprecated", FutureWarning)
    warnings.warn(f"only rank {rank} says so", UserWarning)
"""
SCRIPT = """
import os, sys, time, warnings
sys.path.insert(0, {folder!r})
import library

for step in range(4):
    library.step(os.environ["RANK"])
    warnings.warn(f"the script's own, at step {{step}}")

open("here" + os.environ["RANK"], "w")
while not all(os.path.exists(f"here{{rank}}") for rank in (0, 1)):
    time.sleep(0.05)
time.sleep(2 * (os.environ["RANK"] == "0"))
"""


def said(folder: Path, **environment: str) -> str:
    """What two ranks of one launch say, together."""
    packages = folder / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / "library.py").write_text(LIBRARY)
    (folder / "script.py").write_text(SCRIPT.format(folder=str(packages)))
    command = [sys.executable, "-m", "zerostart", "run", "script.py"]
    ranks = []
    for rank in ("0", "1"):
        told = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", **environment}
        ranks.append(subprocess.Popen(command, cwd=folder, env=told, stderr=subprocess.PIPE, text=True))
    return "".join(rank.communicate(timeout=120)[1] for rank in ranks)


@pytest.mark.slow
def test_each_warning_of_a_library_is_shown_once(tmp_path: Path) -> None:
    text = said(tmp_path)
    assert text.count("FutureWarning: all_gather is deprecated") == 1
    for rank in (0, 1):
        assert text.count(f"UserWarning: only rank {rank} says so") == 1
    assert text.count("UserWarning: the script's own, at step") == 8
    assert "Error" not in text


@pytest.mark.slow
def test_who_says_what_is_to_be_shown_is_shown_it(tmp_path: Path) -> None:
    assert said(tmp_path, PYTHONWARNINGS="always").count("FutureWarning: all_gather is") == 8
