"""Load one component of a pipeline directory."""

import json
from pathlib import Path

import diffusers
import pytest
import torch

import zerostart
from tests.conformance.diffusion_suite import family, pipeline, write_original
from zerostart.checkpoint.formats.pipeline import components
from zerostart.checkpoint.source import open_catalog
from zerostart.errors import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    wan = write_original(family("wan"), root / "wan", torch.float32)
    vae = write_original(family("ltx2_audio_vae"), root / "vae", torch.float32)
    return pipeline(root / "pipeline", {"transformer": wan, "transformer_2": wan, "vae": vae})


def test_components_are_the_folders_with_a_model(folder: Path) -> None:
    models = components(folder)
    assert models is not None
    assert [(c.name, c.kind) for c in models] == [
        ("transformer", "WanTransformer3DModel"),
        ("transformer_2", "WanTransformer3DModel"),
        ("vae", "AutoencoderKLLTX2Audio"),
    ]
    assert components(folder / "vae") is None


def test_component_is_chosen_by_class(folder: Path) -> None:
    plan = zerostart.plan(folder, world_size=2, model=diffusers.AutoencoderKLLTX2Audio)
    assert plan.parameters == zerostart.plan(folder / "vae", world_size=2).parameters
    assert (plan.missing, plan.unexpected) == ((), ())
    assert open_catalog(folder, ["AutoencoderKLLTX2Audio"]).component == "vae"


def test_single_component_needs_no_class(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "only"
    root.mkdir()
    (root / "vae").symlink_to(folder / "vae")
    (root / "model_index.json").write_text(json.dumps({"_class_name": "P", "vae": ["diffusers", "AnyName"]}))
    assert zerostart.plan(root, world_size=2).missing == ()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            None,
            ["a pipeline of several models", "vae (Auto", "or pass its class as model="],
        ),
        (diffusers.WanTransformer3DModel, ["several models of class WanTransformer3DModel", "transformer_2"]),
        (diffusers.FluxTransformer2DModel, ["no model of class FluxTransformer2DModel", "vae (Auto"]),
    ],
)
def test_unclear_choice_names_the_components(folder: Path, model: type | None, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        zerostart.load(folder, model=model, engine="fsdp2", progress=False)
    for word in (*words, str(folder / "transformer")):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/b", "..", ""])
def test_index_entries_outside_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model_index.json").write_text(json.dumps({name: ["diffusers", "X"]}))
    assert components(tmp_path / "p") == ()
    with pytest.raises(CheckpointError, match="names no folder that has a config"):
        open_catalog(tmp_path / "p")
