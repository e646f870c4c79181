"""Every Python block of README and docs runs, on real ranks, with tiny models under the names of the page."""

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
from tests.documents.scenes import CHANGED, SCENES, Scene, scene_of
from tests.documents.sessions import session_of
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import ConfigError


def of_a_session(page: str) -> bool:
    """Whether the page is run from its top to its end, with its commands."""
    session = session_of(page)
    return session is not None and session.python


PYTHON = [
    block
    for page in pages()
    for block in blocks_of(page)
    if block.language == "python" and block.file is None and block.not_run is None and not of_a_session(page)
]
SCENARIOS = [
    pytest.param(scene, id=scene.id, marks=[pytest.mark.slow] if scene.slow else []) for scene in SCENES
]


@pytest.mark.parametrize("scene", [s for s in SCENARIOS if s.values[0].slow])
def test_blocks_that_take_their_time_run(scene: Scene, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    make_folders(tmp_path, scene.models, checkpoints)
    run_ranks(play, scene.ranks, [scene], [tmp_path], timeout=240)


def test_blocks_run(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """All pages in one group of ranks: most of what a rank takes is its imports."""
    quick = [scene for scene in SCENES if not scene.slow]
    folders = [tmp_path / str(number) for number in range(len(quick))]
    for scene, folder in zip(quick, folders, strict=True):
        folder.mkdir()
        make_folders(folder, scene.models, checkpoints)
    run_ranks(play, 2, quick, folders, timeout=240)


def play(scenes: list[Scene], folders: list[Path]) -> None:
    """The scenes in turn, each in its folder, on this rank."""
    if not file_aio.compiled():
        file_aio.install()
    for scene, folder in zip(scenes, folders, strict=True):
        os.chdir(folder)
        names = scene.given()
        try:
            for block in PYTHON:
                if scene_of(block.page, block.text) == scene:
                    exec(compile(changed(block), str(block.page), "exec"), names)
        finally:
            with contextlib.suppress(ConfigError):
                zerostart.disable()
        names.clear()
        gc.collect()


def changed(block: Block) -> str:
    """The text that is run, its lines where they are on the page, so that a traceback names them."""
    text = re.sub("|".join(map(re.escape, CHANGED)), lambda found: CHANGED[found[0]], block.text)
    return "\n" * (block.line - 1) + text
