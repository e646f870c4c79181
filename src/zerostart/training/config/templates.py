"""Write the files of ``zerostart config``: keys that most runs change, the others as comments.

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
    "train.learning_rate": 1e-5,
    "train.weight_decay": 0.01,
    "train.schedule": "constant",
    "train.checkpoint_blocks": True,
    "output.directory": "out/run",
    "checkpoint.every": 500,
    "resume": "auto",
    # A section needs a key that is no comment.
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
#: Values for a LoRA.
LORA: Mapping[str, object] = {"lora.rank": 32, "lora.targets": "auto", "train.learning_rate": 1e-4}
_SECTIONS = (
    *("model", "media", "cache", "task", "lora", "train", "output", "engine"),
    *("checkpoint", "resume", "tracking", "logging"),
)
#: Sections that are written as comments.
_OFFERED = ("samples", "ema")
#: Column at which comments begin, if a line is not longer.
_COLUMN = 40


def render_template(family: str, engine: Engine, lora: bool) -> str:
    """Return a file for ``family`` on ``engine``; raises ConfigError for an unknown family."""
    if family not in TEMPLATES:
        raise ConfigError(f"{family} is no family of models; families are {', '.join(TEMPLATES)}")
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
    """Yield the lines of a section, or of a key without a section."""
    field = TrainConfig.model_fields[name]
    if name in chosen:
        yield _line(name, chosen[name], field)
        return
    annotation = field.annotation
    kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    kind: type[BaseModel] = next(kind for kind in kinds if issubclass(kind, BaseModel))
    if kind is TaskConfig:
        kind = task_class(str(chosen["task.name"])).Settings
    yield f"{name}:"
    for key, field in kind.model_fields.items():
        dotted = f"{name}.{key}"
        value = chosen.get(dotted, field.get_default(call_default_factory=True))
        # Indented, so that comments are aligned.
        line = _line(key, value, field, 2 if dotted in chosen else 4)
        yield f"  {line}" if dotted in chosen else f"  # {line}"


def _line(key: str, value: object, field: FieldInfo, indent: int = 0) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    line = f"{key}: {text}"
    # The first sentence of a key's description.
    first = re.match(r".*?[^.]\.(?=\s|$)", field.description or "", re.DOTALL)
    if first is None:
        return line
    comment = " ".join(first[0].removesuffix(".").replace("``", "`").split())
    return f"{line:<{_COLUMN - indent}}  # {comment}"
