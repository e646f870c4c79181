"""Put diffusers' pipeline, without its encoders, around the model in training."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zerostart
from zerostart.checkpoint.formats.pipeline import components
from zerostart.checkpoint.source import resolve_source
from zerostart.checkpoint.strict_json import read_json
from zerostart.checkpoint.usual_names import PIPELINE_INDEX
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.training.config.configuration import SamplesConfig
from zerostart.training.data.media import sample_texts
from zerostart.training.diffusion.families import known_family
from zerostart.upstream.diffusers.weights import assembled, component_class, pipeline_class

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

#: Encoded tensors of one prompt, [L, D] and the like, by the pipelines' names.
Prompt = Mapping[str, torch.Tensor]
#: Required inputs other than texts and pictures.
_MEDIA = ("video", "control_image", "mask_image")
#: Encoded pictures, which pipelines do not accept together with pictures.
_IMAGE_EMBEDS = "image_embeds"
#: The transformers of a pipeline that draws with one after the other.
_EXPERTS = ("transformer", "transformer_2")
#: Pipelines that also draw without a picture.
_IMAGE_OPTIONAL = ("Flux2Pipeline", "Flux2KleinPipeline", "FluxKontextPipeline")


class SamplePipeline:
    """Draws encoded prompts by the pipeline in a directory, with a given model.

    ``texts`` are the prompts, ``negatives`` their negative prompts: none, or one for each.
    """

    def __init__(self, source: str, component: str, settings: SamplesConfig) -> None:
        """Look at the pipeline in ``source``, whose model ``component`` is trained; nothing is loaded.

        Raises ConfigError if there is no pipeline, or it needs more than text and pictures.
        """
        self._root = resolve_source(source)
        parts = components(self._root) if self._root.is_dir() else None
        if parts is None:
            raise ConfigError(
                f"samples are drawn with a pipeline, but {self._root} has no {PIPELINE_INDEX}: name "
                "the pipeline's directory as model.source, or leave samples out"
            )
        models = {one.name: one for one in parts}
        self._component = component
        self.settings = settings
        self._index = read_json(self._root / PIPELINE_INDEX, "pipeline index")
        self._kind = pipeline_class(self._index.get("_class_name"), self._root)
        self._takes = inspect.signature(self._kind.__call__).parameters
        if component not in models:
            raise ConfigError(f"samples: {self._root} has no {component} to draw with; leave samples out")
        #: The expert that is not trained.
        self._other = None
        if self._index.get("boundary_ratio") is not None:
            experts = (one for key, one in models.items() if key in _EXPERTS and key != component)
            self._other = next(experts, None)
        config = read_json(models[component].path / "config.json", "model configuration")
        family = known_family(config.get("_class_name"))
        # A user's task may have no family: the pipeline gets its autoencoder only.
        self._stand_ins = {} if family is None else family(config).stand_ins()
        decoders = ("vae",) if family is None else family.decoders
        self.texts, negatives = sample_texts(settings)
        self._check(decoders, models)
        self._decoders = [models[name] for name in decoders]
        # A transformer that was distilled for guidance (`guidance_embeds`) takes the scale as an input.
        self._guidance, guides = self._choose_guidance(bool(config.get("guidance_embeds")))
        self.negatives = negatives if guides and "negative_prompt_embeds" in self._takes else []

    def _check(self, decoders: Sequence[str], models: Mapping[str, Any]) -> None:
        name, root, takes, settings = self._kind.__name__, self._root, self._takes, self.settings
        missing = [decoder for decoder in decoders if decoder not in models]
        media = [key for key in _MEDIA if key in takes]
        starts, pictures = "image" in takes, settings.images is not None
        lacks_expert = self._index.get("boundary_ratio") is not None and self._other is None
        problems = {
            f"{root} has no {' and no '.join(missing)} to draw with": bool(missing),
            f"{name} draws with two experts, of which {root} has only {self._component}": lacks_expert,
            f"samples are drawn from texts and pictures, and {name} takes more ({', '.join(media)})": (
                bool(media) or "prompt_embeds" not in takes
            ),
            f"{name} starts from pictures: name one for each prompt in samples.images": (
                starts and not pictures and name not in _IMAGE_OPTIONAL
            ),
            f"{name} draws from texts only: leave samples.images out": pictures and not starts,
            f"{name} draws pictures: leave samples.num_frames out": (
                "num_frames" not in takes and settings.num_frames is not None
            ),
            f"{root} has no scheduler, which drawing needs": not (root / "scheduler").is_dir(),
        }
        for problem, applies in problems.items():
            if applies:
                raise ConfigError(f"samples: {problem}; or leave samples out")

    def _choose_guidance(self, embedded: bool) -> tuple[dict[str, float], bool]:
        """Return the arguments of guidance, and True if the negative prompts are used."""
        scale, classifier_free = self.settings.guidance, self._takes.get("true_cfg_scale")
        if classifier_free is None or embedded:
            return ({} if scale is None else {"guidance_scale": scale}), classifier_free is None
        # diffusers uses the negative prompt only above 1.
        scale = classifier_free.default if scale is None else scale
        return {"true_cfg_scale": scale}, scale > 1.0

    @property
    def videos(self) -> bool:
        """True if more than one frame is drawn."""
        takes = self._takes.get("num_frames")
        # Without a setting and a default it may be a video.
        frames = None if takes is None else self.settings.num_frames or takes.default or math.inf
        return frames is not None and frames > 1

    def opened(self, model: nn.Module, dtype: torch.dtype) -> DiffusionPipeline:
        """Return the pipeline with ``model`` in training, computing in ``dtype``; collective.

        Autoencoders are loaded whole on every rank, and the other expert in shards.
        """
        # Whole (stage 0): ranks may draw different sizes, and then call their layers differently often.
        loaded = {one.name: _load_frozen(one, 0, dtype) for one in self._decoders}
        # Everything else, such as text encoders, is left out: texts were encoded before the training.
        left_out: dict[str, Any] = {
            name: None
            for name, value in self._index.items()
            if isinstance(value, list) and name != "scheduler"
        }
        pipe = assembled(self._kind, self._root, {**left_out, **loaded})
        pipe.set_progress_bar_config(disable=True)
        # Registered afterwards: diffusers' loading checks the class of its arguments.
        pipe.register_modules(**{self._component: model}, **self._stand_ins)
        if self._other is not None:
            # In shards, as it is as large as the model in training; all ranks call it equally often.
            shared = 3 if current_world().size > 1 else 0
            pipe.register_modules(**{self._other.name: _load_frozen(self._other, shared, dtype)})
        return pipe

    def draw(
        self,
        pipe: DiffusionPipeline,
        prompts: Sequence[Prompt],
        negatives: Sequence[Prompt],
        seeds: Sequence[int],
        pictures: Sequence[Image] = (),
    ) -> torch.Tensor:
        """Draw a picture or video of each prompt; collective.

        Returns [B, F, 3, H, W] from 0 to 1. The prompts' tensors have equal shapes. ``negatives`` are the
        encoded negative prompts, none or one for each prompt; ``pictures`` are for a single prompt that
        starts from them.
        """
        settings = self.settings
        sizes = {"height": settings.height, "width": settings.width, "num_frames": settings.num_frames}
        arguments: dict[str, object] = {name: value for name, value in sizes.items() if value is not None}
        arguments |= self._guidance | self._embedded(pipe, prompts)
        if negatives:
            arguments |= {f"negative_{name}": v for name, v in self._embedded(pipe, negatives).items()}
        if pictures:
            arguments |= self._picture_arguments(pipe, pictures, prompts[0])
        output: torch.Tensor = pipe(
            num_inference_steps=settings.steps,
            # On the host, one for each prompt: the same noise on every device and in every batch.
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="pt",
            **arguments,
        )[0]
        # The next batch needs the device memory.
        frames = output.float().cpu()
        return frames if frames.dim() == 5 else frames[:, None]

    def _picture_arguments(
        self, pipe: DiffusionPipeline, pictures: Sequence[Image], prompt: Prompt
    ) -> dict[str, object]:
        arguments: dict[str, object] = {"image": pictures[0] if len(pictures) == 1 else list(pictures)}
        if "last_image" in self._takes and len(pictures) > 1:
            arguments = {"image": pictures[0], "last_image": pictures[-1]}
        if "max_area" in self._takes and self.settings.height and self.settings.width:
            arguments["max_area"] = self.settings.height * self.settings.width  # the pipeline scales to it
        if (embeds := prompt.get(_IMAGE_EMBEDS)) is not None:
            # The autoencoder needs the pictures, and the pipeline then ignores embeddings.
            encoded = embeds.to(pipe.vae.device)
            pipe.encode_image = lambda *_: encoded
        return arguments

    def _embedded(self, pipe: DiffusionPipeline, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return the prompts' tensors that the pipeline takes, each [B, ...] or a list."""
        tensors: dict[str, Any] = {}
        for name in prompts[0].keys() & self._takes.keys() - {_IMAGE_EMBEDS}:
            # To the device of the autoencoder; the model in training may have shards on the host.
            rows = [prompt[name].to(pipe.vae.device) for prompt in prompts]
            rows = [row.to(pipe.vae.dtype) if row.is_floating_point() else row for row in rows]
            # Z-Image's pipeline takes a list; only the annotation shows it.
            lists = str(self._takes[name].annotation).startswith("list[")
            tensors[name] = rows if lists else torch.stack(rows)
        return tensors


def _load_frozen(component: Any, zero_stage: int, dtype: torch.dtype) -> nn.Module:
    """Load a model of the pipeline that is not trained; collective."""
    path = str(component.path)
    kind = component_class(component.library, component.kind, path)
    model = zerostart.load(
        path, model=kind, engine="fsdp2", zero_stage=zero_stage, dtype=dtype, progress=False
    )
    return model.eval().requires_grad_(False)
