"""Flow matching: the velocity from data to noise, as the transformers of diffusion models learn it.

An example ``x`` at time ``t`` is ``(1 - t) * x + t * noise``, the target ``noise - x``, and its loss the mean
of the squared differences in float32. Every example of a step weighs the same. Time and noise are drawn from
the seed of the run, the epoch and the number of the example alone: one rank or many, and a run that goes on,
see the same.
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
from zerostart.training.diffusion.family import Family
from zerostart.training.diffusion.flow_source import FlowSource, copy_others, read_source
from zerostart.training.loop.task import Batch, Collator, Items, Task, split_off

if TYPE_CHECKING:
    from zerostart.distributed.world import World
    from zerostart.training.config.configuration import TrainConfig


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class FlowConfig(TaskConfig):
    """The velocity from data to noise, at times between 0 (data) and 1 (noise)."""

    name: str = "flow-matching"
    """What is learnt."""
    family: str | None = None
    """null: by the class of the transformer. Needed for a class that is derived from that of a family."""
    sampling: Literal["uniform", "logit-normal"] = "uniform"
    """How times are drawn: uniform, logit-normal (the logistic function of normal numbers)."""
    logit_mean: float = 0.0
    """Mean of these normal numbers."""
    logit_std: Annotated[float, Field(gt=0.0)] = 1.0
    """Standard deviation of these normal numbers."""
    shift: Annotated[float, Field(gt=0.0)] | Literal["resolution"] | None = None
    """Of times towards noise; null: the family's, resolution: the pipeline's at so many tokens."""
    boundaries: tuple[Fraction, Fraction] | None = None
    """Lowest and highest time; null: those of the expert, of a pipeline that has two."""
    weighting: Literal["none", "bell", "sigma-sqrt", "cosmap"] = "none"
    """Of the loss at a time: none; bell is DiffSynth's; sigma-sqrt and cosmap are diffusers'."""
    guidance: float = 1.0
    """The guidance that transformers are called with which take it."""
    drop_prompt: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability of an example without its text."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The part of the examples that is not trained on, but evaluated before and after."""

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
        """How far times of latents of so many tokens are moved. Raises ConfigError."""
        chosen = self._config.shift
        if chosen == "resolution":
            return self._family.shift_at(tokens)
        return self._family.shift if chosen is None else float(chosen)

    def at(self, places: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """The times, [batch], that lie at ``places`` (0 to 1) of their distribution; in double precision."""
        # The boundaries are of shifted times: undo the shift, draw between their places, and shift again.
        # `end / (shift - (shift - 1) * end)` is the inverse of the shift. Shifts are given for each example,
        # so both ends are tensors, [batch].
        low, high = (self._place(end / (shifts - (shifts - 1) * end)) for end in self._boundaries)
        u = self._drawn(low + places * (high - low))
        # The clamp takes back what rounding may add beyond an end; with an expert a time beyond its boundary
        # would be the other expert's.
        return (shifts * u / (1 + (shifts - 1) * u)).clamp(*self._boundaries)

    def _place(self, u: torch.Tensor) -> torch.Tensor:
        """The part of the distribution below ``u``."""
        if self._config.sampling == "uniform":
            return u
        # The cumulative distribution; `logit` of 0 and of 1 is infinite, which gives 0 and 1 here.
        below: torch.Tensor = torch.special.ndtr(
            (torch.logit(u) - self._config.logit_mean) / self._config.logit_std
        )
        return below

    def _drawn(self, place: torch.Tensor) -> torch.Tensor:
        """The reverse of ``_place``."""
        if self._config.sampling == "uniform":
            return place
        # Drawing by the inverse of the distribution takes one uniform number for any kind of sampling:
        # changing the sampling leaves the noise of each example as it is.
        normal = torch.special.ndtri(place.clamp(0.0, 1.0))
        return torch.sigmoid(self._config.logit_mean + self._config.logit_std * normal)

    def weights(self, times: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """What losses at ``times`` ([batch]) weigh, [batch]."""
        match self._config.weighting:
            case "none":
                return torch.ones_like(times)
            case "sigma-sqrt":
                # Near the data the weight would grow without bound: the clamp is ours, and no more than 1e6
                # comes out.
                return times.clamp(min=1e-3) ** -2
            case "cosmap":
                return 2 / (torch.pi * (1 - 2 * times + 2 * times**2))
        # DiffSynth's bell is moved down to 0 at its lowest point in the schedule, and then scaled to a mean
        # of 1; both depend on the schedule, and so on the shift.
        bells = [self._bell(shift) for shift in shifts.tolist()]
        lowest, scale = torch.tensor(bells, dtype=times.dtype, device=times.device).unbind(1)
        return (_bell(times) - lowest) * scale

    def _bell(self, shift: float) -> tuple[float, float]:
        heights = _bell(self._family.schedule(shift))
        above = heights - heights.min()
        return float(heights.min()), float(len(above) / above.sum())


def _bell(times: torch.Tensor) -> torch.Tensor:
    return torch.exp(-2 * (times - 0.5) ** 2)


class Numbered:
    """Examples that know their numbers, as ``index`` []."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.items[index], "index": torch.tensor(index, device="cpu")}

    def digest(self) -> str:
        """That of the examples."""
        return self.items.digest()

    def shapes(self) -> Sequence[Hashable]:
        """Those of the examples."""
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
        self._without: dict[str, torch.Tensor] = {}  # what stands for no text
        self._encoded: Items | None = None

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise ValueError for an unknown family, or where nothing says what the data are."""
        settings = config.task
        if isinstance(settings, FlowConfig) and settings.family not in (None, *FAMILIES):
            raise ValueError(f"task.family {settings.family} is unknown; choose one of {', '.join(FAMILIES)}")
        own = cls.items is not FlowMatching.items
        if not own and config.media is None:
            raise ValueError("task.name flow-matching needs the section media")

    def open(self) -> None:
        """Read the configurations of transformer and pipeline.

        Raises :class:`CheckpointError` or :class:`ConfigError` where there is none of a family that is known.
        """
        self.where = where = read_source(self.config.model)
        if self.config.output.pipeline and where.root is None:
            raise ConfigError(f"output.pipeline: {where.directory} is one model, and not a pipeline")
        family = family_of(where.config["_class_name"], self.settings.family)
        self.family = family(where.config, self.settings.guidance)
        self.times = Times(self.settings, self.family, self.settings.boundaries or where.boundaries)

    @property
    def hidden_size(self) -> int | None:
        """That of the transformer."""
        return self.family.hidden_size

    def items(self, world: World) -> Items:
        """Encoded examples: those of the cache, which is made first where there is none. Collective."""
        return self.numbered(ensure_cache(self.config, world))

    def numbered(self, items: Items) -> Items:
        """``items`` as a run has them. Raises :class:`ConfigError` where no text can be dropped."""
        if self.settings.drop_prompt:
            prompt: Any = getattr(items, "prompt", None)
            if prompt is None:
                raise ConfigError(
                    "task.drop_prompt: these data have no embeddings of an empty text, which stands for a "
                    "dropped prompt"
                )
            # Read once: any step may drop a text, and `drawn` opens no file.
            self._without = prompt("")
        self._encoded = items
        return Numbered(items)

    def embedded(self, text: str) -> Mapping[str, torch.Tensor]:
        """What the cache has of a text alone. Raises :class:`ConfigError` where it has nothing of it."""
        prompt: Any = getattr(self._encoded, "prompt", None)
        if prompt is None:
            raise ConfigError(
                f"samples: the data have no embeddings of the text {text!r} alone; train from a cache "
                "(zerostart cache), or leave samples out"
            )
        found: Mapping[str, torch.Tensor] = prompt(text)
        return found

    def split(self, items: Items) -> tuple[Items, Items | None]:
        """By ``task.held_out``: rows, that is, which an epoch may go over several times.

        Raises :class:`ConfigError` where none are left to train on.
        """
        ours = type(self).items is FlowMatching.items  # a task's own examples are as they are
        shares = list(getattr(self._encoded, "shares", ())) if ours else []
        # All repeats of a row are on one side: a row that is trained on must not be evaluated, too.
        repeats = self.config.media.repeats if ours and self.config.media is not None else 1
        try:
            return split_off(items, self.settings.held_out, repeats, shares)
        except ValueError as error:
            raise ConfigError(f"task.held_out {error}") from None

    def begin(self, model: nn.Module) -> None:
        """Freeze what no loss reaches: engines may give it gradients of zero, and its weights would decay."""
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(plain_name(name), pattern) for pattern in self.family.untrained):
                parameter.requires_grad_(False)

    @property
    def source(self) -> str:
        """The transformer's own directory or file."""
        return str(self.where.directory)

    def builder(self) -> None:
        """The class that its configuration names."""

    def collator(self, seed: int) -> Collator:
        """Examples stay as they are: what is drawn may change them."""
        return _together

    def drawn(self, batch: Batch, epoch: int) -> Batch:
        """``noisy`` latents, ``target`` (both [batch, ...]), ``t``, ``weight`` ([batch]) and ``conditions``.

        Raises :class:`ConfigError` for examples that the family does not take.
        """
        items: list[dict[str, torch.Tensor]] = list(batch["items"])
        shapes = {tuple(item["latents"].shape) for item in items}
        if len(shapes) > 1:
            raise ConfigError(f"examples of one batch have latents of different shapes: {shapes}")
        latents = torch.stack([item["latents"] for item in items]).float()
        noises, places = [], []
        for number, item in enumerate(items):
            # In this order, whatever is used of it: place and dropping first, then the noise.
            generator = self._generator(epoch, int(item["index"]))
            place, dropped = torch.rand(2, dtype=torch.float64, generator=generator, device="cpu").tolist()
            # On the CPU on any device: generators of devices give other numbers, and a run may go on
            # elsewhere.
            noises.append(torch.randn(latents.shape[1:], generator=generator, device="cpu"))
            places.append(place)
            if dropped < self.settings.drop_prompt:
                # Only what a text becomes is replaced; pictures that the example starts from stay.
                items[number] = {**item, **{k: v.to(latents.device) for k, v in self._without.items()}}
        # Double precision until the model's time is rounded: latents are mixed at the time that it is given.
        # One shift for all, for a batch has latents of one shape.
        shift = self.times.shift(self.family.tokens(latents.shape[1:]))
        at = torch.tensor(places, dtype=torch.float64, device="cpu")
        shifts = torch.full_like(at, shift)
        exact = self.times.at(at, shifts).float()
        weight = self.times.weights(exact, shifts).to(latents.device)
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
        # In mixed precision weights lie in one dtype and the forward is in another: the latter rounds the
        # time.
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return (t * self.family.unit).to(compute or self._dtype).float() / self.family.unit

    def _generator(self, epoch: int, index: int) -> torch.Generator:
        # No state is carried from one step to the next: a run that is resumed needs no generator restored,
        # and draws what the uninterrupted run would have. 7 bytes, for a seed must fit into a signed number
        # of 64 bits.
        seed = hashlib.blake2b(f"{self.config.train.seed}:{epoch}:{index}".encode(), digest_size=7).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(seed, "big"))

    def _cast(self, conditions: dict[str, object]) -> dict[str, object]:
        """Floating tensors in the dtype that the model was loaded in."""

        def cast(value: Any) -> Any:
            if isinstance(value, list):
                return [cast(one) for one in value]
            # Masks and positions are integers and stay so.
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(self._dtype) if floats else value

        return {name: cast(value) for name, value in conditions.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over the examples of their losses times the weights of their times."""
        conditions = batch["conditions"]
        # Rounded only now: mixed in float32, as the pipelines' schedulers do.
        noisy = batch["noisy"].to(self._dtype)
        found = self.family.velocity(model, noisy, batch["t"], conditions)
        wrong = self.family.trained(found.float() - batch["target"], conditions)
        # A mean for each example by itself, for the weight of its own time multiplies it.
        losses = wrong.square().flatten(1).mean(1)
        mean: torch.Tensor = (losses * batch["weight"]).mean()
        return mean

    def saved_in(self, directory: Path) -> Path:
        """The output directory, or the component's in a pipeline there."""
        component = self.where.component
        return directory / component if self.config.output.pipeline and component else directory

    def finish(self, directory: Path) -> None:
        """The rest of the pipeline, where a whole one is asked for. Raises :class:`ConfigError`."""
        where = self.where
        if self.config.output.pipeline and where.root is not None and where.component is not None:
            copy_others(where.root, where.component, directory)


def _together(items: Sequence[dict[str, torch.Tensor]]) -> Batch:
    """A function of the module: workers that are spawned import it."""
    return {"items": list(items)}
