"""What is replaced of other libraries is put back: after a load, an engine, a block, and after errors."""

import copy
import gc
import pickle
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torchs

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.guard import Use, declared_uses, resolve
from zerostart.upstream.patches import RefCountedPatches, active, fits, replaced


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
    with replaced(module, "name", "ours"), replaced(thing, "name", "ours"):
        assert (module.name, thing.name) == ("ours", "ours")
        assert sorted(listed()) == ["SimpleNamespace.name", "Something.name"]
    assert (module.name, thing.name, vars(thing)) == ("module", "class", {})
    with pytest.raises(KeyError), replaced(Something, "name", "ours"):
        raise KeyError
    assert Something.name == "class"
    assert listed() == []


def test_what_somebody_has_put_over_ours_stays() -> None:
    with replaced(Something, "name", "ours"):
        Something.name = "theirs"
    assert Something.name == "theirs"
    Something.name = "class"


def test_of_two_of_ours_the_first_may_end_first() -> None:
    """As models of two kinds do, for which one method of an engine is replaced twice."""
    thing = Something()
    below, above = ExitStack(), ExitStack()
    below.enter_context(replaced(thing, "name", "below"))
    above.enter_context(replaced(thing, "name", "above"))
    below.close()
    assert thing.name == "above"
    above.close()
    assert vars(thing) == {}


def test_held_while_one_of_the_holders_lives() -> None:
    def put(stack: ExitStack) -> None:
        stack.enter_context(replaced(Something, "name", "ours"))

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


def test_held_while_a_ticket_goes_round() -> None:
    """A mark may outlive the parameter that it was made for, as an attribute of the next."""

    def put(stack: ExitStack) -> None:
        stack.enter_context(replaced(Something, "name", "ours"))

    held = RefCountedPatches(put)
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    first.mark = held.ticket()  # type: ignore[attr-defined]
    assert held.ticket() is first.mark  # type: ignore[attr-defined]
    second.__dict__.update(first.__dict__)
    assert pickle.loads(pickle.dumps(second)).mark is None
    assert copy.deepcopy(vars(second))["mark"] is held.ticket()
    del first
    assert Something.name == "ours"
    del second
    assert (Something.name, listed()) == ("class", [])


def test_what_cannot_be_put_leaves_nothing() -> None:
    def put(stack: ExitStack) -> None:
        stack.enter_context(replaced(Something, "name", "ours"))
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
        for name in use.functions
        if callable(value := vars(resolve(use.owner)).get(name))
    }


def names_of(replaced: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in replaced}


def engine_of(model: Any, stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def through_an_engine(path: Path, stage: int) -> tuple[list[set[str]], bool]:
    """What is replaced after the load, after the engine's start, and when both are gone."""
    from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed

    import_deepspeed()
    before = originals()
    model = zerostart.load(path, zero_stage=stage, progress=False)
    found = [names_of(active())]
    engine = engine_of(model, stage)
    found.append(names_of(active()))
    engine.destroy()
    del model, engine
    if stage == 3:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        FWD_MODULE_STACK.clear()  # DeepSpeed keeps the last ZeRO-3 model alive there.
    gc.collect()
    found.append(names_of(active()))
    return found, originals() == before


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_left_of_a_model_and_its_engine(stage: int, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    (((loaded, started, gone), same),) = run_ranks(through_an_engine, 1, path, stage)
    saving = {"save_pretrained", "push_to_hub", "get_peft_model_state_dict", "_setup_prompt_encoder"}
    saving |= {"inject_adapter", "enable_adapters"}
    saving |= {"check_deepspeed_zero3_enabled", "_collect_token_weights"}
    saving |= {"_maybe_expand_transformer_param_shape_or_error_", "_maybe_expand_lora_state_dict"}
    saving |= {"_get_in_out_features"}
    if stage == 3:
        assert loaded == saving | {
            "_configure_expert_parallel",
            "_get_trainable_parameter_groups",
            "_no_gather_coalesced",
        }
        assert started == loaded
    else:
        starts = {"__init__", "_broadcast_model", "_configure_optimizer"}
        assert loaded == started == saving | starts
    assert gone == set()
    assert same


def through_a_block(path: Path) -> tuple[list[set[str]], bool, int]:
    """What is replaced inside ``enabled``, after it with a model and without, and what waits for imports."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # transformers makes its own table once, and keeps it
    waiting = len(sys.meta_path)
    before = originals()
    found = []
    with zerostart.enabled(engine="fsdp2"):
        with zerostart.enabled():
            found.append(names_of(active()))
        model = AutoModelForCausalLM.from_pretrained(path)
    found.append(names_of(active()))
    del model
    gc.collect()
    found.append(names_of(active()))
    with pytest.raises(KeyError), zerostart.enabled():
        raise KeyError
    found.append(names_of(active()))
    return found, originals() == before, len(sys.meta_path) - waiting


@pytest.mark.slow
def test_nothing_is_left_of_a_block(checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    ((found, same, waiting),) = run_ranks(through_a_block, 1, path)
    inside, kept, gone, failed = found
    assert {"from_pretrained", "get_init_context", "_prepare_deepspeed"} <= inside
    assert "from_pretrained" not in kept
    assert "fsdp2_prepare_model" in kept
    assert gone == failed == set()
    assert same
    assert waiting == 0


# Which gradients a step has taken is known of models of ours, as long as they live, and of no others.


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def hooks() -> list[Any]:
    return list(torchs._global_optimizer_post_hooks.values())


def marks(model: nn.Module) -> set[str]:
    return {name for p in model.parameters() for name in vars(p.grad if p.grad is not None else p)}


def test_steps_of_others_are_not_looked_at() -> None:
    gc.collect()
    before = hooks()
    loaded, other = zerostart.load(None, model=nn.Linear(2, 2), progress=False), nn.Linear(2, 2)
    with zerostart.enabled():
        stepped(loaded)
        stepped(other)
        assert marks(loaded)
        assert not marks(other)
    later = nn.Linear(2, 2)
    stepped(later)
    assert not marks(later)
    assert len(hooks()) == len(before) + 1
    del loaded
    gc.collect()
    assert hooks() == before


def test_a_model_that_is_collected_within_a_step_leaves_the_other_hooks_alone() -> None:
    gc.collect()
    before = hooks()
    loaded: list[nn.Module] = [zerostart.load(None, model=nn.Linear(2, 2), progress=False)]

    def drop(*_: Any) -> None:
        loaded.clear()
        gc.collect()

    first = torchs.register_optimizer_step_post_hook(drop)
    calls: list[Any] = []
    last = torchs.register_optimizer_step_post_hook(lambda *_: calls.append(_))
    try:
        stepped(nn.Linear(2, 2))
    finally:
        first.remove()
        last.remove()
    assert len(calls) == 1
    assert not loaded
    with zerostart.enabled():
        pass
    assert hooks() == before


def test_nothing_remains_after_disable() -> None:
    gc.collect()
    before = hooks()
    with zerostart.enabled():
        other = nn.Linear(2, 2)
        stepped(other)
        assert not marks(other)
    assert hooks() == before
