"""Use LoRAs in a sharded pipeline by diffusers' methods; compare with the unsharded one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import nn

import zerostart
from tests.integrations.pipelines.tiny_pipelines import CALLS, FAMILIES, equal_but_for_rounding, make_pipeline
from tests.ranks import run_ranks

#: DeepSpeed keeps no parameter gathered between two calls.
CONFIG = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-3": {"engine": "deepspeed", "zero_stage": 3, "engine_config": CONFIG},
    "FSDP2": {"engine": "fsdp2", "zero_stage": 3},
    "ZeRO-2": {"engine": "deepspeed", "zero_stage": 2},
}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_v"]}


def make_loras(path: Path, out: Path) -> tuple[Path, Path]:
    """Write two files of random adapters of the transformer, by diffusers."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(path))
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        pipe.transformer.add_adapter(LoraConfig(**LORA, init_lora_weights=False), name)
        layers = get_peft_model_state_dict(pipe.transformer, adapter_name=name)
        pipe.save_lora_weights(out / name, transformer_lora_layers=layers)
    return out / "one", out / "two"


def replicate_others(path: Path) -> dict[str, str]:
    """Return placements that replicate all models except the transformer."""
    index = diffusers.DiffusionPipeline.load_config(str(path))
    names = [n for n in ("vae", "text_encoder", "text_encoder_2") if n in index and index[n][0]]
    return dict.fromkeys(names, "replicate")


def picture(pipe: Any, key: str) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    arguments = {**CALLS[key], "num_inference_steps": 1, "output_type": "latent"}
    image = torch.as_tensor(pipe(prompt="a cat sees the sea", generator=generator, **arguments)[0])
    assert image.isfinite().all()
    return image


def steps(first: Path, second: Path) -> dict[str, Callable[[Any], object]]:
    """Return a user's calls, in order."""
    return {
        "one": lambda p: p.load_lora_weights(first, adapter_name="one"),
        "two, made whole at once": lambda p: p.load_lora_weights(
            second, adapter_name="two", low_cpu_mem_usage=False
        ),
        "both, weighted": lambda p: p.set_adapters(["one", "two"], [0.5, 0.25]),
        "fused": lambda p: p.fuse_lora(adapter_names=["one", "two"]),
        "unfused": lambda p: p.unfuse_lora(),
        "deleted": lambda p: p.delete_adapters("two"),
        "fused again": lambda p: p.fuse_lora(lora_scale=0.7, safe_fusing=True),
        "off, which takes it out": lambda p: p.disable_lora(),
        "unloaded": lambda p: p.unload_lora_weights(),
        "a new one": lambda p: p.transformer.add_adapter(LoraConfig(**LORA), "new"),
    }


def compare(path: Path, key: str, loras: tuple[Path, Path], ways: list[str]) -> list[str]:
    """List the calls after which this rank's picture differs from diffusers'."""
    lines = []
    for way in ways:
        plain = diffusers.DiffusionPipeline.from_pretrained(str(path))
        pipe = zerostart.load_pipeline(path, replicate_others(path), **WAYS[way], progress=False)
        first = picture(pipe, key)
        for name, step in steps(*loras).items():
            step(plain)
            step(pipe)
            if not equal_but_for_rounding(picture(pipe, key), picture(plain, key)):
                lines.append(f"{way}: {name}")
        with zerostart.gathered(pipe.transformer, *first_weight(plain.transformer)) as whole:
            if not torch.equal(whole, plain.transformer.get_parameter(*first_weight(plain.transformer))):
                lines.append(f"{way}: the weights in the end")
        fresh = zerostart.load_pipeline(path, replicate_others(path), **WAYS[way], progress=False)
        fresh.load_lora_weights(loras[0])
        picture(fresh, key)
        fresh.unload_lora_weights()
        if not equal_but_for_rounding(picture(fresh, key), first):
            lines.append(f"{way}: the base is another one")
    return lines


def first_weight(model: nn.Module) -> tuple[str]:
    return (next(n for n, _ in model.named_parameters() if n.endswith("to_q.base_layer.weight")),)


def train(path: Path, out: Path, way: str) -> dict[str, torch.Tensor]:
    """Train an adapter for two steps, one batch a rank; return its tensors."""
    rank, ranks = (torch.distributed.get_rank(), [torch.distributed.get_rank()]) if way else (0, [0, 1])
    if way:
        options = {**WAYS[way], "trainable": ("transformer",)}
        pipe = zerostart.load_pipeline(path, replicate_others(path), **options, progress=False)
    else:
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(path))
    model = pipe.transformer
    torch.manual_seed(5 if way != "FSDP2" else 5 + rank)  # FSDP2 uses rank 0's values
    model.add_adapter(LoraConfig(**LORA))
    torch.manual_seed(6)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-1)
    stepping: Any = None
    if way.startswith("ZeRO"):
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        config |= {"zero_optimization": {"stage": int(way[-1])} | CONFIG["zero_optimization"]}
        stepping, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        for batch_rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + batch_rank)
            latents = torch.randn(1, 4, 2, 4, 4, generator=generator)
            text = torch.randn(1, 3, 16, generator=generator)
            loss = model(latents, torch.tensor([500.0]), text)[0].square().mean() / len(ranks)
            stepping.backward(loss) if stepping is not None else loss.backward()
        if stepping is not None:
            stepping.step()
        else:
            nn.utils.clip_grad_norm_(trained, 1.0)  # DeepSpeed's default
            optimizer.step()
            optimizer.zero_grad()
    layers = get_peft_model_state_dict(model)
    pipe.save_lora_weights(out, transformer_lora_layers=layers, is_main_process=rank == 0)
    return {name: tensor.detach().clone() for name, tensor in layers.items()}


def compare_and_train(path: Path, loras: tuple[Path, Path], out: Path) -> tuple[list[str], list[Any]]:
    """Do both in one group of ranks, to save imports."""
    return compare(path, "wan", loras, ["ZeRO-3"]), [
        train(path, out / way, way) for way in ("ZeRO-3", "FSDP2")
    ]


@pytest.mark.slow
def test_loras_of_a_sharded_pipeline(tmp_path: Path) -> None:
    path = make_pipeline("wan", tmp_path / "wan")
    loras = make_loras(path, tmp_path)
    expected = train(path, tmp_path / "plain", "")
    for lines, trained in run_ranks(compare_and_train, 2, path, loras, tmp_path):
        assert lines == []
        for layers in trained:
            assert layers.keys() == expected.keys()
            for name, tensor in layers.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(path))
    for way in ("ZeRO-3", "FSDP2"):
        pipe.load_lora_weights(tmp_path / way, adapter_name=way[:4])
        for name, tensor in get_peft_model_state_dict(pipe.transformer, adapter_name=way[:4]).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("key", FAMILIES)
def test_loras_of_every_family(key: str, tmp_path: Path) -> None:
    path = make_pipeline(key, tmp_path / key)
    loras = make_loras(path, tmp_path)
    assert run_ranks(compare, 2, path, key, loras, list(WAYS), timeout=200) == [[], []]
