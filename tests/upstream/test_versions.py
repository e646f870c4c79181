"""Set unknown versions: fitting releases work with a warning, others lose a feature.

Each case runs in a fresh process, because checks are cached.
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
    """A plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).relu())
        return result


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


def run_every_verb(source: Path, kind: type[nn.Module] | None, engine: str, stage: int, out: Path) -> None:
    """Load, train a step, save, and save and load a training state."""
    loaded = zerostart.load(source, kind, engine=engine, zero_stage=stage, progress=False)
    wrapped, optimizer = loaded, torch.optim.SGD(loaded.parameters(), lr=0.1)
    if engine == "deepspeed":
        wrapped, optimizer = engine_of(loaded, stage)
    if kind is None:
        loss = wrapped(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.sum()
    else:
        loss = wrapped(torch.ones(2, 8)).sum()
    if engine == "deepspeed":
        wrapped.backward(loss)
        wrapped.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zerostart.save(wrapped, out / "model")
    zerostart.save_state(out / "state", wrapped, optimizer)
    zerostart.load_state(out / "state", wrapped, optimizer)


def set_versions(versions: Mapping[str, str]) -> None:
    for name, version in versions.items():
        importlib.import_module(name).__version__ = version


class RecordingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zerostart").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def check_newer_versions(versions: Mapping[str, str], plain: Path, pretrained: Path, out: Path) -> None:
    set_versions(versions)
    handler = RecordingHandler()
    run_every_verb(plain, Plain, "fsdp2", 3, out / "fsdp2")
    run_every_verb(plain, Plain, "deepspeed", 3, out / "zero3")
    run_every_verb(plain, Plain, "deepspeed", 1, out / "zero1")
    run_every_verb(pretrained, None, "fsdp2", 3, out / "pretrained")
    before, after = load_file(plain / "model.safetensors"), load_file(out / "fsdp2/model/model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    first = torch.distributed.get_rank() == 0
    (text,) = [text for text in handler.texts if "newer than" in text] or [""]
    assert bool(text) == first
    assert all(f"{name} {version} (known: >=" in text for name, version in versions.items()) or not first


@pytest.mark.slow
@pytest.mark.parametrize("versions", NEWER, ids=lambda versions: versions["torch"])
def test_newer_releases_that_fit_work_with_one_warning(
    versions: Mapping[str, str], plain: Path, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run_ranks(check_newer_versions, 2, versions, plain, checkpoints("qwen3"), tmp_path)


def check_older_version(source: Path) -> None:
    set_versions({"torch": "2.10.0"})
    with pytest.raises(
        UnsupportedVersionError, match=r"torch 2\.10\.0 is installed.* pip install 'torch>=2\.11,<"
    ):
        zerostart.load(source, Plain, engine="fsdp2", progress=False)


@pytest.mark.slow
def test_an_older_release_is_refused(plain: Path) -> None:
    run_ranks(check_older_version, 1, plain)


@dataclass
class Misfit:
    """An owner with a missing name, and the feature that is refused for it."""

    owner: str
    name: str
    refused: str | None = None


MISFITS = [
    Misfit("transformers.modeling_utils:PreTrainedModel", "save_pretrained", "save_pretrained"),
    Misfit("peft.tuners.tuners_utils:BaseTuner", "inject_adapter", "get_peft_model"),
    Misfit(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
        ".modules",
        "resize_token_embeddings",
    ),
    Misfit("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer", "__init__"),
    Misfit("transformers.initialization", "no_tie_weights", "transformers"),
]


def break_use(case: Misfit) -> guard.Use:
    """Make the use that begins with ``case.name`` misfit in this process."""
    (use, *_) = [
        use for use in guard.declared_uses() if use.owner == case.owner and use.names.startswith(case.name)
    ]
    original = guard.Use.find_misfit
    guard.Use.find_misfit = lambda self: "X is otherwise" if self == use else original(self)  # type: ignore[method-assign]
    return use


def check_refused(case: Misfit, plain: Path, pretrained: Path, out: Path) -> None:
    break_use(case)
    engines = [("fsdp2", 3), ("deepspeed", 3), ("deepspeed", 1)]
    for engine, stage in engines:
        run_every_verb(plain, Plain, engine, stage, out / f"{engine}{stage}")
    if case.refused == "transformers":
        with pytest.raises(UnsupportedVersionError, match="X is otherwise"):
            zerostart.load(pretrained, engine="fsdp2", progress=False)
        return
    for engine, stage in engines[:2]:
        run_every_verb(pretrained, None, engine, stage, out / f"pretrained-{engine}")
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
    [pytest.param(c, marks=[pytest.mark.slow] * (c.refused != "transformers"), id=c.name) for c in MISFITS],
)
def test_a_misfit_refuses_only_its_feature(
    case: Misfit, plain: Path, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run_ranks(check_refused, 2, case, plain, checkpoints("qwen3"), tmp_path)
