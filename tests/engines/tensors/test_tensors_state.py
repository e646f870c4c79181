"""What is done with a model in DeepSpeed's slices: whole tensors, saving, editing, resuming, masters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.engines.tensors.fused import Fused, fused_file
from tests.engines.tensors.sharing import SHARING, Case, config_of, loaded, whole_model
from tests.parity import batches, checkpoint, optimizer
from tests.ranks import run_ranks


@pytest.mark.slow
def test_kept_and_changed(folder: Path) -> None:
    cases = [
        Case(checkpoint("qwen3", folder), 2),
        Case(fused_file(folder), 3, "fused", module=Fused),
    ]
    run_ranks(kept, SHARING, cases, folder, timeout=240)


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
        resumed(case, folder / f"{dist.get_world_size()}-{case.stage}-{number}-state")
        if case.module is None:
            masters(case)


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


def steps(engine: Any, start: int, stop: int) -> list[float]:
    parts, place = dist.get_world_size() // SHARING, dist.get_rank() // SHARING
    losses = []
    for batch in list(batches(parts))[start:stop]:
        tokens = batch[place]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def resumed(case: Case, place: Path) -> None:
    """The last steps after a resume are those of the run that went on."""
    import deepspeed

    runs = []
    for resuming in (False, True):
        model = loaded(case).train()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config_of(case))
        if resuming:
            zerostart.load_state(place, engine)
        else:
            steps(engine, 0, 2)
            zerostart.save_state(place, engine)
        runs.append(steps(engine, 2, 5))
        runs.append([tensor for _, tensor in zerostart.full_tensors(engine, rank=None)])
        engine.destroy()
    assert runs[0] == runs[2]
    assert all(torch.equal(a, b) for a, b in zip(runs[1], runs[3], strict=True))


def masters(case: Case) -> None:
    """Parameters in bf16 have masters of what the checkpoint stores."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if case.stage == 0:
        return
    config = {**config_of(case), "bf16": {"enabled": True}}
    exact, model = loaded(case), loaded(case, engine_config=config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    with deepspeed.zero.GatheredParameters(list(exact.parameters())):
        wanted = {name: parameter.detach().clone() for name, parameter in exact.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(safe_get_full_fp32_param(parameter), wanted[name])
    engine.destroy()
