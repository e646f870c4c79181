"""The suite of tests that every engine has to pass.

class TestMine(EngineConformance):
    engine = "mine"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import zerostart
from zerostart import engines
from zerostart.engines import Mesh
from zerostart.errors import ConfigError, CoverageError
from zerostart.live.model import get_record
from zerostart.testing.ranks import Net, imported, on_ranks, reference, save

#: Of a loaded model: what ``save_state`` takes as the model, its optimizer, and a function that takes a step.
Training = tuple[nn.Module, torch.optim.Optimizer | None, Callable[[], object]]


def trained_by_torch(model: nn.Module, stage: int) -> Training:
    """Return ``model``, an AdamW optimizer, and a function that takes a step with constant gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


class EngineConformance:
    """Tests of an engine: subclass it in a test module, and set ``engine`` to the engine's name.

    ``stages``, ``config`` and ``training`` are set where the defaults do not do: an engine that makes its
    optimizer itself has a module-level function like ``trained_by_torch``, as a ``staticmethod``.
    """

    #: The name of the engine, which is registered.
    engine: ClassVar[str]
    #: The stages to be tested, and the ``engine_config``.
    stages: ClassVar[tuple[int, ...]] = (3,)
    config: ClassVar[Mapping[str, Any] | None] = None
    #: What the ranks import first, so that the engine is registered there.
    imports: ClassVar[tuple[str, ...]] = ()
    #: Numbers of ranks of real loads.
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 3)

    #: Begins the training of a loaded model at a stage.
    training: ClassVar[Callable[[nn.Module, int], Training]] = staticmethod(trained_by_torch)

    def _resolved(self, stage: int, world_size: int) -> engines.Engine:
        return engines.resolve_engine(self.engine, stage, self.config, Mesh(world_size))

    def test_its_name_and_stages_are_known(self) -> None:
        """Find the engine by its name; expect an error for a stage that it does not have."""
        assert self.engine in engines.engine_names()
        for stage in self.stages:
            assert self._resolved(stage, 2).name == self.engine
        with pytest.raises(ConfigError, match="zero_stage=17"):
            engines.resolve_engine(self.engine, 17, self.config, Mesh(2))

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
    def test_placements_hold_every_element(self, world_size: int) -> None:
        """Expect every element on some rank, the same shards on ranks that are copies of one another."""
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
                    # What is not owned is padding, which holds nothing of the parameter.
                    assert 0 <= layout.owned <= layout.numel
                    for first, count, at in layout.runs():
                        assert 0 <= at <= layout.numel - count
                        held[first : first + count] += 1
                    assert layout == placed.layout(name, placed.twin(rank))
                assert int(held.min()) >= 1, f"{name}: some elements are on no rank of {world_size}"
                assert placed.homes[name] in (engines.DEVICE, engines.HOST, engines.STORAGE)

    def test_loads_hold_what_the_file_holds(self, tmp_path: Path) -> None:
        """Load on real ranks; expect the tensors and ties of an unsharded load, and the planned bytes."""
        path = tmp_path / "model.safetensors"
        save(path)
        for stage in self.stages:
            for world_size in self.worlds:
                plan = zerostart.plan(
                    path, world_size, self.engine, stage, model=Net, engine_config=self.config
                )
                found = on_ranks(
                    _loaded, world_size, self.imports, path, self.engine, stage, dict(self.config or {})
                )
                for rank, (wrong, read) in enumerate(found):
                    assert wrong == [], f"rank {rank} of {world_size} at stage {stage}"
                    # To the byte: a forecast that is only nearly right is none.
                    assert read == plan.ranks[rank].read_bytes

    def test_saves_what_it_loaded(self, tmp_path: Path) -> None:
        """Save on real ranks, copies of a shard once; expect the tensors that were loaded in the files."""
        path = tmp_path / "model.safetensors"
        save(path)
        for stage in self.stages:
            for world_size in self.worlds:
                out = tmp_path / f"{stage}-{world_size}"
                given = (self.imports, path, self.engine, stage, dict(self.config or {}))
                digests = on_ranks(_saved, world_size, *given, out)
                assert all(one == digests[0] for one in digests), "ranks have other digests"
                found = zerostart.diff(path, out)
                assert found.same, f"{world_size} ranks at stage {stage}: {found}"

    def test_resumes_where_it_was_saved(self, tmp_path: Path) -> None:
        """Save a training state and load it; expect the same weights, optimizer states and ``extra``."""
        path = tmp_path / "model.safetensors"
        save(path)
        for stage in self.stages:
            for world_size in self.worlds:
                state = tmp_path / f"{stage}-{world_size}"
                given = (self.imports, path, self.engine, stage, dict(self.config or {}), type(self).training)
                before, after = on_ranks(_state_saved, world_size, *given, state)[0]
                assert before != after, "the step after the save changed nothing"
                # On as many ranks as saved it, and on another number; each once, where they are the same.
                for ranks in dict.fromkeys((world_size, self.worlds[0])):
                    for extra, resumed, stepped in on_ranks(_resumed, ranks, *given, state):
                        where = f"{world_size} ranks, then {ranks}, at stage {stage}"
                        assert extra == {"step": 2}
                        assert resumed == before, f"{where}: other weights than were saved"
                        # On other numbers of ranks sums are rounded in another order: there only what was
                        # saved has to be the same.
                        if ranks == world_size:
                            assert stepped == after, f"{where}: other weights after the next step"

    def test_an_error_is_the_same_on_every_rank(self, tmp_path: Path) -> None:
        """Load a checkpoint that lacks a tensor; expect one error on all ranks, which names the tensor."""
        path = tmp_path / "model.safetensors"
        save(path, without="norm.bias")
        told = on_ranks(_refused, 2, self.imports, path, self.engine, self.stages[0], dict(self.config or {}))
        assert len(set(told)) == 1
        assert "norm.bias" in told[0]


def _loaded(
    modules: tuple[str, ...], path: Path, engine: str, stage: int, config: dict[str, object]
) -> tuple[list[str], int]:
    imported(modules)
    model = zerostart.load(
        path, model=Net, engine=engine, zero_stage=stage, engine_config=config, progress=False
    )
    record, wanted = get_record(model), reference().state_dict()
    wrong = []
    # None: every rank gets each tensor whole, and compares for itself.
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None, "every rank asked for it"
        if not torch.equal(tensor, wanted.pop(name)):
            wrong.append(f"{name} differs")
    wrong += [f"{name} is not there" for name in wanted]
    for name, shard in record.shards(model).items():
        # A forecast starts from the placements: what a load does otherwise, it would tell wrongly.
        if shard.name in record.recipes and shard.layout != record.placements.layout(
            shard.name, record.report.rank
        ):
            wrong.append(f"{name} does not lie where it was placed")
    if not torch.equal(model.get_buffer("table").cpu(), torch.arange(6.0)):
        wrong.append("the buffer that is not persistent differs")
    return wrong, record.report.read_bytes


def _refused(modules: tuple[str, ...], path: Path, engine: str, stage: int, config: dict[str, object]) -> str:
    imported(modules)
    try:
        zerostart.load(path, model=Net, engine=engine, zero_stage=stage, engine_config=config, progress=False)
    except CoverageError as error:
        return str(error)
    return "nothing was raised"


def _saved(
    modules: tuple[str, ...], path: Path, engine: str, stage: int, config: dict[str, object], out: Path
) -> dict[str, str]:
    imported(modules)
    model = zerostart.load(
        path, model=Net, engine=engine, zero_stage=stage, engine_config=config, progress=False
    )
    zerostart.save(model, out)
    return zerostart.digest(model)


def _begun(
    modules: tuple[str, ...],
    path: Path,
    engine: str,
    stage: int,
    config: dict[str, object],
    training: Callable[[nn.Module, int], Training],
) -> Training:
    imported(modules)
    model = zerostart.load(
        path, model=Net, engine=engine, zero_stage=stage, engine_config=config, progress=False
    )
    return training(model, stage)


def _state_saved(*given: Any) -> tuple[dict[str, str], dict[str, str]]:
    *begin, state = given
    model, optimizer, step = _begun(*begin)
    step()
    step()
    zerostart.save_state(state, model, optimizer, extra={"step": 2})
    before = zerostart.digest(model)
    step()
    return before, zerostart.digest(model)


def _resumed(*given: Any) -> tuple[object, dict[str, str], dict[str, str]]:
    *begin, state = given
    model, optimizer, step = _begun(*begin)
    extra = zerostart.load_state(state, model, optimizer)
    before = zerostart.digest(model)
    step()
    return extra, before, zerostart.digest(model)
