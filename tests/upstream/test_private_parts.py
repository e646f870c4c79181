"""Fails when upstream moves: what ``zerostart.upstream`` uses is there, and means what we think."""

import importlib.util
import inspect
import re
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.loaders import single_file_model, single_file_utils
from packaging.version import Version
from torch import nn

from tests.ranks import run_ranks
from zerostart.errors import UnsupportedVersionError
from zerostart.geometry.layout.parallel_plans import EXPERT_STYLES, TENSOR_STYLES
from zerostart.upstream.accelerate import plugins as ac
from zerostart.upstream.accelerate import preparing as accelerate_preparing
from zerostart.upstream.deepspeed import zero3_optimizer as ds3
from zerostart.upstream.deepspeed import zero3_start as start
from zerostart.upstream.diffusers import weights as df
from zerostart.upstream.torch.fsdp2 import are_reduced_as_shards
from zerostart.upstream.transformers import distributed as transformers_distributed
from zerostart.upstream.transformers import loading
from zerostart.upstream.transformers import models as hf
from zerostart.upstream.transformers.distributed import require_styles
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


def test_a_zero3_optimizer_without_a_method_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ds3.require_stage3(), "offload_states")
    ds3.require_stage3.cache_clear()
    with pytest.raises(UnsupportedVersionError, match="Stage3 misses offload_states"):
        ds3.require_stage3()
    ds3.require_stage3.cache_clear()


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


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_deepspeed_has_no_mics_any_more(key: str) -> None:
    """Why a load refuses it: the context and the optimizer are gone, and the configuration is refused.

    ``runtime/config.py``, ``_reject_removed_config_keys``.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    assert not hasattr(deepspeed.zero, "MiCS_Init")
    assert importlib.util.find_spec("deepspeed.runtime.zero.mics") is None
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, key: 2}}
    with pytest.raises(DeepSpeedConfigError, match="MiCS ZeRO-3 sharding has been removed"):
        DeepSpeedConfig(config)


def test_deepspeed_quantises_weights_by_cuda_kernels_alone() -> None:
    """Why a load refuses it elsewhere: ``CUDAQuantizer``, which ``zero.Init`` makes first, loads them."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    if get_accelerator().device_name() != "cpu":
        pytest.skip("an accelerator may have the kernels")
    with pytest.raises(ValueError, match="not been implemented on CPU"):
        CUDAQuantizer()


def test_deepspeed_has_no_secondary_partitions_on_nvme() -> None:
    """Why a load refuses them: they are made on the parameters' device, and torch knows no nvme."""
    from deepspeed.runtime.zero import partition_parameters

    source = inspect.getsource(partition_parameters)  # The method itself is wrapped.
    making = source[source.index("def _partition_param_sec") :]
    assert "device=self.remote_device)" in making[: making.index("def _param_status")]
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(1, device="nvme")


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


# Fails when upstream moves: the seams of transformers and accelerate that ``enabled`` takes over.


def test_unknown_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    import transformers

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


@pytest.mark.slow
def test_fully_shard_names_classes_as_expected() -> None:
    """It does so for real on one rank, whose name for the class is what accelerate's are looked up by."""
    assert run_ranks(sharded_class, 1) == [f"{ac.SHARDED}Linear"]


def sharded_class() -> str:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return type(fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))).__name__


# Fails when upstream moves: the plans that transformers declares, its styles, DeepSpeed's expert groups.


def test_transformers_tensor_parallel_styles() -> None:
    require_styles()
    # Of other ways to route tokens, which older releases register here: zerostart routes by itself.
    routers = {"ep_router", "megamoe_router", "megamoe_experts"}
    known = {*TENSOR_STYLES, *EXPERT_STYLES}
    assert set(transformers_distributed._styles()) <= {*known, *routers}
    if Version(transformers.__version__) >= Version("5.23"):
        assert set(transformers_distributed._styles()) == known


def test_transformers_declares_plans_on_models() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", num_hidden_layers=1))
    experts = hf.parallel_rules(model, "ep")
    assert experts["model.layers.*.mlp.experts.gate_up_proj"] == "grouped_gemm"
    assert hf.parallel_rules(model, "tp")["lm_head"] == "colwise_gather_output"


@pytest.mark.slow
def test_deepspeed_groups_of_experts() -> None:
    found = run_ranks(expert_groups, 4)
    assert found == [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]


def expert_groups() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks of this rank's expert group, and of its owners, in a world of 4 with 2 that share experts."""
    import deepspeed
    from torch.distributed import get_process_group_ranks as ranks_of

    from zerostart.upstream.deepspeed.experts import ExpertGroups

    deepspeed.init_distributed("gloo", dist_init_required=False)
    groups = ExpertGroups(2)
    assert ExpertGroups(2).experts is groups.experts  # Made once.
    return tuple(ranks_of(groups.experts)), tuple(ranks_of(groups.owners))


# Fails when diffusers moves: what zerostart uses of it is there, and means what we think.


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


# Models that are built on meta while the whole process is set up for ZeRO-3.


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


# What accelerate's preparation of FSDP2 does to optimizers: parameters that are replaced are let go.


def test_whole_parameters_are_not_held_while_they_are_replaced() -> None:
    """Else a model that zerostart has not loaded would be in memory whole beside its shards."""
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = weakref.ref(model.weight)
    held: list[bool] = []

    def prepare(accelerator: Any, *args: Any) -> Any:
        model.weight = nn.Parameter(torch.zeros(2, 3))
        optimizer.param_groups[0]["params"] = [model.weight]
        held.append(whole() is not None)
        return args

    prepared = accelerate_preparing._keeps_parameters(prepare)(SimpleNamespace(), model, optimizer)
    assert held == [False]
    assert prepared == (model, optimizer)
    assert optimizer.param_groups[0]["params"][0] is model.weight
