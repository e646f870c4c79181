"""Fails when diffusers moves: what zerostart uses of it is there, and means what we think."""

import re

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_model, single_file_utils

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.diffusers import weights as df

TABLE = single_file_model.SINGLE_FILE_LOADABLE_CLASSES


def test_installed_version_is_known() -> None:
    df.require()


def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    df.require.cache_clear()
    monkeypatch.setattr(diffusers, "__version__", "0.2.0")
    with pytest.raises(UnsupportedVersionError, match=r"diffusers 0\.2\.0 is installed\. .*zerostart knows"):
        df.require()
    df.require.cache_clear()


@pytest.mark.parametrize("name", TABLE)
def test_the_converter_is_the_one_that_diffusers_takes(name: str) -> None:
    """diffusers finds the entry of a class by importing all of the table; we go by names."""
    kind = getattr(diffusers, name, None)
    if kind is None:  # StableCascadeUNet: an entry for a class of another name
        pytest.skip(f"diffusers has no class {name}")
    theirs = TABLE[single_file_model._get_single_file_loadable_mapping_class(kind)]
    assert df.original_layout(kind)[0] is theirs["checkpoint_mapping_fn"]
    assert df.original_layout(type("Mine", (kind,), {}))[0] is theirs["checkpoint_mapping_fn"]


def test_prefixes_are_those_of_the_converters() -> None:
    vae, audio = diffusers.AutoencoderKL, diffusers.AutoencoderKLLTX2Audio
    assert df.original_layout(diffusers.WanTransformer3DModel)[1] == ("model.diffusion_model.",)
    assert df.original_layout(diffusers.UNet2DConditionModel)[1] == ("model.diffusion_model.",)
    assert df.original_layout(vae)[1] == ("first_stage_model.", "vae.")
    assert df.original_layout(audio)[1] == ("audio_vae.",)
    made = single_file_utils.convert_ltx2_audio_vae_to_diffusers({"audio_vae.x": torch.ones(1)})
    assert list(made) == ["x"]


def test_classes_without_a_converter_have_none() -> None:
    assert df.original_layout(diffusers.AutoencoderKLFlux2) == (None, ())
    assert df.original_layout(diffusers.AutoencoderKLQwenImage) == (None, ())


def test_models_are_known_without_their_library() -> None:
    assert df.is_diffusers(diffusers.WanTransformer3DModel)
    assert df.is_diffusers(type("Mine", (diffusers.AutoencoderKL,), {}))
    assert not df.is_diffusers(torch.nn.Linear(1, 1))
    assert df.model_class("WanTransformer3DModel") is diffusers.WanTransformer3DModel
    assert df.model_class("WanModel") is None
    assert df.model_class("DDIMScheduler") is None


def test_patterns_of_a_model() -> None:
    with torch.device("meta"):
        wan = diffusers.WanTransformer3DModel(num_layers=1, num_attention_heads=1, attention_head_dim=12)
    assert {"time_embedder", "scale_shift_table"} <= df.kept_in_fp32(wan)
    assert df.ignorable_unexpected(wan) == ("norm_added_q",)
    assert all(re.compile(pattern) for pattern in df.ignorable_unexpected(wan))
