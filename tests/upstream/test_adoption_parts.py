"""Fails when upstream moves: the seams of transformers and accelerate that ``enabled`` takes over."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ranks import run_ranks
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import accelerate as ac
from zerostart.upstream import deepspeed_active as active
from zerostart.upstream import transformers_loading as loading


def test_what_is_used_is_there() -> None:
    loading.require()
    ac.require()
    active.require()


def test_from_pretrained_calls_the_seams_in_their_order() -> None:
    from transformers import PreTrainedModel

    source = inspect.getsource(PreTrainedModel.from_pretrained)
    calls = (
        "_get_dtype(",
        "cls.get_init_context(dtype",
        "model = cls(config",
        "get_model_conversion_mapping(model, key_mapping, hf_quantizer)",
        "cls._load_pretrained_model(",
        "cls._finalize_model_loading(model, load_config, loading_info)",
        "model.eval()  # Set",
        "adjust_generation_fn(",
        "model.load_adapter(",
    )
    places = [source.find(call) for call in calls]
    assert places == sorted(places)
    assert -1 not in places


def test_the_build_context_asks_for_zero3_by_the_name_that_is_replaced() -> None:
    from transformers import PreTrainedModel, modeling_utils

    assert "if is_deepspeed_zero3_enabled():" in inspect.getsource(PreTrainedModel.get_init_context)
    assert "_is_ds_init_called" in inspect.getsource(PreTrainedModel._from_config)
    assert modeling_utils.set_zero3_state.__name__ == "set_zero3_state"


def test_accelerate_asks_for_fsdp2_by_the_names_that_are_replaced() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    preparing = inspect.getsource(Accelerator._prepare_fsdp2)
    assert preparing.find("set_auto_wrap_policy(model)") < preparing.find("fsdp2_prepare_model(self, model)")
    assert "MULTI_CPU" not in inspect.getsource(AcceleratorState.__init__)
    assert "self.fsdp_plugin_args = self._process_fsdp_args()" in inspect.getsource(
        TrainingArguments.__post_init__
    )


def test_unknown_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    import transformers

    ac.require.cache_clear()
    monkeypatch.setattr(accelerate, "__version__", "1.99.0")
    with pytest.raises(UnsupportedVersionError, match=r"accelerate 1\.99\.0 is installed"):
        ac.require()
    ac.require.cache_clear()

    def moved(model: Any, files: Any) -> None:
        """With other arguments."""

    loading.require.cache_clear()
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", moved)
    with pytest.raises(UnsupportedVersionError, match=r"misses _load_pretrained_model\(model, state_dict"):
        loading.require()
    loading.require.cache_clear()


def test_fully_shard_names_classes_as_expected() -> None:
    """It does so for real on one rank, whose name for the class is what accelerate's are looked up by."""
    assert run_ranks(sharded_class, 1) == [f"{ac._SHARDED}Linear"]


def sharded_class() -> str:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return type(fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))).__name__


def test_diffusers_builds_and_reads_through_the_seams() -> None:
    from diffusers import ModelMixin
    from diffusers.models import modeling_utils

    from zerostart.upstream import diffusers_loading

    diffusers_loading.require(modeling_utils)
    source = inspect.getsource(ModelMixin.from_pretrained.__func__)
    calls = (
        "cls._set_default_torch_dtype(torch_dtype)",
        "with ContextManagers(init_contexts):",
        "model = cls.from_config(config",
        "state_dict = load_state_dict(resolved_model_file[0]",
        "cls._load_pretrained_model(",
        "model.register_to_config(_name_or_path=",
        "# Set model in evaluation mode",
    )
    places = [source.find(call) for call in calls]
    assert places == sorted(places)
    assert -1 not in places


def test_accelerate_has_no_backend_for_ranks_without_an_accelerator() -> None:
    from accelerate.state import PartialState

    source = inspect.getsource(PartialState._prepare_backend)
    assert "return backend, distributed_type" in source
    assert "self._prepare_backend(" in inspect.getsource(PartialState.__init__)
