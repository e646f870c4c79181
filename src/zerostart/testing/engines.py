"""Conformance suite for engines.

class TestMine(EngineConformance):
    engine = "mine"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zerostart
from zerostart import engines
from zerostart.engines import Mesh
from zerostart.errors import ConfigError, CoverageError
from zerostart.testing.ranks import Net, check_loads, load, on_ranks, save

#: A model and optimizer for ``save_state``, and a function that takes a step.
Training = tuple[nn.Module, torch.optim.Optimizer | None, Callable[[], object]]


def train_by_torch(model: nn.Module, stage: int) -> Training:
    """Return ``model``, AdamW, and a function that takes a step with constant gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


class EngineConformance:
    """Tests of an engine; a subclass sets ``engine``.

    Set ``stages``, ``config`` and ``training`` if the defaults do not fit. For an engine that creates its
    optimizer, ``training`` is a ``staticmethod`` of a module-level function like ``train_by_torch``.
    """

    #: Name of the registered engine.
    engine: ClassVar[str]
    #: Stages to test, and the ``engine_config``.
    stages: ClassVar[tuple[int, ...]] = (3,)
    config: ClassVar[Mapping[str, Any] | None] = None
    #: Modules that register the engine; the ranks import them first.
    imports: ClassVar[tuple[str, ...]] = ()
    #: World sizes of the real loads.
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 3)

    #: Starts the training of a loaded model at a stage.
    training: ClassVar[Callable[[nn.Module, int], Training]] = staticmethod(train_by_torch)

    def _resolved(self, stage: int, world_size: int) -> engines.Engine:
        return engines.resolve_engine(self.engine, stage, self.config, Mesh(world_size))

    def test_its_name_and_stages_are_known(self) -> None:
        """Find the engine by its name; expect an error for an unknown stage."""
        assert self.engine in engines.engine_names()
        for stage in self.stages:
            assert self._resolved(stage, 2).name == self.engine
        with pytest.raises(ConfigError, match="zero_stage=17"):
            engines.resolve_engine(self.engine, 17, self.config, Mesh(2))

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
    def test_placements_hold_every_element(self, world_size: int) -> None:
        """Expect every element on some rank, and equal shards on replicas."""
        for stage in self.stages:
            engine = self._resolved(stage, world_size)
            with torch.device("meta"):
                model = Net()
            placed = engine.placements(model, engine.parallelism(model))
            for name, parameter in model.named_parameters():
                # How many ranks hold each element, in row-major order.
                shape, held = tuple(parameter.shape), torch.zeros(parameter.numel(), dtype=torch.int64)
                for rank in range(world_size):
                    layout = placed.layout(name, rank)
                    assert layout.shape == shape
                    # Elements that are not owned are padding.
                    assert 0 <= layout.owned <= layout.numel
                    for first, count, at in layout.runs():
                        assert 0 <= at <= layout.numel - count
                        held[first : first + count] += 1
                    assert layout == placed.layout(name, placed.twin(rank))
                assert int(held.min()) >= 1, f"{name}: some elements are on no rank of {world_size}"
                assert placed.homes[name] in (engines.DEVICE, engines.HOST, engines.STORAGE)

    def _runs(self, tmp_path: Path) -> Iterator[tuple[tuple[Any, ...], int, Path]]:
        """Yield the arguments, world size and output path of each run."""
        path = tmp_path / "model.safetensors"
        save(path)
        for stage in self.stages:
            for world_size in self.worlds:
                arguments = (self.imports, path, self.engine, stage, dict(self.config or {}))
                yield arguments, world_size, tmp_path / f"{stage}-{world_size}"

    def test_loads_hold_what_the_file_holds(self, tmp_path: Path) -> None:
        """Load on real ranks; expect the unsharded tensors and the planned bytes."""
        for arguments, world_size, _ in self._runs(tmp_path):
            check_loads((world_size,), *arguments)

    def test_saves_what_it_loaded(self, tmp_path: Path) -> None:
        """Save on real ranks; expect the loaded tensors in the files."""
        for arguments, world_size, out in self._runs(tmp_path):
            digests = on_ranks(_load_and_save, world_size, *arguments, out)
            assert all(one == digests[0] for one in digests), "ranks have other digests"
            difference = zerostart.diff(arguments[1], out)
            assert difference.same, f"{out.name}: {difference}"

    def test_resumes_where_it_was_saved(self, tmp_path: Path) -> None:
        """Save and load a training state; expect equal weights, optimizer and ``extra``."""
        for arguments, world_size, state in self._runs(tmp_path):
            before, after = on_ranks(_train_and_save, world_size, arguments, type(self).training, state)[0]
            assert before != after, "the step after the save changed nothing"
            # On the same and on another number of ranks.
            for ranks in dict.fromkeys((world_size, self.worlds[0])):
                for extra, resumed, stepped in on_ranks(
                    _resume_and_train, ranks, arguments, type(self).training, state
                ):
                    assert extra == {"step": 2}
                    assert resumed == before, f"{state.name} on {ranks} ranks: other weights than were saved"
                    # Other numbers of ranks round sums in another order.
                    if ranks == world_size:
                        assert stepped == after, f"{state.name}: other weights after the next step"

    def test_an_error_is_the_same_on_every_rank(self, tmp_path: Path) -> None:
        """Load without a tensor; expect one error on all ranks that names it."""
        arguments, _, _ = next(self._runs(tmp_path))
        save(arguments[1], without="norm.bias")
        messages = on_ranks(_load_and_fail, 2, *arguments)
        assert len(set(messages)) == 1
        assert "norm.bias" in messages[0]


def _load_and_fail(*arguments: Any) -> str:
    try:
        load(*arguments)
    except CoverageError as error:
        return str(error)
    return "nothing was raised"


def _load_and_save(*arguments: Any) -> dict[str, str]:
    *begin, out = arguments
    model = load(*begin)
    zerostart.save(model, out)
    return zerostart.digest(model)


def _train_and_save(
    arguments: tuple[Any, ...], training: Callable[[nn.Module, int], Training], state: Path
) -> tuple[dict[str, str], dict[str, str]]:
    model, optimizer, step = training(load(*arguments), arguments[3])
    step()
    step()
    zerostart.save_state(state, model, optimizer, extra={"step": 2})
    before = zerostart.digest(model)
    step()
    return before, zerostart.digest(model)


def _resume_and_train(
    arguments: tuple[Any, ...], training: Callable[[nn.Module, int], Training], state: Path
) -> tuple[object, dict[str, str], dict[str, str]]:
    model, optimizer, step = training(load(*arguments), arguments[3])
    extra = zerostart.load_state(state, model, optimizer)
    before = zerostart.digest(model)
    step()
    return extra, before, zerostart.digest(model)
