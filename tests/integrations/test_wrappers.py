"""Train wrappers that call parts of a sharded model, and prompt adapters."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.scripts import Data, fsdp2, training_arguments, zero3
from tests.ranks import RankError, run_ranks
from tests.tiny import TinyCheckpoints


class Wrapper(torch.nn.Module):
    """A model with a value head; ``calls`` names how it calls the inner model."""

    def __init__(self, model: Any, calls: str) -> None:
        super().__init__()
        self.inner, self._calls = model, calls
        torch.manual_seed(1)
        self.head = torch.nn.Linear(model.config.hidden_size, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._calls == "forward":
            out = self.inner.forward(input_ids=input_ids, labels=labels, output_hidden_states=True)
            return {"loss": out.loss + self.head(out.hidden_states[-1]).mean()}
        model = self.inner.get_base_model() if hasattr(self.inner, "get_base_model") else self.inner
        hidden = model.model(input_ids=input_ids).last_hidden_state
        logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return {"loss": loss + self.head(hidden).mean()}


class SavedWrapper(Wrapper):
    """Wrapper with a ``save_pretrained`` that the Trainer must not call."""

    def save_pretrained(self, path: str) -> None:
        raise AssertionError("the Trainer calls it for models of transformers and PEFT only")


def script(path: Path, out: Path, environment: dict[str, str], adapter: str, calls: str) -> Any:
    os.environ.update(environment)
    import peft
    from transformers import AutoModelForCausalLM, Trainer

    if environment:
        import zerostart

        zerostart.enable()
    batch_size = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    args = training_arguments(out, max_steps=3, per_device_train_batch_size=batch_size, use_cpu=True)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(0)
    configs = {
        "lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4),
        "tied": peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            r=4,
            modules_to_save=["embed_tokens", "lm_head"],
            ensure_weight_tying=True,
        ),
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "encoder": peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16
        ),
    }
    if adapter:
        model = peft.get_peft_model(model, configs[adapter])
    if calls:
        model = SavedWrapper(model, "forward") if calls == "saved" else Wrapper(model, calls)
    trainer = Trainer(model=model, args=args, train_dataset=Data())
    trainer.train()
    if environment or not calls:  # in one process the Trainer cannot save tied weights of such a wrapper
        trainer.save_model(str(out))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def environment(engine: str, folder: Path) -> dict[str, str]:
    if engine == "fsdp2":
        return fsdp2()
    return zero3(folder / "config", zero_optimization={"stage": int(engine[-1])})


def run(ranks: int, path: Path, out: Path, *arguments: Any) -> list[float]:
    first, *others = run_ranks(script, ranks, path, out, *arguments, process_group=False)
    assert all(other == first for other in others)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("calls", ["forward", "parts"])
def test_calls_of_parts_with_a_lora(
    engine: str, calls: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = checkpoints("qwen3")
    expected = run(1, path, tmp_path / "one", {}, "lora", calls)
    losses = run(2, path, tmp_path / "two", environment(engine, tmp_path), "lora", calls)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["forward", "parts"])
def test_calls_of_trained_parts_on_fsdp2(calls: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"of model.embed_tokens are used outside the forward of Qwen3ForCausalLM"
    ):
        run(2, checkpoints("qwen3"), tmp_path / "two", fsdp2(), "", calls)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("adapter", ["prompt", "prefix", "encoder", "tied"])
def test_prompt_and_tied_adapters(
    engine: str, adapter: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path, one, two = checkpoints("qwen3"), tmp_path / "one", tmp_path / "two"
    expected = run(1, path, one, {}, adapter, "")
    assert run(2, path, two, environment(engine, tmp_path), adapter, "") == pytest.approx(expected, rel=1e-5)
    saved, reference = (load_file(out / "adapter_model.safetensors") for out in (two, one))
    assert saved.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "fsdp2"])
def test_a_wrapper_with_save_pretrained_is_saved_by_the_trainer(
    engine: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """The Trainer saves the state dict of a plain module."""
    run(2, checkpoints("qwen3"), tmp_path / "two", environment(engine, tmp_path), "lora", "saved")
    assert {"head.weight", "head.bias"} < load_file(tmp_path / "two/model.safetensors").keys()


def check_parts(path: Path) -> None:
    """Call parts after an evaluation, and the head after a training forward."""
    import transformers

    import zerostart

    tokens = torch.arange(8).reshape(1, 8)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    model: Any = zerostart.load(path, engine="fsdp2", progress=False)
    with torch.no_grad():
        model(input_ids=tokens)
    with pytest.raises(zerostart.ZerostartError, match=r"model.embed_tokens are used outside the forward"):
        model.model.embed_tokens(tokens)
    for each_model in (plain, model):
        hidden = each_model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
        each_model.lm_head(hidden).square().mean().backward()
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe_aligned"])
def test_parts_after_an_evaluation_on_fsdp2(name: str, checkpoints: TinyCheckpoints) -> None:
    run_ranks(check_parts, 2, checkpoints(name))


def clip(path: Path) -> None:
    """A text encoder, whose class names a class of the vision encoder as well."""
    os.environ.update(fsdp2())
    from accelerate import Accelerator
    from transformers import CLIPTextModel

    import zerostart

    zerostart.enable()
    accelerator = Accelerator(cpu=True)
    model = CLIPTextModel.from_pretrained(path)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.arange(8).reshape(1, 8)
    zerostart.disable()
    whole = CLIPTextModel.from_pretrained(path)
    with torch.no_grad():
        expected = whole(input_ids=tokens).pooler_output
        torch.testing.assert_close(model(input_ids=tokens).pooler_output, expected)


@pytest.mark.slow
def test_a_part_that_names_classes_of_other_parts(tmp_path: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPTextConfig(**sizes, vocab_size=50, eos_token_id=49, bos_token_id=48)
    CLIPTextModel(config).save_pretrained(tmp_path / "clip")
    run_ranks(clip, 2, tmp_path / "clip", process_group=False)
