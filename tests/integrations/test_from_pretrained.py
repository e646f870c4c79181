"""Compare ``from_pretrained`` with and without zerostart."""

import contextlib
import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.ranks import RankError, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import ConfigError
from zerostart.integrations.barrier import _Calls

ENGINES = ("deepspeed", "fsdp2")
Attributes = dict[str, Any]


def attributes_of(model: Any) -> Attributes:
    """Return attributes that a later library call may read."""
    generation = model.generation_config.to_dict() if model.can_generate() else None
    return {
        "class": model.config.__class__.__name__,
        "config": model.config.to_dict(),
        "dtype": model.config.dtype,
        "name": model.name_or_path,
        "generation": generation,
        "training": model.training,
        "conversions": [type(c).__name__ for c in getattr(model, "_weight_conversions", ())],
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
    }


def check_equal(ours: Attributes, stock: Attributes) -> None:
    for name, tensor in stock.pop("buffers").items():
        assert torch.equal(ours["buffers"][name], tensor), name
    ours.pop("buffers")
    assert ours == stock


def load_enabled(
    name: str, path: Path, settings: dict[str, Any], loading: dict[str, Any]
) -> tuple[Attributes, dict[str, torch.Tensor], Any]:
    """Return attributes, whole tensors and loading info of a model."""
    import transformers

    kind = getattr(transformers, name)
    with zerostart.enabled(**settings):
        model, info = kind.from_pretrained(path, output_loading_info=True, **loading)
    assert zerostart.report(model).engine == settings["engine"]
    return attributes_of(model), dict(zerostart.full_tensors(model, rank=None)), info


def compare(engine: str, name: str, path: Path, **loading: Any) -> Any:
    """Load on two ranks, and once without zerostart; return the loading info."""
    import transformers

    results = run_ranks(load_enabled, 2, name, path, {"engine": engine}, loading)
    stock, info = getattr(transformers, name).from_pretrained(path, output_loading_info=True, **loading)
    expected = dict(stock.state_dict())
    reference = attributes_of(stock)
    for ours, whole, loading_info in results:
        check_equal(ours, dict(reference))
        assert whole.keys() == expected.keys()
        missing = set(loading_info["missing_keys"]) | {key for key, *_ in loading_info["mismatched_keys"]}
        assert [n for n in expected if n not in missing and not torch.equal(whole[n], expected[n])] == []
        assert [n for n in expected if whole[n].dtype != expected[n].dtype] == []
        assert loading_info == info
    return info


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("deepspeed", "gpt_oss"),
        ("fsdp2", "qwen3"),
        pytest.param("deepspeed", "qwen3", marks=pytest.mark.slow),
        pytest.param("fsdp2", "gpt_oss", marks=pytest.mark.slow),
    ],
)
def test_a_load_equals_transformers(engine: str, name: str, checkpoints: TinyCheckpoints) -> None:
    info = compare(engine, "AutoModelForCausalLM", checkpoints(name))
    assert not any(info.values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_requested_dtype(engine: str, checkpoints: TinyCheckpoints) -> None:
    # flint keeps some modules in fp32.
    compare(engine, "AutoModelForCausalLM", checkpoints("flint"), dtype=torch.bfloat16)
    compare(engine, "AutoModelForCausalLM", checkpoints("qwen3"), torch_dtype="bfloat16")


@pytest.mark.slow
def test_missing_and_unexpected_weights(checkpoints: TinyCheckpoints) -> None:
    info = compare("deepspeed", "AutoModelForSequenceClassification", checkpoints("mixtral"))
    assert info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == {"lm_head.weight"}


REFUSED = {
    "device_map": {"": 0},
    "gguf_file": "weights.gguf",
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(
    name: str, checkpoints: TinyCheckpoints
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(
            load_enabled,
            2,
            "Qwen3ForCausalLM",
            checkpoints("qwen3"),
            {"engine": "fsdp2"},
            {name: REFUSED[name]},
        )
    assert {o.error for o in caught.value.outcomes} == {"zerostart.errors.ConfigError"}
    assert all(f"from_pretrained({name}=...) is not" in o.message for o in caught.value.outcomes)


def load_missing_on_one_rank(path: Path, missing: Path) -> str:
    import torch.distributed as dist
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(path)
    with zerostart.enabled(engine="fsdp2"), pytest.raises(zerostart.ZerostartError) as caught:
        Qwen3ForCausalLM.from_pretrained(path if dist.get_rank() == 0 else missing, config=config)
    return str(caught.value)


@pytest.mark.slow
def test_a_failure_on_one_rank_is_raised_on_all(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    (tmp_path / "missing").mkdir()
    messages = run_ranks(load_missing_on_one_rank, 2, checkpoints("qwen3"), tmp_path / "missing", timeout=60)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: OSError: ")


def save_gathered(path: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    with zerostart.enabled(engine="deepspeed", expert_parallel=2):
        model = AutoModelForCausalLM.from_pretrained(path)
    whole = {n: t for n, t in zerostart.full_tensors(model) if t is not None}
    if whole:
        model.save_pretrained(out, state_dict=whole)


@pytest.mark.slow
def test_expert_parallelism_does_not_change_the_saved_configuration(
    checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    path = checkpoints("mixtral")
    run_ranks(save_gathered, 2, path, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == json.loads((path / "config.json").read_text())
    weights, expected = load_file(tmp_path / "model.safetensors"), load_file(path / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def load_in_zero_init(path: Path) -> tuple[str, set[torch.dtype], bool]:
    import deepspeed
    from transformers import AutoModelForCausalLM

    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    deepspeed.init_distributed("gloo", dist_init_required=False)
    with zerostart.enabled(), deepspeed.zero.Init(config_dict_or_path=config):
        model = AutoModelForCausalLM.from_pretrained(path)
        inside = torch.nn.Linear(4, 4)  # a module created next to it is partitioned as usual
    whole = dict(zerostart.full_tensors(model, rank=None))
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(whole[n], expected[n]) for n in expected)
    return (
        zerostart.report(model).engine,
        {p.dtype for p in model.parameters()},
        hasattr(inside.weight, "ds_id"),
    )


@pytest.mark.slow
def test_an_open_zero_init_is_an_active_configuration(checkpoints: TinyCheckpoints) -> None:
    assert (
        run_ranks(load_in_zero_init, 2, checkpoints("qwen3")) == [("deepspeed", {torch.bfloat16}, True)] * 2
    )


def check_without_engine(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with zerostart.enabled():
        model = AutoModelForCausalLM.from_pretrained(path)
        with pytest.raises(zerostart.ZerostartError, match="was not loaded by zerostart"):
            zerostart.report(model)
    stderr = io.StringIO()
    os.environ["WORLD_SIZE"] = "2"  # under a launcher there is one notice
    with zerostart.enabled(), contextlib.redirect_stderr(stderr):
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(path)
    os.environ["WORLD_SIZE"] = "1"
    assert stderr.getvalue().count("was loaded whole by every rank") == 1
    no_engine = pytest.raises(zerostart.ZerostartError, match=r"expert_parallel=2.* no engine is set up")
    with zerostart.enabled(expert_parallel=2), no_engine:
        AutoModelForCausalLM.from_pretrained(path)


def test_a_load_without_engine_is_transformers_own(checkpoints: TinyCheckpoints) -> None:
    run_ranks(check_without_engine, 1, checkpoints("qwen3"))


def test_methods_are_restored() -> None:
    from transformers import PreTrainedModel

    names = ("from_pretrained", "get_init_context", "_load_pretrained_model", "_finalize_model_loading")
    before = [vars(PreTrainedModel)[name] for name in names]
    with zerostart.enabled(), zerostart.enabled(engine="fsdp2"):
        assert all(vars(PreTrainedModel)[n] is not b for n, b in zip(names, before, strict=True))
    assert [vars(PreTrainedModel)[name] for name in names] == before
    with pytest.raises(zerostart.ZerostartError, match="zerostart is not enabled"):
        zerostart.disable()
    with pytest.raises(zerostart.ZerostartError, match="engine='jax' is unknown"):
        zerostart.enable(engine="jax")


# Ranks compare their calls of ``from_pretrained`` by the store, which several groups may share in turn.


def _errors_of_two_ranks(store: dist.Store, calls: tuple[str, str]) -> list[Exception | None]:
    """Return the errors of two ranks of a new group, the first one late."""
    second_is_here = threading.Event()

    def rank(number: int) -> Exception | None:
        group = dist.PrefixStore("group", store)
        own = _Calls(group, number, 2, 10)
        if number == 0:
            second_is_here.wait(10)
        else:
            threading.Timer(0.05, second_is_here.set).start()
        try:
            own.gather(calls[number])
        except ConfigError as error:
            return error
        own.record_wait()
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_a_second_group_over_the_same_store_ignores_the_first_ones_loads() -> None:
    store = dist.HashStore()
    assert _errors_of_two_ranks(store, ("A.from_pretrained",) * 2) == [None, None]
    assert _errors_of_two_ranks(store, ("B.from_pretrained",) * 2) == [None, None]
    assert _errors_of_two_ranks(store, ("C.from_pretrained",) * 2) == [None, None]


def test_different_loads_are_an_error_in_any_group_over_the_store() -> None:
    store = dist.HashStore()
    assert _errors_of_two_ranks(store, ("A.from_pretrained",) * 2) == [None, None]
    for error in _errors_of_two_ranks(store, ("B.from_pretrained", "C.from_pretrained")):
        assert "something else on another" in str(error)
