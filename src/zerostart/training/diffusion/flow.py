"""Flow matching: transformers of diffusion models learn the velocity from data to noise.

An example ``x`` at time ``t`` is ``(1 - t) * x + t * noise``, its target ``noise - x``, and its loss the mean
of the squared differences in float32. All examples of a step have equal weights. Time and noise depend only
on the seed of the run, the epoch and the number of the example, so they are the same for any number of ranks
and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from zerostart.engines import plain_name
from zerostart.errors import ConfigError
from zerostart.training.config.sections import TaskConfig
from zerostart.training.data.cache import ensure_cache
from zerostart.training.diffusion.families import FAMILIES, family_of
from zerostart.training.diffusion.family import Family, shift_times
from zerostart.training.diffusion.flow_source import FlowSource, copy_others, read_source
from zerostart.training.loop.task import Batch, Collator, Items, Task, split_off

if TYPE_CHECKING:
    from zerostart.distributed.world import World
    from zerostart.training.config.configuration import TrainConfig


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class FlowConfig(TaskConfig):
    """The velocity from data to noise, at times between 0 (data) and 1 (noise)."""

    name: str = "flow-matching"
    """Name of the task."""
    family: str | None = None
    """Family of a transformer class that is derived from a known one; null: by its class."""
    sampling: Literal["uniform", "logit-normal"] = "uniform"
    """Distribution of times: uniform, logit-normal (the logistic function of normal numbers)."""
    logit_mean: float = 0.0
    """Mean of these normal numbers."""
    logit_std: Annotated[float, Field(gt=0.0)] = 1.0
    """Standard deviation of these normal numbers."""
    shift: Annotated[float, Field(gt=0.0)] | Literal["resolution"] | None = None
    """Shift of times towards noise; null: the family's; resolution: the pipeline's by number of tokens."""
    boundaries: tuple[Fraction, Fraction] | None = None
    """Lowest and highest time; null: those of the expert in a pipeline with two."""
    weighting: Literal["none", "bell", "sigma-sqrt", "cosmap"] = "none"
    """Weight of the loss by time: none, bell (DiffSynth's), sigma-sqrt or cosmap (diffusers')."""
    guidance: float = 1.0
    """Guidance input of transformers that were distilled for it."""
    drop_prompt: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability of dropping the text of an example."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the examples that is only evaluated, not trained on."""

    @model_validator(mode="after")
    def _in_order(self) -> FlowConfig:
        if self.boundaries is not None and self.boundaries[0] >= self.boundaries[1]:
            low, high = self.boundaries
            raise ValueError(f"boundaries must be a lower and a higher time, not {low} and {high}")
        return self


class Times:
    """The times of a ``family`` between two boundaries, and their weights."""

    def __init__(self, config: FlowConfig, family: Family, boundaries: tuple[float, float]) -> None:
        self._config = config
        self._family = family
        self._boundaries = boundaries

    def shift(self, tokens: int) -> float:
        """Return the shift of times for latents of this number of tokens. Raises ConfigError."""
        chosen = self._config.shift
        if chosen == "resolution":
            return self._family.shift_at(tokens)
        return self._family.shift if chosen is None else float(chosen)

    def at(self, places: torch.Tensor, shift: float) -> torch.Tensor:
        """Return the times, [batch], at the quantiles ``places`` of their distribution, in float64."""
        # Draw between the quantiles of the unshifted boundaries, then shift.
        unshifted = torch.tensor(self._boundaries, dtype=torch.float64, device="cpu")
        low, high = self._cumulative(unshifted / (shift - (shift - 1) * unshifted))
        u = self._invert(low + places * (high - low))
        # The clamp undoes rounding beyond a boundary.
        return shift_times(u, shift).clamp(*self._boundaries)

    def _cumulative(self, u: torch.Tensor) -> torch.Tensor:
        """Return the cumulative distribution at ``u``."""
        if self._config.sampling == "uniform":
            return u
        below: torch.Tensor = torch.special.ndtr(
            (torch.logit(u) - self._config.logit_mean) / self._config.logit_std
        )
        return below

    def _invert(self, place: torch.Tensor) -> torch.Tensor:
        """Invert ``_cumulative``, with one random number for any sampling."""
        if self._config.sampling == "uniform":
            return place
        normal = torch.special.ndtri(place.clamp(0.0, 1.0))
        return torch.sigmoid(self._config.logit_mean + self._config.logit_std * normal)

    def weights(self, times: torch.Tensor, shift: float) -> torch.Tensor:
        """Return the weights of losses at ``times``, both [batch]."""
        match self._config.weighting:
            case "none":
                return torch.ones_like(times)
            case "sigma-sqrt":
                # Bounded by 1e6 near the data.
                return times.clamp(min=1e-3) ** -2
            case "cosmap":
                return 2 / (torch.pi * (1 - 2 * times + 2 * times**2))
        # DiffSynth's bell is moved to a minimum of 0 and scaled to a mean of 1 over its schedule.
        heights = _bell(self._family.schedule(shift))
        above = heights - heights.min()
        return (_bell(times) - heights.min()) * (len(above) / above.sum())


def _bell(times: torch.Tensor) -> torch.Tensor:
    return torch.exp(-2 * (times - 0.5) ** 2)


class Numbered:
    """Examples with their numbers, as ``index`` []."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.items[index], "index": torch.tensor(index, device="cpu")}

    def digest(self) -> str:
        """Return the digest of the examples."""
        return self.items.digest()

    def shapes(self) -> Sequence[Hashable]:
        """Return the keys of the examples."""
        return self.items.shapes()


class FlowMatching(Task):
    """A transformer of one of the families in ``zerostart.training.diffusion.families``."""

    Settings: ClassVar[type[TaskConfig]] = FlowConfig
    sections: ClassVar[frozenset[str]] = frozenset({"media", "cache", "samples"})
    where: FlowSource
    family: Family
    times: Times

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        assert isinstance(config.task, FlowConfig)
        self.settings = config.task
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._empty_text: Mapping[str, torch.Tensor] = {}
        self._encoded: Items | None = None

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise ValueError for an unknown family, or without data."""
        settings = config.task
        if isinstance(settings, FlowConfig) and settings.family not in (None, *FAMILIES):
            raise ValueError(f"task.family {settings.family} is unknown; choose one of {', '.join(FAMILIES)}")
        own = cls.items is not FlowMatching.items
        if not own and config.media is None:
            raise ValueError("task.name flow-matching needs the section media")

    def open(self) -> None:
        """Read the configurations of transformer and pipeline.

        Raises CheckpointError or ConfigError if there is none of a known family.
        """
        self.where = where = read_source(self.config.model)
        if self.config.output.pipeline and where.root is None:
            raise ConfigError(f"output.pipeline: {where.directory} is one model, and not a pipeline")
        family = family_of(where.config["_class_name"], self.settings.family)
        self.family = family(where.config, self.settings.guidance)
        self.times = Times(self.settings, self.family, self.settings.boundaries or where.boundaries)

    @property
    def hidden_size(self) -> int | None:
        """Width of the transformer."""
        return self.family.hidden_size

    def items(self, world: World) -> Items:
        """Return the encoded examples of the cache, which is made if necessary; collective."""
        return self.numbered(ensure_cache(self.config, world))

    def numbered(self, items: Items) -> Items:
        """Return ``items`` with their numbers. Raises ConfigError if texts cannot be dropped."""
        self._encoded = items
        if self.settings.drop_prompt:
            self._empty_text = self.embedded("")
        return Numbered(items)

    def embedded(self, text: str) -> Mapping[str, torch.Tensor]:
        """Return the embeddings of a text in the cache; raises ConfigError."""
        prompt: Any = getattr(self._encoded, "prompt", None)
        if prompt is None:
            raise ConfigError(
                f"the data have no embeddings of the text {text!r} for samples or task.drop_prompt: train "
                "from a cache (zerostart cache), or leave these out"
            )
        return dict(prompt(text))

    def split(self, items: Items) -> tuple[Items, Items | None]:
        """Split rows, with all their repeats, by ``task.held_out``. Raises ConfigError if none are left."""
        shares = getattr(self._encoded, "shares", ())
        try:
            return split_off(items, self.settings.held_out, shares)
        except ValueError as error:
            raise ConfigError(f"task.held_out {error}") from None

    def begin(self, model: nn.Module) -> None:
        """Freeze parameters that get no gradient: weight decay would change them."""
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(plain_name(name), pattern) for pattern in self.family.untrained):
                parameter.requires_grad_(False)

    @property
    def source(self) -> str:
        """Directory or file of the transformer."""
        return str(self.where.directory)

    def builder(self) -> None:
        """Return None: the configuration names the class."""

    def collator(self, seed: int) -> Collator:
        """Return a function that keeps the examples, which ``drawn`` changes."""
        return _keep_items

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """Return ``noisy``, ``target`` (both [batch, ...]), ``t``, ``weight`` ([batch]) and ``conditions``.

        Raises ConfigError for examples that the family cannot use.
        """
        items: list[dict[str, torch.Tensor]] = list(batch["items"])
        shapes = {tuple(item["latents"].shape) for item in items}
        if len(shapes) > 1:
            raise ConfigError(f"examples of one batch have latents of different shapes: {shapes}")
        latents = torch.stack([item["latents"] for item in items]).float()
        noises, places = [], []
        for number, item in enumerate(items):
            generator = self._generator(epoch, int(item["index"]))
            place, dropped = torch.rand(2, dtype=torch.float64, generator=generator, device="cpu").tolist()
            # On the CPU: generators of other devices give other numbers.
            noises.append(torch.randn(latents.shape[1:], generator=generator, device="cpu"))
            places.append(place)
            if dropped < self.settings.drop_prompt:
                # Pictures to start from stay.
                items[number] = {**item, **{k: v.to(latents.device) for k, v in self._empty_text.items()}}
        # Latents are mixed at the rounded time that the model gets.
        shift = self.times.shift(self.family.tokens(latents.shape[1:]))
        exact = self.times.at(torch.tensor(places, dtype=torch.float64, device="cpu"), shift).float()
        weight = self.times.weights(exact, shift).to(latents.device)
        t = self._model_time(exact).to(latents.device)
        noise = torch.stack(noises).to(latents.device)
        mixing = t.view(-1, *[1] * (latents.ndim - 1))
        return {
            "noisy": (1 - mixing) * latents + mixing * noise,
            "target": noise - latents,
            "t": t,
            "weight": weight,
            "conditions": self._cast(self.family.conditions(items)),
        }

    def _model_time(self, t: torch.Tensor) -> torch.Tensor:
        # The forward rounds the time to its own dtype, which differs from the weights' in mixed precision.
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return (t * self.family.unit).to(compute or self._dtype).float() / self.family.unit

    def _generator(self, epoch: int, index: int) -> torch.Generator:
        # Without state, so that a resumed run draws the same. 7 bytes fit into a signed number of 64 bits.
        seed = hashlib.blake2b(f"{self.config.train.seed}:{epoch}:{index}".encode(), digest_size=7).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(seed, "big"))

    def _cast(self, conditions: dict[str, object]) -> dict[str, object]:
        """Convert floating tensors to the dtype of the loaded model."""

        def cast(value: Any) -> Any:
            if isinstance(value, list):
                return [cast(one) for one in value]
            # Masks and positions are integers.
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(self._dtype) if floats else value

        return {name: cast(value) for name, value in conditions.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean of the examples' losses, weighted by their times."""
        conditions = batch["conditions"]
        # Mixed in float32 and rounded now, as in the pipelines' schedulers.
        noisy = batch["noisy"].to(self._dtype)
        predicted = self.family.velocity(model, noisy, batch["t"], conditions)
        error = self.family.loss_values(predicted.float() - batch["target"], conditions)
        losses = error.square().flatten(1).mean(1)
        mean: torch.Tensor = (losses * batch["weight"]).mean()
        return mean

    def saved_in(self, directory: Path) -> Path:
        """Return the output directory, or that of the component in a pipeline there."""
        component = self.where.component
        return directory / component if self.config.output.pipeline and component else directory

    def finish(self, directory: Path) -> None:
        """Copy the rest of the pipeline if ``output.pipeline`` is set. Raises ConfigError."""
        where = self.where
        if self.config.output.pipeline and where.root is not None and where.component is not None:
            copy_others(where.root, where.component, directory)


def _keep_items(items: Sequence[dict[str, torch.Tensor]]) -> Batch:
    """Keep the examples; spawned workers import this function by name."""
    return {"items": list(items)}
