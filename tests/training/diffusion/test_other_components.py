"""The parts of a pipeline that a run does not train: copied beside what it trained, or left as they are."""

import json
import os

import pytest

from zerostart.errors import ConfigError
from zerostart.training.diffusion.flow_source import copy_others


@pytest.fixture
def pipeline(tmp_path):
    """A pipeline of two models, with a run's folder beside them."""
    root = tmp_path / "pipeline"
    for name in ("transformer", "vae", "out"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(name)
    kinds = {"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}
    (root / "model_index.json").write_text(json.dumps({"_class_name": "P", **kinds}))
    return root


def test_a_pipeline_that_is_trained_in_its_place_keeps_its_parts(pipeline):
    copy_others(pipeline, "transformer", pipeline)
    assert (pipeline / "vae" / "config.json").read_text() == "vae"
    copy_others(pipeline, "transformer", pipeline / "out")
    assert sorted(one.name for one in (pipeline / "out").iterdir()) == [
        "config.json",
        "model_index.json",
        "vae",
    ]


def test_what_runs_left_beside_a_pipeline_is_none_of_it(pipeline, tmp_path):
    """The output of one run is the source of the next, whose own checkpoints are to stay."""
    made = tmp_path / "made"
    for folder, text in ((pipeline, "the first"), (made, "the second")):
        (folder / "ema").mkdir(parents=True)
        (folder / "ema" / "config.json").write_text(text)
    copy_others(pipeline, "transformer", made)
    assert (made / "ema" / "config.json").read_text() == "the second"


def test_files_that_cannot_be_linked_are_copied(pipeline, tmp_path, monkeypatch):
    def refused(source, target):
        raise PermissionError(1, "Operation not permitted")  # what a system says of another user's file

    monkeypatch.setattr("os.link", refused)
    (tmp_path / "made").mkdir()
    copy_others(pipeline, "transformer", tmp_path / "made")
    assert (tmp_path / "made" / "vae" / "config.json").read_text() == "vae"


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_has_no_end_is_not_copied(tmp_path, kind):
    root = tmp_path / "root"
    (tmp_path / "made").mkdir()
    (root / "scheduler").mkdir(parents=True)
    (root / "model_index.json").write_text(json.dumps({"scheduler": ["diffusers", "S"]}))
    if kind == "fifo":
        os.mkfifo(root / "scheduler" / "one")
    else:
        (root / "scheduler" / "one").symlink_to(root)
    with pytest.raises(ConfigError, match=r"scheduler/one is (not a regular file|a link to a directory)"):
        copy_others(root, "transformer", tmp_path / "made")
    assert not (tmp_path / "made" / "model_index.json").exists()


def test_files_of_others_stay_beside_a_copied_part(pipeline, tmp_path):
    """And no weights of an earlier base are read in the place of the new ones, as an index would be."""
    made, vae = tmp_path / "made", pipeline / "vae"
    (vae / "diffusion_pytorch_model.safetensors").write_text("new")
    (made / "vae").mkdir(parents=True)
    for name in ("-00001-of-00002.safetensors", ".safetensors.index.json", ".safetensors"):
        (made / "vae" / f"diffusion_pytorch_model{name}").write_text("old")
    for name in ("notes", "other.safetensors"):
        (made / "vae" / name).write_text("mine")
    (tmp_path / "mine").write_text("mine")
    (made / "model_index.json").symlink_to(tmp_path / "mine")
    for _ in range(2):
        copy_others(pipeline, "transformer", made)
        assert {file.name: file.read_text() for file in (made / "vae").iterdir()} == {
            "config.json": "vae",
            "diffusion_pytorch_model.safetensors": "new",
            "notes": "mine",
            "other.safetensors": "mine",
        }
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "vae").symlink_to(made / "vae")
    with pytest.raises(ConfigError, match="is a link"):
        copy_others(pipeline, "transformer", tmp_path / "second")
