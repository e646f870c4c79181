"""Save and resume a sharded pipeline by DiffSynth's training code, on a rank."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerostart
from tests.diffusion.engine_results import ZERO3, compare, fill
from tests.diffusion.families import FAMILIES
from tests.diffusion.oracle import import_diffsynth

WAN = FAMILIES["wan2.1 t2v"]
ENGINES: dict[str, dict[str, Any]] = {
    "zero3": {"engine": "deepspeed", "engine_config": ZERO3},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "fsdp2": {"engine": "fsdp2"},
}


def build_training_module(dit: nn.Module, encoder: nn.Module, target: str = "") -> Any:
    """Return DiffSynth's training module as ``switch_pipe_to_training_mode`` leaves it."""
    from diffsynth.diffusion import DiffusionTrainingModule
    from diffsynth.diffusion.base_pipeline import BasePipeline

    module = DiffusionTrainingModule()
    module.pipe = BasePipeline(device="cpu", torch_dtype=torch.float32)
    module.pipe.dit, module.pipe.encoder = dit, encoder
    module.pipe.freeze_except([] if target else ["dit"])
    if target:
        torch.manual_seed(3)
        module.add_lora_to_model(dit, [target, "ffn.0"], 4)
    return module


def rename_lora(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename LoRA tensors and add a constant alpha to each, as FLUX.1's script does."""
    renamed = {f"lora_unet_{name}": tensor for name, tensor in state.items()}
    return renamed | {f"{name}.alpha": torch.tensor((tensor.shape[-1],))[0] for name, tensor in state.items()}


def save_bytes(module: Any, folder: Path, name: str, **settings: Any) -> bytes:
    from accelerate import Accelerator
    from diffsynth.diffusion import ModelLogger

    accelerator = Accelerator(cpu=True)
    ModelLogger(str(folder), **settings).save_model(accelerator, module, name)
    accelerator.wait_for_everyone()
    return (folder / name).read_bytes()


def catch_error(function: Any, *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except zerostart.ZerostartError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is refused"


def save_and_resume(root: Path) -> dict[str, Any]:
    """Save and resume on each engine; return comparisons with DiffSynth and error texts."""
    import_diffsynth()
    import torch.distributed as dist
    from diffsynth.core.loader import model as loader
    from safetensors.torch import save_file

    kind, config = WAN.model(), dict(WAN.config)
    values = [dict(fill(kind(**config), seed).state_dict()) for seed in (0, 1, 2)]
    if dist.get_rank() == 0:
        root.mkdir()
        for name, state in zip(("dit", "encoder"), values, strict=False):
            save_file(state, root / f"{name}.safetensors")
        save_file({n: t for n, t in values[2].items() if "blocks.1" in n}, root / "resumed.safetensors")
    dist.barrier()

    def build(target: str = "") -> Any:
        models = [
            loader.load_model(kind, str(root / f"{name}.safetensors"), config, torch.float32)
            for name in ("dit", "encoder")
        ]
        return build_training_module(*models, target)

    lora = {"remove_prefix_in_ckpt": "pipe.dit.", "state_dict_converter": rename_lora}
    stock_files = {
        "full": save_bytes(build(), root / "theirs", "full.safetensors", remove_prefix_in_ckpt="pipe.dit."),
        "lora": save_bytes(build("self_attn.q"), root / "theirs", "lora.safetensors", **lora),
    }
    results: dict[str, Any] = {}
    for engine, settings in ENGINES.items():
        with zerostart.enabled(progress=False, **settings):
            module = build()
            full = save_bytes(module, root / engine, "full.safetensors", remove_prefix_in_ckpt="pipe.dit.")
            adapted = save_bytes(build("self_attn.q"), root / engine, "lora.safetensors", **lora)
            results[engine] = [full == stock_files["full"], adapted == stock_files["lora"]]
            module.resume_from_checkpoint(str(root / "resumed.safetensors"), "pipe.dit.")
            expected = {n: values[2 if "blocks.1" in n else 0][n] for n in values[0]}
            full_state = dict(zerostart.full_tensors(module.pipe.dit, rank=None))
            results[engine].append(compare(full_state, expected))
        if engine == "zero3":
            converter = {"state_dict_converter": lambda state: {n: t * 2 for n, t in state.items()}}
            results["calculated"] = catch_error(save_bytes, module, root, "none.safetensors", **converter)
            results["prefix"] = catch_error(
                module.resume_from_checkpoint, str(root / "resumed.safetensors"), "dit."
            )
            results["fused"] = catch_error(module.pipe.load_lora, module.pipe.dit, "nowhere.safetensors")
    return results
