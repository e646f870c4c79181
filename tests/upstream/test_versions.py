"""Versions that are not known, set by hand: what fits is served, what does not refuses its feature.

Each case is a process of its own: what fitted once is not looked at again.
"""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import guard, patches

NEWER = [
    {"torch": "2.16.0", "transformers": "5.25.0"},
    {"torch": "2.17.1", "transformers": "6.0.0", "deepspeed": "0.21.0"},
]


class Plain(nn.Module):
    """No model of any library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x).relu())
        return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    save_file(Plain().state_dict(), path / "model.safetensors")
    return path


def engine_of(model: nn.Module, stage: int) -> tuple[Any, Any]:
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], None


def through(source: Path, kind: type[nn.Module] | None, engine: str, stage: int, out: Path) -> None:
    """Load, train a step, save, and save and load a training state."""
    loaded = zerostart.load(source, kind, engine=engine, zero_stage=stage, progress=False)
    trained, optimizer = loaded, torch.optim.SGD(loaded.parameters(), lr=0.1)
    if engine == "deepspeed":
        trained, optimizer = engine_of(loaded, stage)
    if kind is None:
        loss = trained(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.sum()
    else:
        loss = trained(torch.ones(2, 8)).sum()
    if engine == "deepspeed":
        trained.backward(loss)
        trained.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zerostart.save(trained, out / "model")
    zerostart.save_state(out / "state", trained, optimizer)
    zerostart.load_state(out / "state", trained, optimizer)


def set_versions(versions: Mapping[str, str]) -> None:
    for name, version in versions.items():
        importlib.import_module(name).__version__ = version


class Told(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zerostart").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def serve(versions: Mapping[str, str], plain: Path, pretrained: Path, out: Path) -> None:
    set_versions(versions)
    told = Told()
    through(plain, Plain, "fsdp2", 3, out / "fsdp2")
    through(plain, Plain, "deepspeed", 3, out / "zero3")
    through(plain, Plain, "deepspeed", 1, out / "zero1")
    through(pretrained, None, "fsdp2", 3, out / "pretrained")
    before, after = load_file(plain / "model.safetensors"), load_file(out / "fsdp2/model/model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    first = torch.distributed.get_rank() == 0
    (text,) = [text for text in told.texts if "newer than" in text] or [""]
    assert bool(text) == first
    assert all(f"{name} {version} (known: >=" in text for name, version in versions.items()) or not first


@pytest.mark.slow
@pytest.mark.parametrize("versions", NEWER, ids=lambda versions: versions["torch"])
def test_newer_releases_that_fit_are_served_with_one_warning(
    versions: Mapping[str, str], plain: Path, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run_ranks(serve, 2, versions, plain, checkpoints("qwen3"), tmp_path)


def refuse(source: Path) -> None:
    set_versions({"torch": "2.10.0"})
    with pytest.raises(
        UnsupportedVersionError, match=r"torch 2\.10\.0 is installed.* pip install 'torch>=2\.11,<"
    ):
        zerostart.load(source, Plain, engine="fsdp2", progress=False)


@pytest.mark.slow
def test_an_older_release_is_refused(plain: Path) -> None:
    run_ranks(refuse, 1, plain)


@dataclass
class Broken:
    """The owner whose names are missing, and what is refused for that, if anything."""

    owner: str
    name: str
    refused: str | None = None


BROKEN = [
    Broken("transformers.modeling_utils:PreTrainedModel", "save_pretrained", "save_pretrained"),
    Broken("peft.tuners.tuners_utils:BaseTuner", "inject_adapter", "get_peft_model"),
    Broken(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        ".modules",
        "resize_token_embeddings",
    ),
    Broken("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer", "__init__"),
    Broken("transformers.initialization", "no_tie_weights", "transformers"),
]


def break_one(case: Broken) -> guard.Use:
    """Have the use that names ``case.name`` first misfit in this process."""
    (use, *_) = [
        use for use in guard.declared_uses() if use.owner == case.owner and use.names.startswith(case.name)
    ]
    original = guard.Use.misfit
    guard.Use.misfit = lambda self: "X is otherwise" if self == use else original(self)  # type: ignore[method-assign]
    return use


def refused_alone(case: Broken, plain: Path, pretrained: Path, out: Path) -> None:
    break_one(case)
    engines = [("fsdp2", 3), ("deepspeed", 3), ("deepspeed", 1)]
    for engine, stage in engines:
        through(plain, Plain, engine, stage, out / f"{engine}{stage}")
    if case.refused == "transformers":
        with pytest.raises(UnsupportedVersionError, match="X is otherwise"):
            zerostart.load(pretrained, engine="fsdp2", progress=False)
        return
    for engine, stage in engines[:2]:
        through(pretrained, None, engine, stage, out / f"pretrained-{engine}")
    loaded = zerostart.load(plain, Plain, engine="deepspeed", progress=False)
    name = f"{case.owner.rpartition(':')[2]}.{case.name}"
    assert case.refused is not None or name not in patches.active()
    del loaded
    if case.refused is not None:
        model: Any = zerostart.load(pretrained, engine="fsdp2", progress=False)
        with pytest.raises(UnsupportedVersionError, match=r"X is otherwise .*pip install '\w+>="):
            REFUSED[case.refused](model, pretrained)


def adapt(model: Any, _: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


REFUSED = {
    "save_pretrained": lambda model, path: model.save_pretrained(path / "again"),
    "get_peft_model": adapt,
    "resize_token_embeddings": lambda model, _: model.resize_token_embeddings(77),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c.refused != "transformers"), id=c.name) for c in BROKEN],
)
def test_what_does_not_fit_refuses_its_feature_alone(
    case: Broken, plain: Path, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run_ranks(refused_alone, 2, case, plain, checkpoints("qwen3"), tmp_path)
