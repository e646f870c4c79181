"""Parts of a model that are trained where DeepSpeed's ranks share experts: as one process trains them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.parity import CLIP, LEARNING_RATE, batches, checkpoint
from tests.ranks import run_ranks
from zerostart.errors import EngineError

SLOW = pytest.mark.slow
Course = list[tuple[float, float]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3_moe", tmp_path_factory.mktemp("parts"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "stage", "world"),
    [
        ("adapters", 2, 2),
        *(
            pytest.param(parts, stage, world, marks=SLOW)
            for parts in ("adapters", "dense", "experts")
            for stage, world in ((1, 2), (2, 2), (3, 2), (2, 4))
            if (parts, stage, world) not in (("adapters", 2, 2), ("experts", 3, 2))
        ),
    ],
)
def test_parts_train_as_in_one_process(parts: str, stage: int, world: int, path: Path) -> None:
    wanted = run_ranks(alone, 1, path, parts)[0]
    for found in run_ranks(shared, world, path, parts, stage):
        assert [x for step in found for x in step] == pytest.approx([x for s in wanted for x in s], rel=1e-5)


def chosen(model: Any, parts: str) -> Any:
    """The model with what of it is trained."""
    if parts == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
        return get_peft_model(model, LoraConfig(**options, init_lora_weights="gaussian"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((".experts." in name) == (parts == "experts"))
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=1e-4)


def alone(path: Path, parts: str) -> Course:
    from transformers import AutoModelForCausalLM

    model = chosen(AutoModelForCausalLM.from_pretrained(path).train(), parts)
    optim, course = optimizer(model), []
    for batch in batches(1):
        loss = model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        course.append((loss.item(), norm.item()))
        optim.step()
        optim.zero_grad()
    return course


def configured(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }


def loaded(path: Path, stage: int, **more: Any) -> nn.Module:
    options: dict[str, Any] = {"engine": "deepspeed", "zero_stage": stage, "progress": False, **more}
    return zerostart.load(path, engine_config=configured(stage), **options).train()


def shared(path: Path, parts: str, stage: int) -> Course:
    import deepspeed

    model = chosen(loaded(path, stage, expert_parallel=2), parts)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=configured(stage))
    course = []
    for batch in batches(dist.get_world_size()):
        tokens = batch[dist.get_rank()]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        course.append((total.item() / dist.get_world_size(), float(engine.get_global_grad_norm())))
    return course


@pytest.mark.slow
def test_what_no_engine_can_train_is_refused(path: Path) -> None:
    run_ranks(refused, 2, path)


def refused(path: Path) -> None:
    import deepspeed

    for loading, other, experts in ((3, 2, 1), (3, 0, 1), (2, 3, 2), (1, 0, 2)):
        model = loaded(path, loading, expert_parallel=experts)
        said = f"loaded for DeepSpeed ZeRO-{loading}, but .* has ZeRO stage {other}; use the same stage"
        with pytest.raises(EngineError, match=said):
            deepspeed.initialize(model=model, optimizer=optimizer(model), config=configured(other))
    model = chosen(loaded(path, 3), "experts")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=configured(3))
    tokens = next(batches(2))[dist.get_rank()]
    with pytest.raises(EngineError, match=r"call model.enable_input_require_grads\(\) before"):
        engine(input_ids=tokens, labels=tokens, use_cache=False)
    model.enable_input_require_grads()  # type: ignore[operator]
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()
