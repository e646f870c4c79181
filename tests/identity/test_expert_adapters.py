"""LoRA on experts that ranks share trains as in one process, and is saved in PEFT's format."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.identity.parallel import Layout, Training, choose_parts
from tests.identity.test_parallel import MODELS
from tests.parity import STEPS, Trace, batches, checkpoint, differences, train_in_one_process
from tests.ranks import run_ranks

PARTS = "expert adapters"
FSDP2 = partial(Layout, "fsdp2")
#: Five steps of AdamW turn the rounding of small gradients of DeepSeek's last factors into more.
TOLERANCE = {"deepseek_v3": 3e-5}
FAST = [("qwen3_moe", 2, FSDP2(experts=2)), ("gpt_oss", 2, Layout(experts=2, accumulation=2))]


def slow() -> Iterator[tuple[str, int, Layout]]:
    for stage in (1, 2, 3):
        yield "qwen3_moe", 2, Layout(stage=stage)
    yield "qwen3_moe", 2, FSDP2()
    for kind in MODELS:
        yield kind, 4, FSDP2(experts=2)
        yield kind, 4, FSDP2(experts=4, accumulation=1)
        for stage in (1, 2, 3):
            yield kind, 2, Layout(stage=stage, experts=2, accumulation=2)
            yield kind, 4, Layout(stage=stage, experts=4)
            yield kind, 4, Layout(stage=stage, experts=2)


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def pretrained(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = choose_parts(AutoModelForCausalLM.from_pretrained(path), PARTS)
    return model


def train_alone(path: Path) -> tuple[dict[str, torch.Tensor], Trace]:
    """One process with plain PEFT: the adapters before and after."""
    models: list[nn.Module] = []

    def fill(path: Path) -> nn.Module:
        models.append(pretrained(path))
        return models[0]

    start = adapters_of(pretrained(path))
    trace = train_in_one_process(path, fill)
    trace.weights = adapters_of(models[0])
    trace.gradients = {}
    return start, trace


def train(
    path: Path, layout: Layout, out: Path, steps: range = range(STEPS)
) -> tuple[dict[str, torch.Tensor], Trace]:
    """Train ``steps``, from the state in ``out`` and to it where they are not all; save the last."""
    training, trace = Training(path, layout, PARTS), Trace()
    start = adapters_of(training.model)
    if steps.start:
        zerostart.load_state(out / "state", *training.state())
    for batch in list(batches(1))[steps.start : steps.stop]:
        training.step(batch[0], trace)
    if steps.stop < STEPS:
        zerostart.save_state(out / "state", *training.state())
        training.close()
        return start, trace
    trace.weights, trace.gradients = adapters_of(training.model), {}
    zerostart.save(training.engine, out / "adapter", adapters_only=True)
    zerostart.save(training.engine, out / "merged", merge_adapters=True)
    training.model.save_pretrained(out / "by PEFT")
    training.close()
    return start, trace


@pytest.mark.parametrize(
    ("kind", "world", "layout"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow())]
)
def test_adapters_train_as_in_one_process(
    kind: str, world: int, layout: Layout, folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = checkpoint(kind, folder)
    start, wanted = run_ranks(train_alone, 1, path)[0]
    for found_start, found in run_ranks(train, world, path, layout, tmp_path, timeout=240):
        assert found_start.keys() == start.keys()
        assert all(torch.equal(found_start[name], tensor) for name, tensor in start.items())
        wrong = differences(found, wanted, TOLERANCE.get(kind, 1e-5))
        assert wrong == [], "\n".join(wrong)
    tokens = next(batches(1))[0]
    logits = []
    for name in ("adapter", "by PEFT"):
        plain = AutoModelForCausalLM.from_pretrained(path)
        adapted: Any = PeftModel.from_pretrained(plain, tmp_path / name).eval()
        assert adapters_of(adapted).keys() == wanted.weights.keys()
        for key, tensor in adapters_of(adapted).items():
            assert torch.equal(tensor, found.weights[key])
        logits.append(adapted(input_ids=tokens).logits)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(merged(input_ids=tokens).logits, logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("world", "layout", "after", "then"),
    [
        (2, FSDP2(experts=2), 4, Layout(experts=2)),
        pytest.param(4, Layout(experts=2), 2, Layout(stage=1, experts=2), marks=pytest.mark.slow),
        pytest.param(2, Layout(stage=2, experts=2), 4, FSDP2(experts=4), marks=pytest.mark.slow),
        pytest.param(4, Layout(stage=2, experts=4), 2, FSDP2(), marks=pytest.mark.slow),
    ],
)
def test_adapters_resume_on_other_ranks(
    world: int, layout: Layout, after: int, then: Layout, folder: Path, tmp_path: Path
) -> None:
    path = checkpoint("mixtral", folder)
    _, wanted = run_ranks(train_alone, 1, path)[0]
    _, first = run_ranks(train, world, path, layout, tmp_path, range(2), timeout=240)[0]
    for _, found in run_ranks(train, after, path, then, tmp_path, range(2, STEPS), timeout=240):
        found.losses, found.norms = first.losses + found.losses, first.norms + found.norms
        wrong = differences(found, wanted)
        assert wrong == [], "\n".join(wrong)
