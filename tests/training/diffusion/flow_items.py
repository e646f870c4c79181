"""Flow-matching runs on tiny transformers, and a reference in plain torch.

The reference calls each transformer by functions of diffusers' pipelines, one example at a time.
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
    "ltx2": ("ltx-2", (4, 2, 2, 4), 32, (6,)),  # 16 each for video and audio
}


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_examples(family: str, count: int, sizes: int = 1) -> list[dict[str, torch.Tensor]]:
    """Make examples with texts of several lengths and latents of ``sizes`` widths."""
    _, shape, width, lengths = FAMILIES[family]
    items = []
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
        items.append(item)
    return items


class StoredExamples:
    """Examples in a file written by ``torch.save``."""

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
    path: str


class StoredFlowMatching(FlowMatching):
    """Flow matching on stored examples, written like a user's task."""

    Settings: ClassVar = StoredConfig

    def items(self, world):
        return self.numbered(StoredExamples(self.settings.path))


def build_transformer(family: str) -> torch.nn.Module:
    """Build the tiny transformer of a family from a seed."""
    torch.manual_seed(3)
    model = COMPONENTS[FAMILIES[family][0]].build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Some are initialised to zero, such as output layers, and some not at all.
            if name.endswith("pad_token") or not parameter.any():
                parameter.copy_(0.05 * noise(*parameter.shape, seed=len(name)))
    return model


def make_config(
    folder: Path, family: str, engine: str, stage: int, count: int = 12, sizes: int = 1, **train
) -> dict:
    """Write a model and examples, and return the configuration of a run on them."""
    source = folder / family
    if not source.exists():
        build_transformer(family).save_pretrained(source / "transformer")
        index = {"_class_name": "DiffusionPipeline", "_diffusers_version": "0.35.0"}
        kind = ["diffusers", COMPONENTS[FAMILIES[family][0]].kind]
        index |= {"transformer": kind, "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
        (source / "model_index.json").write_text(json.dumps(index))
        (source / "scheduler").mkdir()
        (source / "scheduler" / "scheduler_config.json").write_text("{}")
        torch.save(make_examples(family, count, sizes), source / "examples.pt")
    return {
        "model": {"source": str(source)},
        "task": {"name": f"{__name__}:StoredFlowMatching", "path": str(source / "examples.pt")},
        "engine": {"name": engine, "zero_stage": stage},
        "train": {"steps": 3, "batch_size": 2, "learning_rate": 1e-3, "schedule": "constant", **train},
        "output": {"directory": str(folder / "out"), "overwrite": True},
    }


def run_and_record(values: dict, dies_after: int | None = None) -> dict:
    """Run on this rank; return losses, draws, held-out draws and final weights.

    A draw is (number, time, noise). With ``dies_after`` the run fails after that step.
    """
    import zerostart
    from zerostart.training.config.load import parse_config
    from zerostart.training.loop import runner

    batches, held_out, weights, draw = [], [], {}, FlowMatching.drawn
    step, export = runner._Run._step, runner.Exporter.save_final

    def draw_and_record(self, batch, epoch):
        batch_drawn = draw(self, batch, epoch)
        latents = [item["latents"] for item in batch["items"]]
        numbers = [int(item["index"]) for item in batch["items"]]
        noises = [target + x for target, x in zip(batch_drawn["target"], latents, strict=True)]
        draws = list(zip(numbers, batch_drawn["t"].tolist(), noises, strict=True))
        batches.append(draws) if epoch >= 0 else held_out.extend(draws)
        return batch_drawn

    def step_or_die(self, number, source):
        if dies_after is not None and number > dies_after:
            raise OSError("the machine is gone")
        step(self, number, source)

    def export_and_record(self, *arguments):
        weights.update(zerostart.full_tensors(self._model, rank=None))
        return export(self, *arguments)

    FlowMatching.drawn, runner._Run._step = draw_and_record, step_or_die
    runner.Exporter.save_final = export_and_record
    if dies_after is not None:
        with pytest.raises(OSError, match="the machine is gone"):
            runner.train(parse_config(values))
        return {"batches": batches}
    result = runner.train(parse_config(values))
    lines = [json.loads(line) for line in Path(result.directory, "metrics.jsonl").read_text().splitlines()]
    return {
        "batches": batches,
        "losses": [line["loss"] for line in lines if "loss" in line],
        "held": held_out,
        "held_out": result.held_out,
        "directory": result.directory,
        "items": [line["items"] for line in lines if "items" in line],
        "weights": weights,
    }


def predict_velocity(
    family: str, model, x: torch.Tensor, t: float, item: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Call ``model`` on one example as diffusers' pipeline of the family does."""
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
        guidance = torch.ones(1) if model.config.guidance_embeds else None
        out = model(
            kind._pack_latents(x), text, time, ids, kind._prepare_text_ids(text), guidance, return_dict=False
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
        guidance = torch.tensor([1.0]) * 1000.0
        return model(x, time * 1000, text, mask, pooled, guidance, return_dict=False)[0][0]
    if family == "ltx2":
        return call_ltx2(model, x, time * 1000, text, item["prompt_attention_mask"][None])
    kind = diffusers.FluxPipeline
    tokens = kind._pack_latents(x, 1, x.shape[1], height, width)
    ids = kind._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)
    text_ids = torch.zeros(text.shape[1], 3)
    pooled = item["pooled_prompt_embeds"][None]
    out = model(tokens, text, pooled, time, ids, text_ids, torch.ones(1), return_dict=False)[0]
    return kind._unpack_latents(out, height * 8, width * 8, 8)[0]


def call_ltx2(model, x, time, text, mask) -> torch.Tensor:
    """Call as the pipeline does for modality guidance, where the audio has no influence."""
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


def train_reference(values: dict, family: str, steps: list) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process on all examples of each step; return losses and weights."""
    model = load_transformer(values, family)
    losses = train_model(model, values, family, steps)
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def load_transformer(values: dict, family: str) -> torch.nn.Module:
    """Load the transformer that a run starts from with diffusers."""
    import diffusers

    kind = getattr(diffusers, COMPONENTS[FAMILIES[family][0]].kind)
    return kind.from_pretrained(Path(values["model"]["source"]) / "transformer").train()


def train_model(model: torch.nn.Module, values: dict, family: str, steps: list) -> list[float]:
    """Train the parameters of ``model`` that need gradients, and return the losses."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = values["train"].get("weight_decay", 0.0)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    arguments = values["train"].get("optimizer_args", {})
    optimizer = torch.optim.AdamW(groups, lr=values["train"]["learning_rate"], **arguments)
    items = torch.load(values["task"]["path"])
    losses = []
    for step in steps:
        loss = compute_loss(model, items, family, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, values["train"].get("max_grad_norm", 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compute_loss(model: torch.nn.Module, items: list, family: str, draws: list) -> torch.Tensor:
    """Return the mean loss of examples, one after the other."""
    loss = torch.zeros(())
    for number, t, eps in draws:
        x = items[number]["latents"]
        prediction = predict_velocity(family, model, (1 - t) * x + t * eps, t, items[number])
        loss = loss + mse_loss(prediction, eps - x) / len(draws)
    return loss
