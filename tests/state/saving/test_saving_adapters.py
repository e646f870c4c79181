"""Save adapters, merged adapters and foreign models."""

import shutil
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import zerostart
from tests.ranks import run_ranks
from tests.state.saving.test_saving import DEEPSPEED3, FSDP2, Options, assert_same_tensors, tensors_in
from tests.tiny import TinyCheckpoints

TARGETS = ["q_proj", "v_proj", "k_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": TARGETS},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "whole head": {"target_modules": TARGETS, "modules_to_save": ["lm_head"]},
}


VALUE = LoraConfig(r=1, target_modules=["0"])


def adapt(model: torch.nn.Module, kind: str) -> Any:
    """Add an adapter with nonzero weights depending on ``kind``."""
    torch.manual_seed(7)
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=8, **KINDS[kind]))
    torch.manual_seed(8)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape).to(parameter.dtype) * 0.1)
    return adapted


def engine_of(model: torch.nn.Module) -> torch.nn.Module:
    import deepspeed

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def save_adapters(path: Path, out: Path, options: Options, kinds: list[str]) -> str:
    """Save adapters both ways; return a traceback, or nothing."""
    try:
        for kind in kinds:
            model = zerostart.load(path, progress=False, **options)
            if kind == "plain":
                model.save_pretrained(out / kind / "save_pretrained")
            adapted = adapt(model, kind)
            if kind == "plain":
                adapted.save_pretrained(out / kind / "PEFT save_pretrained")
            with pytest.raises(zerostart.errors.ConfigError, match="adapters_only"):
                zerostart.save(adapted, out / "neither")
            zerostart.save(adapted, out / kind / "adapter", adapters_only=True)
            zerostart.save(adapted, out / kind / "merged", merge_adapters=True)
            if kind == "plain":
                # Within a script's module, PEFT's names are still relative to the adapted model.
                outer = torch.nn.ModuleDict({"policy": adapted, "value": torch.nn.Linear(2, 2)})
                zerostart.save(outer, out / kind / "outer", adapters_only=True)
                pair = torch.nn.ModuleList(
                    [adapted, get_peft_model(torch.nn.Sequential(outer["value"]), VALUE)]
                )
                with pytest.raises(
                    zerostart.errors.ConfigError, match=r"several models .* \(0, 1\): save each"
                ):
                    zerostart.save(pair, out / "neither", adapters_only=True)
        if options == DEEPSPEED3:  # its engine forwards attributes of the wrapped model
            model = zerostart.load(path, dtype=torch.float32, progress=False, **options)
            zerostart.save(engine_of(adapt(model, "plain")), out / "plain" / "engine", adapters_only=True)
        else:  # fully_shard derives a new class from PEFT's
            sharded = fully_shard(adapt(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), "plain"))
            zerostart.save(sharded, out / "plain" / "engine", adapters_only=True)
            zerostart.save(sharded, out / "plain" / "merged by torch", merge_adapters=True)
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize(
    "options",
    [DEEPSPEED3, pytest.param(FSDP2, marks=pytest.mark.slow)],
    ids=["deepspeed", "fsdp2"],
)
def test_adapters(options: Options, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Files equal those of PEFT for the unsharded model."""
    path = checkpoints("mixtral", torch.bfloat16)
    kinds = list(KINDS) if options is DEEPSPEED3 else ["plain"]
    assert run_ranks(save_adapters, 2, path, tmp_path / "out", options, kinds, timeout=240) == ["", ""]
    for kind in kinds:
        reference = adapt(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), kind)
        reference.save_pretrained(tmp_path / "reference")
        saved = tmp_path / "out" / kind
        assert_same_tensors(saved / "adapter", tmp_path / "reference")
        if kind == "plain":
            # The libraries' own save calls work without zerostart.enable().
            assert_same_tensors(saved / "PEFT save_pretrained", tmp_path / "reference")
            assert_same_tensors(saved / "outer", tmp_path / "reference")
            assert_same_tensors(saved / "save_pretrained", path)
        if (saved / "engine").exists():
            assert_same_tensors(saved / "engine", tmp_path / "reference")
        reopened = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(path, dtype="auto"), saved / "adapter"
        )
        assert reopened.peft_config["default"].r == 3
        reference.merge_and_unload().save_pretrained(tmp_path / "whole")
        for merged in saved.glob("merged*"):
            assert_same_tensors(merged, tmp_path / "whole")
        AutoModelForCausalLM.from_pretrained(saved / "merged", dtype="auto")
        for folder in ("reference", "whole"):
            shutil.rmtree(tmp_path / folder)


def save_foreign_models(path: Path, out: Path) -> str:
    """Save models of other libraries; return a traceback, or nothing."""
    try:
        import deepspeed

        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        zerostart.save(model, out / "whole")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert not zerostart.save(model, out / "fsdp2").own_names
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            torch.manual_seed(2)
            partitioned = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
        zerostart.save(partitioned, out / "zero3")
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.mark.slow
def test_models_loaded_by_other_libraries(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Files equal those of ``save_pretrained``."""
    path = checkpoints("mixtral", torch.bfloat16)
    assert run_ranks(save_foreign_models, 2, path, tmp_path, timeout=240) == ["", ""]
    AutoModelForCausalLM.from_pretrained(path, dtype="auto").save_pretrained(tmp_path / "reference")
    for name in ("whole", "fsdp2"):
        assert_same_tensors(tmp_path / name, tmp_path / "reference")
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_in(tmp_path / "zero3").items()}
    assert shapes == {"0.weight": (5, 7), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}
    assert all(tensor.isfinite().all() for tensor in tensors_in(tmp_path / "zero3").values())
