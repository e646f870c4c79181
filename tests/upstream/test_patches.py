"""What is replaced of other libraries is put back: after a load, an engine, a block, and after errors."""

import gc
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.guard import Use, declared_uses, resolve
from zerostart.upstream.patches import RefCountedPatches, active, fits, patch


class Something:
    name = "class"

    def call(self, *_: Any) -> str:
        return "called"


def listed() -> list[str]:
    """What these tests replace, of all that is in place: a model of another test may still live here."""
    return [name for name in active() if name.startswith("Something.") or name.endswith("Namespace.name")]


def test_what_was_there_comes_back() -> None:
    module = SimpleNamespace(name="module")
    thing = Something()
    with patch(module, "name", "ours"), patch(thing, "name", "ours"):
        assert (module.name, thing.name) == ("ours", "ours")
        assert sorted(listed()) == ["SimpleNamespace.name", "Something.name"]
    assert (module.name, thing.name, vars(thing)) == ("module", "class", {})
    with pytest.raises(KeyError), patch(Something, "name", "ours"):
        raise KeyError
    assert Something.name == "class"
    assert listed() == []


def test_held_while_one_of_the_holders_lives() -> None:
    def put(stack: ExitStack) -> None:
        stack.enter_context(patch(Something, "name", "ours"))

    held = RefCountedPatches(put)
    one, two = Something(), Something()
    held.hold(one)
    held.hold(two)
    held.open()
    del one
    held.close()
    assert (Something.name, listed()) == ("ours", ["Something.name"])
    del two
    assert (Something.name, listed()) == ("class", [])
    held.open()
    assert Something.name == "ours"
    held.close()
    assert Something.name == "class"


def test_what_cannot_be_put_leaves_nothing() -> None:
    def put(stack: ExitStack) -> None:
        stack.enter_context(patch(Something, "name", "ours"))
        raise OSError("no room")

    held = RefCountedPatches(put)
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            held.open()
        assert (Something.name, listed()) == ("class", [])


def test_calls_that_do_not_fit_are_refused_for_loaded_models_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.made_up", SimpleNamespace(Something=Something))  # type: ignore[arg-type]
    use = Use("torch.made_up:Something", "call, .absent", "a test")

    def put(stack: ExitStack) -> None:
        assert not fits(stack, held, (use,), "Do otherwise")

    held = RefCountedPatches(put)
    ours, others = torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
    held.hold(ours)
    pipeline, tokenizer = Something(), Something()
    vars(pipeline)["transformer"] = ours[0]
    for owner, given in ((pipeline, others), (tokenizer, ours), (tokenizer, ours[0])):
        with pytest.raises(UnsupportedVersionError, match=r"misses absent .*Do otherwise"):
            owner.call(given)
    assert tokenizer.call() == tokenizer.call(others) == "called"
    vars(pipeline).clear()
    del ours, given
    assert pipeline.call() == "called"


def originals() -> dict[tuple[str, str], Any]:
    """What is now at every place where something may be replaced."""
    return {
        (use.owner, name): value
        for use in declared_uses()
        if use.library.installed() and not use.owner.startswith("torch:_C")
        # Given back at the next torch function of a DTensor.
        if use.owner != "torch.distributed.tensor:DTensor"
        for name in use.functions
        if callable(value := vars(resolve(use.owner)).get(name))
    }


def engine_of(model: Any, stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def through_an_engine(path: Path, stage: int) -> tuple[int, list[str], bool]:
    """Return what is replaced after the start, what is when the engine is gone, and if all is as before."""
    from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed

    import_deepspeed()
    before = originals()
    model = zerostart.load(path, zero_stage=stage, progress=False)
    engine = engine_of(model, stage)
    count = len(active())
    engine.destroy()
    del model, engine
    if stage == 3:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        FWD_MODULE_STACK.clear()  # DeepSpeed keeps the last ZeRO-3 model alive there.
    gc.collect()
    return count, active(), originals() == before


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_left_of_a_model_and_its_engine(stage: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    ((count, gone, same),) = run_ranks(through_an_engine, 1, path, stage)
    assert count > 3
    assert list(gone) == []
    assert same


def through_a_block(path: Path) -> tuple[list[int], bool, int]:
    """Return how much is replaced inside ``enabled``, after it with a model, without, and after an error."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # transformers makes its own table once, and keeps it
    waiting = len(sys.meta_path)
    before = originals()
    with zerostart.enabled(engine="fsdp2"):
        found = [len(active())]
        model = AutoModelForCausalLM.from_pretrained(path)
    found.append(len(active()))
    del model
    gc.collect()
    found.append(len(active()))
    with pytest.raises(KeyError), zerostart.enabled():
        raise KeyError
    found.append(len(active()))
    return found, originals() == before, len(sys.meta_path) - waiting


@pytest.mark.slow
def test_nothing_is_left_of_a_block(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    ((found, same, waiting),) = run_ranks(through_a_block, 1, path)
    inside, kept, gone, failed = found
    assert inside > 0
    assert kept > 0
    assert gone == failed == waiting == 0
    assert same


# Which gradients a step has taken is known of models of ours, as long as they live, and of no others.


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def marks(model: nn.Module) -> set[str]:
    return {name for p in model.parameters() for name in vars(p.grad if p.grad is not None else p)}


def test_steps_of_others_are_not_looked_at() -> None:
    loaded, other = (
        zerostart.load(None, model=nn.Linear(2, 2), engine="fsdp2", progress=False),
        nn.Linear(2, 2),
    )
    with zerostart.enabled():
        stepped(loaded)
        stepped(other)
        assert marks(loaded)
        assert not marks(other)
    later = nn.Linear(2, 2)
    stepped(later)
    assert not marks(later)
