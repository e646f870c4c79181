"""The files that ``zerostart config`` writes: what most runs change, and every other key as a comment.

Names, order and defaults come from the fields of the sections; what a family has otherwise is a template
here, by dotted keys, each of which a test holds to be one of ``TrainConfig``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import read_json
from zerostart.engines import Engine
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import TrainConfig
from zerostart.training.config.sections import TaskConfig
from zerostart.training.loop.task import task_class


@dataclass(frozen=True)
class Template:
    """The ``sections`` of a family, in their order, and those that are ``offered``: written as comments.

    ``values`` are what is written, by dotted keys; all other keys are written as comments, with their
    defaults.
    """

    sections: tuple[str, ...]
    offered: tuple[str, ...]
    values: Mapping[str, object] = field(default_factory=dict)


#: What every run says.
_RUN: dict[str, object] = {
    "train.steps": 1000,
    "train.accumulation": 1,
    "train.max_grad_norm": 1.0,
    "train.seed": 42,
    "output.directory": "out/run",
    "checkpoint.every": 500,
    "checkpoint.keep": 2,
    "resume": "auto",
    "tracking.trackers": [],
    "logging.every": 10,
    "ema.decay": 0.9999,
}
_DIFFUSION: dict[str, object] = {
    **_RUN,
    "model.source": "path/of/a/pipeline",
    "media.source": "data/metadata.csv",
    "media.height": 1024,
    "media.width": 1024,
    "media.repeats": 1,
    "media.workers": 2,
    "cache.directory": "out/cache",
    "task.name": "flow-matching",
    "train.batch_size": 1,
    "train.learning_rate": 1e-5,
    "train.weight_decay": 0.01,
    "train.schedule": "constant",
    "train.checkpoint_blocks": True,
    "samples.prompts": ["a lighthouse at dusk"],
    "samples.every": 500,
}
_VIDEO: dict[str, object] = {
    **_DIFFUSION,
    "media.height": 480,
    "media.width": 832,
    "media.num_frames": 81,
    "samples.num_frames": 81,
}
_LAST = ("train", "output", "engine", "checkpoint", "resume", "tracking", "logging")


def _diffusion(values: Mapping[str, object]) -> Template:
    return Template(("model", "media", "cache", "task", *_LAST), ("samples", "ema"), MappingProxyType(values))


#: By the word on the command line.
TEMPLATES: Mapping[str, Template] = {
    "wan": _diffusion(_VIDEO),
    "qwen-image": _diffusion(_DIFFUSION),
    "flux": _diffusion(_DIFFUSION),
    "flux2": _diffusion(_DIFFUSION),
    "z-image": _diffusion(_DIFFUSION),
    "hunyuan-video": _diffusion(
        {**_VIDEO, "media.height": 544, "media.width": 960, "media.num_frames": 61, "samples.num_frames": 61}
    ),
    "ltx2": _diffusion(
        {
            **_VIDEO,
            "media.height": 512,
            "media.width": 768,
            "media.multiple_of": 32,
            "media.num_frames": 121,
            "media.time_division_factor": 8,
            "media.frame_rate": 24,
            "samples.num_frames": 121,
            "samples.fps": 24,
            "lora.exclude": ["*audio*"],  # the stream of sound, which is not trained
        }
    ),
}
#: What a LoRA has otherwise.
LORA: Mapping[str, object] = {
    "lora.rank": 32,
    "lora.targets": "auto",
    "train.learning_rate": 1e-4,
}
#: Where the comments of a file begin, if a line is not longer.
_COLUMN = 40


def template_of(family: str) -> tuple[Template, Mapping[str, object]]:
    """What a family begins with, and the values that are known besides.

    ``family`` is one of ``TEMPLATES``, or the directory of a model or of a pipeline, whose family is looked
    up there. Raises ConfigError for what is neither.
    """
    if (known := TEMPLATES.get(family)) is not None:
        return known, {}
    path = expanded(family)
    if not path.is_dir():
        raise ConfigError(
            f"{family} is neither a family nor the directory of a model; families are {', '.join(TEMPLATES)}"
        )
    return TEMPLATES[_family_in(path)], {"model.source": str(path)}


def described(template: Template, values: Mapping[str, object], engine: Engine, lora: bool) -> str:
    """A file of the ``template`` with ``values`` over its own, for ``engine``, with a LoRA or without."""
    precision = "bf16" if "bf16" in engine.precisions else "no"
    # The later ones count: what the family says, what follows from the engine, a LoRA's, the user's own.
    chosen = {
        **template.values,
        "engine.name": engine.name,
        "engine.zero_stage": engine.zero_stage,
        "train.mixed_precision": precision,
        **(LORA if lora else {}),
        **values,
    }
    sections = list(template.sections)
    if lora:
        sections.insert(sections.index("train"), "lora")
    lines = [
        f"# A run of `zerostart train` on {engine.title}. What is a comment here has the value that it says.",
        "",
    ]
    for section in sections:
        lines += _section(section, chosen)
    for section in template.offered:
        lines += ["", *(f"# {line}" for line in _section(section, chosen))]
    return "\n".join(lines) + "\n"


def _section(name: str, chosen: Mapping[str, object]) -> Iterator[str]:
    """The lines of a section, or of a value that stands by itself."""
    described = TrainConfig.model_fields[name]
    kind = _kind(described, chosen)
    if kind is None or name in chosen:  # a section that one value stands for
        yield _line(name, chosen[name], _comment(described))
        return
    yield f"{name}:"
    for key, described in kind.model_fields.items():
        dotted = f"{name}.{key}"
        value = chosen.get(dotted, _default(described))
        # Columns that come before the line, so that comments stand below each other.
        line = _line(key, value, _comment(described), 2 if dotted in chosen else 4)
        yield f"  {line}" if dotted in chosen else f"  # {line}"


def _kind(described: FieldInfo, chosen: Mapping[str, object]) -> type[BaseModel] | None:
    """The class of a section; None for a plain value."""
    annotation = described.annotation
    found = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    kinds = [kind for kind in found if issubclass(kind, BaseModel)]
    if TaskConfig in kinds:
        return task_class(str(chosen["task.name"])).Settings
    return kinds[0] if kinds else None


def _comment(described: FieldInfo) -> str | None:
    """The first sentence of a key's description."""
    first = re.match(r".*?[^.]\.(?=\s|$)", described.description or "", re.DOTALL)
    return None if first is None else " ".join(first[0].removesuffix(".").replace("``", "`").split())


def _default(described: FieldInfo) -> object:
    return described.get_default(call_default_factory=True)


def _line(key: str, value: object, comment: str | None, indent: int = 0) -> str:
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    line = f"{key}: {text}"
    return line if comment is None else f"{line:<{_COLUMN - indent}}  # {comment}"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _family_in(path: Path) -> str:
    for name, family in (("model_index.json", _of_pipeline), ("config.json", _of_model)):
        file = path / name
        if file.is_file():
            if (found := family(read_json(file, "configuration"))) is not None:
                return found
            raise ConfigError(f"{file} belongs to no known family; choose one of {', '.join(TEMPLATES)}")
    raise ConfigError(
        f"{path} has neither model_index.json nor config.json, so it is not the directory of a model"
    )


def _of_pipeline(settings: Mapping[str, object]) -> str | None:
    classes = [entry[1] for entry in settings.values() if isinstance(entry, list) and len(entry) == 2]
    return next((family for kind in classes if (family := _of_class(kind)) is not None), None)


def _of_model(settings: Mapping[str, object]) -> str | None:
    return _of_class(settings.get("_class_name"))


def _of_class(kind: object) -> str | None:
    """The family of a class of diffusers, None for one of none."""
    from zerostart.training.diffusion.families import known_family

    family = known_family(kind)
    return None if family is None else family.name
