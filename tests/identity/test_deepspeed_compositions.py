"""Loaded models within other modules, inside ``zero.Init``, or refused."""

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests import file_aio
from tests.identity.snapshots import Snapshot, pretrained, same_bits
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TINY, TinyCheckpoints

KIND = "qwen3_moe_aligned"
BATCH, LENGTH = 2, 16


def configuration(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
    }


class Classifier(nn.Module):
    """A pretrained body with the user's head."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.head = nn.Linear(24, 3, bias=False)
        self.body = body() if callable(body) and not isinstance(body, nn.Module) else body
        with torch.no_grad():
            rows = torch.arange(72, dtype=torch.float32).view(3, 24) / 72
            if self.head.weight.numel():
                self.head.weight.copy_(rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body.model(input_ids=tokens).last_hidden_state.mean(1)
        return self.head(hidden).float().square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def path(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints(KIND)


@pytest.fixture(scope="module")
def reference(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("references") / "whole.pt"
    torch.save(Snapshot.of(pretrained(path, torch.float32)).state, file)
    return file


@pytest.mark.slow
def test_loaded_body_with_the_users_head(path: Path, reference: Path) -> None:
    ours = run_ranks(train_classifier, 2, path, reference)
    stock = run_ranks(train_classifier, 2, path, None)
    assert ours == stock


def train_classifier(path: Path, reference: Path | None) -> tuple[list[float], float]:
    config = configuration()
    if reference is None:
        body = stock_zero3(path, torch.float32, config)
    else:
        body = zerostart.load(path, engine_config=config, progress=False)
        compare(body, reference)
    return train_steps(Classifier(body), config, body, reference)


def train_steps(
    model: nn.Module, config: dict[str, Any], body: nn.Module, reference: Path | None
) -> tuple[list[float], float]:
    import deepspeed

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if reference is not None:
        compare(body, reference)
    losses = []
    vocabulary = int(TINY[KIND][1]["vocab_size"])
    tokens = torch.randint(3, vocabulary, (4, 2, 16), generator=torch.Generator().manual_seed(7))
    for _ in range(2):
        loss = engine(tokens[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, sum(float(whole.double().abs().sum()) for _, whole in gather_all(model))


@pytest.mark.slow
def test_load_inside_an_active_context(path: Path, reference: Path) -> None:
    inside = run_ranks(build_in_context, 2, path, reference)
    assert inside == run_ranks(train_classifier, 2, path, reference)


def build_in_context(path: Path, reference: Path) -> tuple[list[float], float]:
    import deepspeed

    config = configuration()
    complete = {**config, "train_batch_size": 2 * dist.get_world_size()}
    with deepspeed.zero.Init(config_dict_or_path=complete):
        model = Classifier(lambda: zerostart.load(path, engine_config=config, progress=False))
        assert nn.Linear(8, 8).weight.numel() == 0, "the context must be active again after the load"
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    with deepspeed.zero.GatheredParameters([model.head.weight], modifier_rank=0), torch.no_grad():
        model.head.weight.copy_(torch.arange(72, dtype=torch.float32).view(3, 24) / 72)
    compare(model.body, reference)
    return train_steps(model, config, model.body, reference)


@pytest.mark.slow
def test_second_load_reuses_hierarchical_groups(path: Path, reference: Path) -> None:
    run_ranks(load_twice, 4, path, reference)


def load_twice(path: Path, reference: Path) -> None:
    config = configuration(zero_hpz_partition_size=2)
    for _ in range(2):
        compare(zerostart.load(path, engine_config=config, progress=False), reference)
    larger_groups = copy.deepcopy(config)
    larger_groups["zero_optimization"]["zero_hpz_partition_size"] = 4
    with pytest.raises(zerostart.errors.ConfigError, match="groups of 2 ranks before"):
        zerostart.load(path, engine_config=larger_groups, progress=False)


def nvme_config(folder: Path, elements: int) -> dict[str, Any]:
    config = configuration()
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 5, "buffer_size": elements}
    config["zero_optimization"]["offload_param"] = {**nvme, "max_in_cpu": 0, "pin_memory": False}
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (True, "buffer_size"),
        pytest.param(
            False, "libaio", marks=pytest.mark.skipif(file_aio.is_compilable(), reason="libaio is installed")
        ),
    ],
)
def test_impossible_swapping_is_refused(
    compiled: bool, message: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Too small swap buffers, or libaio is not installed."""
    path = checkpoints("qwen3_wide")
    for outcome in rank_outcomes(load_swapped, 2, path, nvme_config(tmp_path, 2**18), compiled):
        assert outcome.error == "zerostart.errors.EngineError"
        assert message in outcome.message


def load_swapped(path: Path, config: dict[str, Any], compiled: bool) -> None:
    if compiled and not file_aio.is_compilable():
        file_aio.install()
    zerostart.load(path, engine_config=config, progress=False)


def compare(model: nn.Module, reference: Path) -> None:
    """Compare gathered parameters with the unsharded load."""
    expected = torch.load(reference)
    for name, whole in gather_all(model):
        assert same_bits(whole, expected[name]), name
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None
        assert same_bits(tensor, expected[name]), name


def gather_all(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    import deepspeed

    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.data.clone()


_configs: list[Any] = []  # transformers keeps only a weak reference


def stock_zero3(path: Path, dtype: torch.dtype, config: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    integrations = importlib.import_module("transformers.integrations")
    _configs.append(integrations.HfDeepSpeedConfig(config))
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)  # type: ignore[no-any-return]
