"""Families of diffusion transformers: their calls, units of time and layouts of latents.

Everywhere else time ``t`` goes from 0 (the data) to 1 (noise), latents at it are ``(1 - t) * data + t *
noise``, and the velocity is ``noise - data``. A family converts from and to these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import exp, prod
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import pad

from zerostart.errors import ConfigError
from zerostart.training.diffusion.encoder import Encoder

#: One example.
Tensors = Mapping[str, torch.Tensor]
#: Inputs next to the latents of a batch: tensors, lists of tensors of different lengths, or one number.
Conditions = dict[str, Any]


class Family(ABC):
    """Calls of one transformer, which has ``config``; ``guidance`` is for distilled transformers."""

    name: ClassVar[str]
    #: The transformer's timestep at time 1.
    unit: ClassVar[float] = 1.0
    #: diffusers' classes of transformers in the family.
    classes: ClassVar[frozenset[str]]
    #: The encoder of examples for each class of its pipelines.
    encoders: ClassVar[Mapping[str, type[Encoder]]]
    #: Latents in a token of the transformer, along each axis after the channels.
    patch: tuple[int, ...] = (1, 1, 1)
    #: The last of the 1000 times at which DiffSynth trains; None: just above 0.
    last_time: ClassVar[float | None] = None
    #: The shift of training: a drawn time ``u`` becomes ``shift * u / (1 + (shift - 1) * u)``.
    shift: ClassVar[float]
    #: Tensors that an example may have next to ``latents``, and those that it must have.
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds"})
    required: ClassVar[frozenset[str]] = frozenset({"prompt_embeds"})
    #: Maximum number of pictures to start from: ``image_latents.0``, ``image_latents.1`` and so on.
    most_images: ClassVar[int] = 0
    #: Patterns of parameters that get no gradient and are not trained.
    untrained: ClassVar[tuple[str, ...]] = ()
    #: The models of its pipelines that decode latents.
    decoders: ClassVar[tuple[str, ...]] = ("vae",)
    #: True if texts of different lengths may be in one batch, padded and masked.
    masked: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], guidance: float = 1.0) -> None:
        self.config = config
        self.guidance = guidance

    @property
    def hidden_size(self) -> int | None:
        """Width of the transformer."""
        heads, size = self.config.get("num_attention_heads"), self.config.get("attention_head_dim")
        # A family whose configuration names its width otherwise overrides this.
        return heads * size if heads and size else None

    def tokens(self, shape: Sequence[int]) -> int:
        """Return the number of tokens of latents of ``shape`` (without a batch)."""
        return prod(size // patch for size, patch in zip(shape[1:], self.patch, strict=False))

    def shift_at(self, tokens: int) -> float:
        """Return the pipeline's shift for a number of tokens; raises ConfigError without one."""
        raise ConfigError(
            f"task.shift: {self.name} has no shift by resolution; give a number, or leave it out"
        )

    def schedule(self, shift: float) -> torch.Tensor:
        """Return the 1000 times, from noise on, at which DiffSynth trains."""
        times = shift_times(torch.linspace(1.0, 0.0, 1001, device="cpu")[:-1], shift)
        # Stretched linearly in `1 - t`, so that 1 stays 1 and the last time becomes `last_time`.
        last = self.last_time
        return times if last is None else 1 - (1 - times) * (1 - last) / (1 - times[-1])

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """Return the inputs next to the latents of ``items``, as one batch. Raises ConfigError."""
        names = items[0].keys() - {"latents", "index"}
        images = {f"image_latents.{number}" for number in range(self.most_images)}
        for item in items:
            self.check(item)
            own = item.keys() - {"latents", "index"}
            if unknown := sorted(own - self.keys - images):
                raise ConfigError(
                    f"an example has {unknown[0]}, which {self.name} does not use; remove it from the "
                    "examples"
                )
            if missing := sorted(self.required - own):
                raise ConfigError(f"an example has no {missing[0]}, which {self.name} needs")
            # One call of the transformer takes the batch, so all examples have the same inputs.
            if own != names:
                raise ConfigError(
                    "examples of one batch do not have the same tensors: only some have "
                    f"{', '.join(sorted(own ^ names))}"
                )
        # Sorted: a set has another order in each process, and ranks must build the same call.
        return {name: self._stack(name, [item[name] for item in items]) for name in sorted(names)}

    def check(self, item: Tensors) -> None:
        """Raise ConfigError for an example that the transformer cannot take."""
        return

    def _check_channels(self, count: int, expected: int) -> None:
        if count != expected:
            raise ConfigError(
                f"examples have latents (and condition) of {count} channels, but the transformer takes "
                f"{expected}: they were encoded for another model"
            )

    def _stack(self, name: str, parts: list[torch.Tensor]) -> object:
        """Stack one key of all examples, [batch, ...]; masked texts are padded first."""
        # A number, such as the frame rate, has no length and is never padded.
        lengths = [len(part) for part in parts if part.ndim]
        if self.masked and name in ("prompt_embeds", "prompt_embeds_mask") and len(set(lengths)) > 1:
            longest = max(lengths)
            # Zeros at the end of the first axis, the tokens; `pad` counts axes from the last one. The mask is
            # padded alike, and hides the padding.
            parts = [pad(part, (*(0, 0) * (part.ndim - 1), 0, longest - len(part))) for part in parts]
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            listed = " and ".join(map(str, sorted(shapes)))
            raise ConfigError(
                f"examples of one batch have {name} of the shapes {listed}, which {self.name} cannot have in "
                "one; make them alike, or set train.batch_size=1"
            )
        return torch.stack(parts)

    @abstractmethod
    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        """Return the velocity that ``model`` predicts for ``latents`` at times ``t`` ([batch]).

        Floating tensors of ``conditions`` and ``latents`` ([batch, ...]) are in the dtype of the model, ``t``
        in float32. The result is shaped as ``latents``.
        """

    def stand_ins(self) -> Mapping[str, Callable[..., object]]:
        """Return replacements, by name, for models that encoded texts do not need."""
        return {}

    def loss_values(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """Return the part of ``values`` (shaped as the latents) that enters the loss."""
        return values

    def images(self, conditions: Conditions) -> list[torch.Tensor]:
        """Return the latents of the pictures to start from, each [batch, ...]."""
        images: list[torch.Tensor] = []
        while (image := conditions.get(f"image_latents.{len(images)}")) is not None:
            images.append(image)
        return images


def shift_times(u: torch.Tensor, shift: float) -> torch.Tensor:
    """Move times ``u`` towards noise."""
    return shift * u / (1 + (shift - 1) * u)


def linear_shift(tokens: int, min_tokens: int, max_tokens: int, low: float, high: float) -> float:
    """Return the shift whose logarithm is linear: ``low`` to ``high`` over the range of tokens."""
    # diffusers' schedulers call this logarithm mu.
    return exp(low + (high - low) * (tokens - min_tokens) / (max_tokens - min_tokens))


class Packed(Family):
    """Family whose transformers take latents [C, H, W] as tokens of 2 by 2.

    Further pictures follow the latents as tokens of the same kind.
    """

    patch = (2, 2)

    def check(self, item: Tensors) -> None:
        """Raise ConfigError for odd sides."""
        for name, value in item.items():
            if name == "latents" or name.startswith("image_latents."):
                height, width = value.shape[-2:]
                if height % 2 or width % 2:
                    raise ConfigError(
                        f"{name} of {height} by {width} cannot be divided into patches of 2 by 2: make both "
                        "sides even"
                    )

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        pictures = [latents, *self.images(conditions)]
        predicted: torch.Tensor = model(
            hidden_states=torch.cat([_pack_latents(one) for one in pictures], dim=1),
            # These classes multiply by 1000 themselves.
            timestep=t,
            guidance=torch.full_like(t, self.guidance) if self.config.get("guidance_embeds") else None,
            encoder_hidden_states=conditions["prompt_embeds"],
            return_dict=False,
            **self.model_inputs(pictures, conditions),
        )[0]
        # The transformer returns tokens of all pictures; those of the latents come first.
        return _unpack_latents(predicted[:, : self.tokens(latents.shape[1:])], *latents.shape[-2:])

    @abstractmethod
    def model_inputs(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, object]:
        """Return further inputs; ``pictures``, [batch, C, H, W], begin with the latents."""


def _pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """Convert [batch, C, H, W] to tokens of 2 by 2, [batch, H/2 W/2, 4 C]."""
    batch, channels, height, width = latents.shape
    # Channel, row and column within a token, as in `_pack_latents` of diffusers' pipelines.
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, height // 2 * (width // 2), channels * 4)


def _unpack_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Invert ``_pack_latents`` for latents of ``height`` by ``width``."""
    batch, _, channels = tokens.shape
    patches = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def grid_positions(latents: torch.Tensor, number: int, patch: int = 1) -> torch.Tensor:
    """Return the picture's ``number``, row and column of each token, [tokens, 3]."""
    rows, columns = (torch.arange(size // patch, device=latents.device) for size in latents.shape[-2:])
    grid = torch.cartesian_prod(rows, columns)
    return torch.cat([torch.full_like(grid[:, :1], number), grid], dim=1)
