"""What a family of diffusion transformers is: how it is called, and in what units its flow is.

Everywhere else time ``t`` goes from 0 (the data) to 1 (noise), latents at it are ``(1 - t) * data + t *
noise``, and the velocity is ``noise - data``; what a transformer wants in their place, and how its latents
lie, is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import exp
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import pad

from zerostart.errors import ConfigError
from zerostart.training.diffusion.encoder import Encoder

#: One example.
Tensors = Mapping[str, torch.Tensor]
#: What goes with latents in one batch: tensors, lists of those that differ in length, or a number for all.
Conditions = dict[str, Any]


class Family(ABC):
    """A transformer by its ``config``, with the ``index`` of its pipeline, where it is of one."""

    name: ClassVar[str]
    #: What the transformer takes for time 1.
    unit: ClassVar[float] = 1.0
    #: diffusers' classes of transformers that are of the family.
    classes: ClassVar[frozenset[str]]
    #: The encoder of examples for each class of its pipelines.
    encoders: ClassVar[Mapping[str, type[Encoder]]]
    #: The shift of training: of times ``u`` that are drawn, ``shift * u / (1 + (shift - 1) * u)`` is taken.
    shift: ClassVar[float]
    #: What an example may have beside ``latents``, and which of it has to be there.
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds"})
    required: ClassVar[frozenset[str]] = frozenset({"prompt_embeds"})
    #: At most so many pictures to start from: ``image_latents.0``, ``image_latents.1`` and so on.
    most_images: ClassVar[int] = 0
    #: Patterns of the parameters that no loss reaches, which are not trained.
    untrained: ClassVar[tuple[str, ...]] = ()
    #: The models of its pipelines that make pictures of latents.
    decoders: ClassVar[tuple[str, ...]] = ("vae",)
    #: Whether texts of different lengths may be in one batch, padded and masked.
    masked: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @property
    def hidden_size(self) -> int | None:
        """The width of the transformer."""
        heads, size = self.config.get("num_attention_heads"), self.config.get("attention_head_dim")
        # None where the configuration of a class names its width otherwise: such a family overrides this.
        return heads * size if heads and size else None

    @abstractmethod
    def tokens(self, shape: Sequence[int]) -> int:
        """How many tokens latents of ``shape`` (without a batch) are."""

    def shift_at(self, tokens: int) -> float:
        """The shift for so many tokens, as the family's pipeline has it. Raises ConfigError without one."""
        raise ConfigError(
            f"task.shift: {self.name} has no shift by resolution; give a number, or leave it out"
        )

    def schedule(self, shift: float) -> torch.Tensor:
        """The 1000 times, from noise on, that DiffSynth trains at."""
        # From exactly 1 down to just above 0: the end itself, where an example has no noise, is not among
        # them.
        return shifted(torch.linspace(1.0, 0.0, 1001, device="cpu")[:-1], shift)

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """What goes with the latents of ``items``, as one batch. Raises ConfigError for what is amiss."""
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
            # One call of the transformer takes the batch: a condition that only some examples have could not
            # be passed.
            if own != names:
                raise ConfigError(
                    "examples of one batch do not have the same tensors: only some have "
                    f"{', '.join(sorted(own ^ names))}"
                )
        # Sorted, for a set of names has another order in each process, and ranks are to build the same call.
        return {name: self._joined(name, [item[name] for item in items]) for name in sorted(names)}

    def check(self, item: Tensors) -> None:
        """Raise ConfigError for an example that the transformer cannot take, before anybody calls it."""
        return

    def _joined(self, name: str, parts: list[torch.Tensor]) -> object:
        """One key of all examples: stacked, [batch, ...]; texts that are masked are padded first."""
        # A number (the frame rate, say) has no length and is never padded.
        lengths = [len(part) for part in parts if part.ndim]
        if self.masked and name in ("prompt_embeds", "prompt_embeds_mask") and len(set(lengths)) > 1:
            most = max(lengths)
            # Zeros at the end of the first axis, the tokens. `pad` counts axes from the last one: a pair of
            # zeros for each of the others comes first. A mask padded alike hides what was added to the
            # embeddings.
            parts = [pad(part, (*(0, 0) * (part.ndim - 1), 0, most - len(part))) for part in parts]
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
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """The velocity that ``model`` predicts for ``latents`` ([batch, ...]) at times ``t`` ([batch]).

        Floating tensors of ``conditions`` and ``latents`` are in the dtype of the model; ``t`` is float32.
        ``guidance`` is passed to transformers that were distilled for it. Shaped as ``latents``.
        """

    def stand_ins(self) -> Mapping[str, Callable[..., object]]:
        """What its pipeline gets in the place of models of its own, to draw texts that are encoded."""
        return {}

    def trained(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """The part of ``values`` (shaped as the latents) that a loss is of: what is not given beforehand."""
        return values

    def images(self, conditions: Conditions) -> list[torch.Tensor]:
        """The latents of the pictures that an example starts from, in their order, each [batch, ...]."""
        found: list[torch.Tensor] = []
        # Numbers have no gaps: the first that is absent ends the list.
        while (image := conditions.get(f"image_latents.{len(found)}")) is not None:
            found.append(image)
        return found


def shifted(u: torch.Tensor, shift: float) -> torch.Tensor:
    """Times ``u``, moved towards noise."""
    return shift * u / (1 + (shift - 1) * u)


def linear_shift(tokens: int, least: int, most: int, low: float, high: float) -> float:
    """The shift whose logarithm is ``low`` at ``least`` tokens, ``high`` at ``most``, and linear."""
    # Schedulers of diffusers keep this logarithm and call it mu; a shift here is always its exponential.
    return exp(low + (high - low) * (tokens - least) / (most - least))


class Packed(Family):
    """A family whose transformers take latents [C, H, W], of even sides, as tokens of 2 by 2.

    Further pictures follow the latents as tokens of the same kind.
    """

    def tokens(self, shape: Sequence[int]) -> int:
        """2 by 2 latents each."""
        return shape[-2] // 2 * (shape[-1] // 2)

    def check(self, item: Tensors) -> None:
        """Sides have to be even. Raises ConfigError."""
        for name, value in item.items():
            if name == "latents" or name.startswith("image_latents."):
                height, width = value.shape[-2:]
                if height % 2 or width % 2:
                    raise ConfigError(
                        f"{name} of {height} by {width} cannot be divided into patches of 2 by 2: make both "
                        "sides even"
                    )

    def velocity(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """See ``Family``."""
        pictures = [latents, *self.images(conditions)]
        predicted: torch.Tensor = model(
            hidden_states=torch.cat([_packed(one) for one in pictures], dim=1),
            # These classes multiply by 1000 themselves; their pipelines divide the scheduler's timestep by
            # 1000 first.
            timestep=t,
            guidance=torch.full_like(t, guidance) if self.config.get("guidance_embeds") else None,
            encoder_hidden_states=conditions["prompt_embeds"],
            return_dict=False,
            **self.model_inputs(pictures, conditions),
        )[0]
        # The transformer gives tokens back for all pictures; the latents' are the first, and the others are
        # given, not predicted.
        return _unpacked(predicted[:, : self.tokens(latents.shape)], *latents.shape[-2:])

    @abstractmethod
    def model_inputs(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, object]:
        """What else the transformer takes; ``pictures``, [batch, C, H, W], begin with the latents."""


def _packed(latents: torch.Tensor) -> torch.Tensor:
    """[batch, C, H, W] as tokens of 2 by 2: [batch, H/2 * W/2, 4 C]."""
    batch, channels, height, width = latents.shape
    # Channels outermost within a token, then the row and the column in the patch, as in `_pack_latents` of
    # diffusers' pipelines: weights of the input and output layers are in this order.
    cut = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, height // 2 * (width // 2), channels * 4)


def _unpacked(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The reverse of ``_packed`` for latents of ``height`` by ``width``."""
    batch, _, channels = tokens.shape
    # The three axes of a token come back in the order in which `_packed` put them: channel, row, column.
    cut = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)
