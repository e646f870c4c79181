"""diffusers' own pipeline around the model in training: its scheduler and autoencoder, and no encoder."""

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

#: What encoders have made of a prompt: tensors of one item, [L, D] and the like, by the pipelines' names.
Prompt = Mapping[str, torch.Tensor]
#: What a pipeline takes beside texts and pictures, if it has to.
_MEDIA = ("video", "control_image", "mask_image")
#: What image encoders have made of pictures, which pipelines do not take beside these.
_OF_PICTURES = "image_embeds"
#: The transformers of a pipeline that draws with one after the other.
_EXPERTS = ("transformer", "transformer_2")
#: Pipelines that draw from text alone as well, where no picture is given.
_NEEDS_NO_IMAGE = ("Flux2Pipeline", "Flux2KleinPipeline", "FluxKontextPipeline")


class Drawing:
    """How the pipeline in a directory draws prompts that are encoded already, with a model that is given.

    ``texts`` are the prompts, ``negatives`` what each is guided away from: none, or one for each.
    """

    def __init__(self, source: str, component: str, settings: SamplesConfig) -> None:
        """Look at the pipeline in ``source``, whose model ``component`` is trained; nothing is loaded.

        Raises :class:`ConfigError` for what is no pipeline, or one that needs more than text and pictures.
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
            raise ConfigError(f"samples: {self._root} has no {component} to draw with; leave samples out")
        #: Of two experts the one that is not trained: it draws as it was loaded.
        self._other = None
        if self._index.get("boundary_ratio") is not None:
            others = (one for key, one in models.items() if key in _EXPERTS and key != component)
            self._other = next(others, None)
        config = read_json(models[component].path / "config.json", "model configuration")
        family = known_family(config.get("_class_name"))
        # No family, as a task of its own may have: the pipeline gets its autoencoder alone.
        self._stand_ins = {} if family is None else family(config).stand_ins()
        decoders = ("vae",) if family is None else family.decoders
        self.texts, negatives = sample_texts(settings)
        self._check(decoders, models)
        self._decoders = [models[name] for name in decoders]
        # A transformer that was distilled for guidance (`guidance_embeds`) takes the scale as an input.
        self._guidance, guides = self._guided(bool(config.get("guidance_embeds")))
        self.negatives = negatives if guides and "negative_prompt_embeds" in self._takes else []

    def _check(self, decoders: Sequence[str], models: Mapping[str, Any]) -> None:
        name = self._kind.__name__
        for needed in decoders:
            if needed not in models:
                raise ConfigError(f"samples: {self._root} has no {needed} to draw with; leave samples out")
        if self._index.get("boundary_ratio") is not None and self._other is None:
            raise ConfigError(
                f"samples: {name} draws with two experts, of which {self._root} has {self._component} alone; "
                "leave samples out"
            )
        media = [key for key in _MEDIA if key in self._takes]
        if media or "prompt_embeds" not in self._takes:
            raise ConfigError(
                f"samples are drawn from texts and pictures, and {name} takes more ({', '.join(media)}): "
                "leave samples out"
            )
        starts, needs = "image" in self._takes, name not in _NEEDS_NO_IMAGE
        if starts and needs and self.settings.images is None:
            raise ConfigError(
                f"samples: {name} starts from pictures; name one for each prompt in samples.images, or leave "
                "samples out"
            )
        if not starts and self.settings.images is not None:
            raise ConfigError(f"samples.images: {name} draws from text alone; leave it out")
        if "num_frames" not in self._takes and self.settings.num_frames is not None:
            raise ConfigError(f"samples.num_frames: {name} draws pictures; leave it out")
        if not (self._root / "scheduler").is_dir():
            raise ConfigError(
                f"samples: {self._root} has no scheduler, which drawing needs; leave samples out"
            )

    def _guided(self, embedded: bool) -> tuple[dict[str, float], bool]:
        scale, classifier_free = self.settings.guidance, self._takes.get("true_cfg_scale")
        if classifier_free is None or embedded:
            return ({} if scale is None else {"guidance_scale": scale}), classifier_free is None
        # diffusers runs the negative prompt only above 1: otherwise its embeddings are not asked for.
        scale = classifier_free.default if scale is None else scale
        return {"true_cfg_scale": scale}, scale > 1.0

    @property
    def videos(self) -> bool:
        """Whether more than one frame is drawn."""
        takes = self._takes.get("num_frames")
        # Neither a setting nor a default: it has to be taken for a video.
        frames = None if takes is None else self.settings.num_frames or takes.default or math.inf
        return frames is not None and frames > 1

    def opened(self, model: nn.Module, dtype: torch.dtype) -> DiffusionPipeline:
        """The pipeline with ``model`` in the place of its own, computing in ``dtype``; collective.

        Autoencoders are loaded whole on every rank, and the expert beside the model in shards. Raises what a
        load raises.
        """
        # Stage 0 is the whole model on every rank: how often an autoencoder calls its layers may depend on
        # the size of a sample, and ranks may draw different ones.
        loaded = {one.name: _frozen(one, 0, dtype) for one in self._decoders}
        # All else of the pipeline, its text encoders first of all, is left out: texts were encoded before the
        # training.
        left_out: dict[str, Any] = {
            name: None
            for name, value in self._index.items()
            if isinstance(value, list) and name != "scheduler"
        }
        pipe = assembled(self._kind, self._root, {**left_out, **loaded})
        pipe.set_progress_bar_config(disable=True)
        # After the pipeline is put together: diffusers' loading would look at the class of what it is handed.
        pipe.register_modules(**{self._component: model}, **self._stand_ins)
        if self._other is not None:
            # In shards, as it is as large as the model in training; all ranks call it equally often.
            shared = 3 if current_world().size > 1 else 0
            pipe.register_modules(**{self._other.name: _frozen(self._other, shared, dtype)})
        return pipe

    def draw(
        self,
        pipe: DiffusionPipeline,
        prompts: Sequence[Prompt],
        negatives: Sequence[Prompt],
        seeds: Sequence[int],
        pictures: Sequence[Image] = (),
    ) -> torch.Tensor:
        """One picture or video of each prompt, [B, F, 3, H, W] from 0 to 1; collective where ranks share it.

        The prompts' tensors have the same shapes. ``negatives`` are the encoded texts of that name, none or
        one for each prompt; ``pictures`` those that the one prompt starts from.
        """
        settings = self.settings
        sizes = {"height": settings.height, "width": settings.width, "num_frames": settings.num_frames}
        arguments: dict[str, object] = {name: value for name, value in sizes.items() if value is not None}
        arguments |= self._guidance | self._embedded(pipe, prompts)
        if negatives:
            away = self._embedded(pipe, negatives)
            arguments |= {f"negative_{name}": value for name, value in away.items()}
        if pictures:
            arguments |= self._started(pipe, pictures, prompts[0])
        made: torch.Tensor = pipe(
            num_inference_steps=settings.steps,
            # From the host, each its own: a prompt has the same noise on every device and in every batch.
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="pt",
            **arguments,
        )[0]
        # To the host at once: the next batch needs the room.
        drawn = made.float().cpu()
        return drawn if drawn.dim() == 5 else drawn[:, None]

    def _started(
        self, pipe: DiffusionPipeline, pictures: Sequence[Image], prompt: Prompt
    ) -> dict[str, object]:
        found: dict[str, object] = {"image": pictures[0] if len(pictures) == 1 else list(pictures)}
        if "last_image" in self._takes and len(pictures) > 1:
            found = {"image": pictures[0], "last_image": pictures[-1]}
        if "max_area" in self._takes and self.settings.height and self.settings.width:
            found["max_area"] = self.settings.height * self.settings.width  # which it would scale them to
        if (embeds := prompt.get(_OF_PICTURES)) is not None:
            # It takes no embeddings beside pictures, which the autoencoder sees, and has no image encoder.
            encoded = embeds.to(pipe.vae.device)
            pipe.encode_image = lambda *_: encoded
        return found

    def _embedded(self, pipe: DiffusionPipeline, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The prompts' tensors that the pipeline takes, each [B, ...], or lists where it takes those."""
        found: dict[str, Any] = {}
        for name in prompts[0].keys() & self._takes.keys() - {_OF_PICTURES}:
            # The autoencoder lies where the pipeline computes; the model in training may have shards on the
            # host.
            rows = [prompt[name].to(pipe.vae.device) for prompt in prompts]
            rows = [row.to(pipe.vae.dtype) if row.is_floating_point() else row for row in rows]
            # Z-Image's pipeline takes a list, one tensor for each prompt; the annotation is all that tells.
            lists = str(self._takes[name].annotation).startswith("list[")
            found[name] = rows if lists else torch.stack(rows)
        return found


def _frozen(component: Any, zero_stage: int, dtype: torch.dtype) -> nn.Module:
    """A model of the pipeline that is not trained; collective."""
    path = str(component.path)
    kind = component_class(component.library, component.kind, path)
    model = zerostart.load(
        path, model=kind, engine="fsdp2", zero_stage=zero_stage, dtype=dtype, progress=False
    )
    return model.eval().requires_grad_(False)
