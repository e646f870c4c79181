"""Patches of other libraries are removed after loads, engines, blocks and errors."""

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
from zerostart.upstream.patches import RefCountedPatches, active, check_compatible, patch


class Target:
    name = "class"

    def call(self, *_: Any) -> str:
        return "called"


def own_patches() -> list[str]:
    """List the active patches of these tests, without those of other tests' models."""
    return [name for name in active() if name.startswith("Target.") or name.endswith("Namespace.name")]


def test_attributes_are_restored() -> None:
    module = SimpleNamespace(name="module")
    thing = Target()
    with patch(module, "name", "ours"), patch(thing, "name", "ours"):
        assert (module.name, thing.name) == ("ours", "ours")
        assert sorted(own_patches()) == ["SimpleNamespace.name", "Target.name"]
    assert (module.name, thing.name, vars(thing)) == ("module", "class", {})
    with pytest.raises(KeyError), patch(Target, "name", "ours"):
        raise KeyError
    assert Target.name == "class"
    assert own_patches() == []


def test_patches_last_as_long_as_an_owner() -> None:
    def add_patch(stack: ExitStack) -> None:
        stack.enter_context(patch(Target, "name", "ours"))

    counted = RefCountedPatches(add_patch)
    first, second = Target(), Target()
    counted.hold(first)
    counted.hold(second)
    counted.open()
    del first
    counted.close()
    assert (Target.name, own_patches()) == ("ours", ["Target.name"])
    del second
    assert (Target.name, own_patches()) == ("class", [])
    counted.open()
    assert Target.name == "ours"
    counted.close()
    assert Target.name == "class"


def test_a_failed_patch_leaves_nothing() -> None:
    def add_patch(stack: ExitStack) -> None:
        stack.enter_context(patch(Target, "name", "ours"))
        raise OSError("no room")

    counted = RefCountedPatches(add_patch)
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            counted.open()
        assert (Target.name, own_patches()) == ("class", [])


def test_misfitting_calls_are_refused_only_for_loaded_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.made_up", SimpleNamespace(Target=Target))  # type: ignore[arg-type]
    use = Use("torch.made_up:Target", "call, .absent", "a test")

    def add_patch(stack: ExitStack) -> None:
        assert not check_compatible(stack, counted, (use,), "Do otherwise")

    counted = RefCountedPatches(add_patch)
    loaded, foreign = torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
    counted.hold(loaded)
    pipeline, tokenizer = Target(), Target()
    vars(pipeline)["transformer"] = loaded[0]
    for owner, argument in ((pipeline, foreign), (tokenizer, loaded), (tokenizer, loaded[0])):
        with pytest.raises(UnsupportedVersionError, match=r"misses absent .*Do otherwise"):
            owner.call(argument)
    assert tokenizer.call() == tokenizer.call(foreign) == "called"
    vars(pipeline).clear()
    del loaded, argument
    assert pipeline.call() == "called"


def originals() -> dict[tuple[str, str], Any]:
    """Return the current value of every attribute that may be patched."""
    return {
        (use.owner, name): value
        for use in declared_uses()
        if use.library.installed() and not use.owner.startswith("torch:_C")
        # Restored at the next torch function of a DTensor.
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


def run_engine(path: Path, stage: int) -> tuple[int, list[str], bool]:
    """Return the patches during and after an engine, and True if all are removed."""
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

        FWD_MODULE_STACK.clear()  # DeepSpeed keeps the last ZeRO-3 model here
    gc.collect()
    return count, active(), originals() == before


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_no_patch_outlives_a_model_and_its_engine(stage: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    ((count, remaining, restored),) = run_ranks(run_engine, 1, path, stage)
    assert count > 3
    assert list(remaining) == []
    assert restored


def run_block(path: Path) -> tuple[list[int], bool, int]:
    """Count patches in ``enabled``, and after it with and without a model."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # cached by transformers
    import_hooks = len(sys.meta_path)
    before = originals()
    with zerostart.enabled(engine="fsdp2"):
        counts = [len(active())]
        model = AutoModelForCausalLM.from_pretrained(path)
    counts.append(len(active()))
    del model
    gc.collect()
    counts.append(len(active()))
    with pytest.raises(KeyError), zerostart.enabled():
        raise KeyError
    counts.append(len(active()))
    return counts, originals() == before, len(sys.meta_path) - import_hooks


@pytest.mark.slow
def test_no_patch_outlives_a_block(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    ((counts, restored, import_hooks),) = run_ranks(run_block, 1, path)
    inside, with_model, without_model, after_error = counts
    assert inside > 0
    assert with_model > 0
    assert without_model == after_error == import_hooks == 0
    assert restored


# Optimizer steps mark the gradients of loaded models only.


def run_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def marks(model: nn.Module) -> set[str]:
    return {name for p in model.parameters() for name in vars(p.grad if p.grad is not None else p)}


def test_gradients_of_other_models_get_no_marks() -> None:
    loaded, foreign = (
        zerostart.load(None, model=nn.Linear(2, 2), engine="fsdp2", progress=False),
        nn.Linear(2, 2),
    )
    with zerostart.enabled():
        run_step(loaded)
        run_step(foreign)
        assert marks(loaded)
        assert not marks(foreign)
    later = nn.Linear(2, 2)
    run_step(later)
    assert not marks(later)
