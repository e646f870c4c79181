"""Original files without a directory get the configuration that diffusers chooses."""

from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import zerostart
from tests.conformance.diffusion_suite import family, write_original
from zerostart.errors import BuildError
from zerostart.training.config.configuration import ModelConfig
from zerostart.training.diffusion.flow_source import read_source

#: Repository that diffusers chooses by the tensors of each family, at these sizes.
RELEASES = {"z_image": "Tongyi-MAI/Z-Image-Turbo", "wan": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache of the hub."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def bare(key: str, folder: Path) -> tuple[Path, Path]:
    """Copy only the family's original file; its configuration is elsewhere."""
    write_original(family(key), folder / "whole", torch.float32)
    (folder / "bare").mkdir()
    file = folder / "bare" / "release.safetensors"
    (folder / "whole" / "release.safetensors").rename(file)
    return file, folder / "whole" / "config.json"


def cache(hub: Path, repository: str, config: Path) -> None:
    root = hub / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    folder = root / "snapshots" / ("0" * 40) / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.read_text())


@pytest.mark.parametrize("key", RELEASES)
def test_a_file_alone_is_loaded_as_by_from_single_file(key: str, tmp_path: Path, hub: Path) -> None:
    file, config = bare(key, tmp_path)
    repository = RELEASES[key]
    with pytest.raises(BuildError, match=rf"hf download {repository} transformer/config\.json"):
        zerostart.load(file, engine="fsdp2", progress=False)
    cache(hub, repository, config)
    kind = getattr(diffusers, family(key).kind)
    expected = kind.from_single_file(str(file), local_files_only=True)
    for model in (None, kind):
        actual = zerostart.load(file, model, engine="fsdp2", progress=False)
        assert type(actual).__name__.endswith(kind.__name__)
        assert dict(actual.config) == dict(expected.config)
        tensors = dict(zerostart.full_tensors(actual))
        assert tensors.keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(tensors[name], tensor), name
    assert read_source(ModelConfig(source=str(file))).config["_class_name"] == kind.__name__


def test_tensors_of_no_release_are_nobody_s(tmp_path: Path) -> None:
    """diffusers takes such tensors for Stable Diffusion 1.5."""
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BuildError, match=r"config\.json"):
        zerostart.load(tmp_path / "model.safetensors", engine="fsdp2", progress=False)
    with pytest.raises(BuildError, match=r"has no config\.json to build FluxTransformer2DModel"):
        zerostart.load(
            tmp_path / "model.safetensors",
            diffusers.FluxTransformer2DModel,
            engine="fsdp2",
            progress=False,
        )


def test_a_file_alone_is_converted_with_the_configuration_that_it_has(tmp_path: Path, hub: Path) -> None:
    """The names of the file are kept; the configuration names the model."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file, config = bare("wan", tmp_path)
    cache(hub, RELEASES["wan"], config)
    kind = getattr(diffusers, family("wan").kind)
    expected = kind.from_single_file(str(file), local_files_only=True)
    zerostart.convert(file, tmp_path / "dcp", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    actual = torch.load(tmp_path / "dcp.pt")
    actual = actual.get("model", actual)
    assert actual.keys() == load_file(file).keys()
    model = zerostart.load(tmp_path / "dcp", engine="fsdp2", progress=False)
    assert type(model).__name__.endswith(kind.__name__)
    assert dict(model.config) == {**expected.config, "_name_or_path": model.config["_name_or_path"]}
    full = dict(zerostart.full_tensors(model))
    assert all(torch.equal(full[name], tensor) for name, tensor in expected.state_dict().items())
