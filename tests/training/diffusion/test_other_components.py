"""Untrained components of a pipeline are copied to the output of a run."""

import json
import os

import pytest

from zerostart.errors import ConfigError
from zerostart.training.diffusion.flow_source import copy_others


@pytest.fixture
def pipeline(tmp_path):
    """Pipeline of two models, with the output folder of a run in it."""
    root = tmp_path / "pipeline"
    for name in ("transformer", "vae", "out"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(name)
    kinds = {"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}
    (root / "model_index.json").write_text(json.dumps({"_class_name": "P", **kinds}))
    return root


def test_pipeline_trained_in_place_keeps_its_components(pipeline):
    copy_others(pipeline, "transformer", pipeline)
    assert (pipeline / "vae" / "config.json").read_text() == "vae"
    copy_others(pipeline, "transformer", pipeline / "out")
    assert sorted(entry.name for entry in (pipeline / "out").iterdir()) == [
        "config.json",
        "model_index.json",
        "vae",
    ]


def test_folders_of_runs_are_not_copied(pipeline, tmp_path):
    """The output of one run may be the source of the next."""
    output = tmp_path / "made"
    for folder, text in ((pipeline, "the first"), (output, "the second")):
        (folder / "ema").mkdir(parents=True)
        (folder / "ema" / "config.json").write_text(text)
    copy_others(pipeline, "transformer", output)
    assert (output / "ema" / "config.json").read_text() == "the second"


def test_files_that_cannot_be_linked_are_copied(pipeline, tmp_path, monkeypatch):
    def refuse_link(source, target):
        raise PermissionError(1, "Operation not permitted")  # the error for a file of another user

    monkeypatch.setattr("os.link", refuse_link)
    (tmp_path / "made").mkdir()
    copy_others(pipeline, "transformer", tmp_path / "made")
    assert (tmp_path / "made" / "vae" / "config.json").read_text() == "vae"


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_special_files_and_folder_links_are_refused(tmp_path, kind):
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


def test_user_files_next_to_copied_components_stay(pipeline, tmp_path):
    """Old weights files are removed: an index would be read before the new file."""
    output, vae = tmp_path / "made", pipeline / "vae"
    (vae / "diffusion_pytorch_model.safetensors").write_text("new")
    (output / "vae").mkdir(parents=True)
    for name in ("-00001-of-00002.safetensors", ".safetensors.index.json", ".safetensors"):
        (output / "vae" / f"diffusion_pytorch_model{name}").write_text("old")
    for name in ("notes", "other.safetensors"):
        (output / "vae" / name).write_text("mine")
    (tmp_path / "mine").write_text("mine")
    (output / "model_index.json").symlink_to(tmp_path / "mine")
    for _ in range(2):
        copy_others(pipeline, "transformer", output)
        assert {file.name: file.read_text() for file in (output / "vae").iterdir()} == {
            "config.json": "vae",
            "diffusion_pytorch_model.safetensors": "new",
            "notes": "mine",
            "other.safetensors": "mine",
        }
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "vae").symlink_to(output / "vae")
    with pytest.raises(ConfigError, match="is a link"):
        copy_others(pipeline, "transformer", tmp_path / "second")
