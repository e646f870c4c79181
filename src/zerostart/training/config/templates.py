"""The files that ``zerostart config`` writes: what most runs change, and every other key as a comment.

Names, order and defaults come from the fields of the sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zerostart.engines import Engine
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.sections import TaskConfig
from zerostart.training.loop.task import task_class

_DIFFUSION: Mapping[str, object] = {
    "model.source": "path/of/a/pipeline",
    "media.source": "data/metadata.csv",
    "media.height": 1024,
    "media.width": 1024,
    "cache.directory": "out/cache",
    "task.name": "flow-matching",
    "train.steps": 1000,
    "train.batch_size": 1,
    "train.accumulation": 1,
    "train.learning_rate": 1e-5,
    "train.weight_decay": 0.01,
    "train.schedule": "constant",
    "train.checkpoint_blocks": True,
    "output.directory": "out/run",
    "checkpoint.every": 500,
    "resume": "auto",
    "tracking.trackers": [],
    "logging.every": 10,
    "samples.prompts": ["a lighthouse at dusk"],
    "samples.every": 500,
    "ema.decay": 0.9999,
}


def _video(height: int, width: int, frames: int, **more: object) -> Mapping[str, object]:
    sizes = {"media.height": height, "media.width": width, "media.num_frames": frames}
    return {**_DIFFUSION, **sizes, "samples.num_frames": frames, **more}


#: Values that a file of each family states, by dotted keys; all other keys are comments with their defaults.
TEMPLATES: Mapping[str, Mapping[str, object]] = {
    "wan": _video(480, 832, 81),
    "qwen-image": _DIFFUSION,
    "flux": _DIFFUSION,
    "flux2": _DIFFUSION,
    "z-image": _DIFFUSION,
    "hunyuan-video": _video(544, 960, 61),
    "ltx2": _video(
        512,
        768,
        121,
        **{
            "media.multiple_of": 32,
            "media.time_division_factor": 8,
            "media.frame_rate": 24,
            "samples.fps": 24,
            "lora.exclude": ["*audio*"],  # the stream of sound, which is not trained
        },
    ),
}
#: What a LoRA has otherwise.
LORA: Mapping[str, object] = {"lora.rank": 32, "lora.targets": "auto", "train.learning_rate": 1e-4}
_SECTIONS = (
    *("model", "media", "cache", "task", "lora", "train", "output", "engine"),
    *("checkpoint", "resume", "tracking", "logging"),
)
#: Sections that are written as comments.
_OFFERED = ("samples", "ema")
#: Where the comments of a file begin, if a line is not longer.
_COLUMN = 40


def described(family: str, engine: Engine, lora: bool) -> str:
    """A file for ``family`` on ``engine``, with a LoRA or without; raises ConfigError for an unknown one."""
    if family not in TEMPLATES:
        raise ConfigError(f"{family} is no family of models; families are {', '.join(TEMPLATES)}")
    # The later ones count: what the family says, what follows from the engine, a LoRA's.
    chosen = {
        **TEMPLATES[family],
        "engine.name": engine.name,
        "engine.zero_stage": engine.zero_stage,
        "train.mixed_precision": "bf16" if "bf16" in engine.precisions else "no",
        **(LORA if lora else {}),
    }
    lines = [
        f"# A run of `zerostart train` on {engine.title}. What is a comment here has the value that it says.",
        "",
    ]
    for section in _SECTIONS:
        if lora or section != "lora":
            lines += _section(section, chosen)
    for section in _OFFERED:
        lines += ["", *(f"# {line}" for line in _section(section, chosen))]
    return "\n".join(lines) + "\n"


def _section(name: str, chosen: Mapping[str, object]) -> Iterator[str]:
    """The lines of a section, or of a value that stands by itself."""
    described = TrainConfig.model_fields[name]
    if name in chosen:
        yield _line(name, chosen[name], described)
        return
    annotation = described.annotation
    found = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    kind: type[BaseModel] = next(kind for kind in found if issubclass(kind, BaseModel))
    if kind is TaskConfig:
        kind = task_class(str(chosen["task.name"])).Settings
    yield f"{name}:"
    for key, described in kind.model_fields.items():
        dotted = f"{name}.{key}"
        value = chosen.get(dotted, described.get_default(call_default_factory=True))
        # Columns that come before the line, so that comments stand below each other.
        line = _line(key, value, described, 2 if dotted in chosen else 4)
        yield f"  {line}" if dotted in chosen else f"  # {line}"


def _line(key: str, value: object, described: FieldInfo, indent: int = 0) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    line = f"{key}: {text}"
    # The first sentence of a key's description.
    first = re.match(r".*?[^.]\.(?=\s|$)", described.description or "", re.DOTALL)
    if first is None:
        return line
    comment = " ".join(first[0].removesuffix(".").replace("``", "`").split())
    return f"{line:<{_COLUMN - indent}}  # {comment}"
