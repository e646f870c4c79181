"""What every engine has to pass.

class TestMine(EngineConformance):
    engine = "mine"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import zerostart
from zerostart import engines
from zerostart.errors import ConfigError, CoverageError
from zerostart.geometry.layout import Mesh
from zerostart.live.record import record_of
from zerostart.testing.net import Net, imported, reference, save
from zerostart.testing.ranks import on_ranks


class EngineConformance:
    """Subclass it, and set ``engine``, the name; ``stages`` and ``config`` where the defaults do not do."""

    #: The name of the engine, which is registered.
    engine: ClassVar[str]
    #: The stages to be tested, and the ``engine_config``.
    stages: ClassVar[tuple[int, ...]] = (3,)
    config: ClassVar[Mapping[str, Any] | None] = None
    #: What the ranks import first, so that the engine is registered there.
    imports: ClassVar[tuple[str, ...]] = ()
    #: Numbers of ranks of real loads.
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def _resolved(self, stage: int, world_size: int) -> engines.Engine:
        return engines.resolve_engine(self.engine, stage, self.config, Mesh(world_size))

    def test_its_name_and_stages_are_known(self) -> None:
        """It is found by its name, and refuses a stage that it does not have."""
        assert self.engine in engines.engine_names()
        for stage in self.stages:
            assert self._resolved(stage, 2).name == self.engine
        with pytest.raises(ConfigError, match="zero_stage=17"):
            engines.resolve_engine(self.engine, 17, self.config, Mesh(2))

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
    def test_placements_hold_every_element(self, world_size: int) -> None:
        """Every element is on some rank; twins hold the same; what is alike lies alike."""
        for stage in self.stages:
            engine = self._resolved(stage, world_size)
            with torch.device("meta"):
                model = Net()
            placed = engine.placements(model, engine.parallelism(model))
            for name, parameter in model.named_parameters():
                shape, held = tuple(parameter.shape), torch.zeros(parameter.numel(), dtype=torch.int64)
                for rank in range(world_size):
                    layout = placed.layout(name, rank)
                    assert layout.shape == shape
                    assert 0 <= layout.owned <= layout.numel
                    for first, count, at in layout.runs():
                        assert 0 <= at <= layout.numel - count
                        held[first : first + count] += 1
                    assert layout == placed.layout(name, placed.twin(rank))
                assert int(held.min()) >= 1, f"{name}: some elements are on no rank of {world_size}"
                assert placed.homes[name] in (engines.DEVICE, engines.HOST, engines.STORAGE)

    def test_loads_hold_what_the_file_holds(self, tmp_path: Path) -> None:
        """On real ranks: parameters, ties and buffers as unsharded, and bytes as planned."""
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
                    assert read == plan.ranks[rank].read_bytes

    def test_an_error_is_the_same_on_every_rank(self, tmp_path: Path) -> None:
        """What is missing in the checkpoint is told by name, everywhere."""
        path = tmp_path / "model.safetensors"
        save(path, without="norm.bias")
        told = on_ranks(_refused, 2, self.imports, path, self.engine, self.stages[0], dict(self.config or {}))
        assert len(set(told)) == 1
        assert "norm.bias" in told[0]


def _loaded(
    modules: tuple[str, ...], path: Path, engine: str, stage: int, config: dict[str, Any]
) -> tuple[list[str], int]:
    """What differs from the unsharded model on this rank, and the bytes that it has read."""
    imported(modules)
    model = zerostart.load(
        path, model=Net, engine=engine, zero_stage=stage, engine_config=config, progress=False
    )
    record, wanted = record_of(model), reference().state_dict()
    wrong = []
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None, "every rank asked for it"
        if not torch.equal(tensor, wanted.pop(name)):
            wrong.append(f"{name} differs")
    wrong += [f"{name} is not there" for name in wanted]
    for name, shard in record.shards(model).items():
        if shard.name in record.recipes and shard.layout != record.placements.layout(
            shard.name, record.report.rank
        ):
            wrong.append(f"{name} does not lie where it was placed")
    if not torch.equal(model.get_buffer("table").cpu(), torch.arange(6.0)):
        wrong.append("the buffer that is not persistent differs")
    return wrong, record.report.read_bytes


def _refused(modules: tuple[str, ...], path: Path, engine: str, stage: int, config: dict[str, Any]) -> str:
    imported(modules)
    try:
        zerostart.load(path, model=Net, engine=engine, zero_stage=stage, engine_config=config, progress=False)
    except CoverageError as error:
        return str(error)
    return "nothing was raised"
