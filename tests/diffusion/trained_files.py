"""What DiffSynth's training scripts save of a pipeline in shards, resume from, and what is refused."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerostart
from tests.diffusion.families import FAMILIES
from tests.diffusion.oracle import import_diffsynth
from tests.diffusion.sharded import ZERO3, differing, fill

WAN = FAMILIES["wan2.1 t2v"]
ENGINES: dict[str, dict[str, Any]] = {
    "zero3": {"engine": "deepspeed", "engine_config": ZERO3},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "fsdp2": {"engine": "fsdp2"},
}


def training(dit: nn.Module, encoder: nn.Module, target: str = "") -> Any:
    """DiffSynth's training module with its pipeline, as ``switch_pipe_to_training_mode`` leaves it."""
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


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As FLUX.1's script has them for others: other names, and a constant for each."""
    made = {f"lora_unet_{name}": tensor for name, tensor in state.items()}
    return made | {f"{name}.alpha": torch.tensor((tensor.shape[-1],))[0] for name, tensor in state.items()}


def saved(module: Any, folder: Path, name: str, **settings: Any) -> bytes:
    from accelerate import Accelerator
    from diffsynth.diffusion import ModelLogger

    accelerator = Accelerator(cpu=True)
    ModelLogger(str(folder), **settings).save_model(accelerator, module, name)
    accelerator.wait_for_everyone()
    return (folder / name).read_bytes()


def refusal(function: Any, *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except zerostart.ZerostartError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is refused"


def tried(root: Path) -> dict[str, Any]:
    """On a rank: of each engine whether its files are DiffSynth's, to the byte, and what is refused."""
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

    def pipeline(target: str = "") -> Any:
        made = [
            loader.load_model(kind, str(root / f"{name}.safetensors"), config, torch.float32)
            for name in ("dit", "encoder")
        ]
        return training(*made, target)

    lora = {"remove_prefix_in_ckpt": "pipe.dit.", "state_dict_converter": renamed}
    wanted = {
        "full": saved(pipeline(), root / "theirs", "full.safetensors", remove_prefix_in_ckpt="pipe.dit."),
        "lora": saved(pipeline("self_attn.q"), root / "theirs", "lora.safetensors", **lora),
    }
    found: dict[str, Any] = {}
    for engine, settings in ENGINES.items():
        with zerostart.enabled(progress=False, **settings):
            module = pipeline()
            full = saved(module, root / engine, "full.safetensors", remove_prefix_in_ckpt="pipe.dit.")
            adapted = saved(pipeline("self_attn.q"), root / engine, "lora.safetensors", **lora)
            found[engine] = [full == wanted["full"], adapted == wanted["lora"]]
            module.resume_from_checkpoint(str(root / "resumed.safetensors"), "pipe.dit.")
            expected = {n: values[2 if "blocks.1" in n else 0][n] for n in values[0]}
            whole = dict(zerostart.full_tensors(module.pipe.dit, rank=None))
            found[engine].append(differing(whole, expected))
        if engine == "zero3":
            calculating = {"state_dict_converter": lambda state: {n: t * 2 for n, t in state.items()}}
            found["calculated"] = refusal(lambda: saved(module, root, "none.safetensors", **calculating))  # noqa: B023
            found["prefix"] = refusal(
                module.resume_from_checkpoint, str(root / "resumed.safetensors"), "dit."
            )
            found["fused"] = refusal(module.pipe.load_lora, module.pipe.dit, "nowhere.safetensors")
    return found
