"""ZeRO-3 parameters that are changed in place where the change would be lost: an error that names them.

Of models that zerostart loaded; those of others are none of its business.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import rank_outcomes, run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    with pytest.raises(zerostart.ZerostartError) as caught:
        yield
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def values(parameter: nn.Parameter) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameter):
        return parameter.detach().clone()


def change_inside(model: nn.Module) -> None:
    """Each way to lose a change inside, and those that count."""
    import deepspeed

    weight, rank = model[1].weight, dist.get_rank()
    name, before = "1.weight", values(weight)
    assert torch.equal(before, made()[1].weight)
    for change in (
        lambda: weight.data.mul_(2),
        lambda: nn.init.zeros_(weight),
        lambda: weight.data[0, 1].add_(1),
    ):
        with (
            refused(name, "without modifier_rank"),
            deepspeed.zero.GatheredParameters([weight, model[0].bias]),
        ):
            if rank == 1:
                change()
        with (
            refused(name, "not modifier_rank"),
            deepspeed.zero.GatheredParameters(weight, modifier_rank=0),
        ):
            if rank == 1:
                change()
        assert torch.equal(values(weight), before)
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=1):
        if rank == 1:
            weight.data.add_(1)
    assert torch.equal(values(weight), before + 1)
    # All ranks do the same, as transformers does for new tokens: rank 0's values count.
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        weight.data.sub_(1 + rank)
    assert torch.equal(values(weight), before + 1 - 1)


def change_ours() -> None:
    import deepspeed

    model = zerostart.load(None, model=made(), progress=False)
    change_inside(model)
    # A placeholder has no elements to change, and torch does not mind.
    with torch.no_grad():
        model[0].weight.mul_(2)
    with refused("0.weight was changed in place while partitioned"):
        list(zerostart.full_tensors(model))
    found = dict(zerostart.full_tensors(model, rank=None))
    assert all(torch.allclose(found[name], p) for name, p in made().named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    for turn in range(3):
        engine.backward(engine(torch.ones(2, 5)).sum())
        if turn == 1:
            with torch.no_grad():
                model[1].bias.fill_(0)
            with refused("1.bias was changed in place while partitioned"):
                engine.step()
        engine.step()
    with refused("1.weight", "is lost"), deepspeed.zero.GatheredParameters(model[1].weight):
        model[1].weight.data.zero_()


def change_deepspeeds_own() -> None:
    """Parameters that zerostart did not load, while one lives that it did, are as DeepSpeed has them."""
    import deepspeed

    ours = zerostart.load(None, model=made(), progress=False)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = made()
    with zerostart.enabled():
        with torch.no_grad():
            model[0].weight.mul_(2)
        before = values(model[0].weight)
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_gather_object"):
                patch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
            with deepspeed.zero.GatheredParameters([model[0].weight, model[1].weight]):
                model[0].weight.data.zero_()
        assert calls == []
    assert torch.equal(values(model[0].weight), before)
    del ours


def changed_on_one_rank(config: dict[str, Any]) -> Any:
    """The engine of a model of which rank 1 has changed a placeholder before a step."""
    import deepspeed

    model = zerostart.load(None, model=made(), engine_config=config, progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(2, 5)).sum())
    with torch.no_grad():
        if dist.get_rank() == 1:
            model[1].bias.fill_(0)
    return engine


def change_on_one_rank() -> None:
    """With ``enable_sanity_checks`` all ranks say what one of them has changed before a step."""
    checked = {"stage": 3, "enable_sanity_checks": True}
    engine = changed_on_one_rank({**CONFIG, "zero_optimization": checked})
    with refused("1.bias was changed in place while partitioned"):
        engine.step()
    engine.step()


def large_ones_in_blocks() -> None:
    """What is summed of a large parameter is all over it, and where its memory begins does not matter."""
    import deepspeed

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1 << 12, 1 << 10))

    model = zerostart.load(None, model=Large(), progress=False)
    for rows in (slice(None), slice(1 << 11), slice(1 << 11, None)):
        with refused("weight", "without modifier_rank"), deepspeed.zero.GatheredParameters(model.weight):
            model.weight.data[rows].add_(1)


def merge_for_a_while() -> None:
    """Adapters merged while everything is gathered, as a trainer does that generates elsewhere."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    model = zerostart.load(None, model=made(), progress=False)
    adapter = LoraConfig(target_modules=["0"], init_lora_weights=False)
    adapted = get_peft_model(model, adapter)  # type: ignore[arg-type]
    weight = model[0].base_layer.weight
    for unmerged in (True, False):
        with deepspeed.zero.GatheredParameters(list(adapted.parameters())):
            adapted.merge_adapter()
            assert not torch.equal(weight, made()[0].weight)
            if unmerged:
                adapted.unmerge_adapter()
        assert torch.equal(values(weight), made()[0].weight)
    with refused("0.weight", "without modifier_rank"), deepspeed.zero.GatheredParameters(weight):
        nn.init.zeros_(weight)


def change_both() -> None:
    change_deepspeeds_own()
    change_ours()
    change_on_one_rank()
    large_ones_in_blocks()
    merge_for_a_while()


def test_changes_that_would_be_lost_are_errors() -> None:
    run_ranks(change_both, 2)


def change_alone() -> None:
    """Without it no rank asks the others."""
    engine = changed_on_one_rank(CONFIG)
    engine.step()
    engine.step()


@pytest.mark.slow
def test_a_change_on_one_rank_ends_all_of_them() -> None:
    """The one that has made it says so, and what waits for it fails as it ends, not after a time-out."""
    first, second = rank_outcomes(change_alone, 2, grace=20.0)
    assert "1.bias was changed in place while partitioned" in second.message
    assert first.error
    assert first.exit_code is not None
