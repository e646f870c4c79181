"""Flow matching: the velocity from data to noise, as the transformers of diffusion models learn it.

An example ``x`` at time ``t`` is ``(1 - t) * x + t * noise``, the target ``noise - x``, and its loss the mean
of the squared differences in float32. Every example of a step weighs the same. Time and noise are drawn from
the seed of the run, the epoch and the number of the example alone: one rank or many, and a run that goes on,
see the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.config.sections import TaskConfig
from zerostart.training.data.cache import ensure_cache
from zerostart.training.diffusion.families import FAMILIES, family_of
from zerostart.training.diffusion.family import Family
from zerostart.training.diffusion.flow_source import FlowSource, copy_others, read_source
from zerostart.training.diffusion.flow_times import FlowConfig, Times
from zerostart.training.loop.task import Batch, Collator, Items, Task, split_off

if TYPE_CHECKING:
    from zerostart.distributed.world import World
    from zerostart.training.config.configuration import TrainConfig


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
    """A transformer of one of the families that ``zerostart.training.families`` knows."""

    Settings: ClassVar[type[TaskConfig]] = FlowConfig
    sections: ClassVar[frozenset[str]] = frozenset({"media", "cache", "samples"})
    data_key: ClassVar[str] = "media.source"
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
        if not own and all(getattr(config, section, None) is None for section in ("media", "cache")):
            raise ValueError(
                "media, or a cache that was made of them, is required with task.name flow-matching"
            )

    def open(self) -> None:
        """Read the configurations of transformer and pipeline.

        Raises :class:`CheckpointError` or :class:`ConfigError` where there is none of a family that is known.
        """
        self.where = where = read_source(self.config.model)
        if self.config.output.pipeline and where.root is None:
            raise ConfigError(f"output.pipeline: {where.directory} is one model, and not a pipeline")
        family = family_of(where.config["_class_name"], self.settings.family)
        self.family = family(where.config, where.index)
        self.times = Times(self.settings, self.family, self.settings.boundaries or where.boundaries)

    def facts(self) -> dict[str, str]:
        """The configurations, but for where they were saved."""
        kept = {key: value for key, value in self.where.config.items() if key != "_name_or_path"}
        told = {"config.json": kept, "model_index.json": self.where.index}
        return {f"the model's {name}": _short(value) for name, value in told.items()}

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
            self._without = prompt("")
        self._encoded = items
        return Numbered(items)

    def embedded(self, text: str) -> Mapping[str, torch.Tensor]:
        """What the cache has of a text alone. Raises :class:`ConfigError` where it has nothing of it."""
        prompt: Any = getattr(self._encoded, "prompt", None)
        if prompt is None:
            raise ConfigError(f"samples: these data have no embeddings of the text {text!r} alone")
        found: Mapping[str, torch.Tensor] = prompt(text)
        return found

    def split(self, items: Items) -> tuple[Items, Items | None]:
        """By ``task.held_out``: rows, that is, which an epoch may go over several times.

        Raises :class:`ConfigError` where none are left to train on.
        """
        ours = type(self).items is FlowMatching.items  # a task's own examples are as they are
        repeats = self.config.media.repeats if ours and self.config.media is not None else 1
        try:
            return split_off(items, self.settings.held_out, repeats)
        except ValueError as error:
            raise ConfigError(f"task.held_out {error}") from None

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
            raise ConfigError(f"examples of one batch have latents of several shapes: {shapes}")
        latents = torch.stack([item["latents"] for item in items]).float()
        noises, places = [], []
        for number, item in enumerate(items):
            generator = self._generator(epoch, int(item["index"]))
            place, dropped = torch.rand(2, dtype=torch.float64, generator=generator, device="cpu").tolist()
            noises.append(torch.randn(latents.shape[1:], generator=generator, device="cpu"))
            places.append(place)
            if dropped < self.settings.drop_prompt:
                items[number] = {**item, **{k: v.to(latents.device) for k, v in self._without.items()}}
        shift = self.times.shift(self.family.tokens(latents.shape[1:]))
        at = torch.tensor(places, dtype=torch.float64, device="cpu")
        shifts = torch.full_like(at, shift)
        exact = self.times.at(at, shifts).float()
        weight = self.times.weights(exact, shifts).to(latents.device)
        t = self._told(exact).to(latents.device)
        noise = torch.stack(noises).to(latents.device)
        mixing = t.view(-1, *[1] * (latents.ndim - 1))
        return {
            "noisy": (1 - mixing) * latents + mixing * noise,
            "target": noise - latents,
            "t": t,
            "weight": weight,
            "conditions": self._cast(self.family.conditions(items)),
        }

    def _told(self, t: torch.Tensor) -> torch.Tensor:
        """Times as the transformer is told them: in its unit and dtype. Latents are mixed at these."""
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return (t * self.family.unit).to(compute or self._dtype).float() / self.family.unit

    def _generator(self, epoch: int, index: int) -> torch.Generator:
        seed = hashlib.blake2b(f"{self.config.train.seed}:{epoch}:{index}".encode(), digest_size=7).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(seed, "big"))

    def _cast(self, conditions: dict[str, Any]) -> dict[str, Any]:
        """Floating tensors in the dtype that the model was loaded in."""

        def cast(value: Any) -> Any:
            if isinstance(value, list):
                return [cast(one) for one in value]
            return value.to(self._dtype) if value.is_floating_point() else value

        return {name: cast(value) for name, value in conditions.items()}

    def seen(self, batch: Batch) -> int:
        """Examples."""
        return len(batch["t"])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over the examples of their losses times the weights of their times."""
        conditions = batch["conditions"]
        noisy = batch["noisy"].to(self._dtype)
        found = self.family.velocity(model, noisy, batch["t"], conditions, self.settings.guidance)
        wrong = self.family.trained(found.float() - batch["target"], conditions)
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


def _short(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
