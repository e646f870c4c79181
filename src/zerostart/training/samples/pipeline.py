"""diffusers' own pipeline around the model in training: its scheduler and autoencoder, and no encoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import zerostart
from zerostart.checkpoint.formats.pipeline import PIPELINE_INDEX, components
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.errors import ConfigError
from zerostart.training.samples.settings import SamplesConfig
from zerostart.upstream.diffusers_pipelines import assembled, component_class, pipeline_class

__all__ = ["Drawing", "Prompt"]

#: What encoders have made of a prompt: tensors of one item, [L, D] and the like, by the pipelines' names.
Prompt = Mapping[str, torch.Tensor]


class Drawing:
    """How the pipeline in a directory draws prompts that are encoded already, with a model that is given."""

    def __init__(self, source: str, component: str, settings: SamplesConfig) -> None:
        """Look at the pipeline in ``source``, whose model ``component`` is trained; nothing is loaded.

        Raises :class:`ConfigError` for what is no pipeline, or for one that does not draw from text alone.
        """
        self._root = resolve_source(source)
        found = components(self._root) if self._root.is_dir() else None
        if found is None:
            raise ConfigError(
                f"samples are drawn by a pipeline, and {self._root} has no {PIPELINE_INDEX}: name the "
                "pipeline's directory as model.source, or leave samples out"
            )
        self._component = component
        self._settings = settings
        self._vae = next((one for one in found if one.name == "vae"), None)
        self._index = read_json(self._root / PIPELINE_INDEX, "pipeline index")
        self._kind = pipeline_class(self._index.get("_class_name"), self._root)
        self._takes = inspect.signature(self._kind.__call__).parameters
        self._check()

    def _check(self) -> None:
        name = self._kind.__name__
        if self._vae is None:
            raise ConfigError(f"samples: {self._root} has no vae to decode them; leave samples out")
        if self._index.get("boundary_ratio") is not None:
            raise ConfigError(
                f"samples: {name} draws with two experts, of which {self._component} alone is loaded; leave "
                "samples out, and draw with the pipeline when both are trained"
            )
        others = {"image", "video", "mask_image", "control_image"} - {"image"} * (name in _TEXT_IS_ENOUGH)
        if "prompt_embeds" not in self._takes or others & self._takes.keys():
            raise ConfigError(f"samples are drawn from text alone, and {name} takes more; leave samples out")
        if "num_frames" not in self._takes and self._settings.num_frames is not None:
            raise ConfigError(f"samples.num_frames: {name} draws pictures, which have no frames; leave it out")

    @property
    def videos(self) -> bool:
        """Whether more than one frame is drawn."""
        takes = self._takes.get("num_frames")
        return takes is not None and (self._settings.num_frames or takes.default) > 1

    def opened(self, model: nn.Module, dtype: torch.dtype) -> Any:
        """The pipeline with ``model`` in the place of its own, computing in ``dtype``; collective.

        The autoencoder is loaded whole on every rank. Raises what a load raises.
        """
        assert self._vae is not None
        kind = component_class(self._vae.library, self._vae.kind, str(self._vae.path))
        vae = zerostart.load(
            str(self._vae.path), model=kind, engine="fsdp2", zero_stage=0, dtype=dtype, progress=False
        )
        vae.eval().requires_grad_(False)
        left_out: dict[str, Any] = {
            name: None
            for name, value in self._index.items()
            if isinstance(value, list) and name not in ("scheduler", "vae")
        }
        pipe = assembled(self._kind, self._root, {**left_out, "vae": vae})
        pipe.set_progress_bar_config(disable=True)
        pipe.register_modules(**{self._component: model})
        return pipe

    def draw(self, pipe: Any, prompts: Sequence[Prompt], negative: Prompt, seeds: Sequence[int]) -> torch.Tensor:
        """One picture or video of each prompt, [B, F, 3, H, W] from 0 to 1; collective where ranks share it.

        The prompts' tensors have the same shapes. ``negative`` is what is guided away from.
        """
        settings = self._settings
        given = {"height": settings.height, "width": settings.width, "num_frames": settings.num_frames}
        arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        arguments |= self._embedded(pipe, prompts) | self._guided(pipe, [negative] * len(prompts))
        made = pipe(
            num_inference_steps=settings.steps,
            # From the host, each its own: a prompt has the same noise on every device and in every batch.
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="pt",
            **arguments,
        )[0]
        pictures = torch.as_tensor(made).float().cpu()
        return pictures if pictures.dim() == 5 else pictures[:, None]

    def _guided(self, pipe: Any, away: Sequence[Prompt]) -> dict[str, Any]:
        """What the pipeline calls its guidance, and what it guides away from where it does."""
        embeds = getattr(getattr(pipe, self._component).config, "guidance_embeds", False)
        scale = self._settings.guidance
        classifier_free = self._takes.get("true_cfg_scale")
        if classifier_free is None or embeds:
            arguments: dict[str, Any] = {} if scale is None else {"guidance_scale": scale}
            used = classifier_free is None
        else:
            arguments = {"true_cfg_scale": classifier_free.default if scale is None else scale}
            used = arguments["true_cfg_scale"] > 1.0
        if used and "negative_prompt_embeds" in self._takes:
            arguments |= {f"negative_{name}": value for name, value in self._embedded(pipe, away).items()}
        return arguments

    def _embedded(self, pipe: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The tensors of the prompts that the pipeline takes, each [B, ...], or lists where it takes those."""
        found: dict[str, Any] = {}
        for name in prompts[0].keys() & self._takes.keys():
            rows = [prompt[name].to(pipe.vae.device) for prompt in prompts]
            rows = [row.to(pipe.vae.dtype) if row.is_floating_point() else row for row in rows]
            lists = str(self._takes[name].annotation).startswith("list[")
            found[name] = rows if lists else torch.stack(rows)
        return found


#: Pipelines that draw from text, and take pictures beside it if there are any.
_TEXT_IS_ENOUGH = ("Flux2Pipeline", "Flux2KleinPipeline")
