"""Runs of flow matching on tiny transformers: examples on disk, a task that reads them, and plain torch.

The reference calls each transformer as diffusers' own pipelines do, by their own functions, one example at a
time.
"""

import hashlib
import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.diffusion.components import COMPONENTS
from zerostart.training.diffusion.flow import FlowConfig, FlowMatching

#: The tiny transformer of each family, the shape of its latents, and the width and lengths of its texts.
FAMILIES = {
    "wan": ("wan2.1 t2v", (4, 3, 4, 4), 16, (6,)),
    "qwen-image": ("qwen-image", (4, 8, 8), 16, (8, 5, 3)),
    "flux": ("flux.1", (1, 8, 8), 32, (8,)),
    "flux2": ("flux.2 dev", (4, 4, 4), 32, (8,)),
    "z-image": ("z-image", (16, 8, 8), 16, (6, 9, 4)),
    "hunyuan-video": ("hunyuan-video", (4, 2, 4, 4), 16, (6,)),
    "ltx2": ("ltx-2", (4, 2, 2, 4), 32, (6,)),  # for the video and for the sound 16 each
}


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def examples(family: str, count: int, sizes: int = 1) -> list[dict[str, torch.Tensor]]:
    """Examples of a family; texts differ in length where they may, and latents are of ``sizes`` widths."""
    _, shape, width, lengths = FAMILIES[family]
    made = []
    for number in range(count):
        length = lengths[number % len(lengths)]
        item = {
            "latents": noise(*shape[:-1], shape[-1] + number % sizes * 2, seed=number),
            "prompt_embeds": noise(length, width, seed=100 + number),
        }
        if family == "flux":
            item["pooled_prompt_embeds"] = noise(32, seed=200 + number)
        if family == "hunyuan-video":
            item["pooled_prompt_embeds"] = noise(20, seed=200 + number)
        if family in ("hunyuan-video", "ltx2"):
            item["prompt_attention_mask"] = (torch.arange(length) < length - number % 3).long()
        made.append(item)
    return made


class Kept:
    """Examples in a file of torch.save."""

    def __init__(self, path: str) -> None:
        self.items = torch.load(path)
        self.bytes = Path(path).read_bytes()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.items[index]

    def digest(self) -> str:
        return hashlib.sha256(self.bytes).hexdigest()

    def shapes(self) -> list[object]:
        return [tuple(item["latents"].shape) for item in self.items]


class StoredConfig(FlowConfig):
    """With the file of the examples."""

    path: str


class Stored(FlowMatching):
    """Flow matching of examples in a file: what a user's own task looks like."""

    Settings: ClassVar = StoredConfig

    def items(self, world):
        return self.numbered(Kept(self.settings.path))


def build(family: str) -> torch.nn.Module:
    """The tiny transformer of a family, initialised from a seed."""
    torch.manual_seed(3)
    model = COMPONENTS[FAMILIES[family][0]].build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Some are zero (an output layer), and some are left as they are found in memory.
            if name.endswith("pad_token") or not parameter.any():
                parameter.copy_(0.05 * noise(*parameter.shape, seed=len(name)))
    return model


def configured(
    folder: Path, family: str, engine: str, stage: int, count: int = 12, sizes: int = 1, **train
) -> dict:
    """The configuration of a run, with the model and the examples that it names."""
    source = folder / family
    if not source.exists():
        build(family).save_pretrained(source / "transformer")
        index = {"_class_name": "DiffusionPipeline", "_diffusers_version": "0.35.0"}
        named = ["diffusers", COMPONENTS[FAMILIES[family][0]].kind]
        index |= {"transformer": named, "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
        (source / "model_index.json").write_text(json.dumps(index))
        (source / "scheduler").mkdir()
        (source / "scheduler" / "scheduler_config.json").write_text("{}")
        torch.save(examples(family, count, sizes), source / "examples.pt")
    return {
        "model": {"source": str(source)},
        "task": {"name": "tests.training.diffusion.flow_items:Stored", "path": str(source / "examples.pt")},
        "engine": {"name": engine, "zero_stage": stage},
        "train": {"steps": 3, "batch_size": 2, "learning_rate": 1e-3, "schedule": "constant", **train},
        "output": {"directory": str(folder / "out"), "overwrite": True},
    }


def recorded_run(values: dict, dies_after: int | None = None) -> dict:
    """Runs ``values`` here: losses, draws (number, time, noise) by batch, and the weights at the end.

    And draws of what is held out, of which no batch is its own.

    With ``dies_after`` the run fails after that step.
    """
    import zerostart
    from zerostart.training.config.load import parse_config
    from zerostart.training.loop import runner

    batches, held, weights, drawn = [], [], {}, FlowMatching.drawn
    step, export = runner._Run._step, runner.Exporter.save_final

    def recording(self, batch, epoch):
        made = drawn(self, batch, epoch)
        latents = [item["latents"] for item in batch["items"]]
        numbers = [int(item["index"]) for item in batch["items"]]
        noises = [target + x for target, x in zip(made["target"], latents, strict=True)]
        draws = list(zip(numbers, made["t"].tolist(), noises, strict=True))
        batches.append(draws) if epoch >= 0 else held.extend(draws)
        return made

    def dying(self, number, source):
        if dies_after is not None and number > dies_after:
            raise OSError("the machine is gone")
        step(self, number, source)

    def exporting(self, *others):
        weights.update(zerostart.full_tensors(self._model, rank=None))
        return export(self, *others)

    FlowMatching.drawn, runner._Run._step = recording, dying
    runner.Exporter.save_final = exporting
    if dies_after is not None:
        with pytest.raises(OSError, match="the machine is gone"):
            runner.train(parse_config(values))
        return {"batches": batches}
    result = runner.train(parse_config(values))
    lines = [json.loads(line) for line in Path(result.directory, "metrics.jsonl").read_text().splitlines()]
    return {
        "batches": batches,
        "losses": [line["loss"] for line in lines if "loss" in line],
        "held": held,
        "held_out": result.held_out,
        "directory": result.directory,
        "items": [line["items"] for line in lines if "items" in line],
        "weights": weights,
    }


def velocity(family: str, model, x: torch.Tensor, t: float, item: dict[str, torch.Tensor]) -> torch.Tensor:
    """What ``model`` predicts for one example, called as diffusers' pipeline of the family calls it."""
    import diffusers

    x, text = x[None], item["prompt_embeds"][None]
    time = torch.tensor([t])
    height, width = x.shape[-2:]
    if family == "wan":
        return model(x, time * 1000, text, return_dict=False)[0][0]
    if family == "z-image":
        return -model([x[0][:, None]], 1 - time, [text[0]], return_dict=False)[0][0][:, 0]
    if family == "flux2":
        kind = diffusers.Flux2Pipeline
        ids = kind._prepare_latent_ids(x)
        told = torch.ones(1) if model.config.guidance_embeds else None
        out = model(
            kind._pack_latents(x), text, time, ids, kind._prepare_text_ids(text), told, return_dict=False
        )[0]
        return kind._unpack_latents_with_ids(out, ids)[0]
    if family == "qwen-image":
        kind = diffusers.QwenImagePipeline
        tokens = kind._pack_latents(x, 1, x.shape[1], height, width)
        sides = [[(1, height // 2, width // 2)]]
        out = model(tokens, text, None, time, sides, return_dict=False)[0]
        return kind._unpack_latents(out, height * 8, width * 8, 8)[0][:, 0]
    if family == "hunyuan-video":
        mask, pooled = item["prompt_attention_mask"][None], item["pooled_prompt_embeds"][None]
        told = torch.tensor([1.0]) * 1000.0
        return model(x, time * 1000, text, mask, pooled, told, return_dict=False)[0][0]
    if family == "ltx2":
        return ltx2(model, x, time * 1000, text, item["prompt_attention_mask"][None])
    kind = diffusers.FluxPipeline
    tokens = kind._pack_latents(x, 1, x.shape[1], height, width)
    ids = kind._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)
    words = torch.zeros(text.shape[1], 3)
    pooled = item["pooled_prompt_embeds"][None]
    out = model(tokens, text, pooled, time, ids, words, torch.ones(1), return_dict=False)[0]
    return kind._unpack_latents(out, height * 8, width * 8, 8)[0]


def ltx2(model, x, time, text, mask) -> torch.Tensor:
    """The call of the pipeline for its guidance by modality; what the sound is makes no difference."""
    import diffusers

    kind = diffusers.LTX2Pipeline
    _, _, frames, height, width = x.shape
    sound = noise(1, 7, model.config.audio_in_channels, seed=9)
    video, audio = text.chunk(2, dim=-1)
    out = model(
        kind._pack_latents(x),
        sound,
        video,
        audio,
        timestep=time,
        sigma=time,
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=frames,
        height=height,
        width=width,
        fps=24.0,
        audio_num_frames=7,
        video_coords=model.rope.prepare_video_coords(1, frames, height, width, x.device, fps=24.0),
        audio_coords=model.audio_rope.prepare_audio_coords(1, 7, x.device),
        isolate_modalities=True,
        use_cross_timestep=True,
        return_dict=False,
    )[0]
    return kind._unpack_latents(out, frames, height, width)[0]


def train_alone(values: dict, family: str, steps: list) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights of one process in plain torch that sees all examples of each step."""
    model = opened(values, family)
    losses = losses_alone(model, values, family, steps)
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def opened(values: dict, family: str) -> torch.nn.Module:
    """The transformer that a run starts from, by diffusers alone."""
    import diffusers

    kind = getattr(diffusers, COMPONENTS[FAMILIES[family][0]].kind)
    return kind.from_pretrained(Path(values["model"]["source"]) / "transformer").train()


def losses_alone(model: torch.nn.Module, values: dict, family: str, steps: list) -> list[float]:
    """Train what of ``model`` needs a gradient, as ``train_alone`` does; the losses."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = values["train"].get("weight_decay", 0.0)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=values["train"]["learning_rate"])
    items = torch.load(values["task"]["path"])
    losses = []
    for step in steps:
        loss = mean_alone(model, items, family, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, values["train"].get("max_grad_norm", 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_alone(model: torch.nn.Module, items: list, family: str, draws: list) -> torch.Tensor:
    """The mean of the losses of examples, one after the other."""
    loss = torch.zeros(())
    for number, t, eps in draws:
        x = items[number]["latents"]
        found = velocity(family, model, (1 - t) * x + t * eps, t, items[number])
        loss = loss + mse_loss(found, eps - x) / len(draws)
    return loss
