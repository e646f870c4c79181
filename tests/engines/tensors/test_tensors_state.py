"""A model in DeepSpeed's slices: whole tensors, digests, saving and editing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.engines.tensors.fused import Fused, fused_file
from tests.engines.tensors.sharing import Case, loaded, whole_model
from tests.parity import checkpoint
from tests.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kept_and_changed_at_every_stage(stage: int, folder: Path) -> None:
    cases = [
        Case(checkpoint("llama", folder), stage),
        Case(fused_file(folder), stage, "fused", module=Fused),
        Case(checkpoint("bert", folder), stage),
    ]
    run_ranks(kept, 4, cases, folder, timeout=240)


def kept(cases: list[Case], folder: Path) -> None:
    for number, case in enumerate(cases):
        whole_tensors(case, folder / f"{dist.get_world_size()}-{case.stage}-{number}")


def whole_tensors(case: Case, place: Path) -> None:
    """Whole tensors, digests, a save and an edit, of a model that no engine has yet."""
    model, stock = loaded(case), whole_model(case)
    wanted = stock.state_dict()
    found = dict(zerostart.full_tensors(model, rank=None))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())  # type: ignore[arg-type]
    zerostart.save(model, place)
    assert zerostart.diff(place, case.path).equal
    assert zerostart.digest(model) == zerostart.digest(zerostart.load(**alone(case, place)))
    rows = ("o_proj.weight", "attention.output.dense.weight")
    name = next(name for name, _ in model.named_parameters() if name.endswith(rows))
    with zerostart.gathered(model, name, modifier_rank=1) as tensor:
        assert torch.equal(tensor, wanted[name])
        if dist.get_rank() == 1:
            tensor[-1, -1] = 7.0
    with zerostart.gathered(model, name) as tensor:
        wanted[name][-1, -1] = 7.0
        assert torch.equal(tensor, wanted[name])


def alone(case: Case, place: Path) -> dict[str, Any]:
    model = None if case.module is None else case.module.build
    return {"source": place, "model": model, "zero_stage": 3, "progress": False}
