"""Test LoRA on experts that ranks share: training as in one process, PEFT's format."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zerostart
from tests.identity.parallel import (
    ONLY_EXPERTS,
    Layout,
    Training,
    choose_parts,
    full_tensor,
    gather_gradients,
)
from tests.identity.test_parallel import MODELS
from tests.parity import STEPS, Trace, batches, checkpoint, differences, optimizer, train_in_one_process
from tests.ranks import run_ranks
from zerostart.errors import ConfigError, EngineError, ZerostartError

PARTS = "expert adapters"
#: Number of experts, and Mixtral's names of the projections.
EXPERTS, MIXTRAL = 8, ("w1", "w3", "w2")
FSDP2 = partial(Layout, "fsdp2")
#: Tolerance for rounding in small gradients, which AdamW enlarges. In the last factor B of ``gate_up_proj``,
#: plain PEFT in one process differs by 1.7e-5 between one micro-batch and two or four, and by up to 5.5e-5
#: from float64.
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
    """Train in one process with plain PEFT; return the first adapters and the trace."""
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
    """Train ``steps`` of a run, and save the adapters after its last step.

    All formats are saved. A run in two parts saves its training state in ``out``, and resumes from there.
    """
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
    if Path(path).name == "gpt_oss":
        with pytest.raises(ConfigError, match="no names for single experts in the checkpoint"):
            zerostart.save(training.engine, out / "experts", adapters_only=True, per_expert=True)
    else:
        zerostart.save(training.engine, out / "experts", adapters_only=True, per_expert=True)
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
    start, expected = run_ranks(train_alone, 1, path)[0]
    for actual_start, actual in run_ranks(train, world, path, layout, tmp_path, timeout=240):
        assert actual_start.keys() == start.keys()
        assert all(torch.equal(actual_start[name], tensor) for name, tensor in start.items())
        wrong = differences(actual, expected, TOLERANCE.get(kind, 1e-5))
        assert wrong == [], "\n".join(wrong)
    tokens = next(batches(1))[0]
    logits = []
    for name in ("adapter", "by PEFT"):
        plain = AutoModelForCausalLM.from_pretrained(path)
        adapted: Any = PeftModel.from_pretrained(plain, tmp_path / name).eval()
        assert adapters_of(adapted).keys() == expected.weights.keys()
        for key, tensor in adapters_of(adapted).items():
            assert torch.equal(tensor, actual.weights[key])
        logits.append(adapted(input_ids=tokens).logits)
    if kind != "gpt_oss":
        assert_one_by_one(tmp_path / "experts", tmp_path / "adapter", kind)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(merged(input_ids=tokens).logits, logits[0], atol=1e-5, rtol=1e-5)


def assert_one_by_one(experts: Path, fused: Path, kind: str) -> None:
    """Compare the factors of each expert with those that vLLM cuts from PEFT's.

    vLLM's function is ``_stack_moe_lora_weights``.
    """
    single = load_file(experts / "adapter_model.safetensors")
    stacked = load_file(fused / "adapter_model.safetensors")
    config = json.loads((experts / "adapter_config.json").read_text())
    projections = MIXTRAL if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    assert set(projections) < set(config["target_modules"])
    assert config["target_parameters"] is None
    layers = [name.partition(".experts.")[0] for name in stacked if ".experts.lora_A" in name]
    for layer in layers:
        gate_up_a, gate_up_b, down_a, down_b = (
            stacked.pop(f"{layer}.experts.{path}lora_{factor}.weight")
            for path in ("base_layer.", "")
            for factor in "AB"
        )
        a, down_a = (factor.reshape(EXPERTS, -1, factor.shape[1]) for factor in (gate_up_a, down_a))
        b, down_b = (factor.reshape(factor.shape[0], -1, EXPERTS) for factor in (gate_up_b, down_b))
        gate_b, up_b = b.chunk(2, dim=0)
        named = layer.replace("mlp", "block_sparse_moe") if kind == "mixtral" else layer
        for e in range(EXPERTS):
            for name, expected in zip(projections, ((a, gate_b), (a, up_b), (down_a, down_b)), strict=True):
                stem = f"{named}.experts.{e}.{name}"
                assert torch.equal(single.pop(f"{stem}.lora_A.weight"), expected[0][e])
                assert torch.equal(single.pop(f"{stem}.lora_B.weight"), expected[1][:, :, e])
    assert layers
    assert single.keys() == stacked.keys()


@pytest.mark.parametrize(
    ("world", "layout", "after", "then"),
    [
        (2, FSDP2(experts=2), 4, Layout(experts=2)),
        pytest.param(4, Layout(experts=2), 2, Layout(stage=1, experts=2), marks=pytest.mark.slow),
        pytest.param(2, Layout(stage=2, experts=2), 4, FSDP2(experts=4), marks=pytest.mark.slow),
        pytest.param(4, Layout(stage=2, experts=4), 2, FSDP2(), marks=pytest.mark.slow),
        pytest.param(4, FSDP2(experts=4), 2, Layout(experts=2), marks=pytest.mark.slow),
    ],
)
def test_adapters_resume_on_other_ranks(
    world: int, layout: Layout, after: int, then: Layout, folder: Path, tmp_path: Path
) -> None:
    path = checkpoint("mixtral", folder)
    _, expected = run_ranks(train_alone, 1, path)[0]
    _, first = run_ranks(train, world, path, layout, tmp_path, range(2), timeout=240)[0]
    for _, actual in run_ranks(train, after, path, then, tmp_path, range(2, STEPS), timeout=240):
        actual.losses, actual.norms = first.losses + actual.losses, first.norms + actual.norms
        wrong = differences(actual, expected)
        assert wrong == [], "\n".join(wrong)


class ChangedWeights(TorchDispatchMode):
    """Count the experts' weights with adapters added: in total, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[StorageWeakRef] = []
        self.total, self.peak = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.baddbmm.default and result.numel():
            self._storages.append(StorageWeakRef(result.untyped_storage()))
            self.total += 1
            self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self._storages)


def count_weights(path: Path, layout: Layout, checkpointing: dict[str, bool] | None) -> tuple[Any, Trace]:
    """Take a step, and count the experts' weights with adapters added.

    Returns the number in total, after the forward and at the peak, and the trace of the step.
    """
    training, trace, after_forward = Training(path, layout, PARTS), Trace(), list[int]()
    if checkpointing is not None:
        training.model.gradient_checkpointing_enable(checkpointing)
        training.model.enable_input_require_grads()
    with ChangedWeights() as weights:
        training.model.register_forward_hook(lambda *_: after_forward.append(weights.alive()))
        training.step(next(batches(1))[0], trace)
    training.close()
    return (weights.total, after_forward, weights.peak), trace


@pytest.mark.parametrize(
    ("checkpointing", "times"),
    [
        (None, 2),
        pytest.param({"use_reentrant": False}, 2, marks=pytest.mark.slow),
        pytest.param({"use_reentrant": True}, 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [FSDP2(experts=2), *(pytest.param(Layout(stage=s, experts=2), marks=pytest.mark.slow) for s in (2, 3))],
    ids=str,
)
def test_one_layers_weights_with_adapters_are_in_memory(
    layout: Layout, checkpointing: dict[str, bool] | None, times: int, folder: Path
) -> None:
    layers = 4
    path = checkpoint("qwen3_moe", folder, num_hidden_layers=layers, mlp_only_layers=[])
    _, expected = run_ranks(train_alone, 1, path)[0]
    for counts, actual in run_ranks(count_weights, 2, path, layout, checkpointing):
        # Two weights of each layer, in each forward and for the backward.
        assert counts == (2 * layers * times, [0], 2)
        assert actual.losses == pytest.approx(expected.losses[:1], rel=1e-5)
        assert actual.norms == pytest.approx(expected.norms[:1], rel=1e-5)


FROM_VALUES = r"init_lora_weights=True or 'gaussian'"
#: Options of LoRA in addition to ``target_parameters`` of experts, and the error; "" for options that work.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"use_rslora": True, "init_lora_weights": False}, ""),
    ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}, "init_lora_weights": False}, ""),
    ({"modules_to_save": ["lm_head"], "init_lora_weights": False, "bias": "lora_only"}, ""),
    *(({"modules_to_save": [name]}, rf"copy of [\w.]*{name}") for name in ("experts", "mlp", "layers.0")),
    *(({"init_lora_weights": name}, FROM_VALUES) for name in ("pissa", "olora", "orthogonal")),
    ({"use_dora": True}, "use_dora"),
    ({"lora_bias": True}, "lora_bias"),
]


def try_options(path: Path, layout: Layout | None) -> list[tuple[Any, Any]]:
    """Return adapters and logits with each of ``OPTIONS``, or the error's type and text."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    results = []
    for options, _ in OPTIONS:
        plain = AutoModelForCausalLM.from_pretrained(path) if layout is None else None
        loaded: Any = plain or zerostart.load(path, progress=False, **(layout or Layout()).options())
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(0)
        try:
            model = get_peft_model(
                loaded, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, **options)
            )
        except (AttributeError, TypeError, ValueError, ConfigError) as error:
            results.append((type(error), str(error)))
            continue
        adapters, logits = adapters_of(model), None
        if layout is None or layout.engine == "fsdp2" or layout.stage < 3:
            # Not at stage 3: hooks of `deepspeed.initialize` gather the weights for a forward.
            logits = model(input_ids=next(batches(1))[0]).logits.detach()
        results.append((adapters, logits))
    return results


@pytest.mark.parametrize(
    "layout",
    [FSDP2(experts=2), *(pytest.param(Layout(stage=s, experts=2), marks=pytest.mark.slow) for s in (2, 3))],
    ids=str,
)
def test_options_of_lora_work_or_are_refused(layout: Layout, folder: Path) -> None:
    path = checkpoint("qwen3_moe", folder)
    (alone,) = run_ranks(try_options, 1, path, None)
    for rank in run_ranks(try_options, 2, path, layout, timeout=240):
        for (options, message), (first, second), reference in zip(OPTIONS, rank, alone, strict=True):
            if message:
                assert first in (ConfigError, ValueError), options
                assert re.search(message, second), (options, second)
                continue
            adapters, logits = reference
            assert first.keys() == adapters.keys()
            assert all(torch.equal(first[name], adapters[name]) for name in first), options
            if second is not None:
                torch.testing.assert_close(second, logits, atol=1e-5, rtol=1e-5)


def open_adapter(path: Path, adapter: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """Open a saved adapter on shared experts, and check the errors of unsupported calls."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def load() -> Any:
        return zerostart.load(path, progress=False, **layout.options())

    for options, message in (
        ({"target_parameters": ["experts.down_proj"], "lora_dropout": 0.1}, "lora_dropout"),
        ({"target_parameters": ["experts.down_proj_bias"]}, "one vector for each expert"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            get_peft_model(load(), LoraConfig(**{"target_modules": [], **options}))
    config = LoraConfig(
        target_modules=[], target_parameters=["experts.down_proj"], lora_bias=dist.get_rank() == 1
    )
    with pytest.raises(ZerostartError, match=r"rank 1.*lora_bias"):  # on every rank
        get_peft_model(load(), config)
    config = LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
    with pytest.raises(ConfigError, match="use low_cpu_mem_usage=False"):
        get_peft_model(load(), config, low_cpu_mem_usage=True)
    model: Any = PeftModel.from_pretrained(load(), adapter)
    frozen = adapters_of(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model = PeftModel.from_pretrained(load(), adapter, is_trainable=True)
    assert all(torch.equal(frozen[name], tensor) for name, tensor in adapters_of(model).items())
    with pytest.raises(ConfigError, match=r"use zerostart.save\(model, path, merge_adapters=True\)"):
        model.merge_adapter()
    config.alpha_pattern = {"experts": 3}
    with pytest.raises(ConfigError, match="ignore rank_pattern and alpha_pattern"):
        zerostart.save(
            get_peft_model(load(), config), adapter / "experts", adapters_only=True, per_expert=True
        )
    with pytest.raises(ConfigError, match="per_expert=True is about adapters"):
        zerostart.save(model, adapter / "merged", merge_adapters=True, per_expert=True)
    return adapters_of(model)


@pytest.mark.parametrize(
    "layout",
    [FSDP2(experts=2), *(pytest.param(Layout(stage=s, experts=2), marks=pytest.mark.slow) for s in (2, 3))],
    ids=str,
)
def test_a_saved_adapter_is_opened_on_shared_experts(layout: Layout, folder: Path, tmp_path: Path) -> None:
    path = checkpoint("gpt_oss", folder)
    adapted: Any = pretrained(path)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape))
    adapted.save_pretrained(tmp_path)
    expected = adapters_of(adapted)
    for actual in run_ranks(open_adapter, 2, path, tmp_path, layout):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("experts", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_zero3_needs_a_gradient_before_adapted_experts(experts: int, folder: Path) -> None:
    path = checkpoint("qwen3_moe", folder)
    expected = run_ranks(losses_alone, 1, path)[0]
    for losses in run_ranks(losses_of_experts, 2, path, Layout(experts=experts)):
        assert losses == pytest.approx(expected, abs=1e-5)


def losses_alone(path: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    def fill(path: Path) -> nn.Module:
        model: nn.Module = choose_parts(AutoModelForCausalLM.from_pretrained(path), ONLY_EXPERTS)
        return model

    return train_in_one_process(path, fill).losses


def losses_of_experts(path: Path, layout: Layout) -> list[float]:
    training, trace = Training(path, layout, ONLY_EXPERTS), Trace()
    tokens = next(batches(1))[0]
    with pytest.raises(EngineError, match=r"call model.enable_input_require_grads\(\) before"):
        training.engine(input_ids=tokens, labels=tokens, use_cache=False)
    training.model.enable_input_require_grads()
    for batch in batches(1):
        training.step(batch[0], trace)
    training.close()
    return trace.losses


def gradients_in_bfloat16(path: Path, layout: Layout | None, change: bool = False) -> dict[str, torch.Tensor]:
    """Return the gradients of a second adapter.

    PEFT adds it frozen, and casts it to float32. With ``change``, factors of experts change between the
    forward and the backward.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dtype, tokens = torch.bfloat16, next(batches(1))[0]
    if layout is None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    else:
        loaded = zerostart.load(path, dtype=dtype, progress=False, **layout.options())
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model = get_peft_model(loaded, config)
    torch.manual_seed(0)
    model.add_adapter("second", config)
    model.set_adapter("second")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(parameter.dtype == torch.float32 for parameter in trained.values())
    if layout is None or layout.engine == "fsdp2":
        loss = model(input_ids=tokens, labels=tokens).loss
        with torch.no_grad():
            for name, parameter in trained.items() if change else ():
                if ".experts." in name:
                    parameter.mul_(30)
        loss.backward()
        return {name: full_tensor(parameter.grad) for name, parameter in trained.items()}
    import deepspeed

    settings = {**layout.config(), "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=settings)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    gradients = gather_gradients(model, layout.experts)
    engine.destroy()
    for name in gradients:
        if ".experts." in name and "lora_B" in name:  # its columns are ordered (r, expert)
            parts = [part.unflatten(1, (2, -1)) for part in gradients[name].chunk(layout.experts)]
            gradients[name] = torch.cat(parts, 2).flatten(1)
    return gradients


@pytest.mark.parametrize(
    ("world", "layout", "change"),
    [
        (2, FSDP2(experts=2), False),
        (2, FSDP2(experts=2), True),
        (2, Layout(stage=2, experts=2), False),
        pytest.param(4, FSDP2(experts=2), False, marks=pytest.mark.slow),
        pytest.param(2, Layout(experts=2), False, marks=pytest.mark.slow),
    ],
)
def test_float32_adapters_of_a_bfloat16_model_have_averaged_gradients(
    world: int, layout: Layout, change: bool, folder: Path
) -> None:
    path = checkpoint("qwen3_moe", folder)
    (expected,) = run_ranks(gradients_in_bfloat16, 1, path, None, change)
    for actual in run_ranks(gradients_in_bfloat16, world, path, layout, change):
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                actual[name].float(), gradient, atol=0.1 * gradient.abs().max().item(), rtol=0
            )


def second_derivatives(path: Path, layout: Layout | None) -> torch.Tensor:
    """Return the gradient of a penalty on gradients, as in adversarial training."""
    from transformers import AutoModelForCausalLM

    if layout is None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path)
    else:
        loaded = zerostart.load(path, progress=False, **layout.options())
    loaded.set_attn_implementation("eager")  # the default has no second derivatives
    model, tokens = choose_parts(loaded, PARTS), next(batches(1))[0]
    embedded = loaded.get_input_embeddings()(tokens).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=tokens).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), embedded)
    return second


def test_gradients_through_shared_experts_have_gradients(folder: Path) -> None:
    path = checkpoint("qwen3_moe", folder)
    (expected,) = run_ranks(second_derivatives, 1, path, None)
    for actual in run_ranks(second_derivatives, 2, path, Layout(stage=2, experts=2)):
        torch.testing.assert_close(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
