"""diffusers' own pipeline around the model in training: its scheduler and autoencoder, and no encoder."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zerostart
from zerostart.checkpoint.formats.pipeline import PIPELINE_INDEX, components
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import SamplesConfig
from zerostart.training.diffusion.families import known_family
from zerostart.upstream.diffusers.pipelines import assembled, component_class, pipeline_class

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

#: What encoders have made of a prompt: tensors of one item, [L, D] and the like, by the pipelines' names.
Prompt = Mapping[str, torch.Tensor]
#: What a pipeline takes beside text, if it has to.
_MEDIA = ("image", "video", "control_image", "mask_image")
#: Pipelines that draw from text alone as well, where no picture is given.
_NEEDS_NO_IMAGE = ("Flux2Pipeline", "Flux2KleinPipeline", "FluxKontextPipeline")


class Drawing:
    """How the pipeline in a directory draws prompts that are encoded already, with a model that is given.

    ``negatives`` are the texts that it guides away from, none or one.
    """

    def __init__(self, source: str, component: str, settings: SamplesConfig) -> None:
        """Look at the pipeline in ``source``, whose model ``component`` is trained; nothing is loaded.

        Raises :class:`ConfigError` for what is no pipeline, or for one that does not draw from text alone.
        """
        self._root = resolve_source(source)
        found = components(self._root) if self._root.is_dir() else None
        if found is None:
            raise ConfigError(
                f"samples are drawn with a pipeline, but {self._root} has no {PIPELINE_INDEX}: name "
                "the pipeline's directory as model.source, or leave samples out"
            )
        models = {one.name: one for one in found}
        self._component = component
        self.settings = settings
        self._index = read_json(self._root / PIPELINE_INDEX, "pipeline index")
        self._kind = pipeline_class(self._index.get("_class_name"), self._root)
        self._takes = inspect.signature(self._kind.__call__).parameters
        if component not in models:
            raise ConfigError(
                f"samples: {self._root} has no {component}, which drawing needs; leave samples out"
            )
        config = read_json(models[component].path / "config.json", "model configuration")
        family = known_family(config.get("_class_name"))
        self._stand_ins = {} if family is None else family(config, self._index).stand_ins()
        decoders = ("vae",) if family is None else family.decoders
        self._check(decoders, models)
        self._decoders = [models[name] for name in decoders]
        self._guidance, guides = self._guided(bool(config.get("guidance_embeds")))
        self.negatives = (settings.negative_prompt,) * (guides and "negative_prompt_embeds" in self._takes)

    def _check(self, decoders: Sequence[str], models: Mapping[str, Any]) -> None:
        name = self._kind.__name__
        for needed in decoders:
            if needed not in models:
                raise ConfigError(
                    f"samples: {self._root} has no {needed}, which drawing needs; leave samples out"
                )
        if self._index.get("boundary_ratio") is not None:
            raise ConfigError(
                f"samples: {name} draws with two experts, but only {self._component} is loaded; leave "
                "samples out, and draw with the pipeline when both are trained"
            )
        media = [key for key in _MEDIA if key in self._takes and name not in _NEEDS_NO_IMAGE]
        if media or "prompt_embeds" not in self._takes:
            raise ConfigError(
                f"samples are drawn from text alone, but {name} needs more ({', '.join(media)}); leave "
                "samples out"
            )
        if "num_frames" not in self._takes and self.settings.num_frames is not None:
            raise ConfigError(f"samples.num_frames: {name} draws pictures; leave it out")
        if not (self._root / "scheduler").is_dir():
            raise ConfigError(
                f"samples: {self._root} has no scheduler, which drawing needs; leave samples out"
            )

    def _guided(self, embedded: bool) -> tuple[dict[str, float], bool]:
        """What the pipeline calls its guidance, and whether it calls the model a second time for it."""
        scale, classifier_free = self.settings.guidance, self._takes.get("true_cfg_scale")
        if classifier_free is None or embedded:
            return ({} if scale is None else {"guidance_scale": scale}), classifier_free is None
        scale = classifier_free.default if scale is None else scale
        return {"true_cfg_scale": scale}, scale > 1.0

    @property
    def videos(self) -> bool:
        """Whether more than one frame is drawn."""
        takes = self._takes.get("num_frames")
        frames = None if takes is None else self.settings.num_frames or takes.default or math.inf
        return frames is not None and frames > 1

    def opened(self, model: nn.Module, dtype: torch.dtype) -> DiffusionPipeline:
        """The pipeline with ``model`` in the place of its own, computing in ``dtype``; collective.

        Autoencoders are loaded whole on every rank. Raises what a load raises.
        """
        loaded: dict[str, Any] = {}
        for one in self._decoders:
            path = str(one.path)
            kind = component_class(one.library, one.kind, path)
            made = zerostart.load(path, model=kind, engine="fsdp2", zero_stage=0, dtype=dtype, progress=False)
            loaded[one.name] = made.eval().requires_grad_(False)
        # All else of the pipeline, its text encoders first of all, is left out: texts were encoded before the
        # training.
        left_out: dict[str, Any] = {
            name: None
            for name, value in self._index.items()
            if isinstance(value, list) and name != "scheduler"
        }
        with _quiet():
            pipe = assembled(self._kind, self._root, {**left_out, **loaded})
        pipe.set_progress_bar_config(disable=True)
        pipe.register_modules(**{self._component: model}, **self._stand_ins)
        return pipe

    def draw(
        self,
        pipe: DiffusionPipeline,
        prompts: Sequence[Prompt],
        negatives: Sequence[Prompt],
        seeds: Sequence[int],
    ) -> torch.Tensor:
        """One picture or video of each prompt, [B, F, 3, H, W] from 0 to 1; collective where ranks share it.

        The prompts' tensors have the same shapes. ``negatives`` are the encoded texts of that name.
        """
        settings = self.settings
        sizes = {"height": settings.height, "width": settings.width, "num_frames": settings.num_frames}
        arguments: dict[str, object] = {name: value for name, value in sizes.items() if value is not None}
        arguments |= self._guidance | self._embedded(pipe, prompts)
        for negative in negatives:
            away = self._embedded(pipe, [negative] * len(prompts))
            arguments |= {f"negative_{name}": value for name, value in away.items()}
        made: torch.Tensor = pipe(
            num_inference_steps=settings.steps,
            # From the host, each its own: a prompt has the same noise on every device and in every batch.
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="pt",
            **arguments,
        )[0]
        pictures = made.float().cpu()
        return pictures if pictures.dim() == 5 else pictures[:, None]

    def _embedded(self, pipe: DiffusionPipeline, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The prompts' tensors that the pipeline takes, each [B, ...], or lists where it takes those."""
        found: dict[str, Any] = {}
        for name in prompts[0].keys() & self._takes.keys():
            rows = [prompt[name].to(pipe.vae.device) for prompt in prompts]
            rows = [row.to(pipe.vae.dtype) if row.is_floating_point() else row for row in rows]
            lists = str(self._takes[name].annotation).startswith("list[")
            found[name] = rows if lists else torch.stack(rows)
        return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars that diffusers shows for what it loads."""
    from diffusers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
