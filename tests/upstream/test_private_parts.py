"""Fails when upstream moves: what ``zerostart.upstream`` uses is there, and means what we think."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.loaders import single_file_model, single_file_utils

from tests.ranks import run_ranks
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.accelerate import plugins as ac
from zerostart.upstream.deepspeed import zero3_optimizer as ds3
from zerostart.upstream.deepspeed import zero3_start as start
from zerostart.upstream.diffusers import weights as df
from zerostart.upstream.torch.fsdp2 import are_reduced_as_shards
from zerostart.upstream.transformers import loading
from zerostart.upstream.transformers import models as hf
from zerostart.upstream.transformers.models import without_weights


@pytest.mark.parametrize("glob", ["router", "layers.*.norm", "a.*.b.*"])
def test_dtype_globs_mean_what_the_library_means(glob: str) -> None:
    from transformers.core_model_loading import build_glob_alternation

    theirs, _, _ = build_glob_alternation([glob])
    plan = hf.dtype_plan(SimpleNamespace(_get_dtype_plan=lambda _: {glob: torch.float32}), torch.bfloat16)
    ((ours, _),) = plan
    for name in ("model.router.weight", "layers.3.norm.weight", "layers.norm", "a.1.b.2", "ab", "x.a.y.b.z"):
        assert bool(ours.search(name)) == bool(theirs.search(name)), name
    assert isinstance(ours, re.Pattern)


@pytest.mark.slow
def test_parameters_without_our_mark_are_left_to_the_optimizer() -> None:
    """In a process of its own: in this one a model of another test may have the method replaced already."""
    run_ranks(unmarked, 1, process_group=False)


def unmarked() -> None:
    """The one method that is replaced gives what it gave, and leaves the class of the optimizer alone."""
    optimizer = ds3.require_stage3()
    before = optimizer._get_trainable_parameter_groups
    elsewhere = torch.nn.Parameter(torch.zeros(1))
    ds3.mark(elsewhere, "elsewhere", None)
    wrapped = optimizer._get_trainable_parameter_groups
    assert wrapped is not before
    plain = object.__new__(optimizer)
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    plain.optimizer = SimpleNamespace(param_groups=[{"params": parameters, "lr": 1.0}])
    plain.dp_process_group = None
    assert wrapped(plain) == before(plain)
    assert type(plain) is optimizer
    del elsewhere
    assert optimizer._get_trainable_parameter_groups is before


def test_an_unknown_start_of_the_zero3_optimizer_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known as installed; where a method has another source, one warning, and DeepSpeed's own way."""
    assert start.is_known()
    monkeypatch.setattr(ds3.require_stage3(), "initialize_optimizer_states", lambda self: None)
    start.is_known.cache_clear()
    assert not start.is_known()
    assert not start.is_known()
    assert caplog.text.count("initialize_optimizer_states has changed") == 1
    start.is_known.cache_clear()


@pytest.mark.slow
def test_the_dtype_that_gradients_travel_in() -> None:
    """A forecast counts them; torch 2.15 has changed it, where the policy names none."""
    run_ranks(travelling, 2)


def travelling() -> None:
    from torch import distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    seen = set()
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))
    original = getattr(dist, name)

    def reduce_scatter(*arguments: Any, **options: Any) -> Any:
        seen.update(tensor.dtype for tensor in (*arguments, *options.values()) if torch.is_tensor(tensor))
        return original(*arguments, **options)

    setattr(dist, name, reduce_scatter)
    try:
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(torch.ones(2, 8)).sum().backward()
    finally:
        setattr(dist, name, original)
    assert seen == {torch.float32 if are_reduced_as_shards() else torch.bfloat16}


def test_unknown_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    ac.require.cache_clear()
    monkeypatch.setattr(accelerate, "__version__", "1.0.0")
    with pytest.raises(UnsupportedVersionError, match=r"accelerate 1\.0\.0 is installed"):
        ac.require()
    ac.require.cache_clear()

    def moved(model: Any, files: Any) -> None:
        """With other arguments."""

    loading.require.cache_clear()
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", moved)
    with pytest.raises(
        UnsupportedVersionError,
        match=r"it takes \(model, files\), not \(model, state_dict, .*use zerostart.load",
    ):
        loading.require()
    loading.require.cache_clear()


TABLE = single_file_model.SINGLE_FILE_LOADABLE_CLASSES


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


def test_a_model_inside_a_model_is_built_on_meta_too() -> None:
    """transformers would partition it: of a model with a vision part, this part alone."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, modeling_utils
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 32}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    active = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    before = "deepspeed" in sys.modules
    try:
        assert active.is_zero3()
        with without_weights(torch.float32):
            model = Qwen2_5_VLModel(config)
        assert not modeling_utils._is_ds_init_called
        with modeling_utils.set_zero3_state(), without_weights(torch.float32):
            Qwen2_5_VLModel(config)
            assert modeling_utils._is_ds_init_called
    finally:
        unset_hf_deepspeed_config()
    assert ("deepspeed" in sys.modules) == before
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not [name for name, p in model.named_parameters() if hasattr(p, "ds_id")]
