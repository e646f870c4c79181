"""Run every Python block of README and docs on real ranks, with tiny models."""

import contextlib
import gc
import os
import re
from pathlib import Path

import pytest

import zerostart
from tests import file_aio
from tests.documents.blocks import Block, blocks_of, pages
from tests.documents.folders import make_folders
from tests.documents.scenes import SCENES, SUBSTITUTIONS, Scene, scene_of
from tests.documents.sessions import session_of
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import ConfigError


def runs_in_session(page: str) -> bool:
    """Return True if a session runs the page's Python blocks together with its commands."""
    session = session_of(page)
    return session is not None and session.python


PYTHON = [
    block
    for page in pages()
    for block in blocks_of(page)
    if block.language == "python"
    and block.file is None
    and block.not_run is None
    and not runs_in_session(page)
]
SCENE_PARAMETERS = [
    pytest.param(scene, id=scene.id, marks=[pytest.mark.slow] if scene.slow else []) for scene in SCENES
]


@pytest.mark.parametrize("scene", [s for s in SCENE_PARAMETERS if s.values[0].slow])
def test_slow_blocks_run(scene: Scene, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    make_folders(tmp_path, scene.models, checkpoints)
    run_ranks(play, scene.ranks, [scene], [tmp_path], timeout=240)


def test_blocks_run(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Run all pages in one group of ranks, which imports only once."""
    quick = [scene for scene in SCENES if not scene.slow]
    folders = [tmp_path / str(number) for number in range(len(quick))]
    for scene, folder in zip(quick, folders, strict=True):
        folder.mkdir()
        make_folders(folder, scene.models, checkpoints)
    run_ranks(play, 2, quick, folders, timeout=240)


def play(scenes: list[Scene], folders: list[Path]) -> None:
    """Run the scenes in turn on this rank, each in its folder."""
    if not file_aio.is_compilable():
        file_aio.install()
    for scene, folder in zip(scenes, folders, strict=True):
        os.chdir(folder)
        names = scene.make_names()
        try:
            for block in PYTHON:
                if scene_of(block.page, block.text) == scene:
                    exec(compile(substitute(block), str(block.page), "exec"), names)
        finally:
            with contextlib.suppress(ConfigError):
                zerostart.disable()
        names.clear()
        gc.collect()


def substitute(block: Block) -> str:
    """Return the text to run, with the page's line numbers for tracebacks."""
    text = re.sub("|".join(map(re.escape, SUBSTITUTIONS)), lambda match: SUBSTITUTIONS[match[0]], block.text)
    return "\n" * (block.line - 1) + text
