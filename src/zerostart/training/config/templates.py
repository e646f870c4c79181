"""The files that ``zerostart config`` writes: what most runs change, and every other key as a comment.

Names, order and defaults come from the fields of the sections; what a family has otherwise is a template
here, by dotted keys, each of which a test holds to be one of ``TrainConfig``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

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
    values: Mapping[str, Any] = field(default_factory=dict)


#: What every run says.
_RUN: dict[str, Any] = {
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
_LANGUAGE: dict[str, Any] = {
    **_RUN,
    "model.source": "path/or/hub-id",
    "data.source": ["corpus/"],
    "data.sequence_length": 512,
    "data.packing": True,
    "data.held_out": 0.05,
    "train.batch_size": 8,
    "train.learning_rate": 5e-5,
    "train.schedule": "linear",
    "train.warmup_steps": 50,
    "train.checkpoint_blocks": False,
}
_DIFFUSION: dict[str, Any] = {
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
_VIDEO: dict[str, Any] = {
    **_DIFFUSION,
    "media.height": 480,
    "media.width": 832,
    "media.num_frames": 81,
    "samples.num_frames": 81,
}
_LAST = ("train", "output", "engine", "checkpoint", "resume", "tracking", "logging")


def _language(task: str) -> Template:
    sections = ("model", "data", "task", *_LAST)
    return Template(sections, ("ema",), MappingProxyType({**_LANGUAGE, "task.name": task}))


def _diffusion(values: Mapping[str, Any]) -> Template:
    return Template(("model", "media", "cache", "task", *_LAST), ("samples", "ema"), MappingProxyType(values))


#: By the word on the command line.
TEMPLATES: Mapping[str, Template] = {
    "causal-lm": _language("causal-lm"),
    "masked-lm": _language("masked-lm"),
    "wan": _diffusion(_VIDEO),
    "qwen-image": _diffusion(_DIFFUSION),
    "flux": _diffusion(_DIFFUSION),
    "flux2": _diffusion(_DIFFUSION),
    "z-image": _diffusion(_DIFFUSION),
}
#: What a LoRA has otherwise.
LORA: Mapping[str, Any] = {
    "lora.rank": 32,
    "lora.targets": "auto",
    "train.learning_rate": 1e-4,
}
#: What keys mean, for who has the file before them. The rest is told in the classes of the sections.
COMMENTS: Mapping[str, str] = {
    "model.source": "what is trained: a directory, or a hub id that the local cache has",
    "model.component": "of a pipeline: what is trained (transformer, transformer_2)",
    "model.dtype": "bfloat16 on fsdp2: computed in, what is frozen held in; what is trained has fp32 masters",
    "model.strict": "false: initialise what the checkpoint lacks, such as a new head",
    "model.fp32_masters": "false: start mixed precision from weights rounded to 16 bits",
    "model.trust_remote_code": "true: run the code of a model or a tokenizer that lies beside its files",
    "data.source": "text files, .jsonl files, directories of both",
    "data.text_field": "of each line of a .jsonl file",
    "data.documents": "how many are taken; 0: all",
    "data.tokenizer": "null: the model's",
    "data.sequence_length": "tokens",
    "data.packing": "documents joined and cut; false: each is one sequence, padded",
    "data.held_out": "the part that is kept out of training, and evaluated",
    "media.source": "a table (.csv, .json, .jsonl), or a directory of pictures and texts",
    "media.base": "what names of files are relative to; null: the table's directory",
    "media.prompt": "the column of texts",
    "media.columns": "which columns name files, where they have other names",
    "media.height": "pixels; null: by max_pixels and buckets",
    "media.width": "pixels",
    "media.max_pixels": "of sizes that are chosen for each picture",
    "media.buckets": "own, standard, or a list of sizes [height, width]",
    "media.num_frames": "of videos",
    "media.repeats": "how often an epoch goes over the rows",
    "media.workers": "processes that decode, beside each rank",
    "cache.directory": "latents and embeddings, made by `zerostart cache` or before training",
    "cache.source": "the pipeline with the encoders; null: model.source",
    "cache.placement": "of the encoders: shard, replicate, offload",
    "cache.last_frame": "of image to video: the last frame is given, too",
    "task.name": "what is learnt",
    "task.mask_probability": "of a token to be hidden",
    "task.family": "null: by the class of the transformer",
    "task.sampling": "of times: uniform, logit-normal",
    "task.shift": "of times towards noise; null: the family's, resolution: the pipeline's",
    "task.boundaries": "lowest and highest time; null: those of the expert",
    "task.weighting": "none; bell is DiffSynth's",
    "task.drop_prompt": "probability of an example without its text",
    "task.held_out": "the part that is kept out of training, and evaluated",
    "train.steps": "of the optimizer",
    "train.batch_size": "on each rank",
    "train.accumulation": "batches on each rank in one step",
    "train.learning_rate": "after the warm-up",
    "train.weight_decay": "of matrices; biases and norms have none",
    "train.schedule": "linear, cosine, constant, ...",
    "train.warmup_steps": "steps that rise to learning_rate",
    "train.max_grad_norm": "0: no clipping",
    "train.mixed_precision": "no, bf16; fp16 with deepspeed",
    "train.seed": "of order, noise and new weights",
    "train.evaluate_every": "steps; 0: at the start and the end",
    "train.checkpoint_blocks": "true: run blocks again in the backward; offload: and keep less on the device",
    "train.patience_nonfinite": "steps on end without a finite loss or gradient norm, after which the run "
    "fails",
    "train.trainable": "names of what is trained, all else being frozen; null: everything",
    "output.directory": "the trained model, metrics.jsonl and checkpoints",
    "output.max_shard_size": "of a file",
    "output.overwrite": "true: a model in the directory may go",
    "output.pipeline": "true: the whole pipeline, with what is trained in it",
    "output.format": "of a LoRA: diffusers, peft, diffsynth",
    "output.merge": "true: the LoRA goes into the weights of a whole model",
    "output.every": "steps between exports; 0: at the end alone",
    "engine.name": "deepspeed, fsdp2, or what another package registers",
    "engine.zero_stage": "3: weights in shards; 1, 2: gradients and optimizer; 0: nothing",
    "engine.expert_parallel": "ranks that share the experts of a mixture",
    "engine.sequence_parallel": "ranks that share each sequence",
    "engine.config": "the engine's own configuration, merged over ours",
    "checkpoint.every": "steps; 0: none",
    "checkpoint.keep": "how many stay",
    "checkpoint.best": "and of the lowest held-out loss",
    "checkpoint.background": "true: written while training goes on",
    "resume": "auto: from the newest checkpoint, if there is one; a path; null; or a section with accept",
    "tracking.trackers": "tensorboard, wandb, ...",
    "tracking.project": "that they log to",
    "logging.every": "steps between plain lines",
    "samples.prompts": "what is drawn with the model in training",
    "samples.every": "steps; 0: at the start and the end",
    "samples.guidance": "null: the pipeline's own",
    "lora.rank": "of the adapters",
    "lora.alpha": "null: as rank",
    "lora.targets": "auto, names, a preset, or DiffSynth's comma-separated list",
    "lora.start_from": "a LoRA file to go on from",
    "ema.decay": "of the average of the weights",
    "ema.place": "device, host",
}


#: Where the comments of a file begin, if a line is not longer.
_COLUMN = 40


def template_of(family: str) -> tuple[Template, Mapping[str, Any]]:
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


def described(template: Template, values: Mapping[str, Any], engine: Engine, lora: bool) -> str:
    """A file of the ``template`` with ``values`` over its own, for ``engine``, with a LoRA or without."""
    precision = "bf16" if "bf16" in engine.precisions else "no"
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


def _section(name: str, chosen: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a section, or of a value that stands by itself."""
    kind = _kind(TrainConfig.model_fields[name], chosen)
    if kind is None or name in chosen:  # a section that one value stands for
        yield _line(name, chosen[name], COMMENTS.get(name))
        return
    yield f"{name}:"
    for key, described in kind.model_fields.items():
        dotted = f"{name}.{key}"
        value = chosen.get(dotted, _default(described))
        line = _line(key, value, COMMENTS.get(dotted), 2 if dotted in chosen else 4)
        yield f"  {line}" if dotted in chosen else f"  # {line}"


def _kind(described: FieldInfo, chosen: Mapping[str, Any]) -> type[BaseModel] | None:
    """The class of a section; None for a plain value."""
    annotation = described.annotation
    found = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    kinds = [kind for kind in found if issubclass(kind, BaseModel)]
    if TaskConfig in kinds:
        return task_class(chosen["task.name"]).Settings
    return kinds[0] if kinds else None


def _default(described: FieldInfo) -> Any:
    return described.get_default(call_default_factory=True)


def _line(key: str, value: Any, comment: str | None, indent: int = 0) -> str:
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    line = f"{key}: {text}"
    return line if comment is None else f"{line:<{_COLUMN - indent}}  # {comment}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _family_in(path: Path) -> str:
    """The family of a model or a pipeline by its own files; raises ConfigError and ReadError."""
    for name, family in (("model_index.json", _of_pipeline), ("config.json", _of_model)):
        file = path / name
        if file.is_file():
            if (found := family(read_json(file, "configuration"))) is not None:
                return found
            raise ConfigError(f"{file} belongs to no known family; choose one of {', '.join(TEMPLATES)}")
    raise ConfigError(
        f"{path} has neither model_index.json nor config.json, so it is not the directory of a model"
    )


def _of_pipeline(settings: Mapping[str, Any]) -> str | None:
    classes = [entry[1] for entry in settings.values() if isinstance(entry, list) and len(entry) == 2]
    return next((family for kind in classes if (family := _of_class(kind)) is not None), None)


def _of_model(settings: Mapping[str, Any]) -> str | None:
    if "_class_name" in settings:
        return _of_class(settings["_class_name"])
    named = settings.get("architectures")
    architectures = [str(kind) for kind in named] if isinstance(named, list) else []
    if any(kind.endswith("ForMaskedLM") for kind in architectures):
        return "masked-lm"
    if any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in architectures):
        return "causal-lm"
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    return "masked-lm" if str(settings.get("model_type")) in MASKED else "causal-lm"


def _of_class(kind: object) -> str | None:
    """The family of a class of diffusers, None for one of none."""
    from zerostart.training.diffusion.families import FAMILIES

    return next((name for name, family in FAMILIES.items() if str(kind) in family.classes), None)
