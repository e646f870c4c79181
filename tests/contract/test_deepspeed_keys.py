"""Every key of a DeepSpeed configuration has a row in the docs, and what is refused there is refused."""

import fnmatch
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zerostart
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.engines.deepspeed.settings import REMOVED, TOP_LEVEL, DeepSpeedSettings
from zerostart.errors import ConfigError
from zerostart.integrations.engine_setup import EngineSetup

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed-config.md"
STATES = {"obeyed", "no effect", "refused"}


def rows() -> dict[str, str]:
    """What the page says of each key, or pattern of keys."""
    found = {}
    prefix = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            prefix = "zero_optimization." if "zero_optimization" in line else ""
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            found |= {prefix + key: cells[1] for key in re.findall(r"`([^`]+)`", cells[0])}
    return found


class Recorded(dict[str, Any]):
    """A configuration that notes which keys it is asked for."""

    def __init__(self, given: dict[str, Any], seen: set[str]) -> None:
        super().__init__(given)
        self.seen = seen

    def __copy__(self) -> "Recorded":
        return self

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self


def top_level() -> set[str]:
    """The keys that DeepSpeed asks a configuration for, and those that ``initialize`` looks at besides."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    DeepSpeedConfig(Recorded({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}, seen))
    source = inspect.getsource(deepspeed.initialize)
    pairs = re.findall(r'"(\w+)" in config\b|config(?:\.get\(|\[)"(\w+)"', source)
    return seen | {name for pair in pairs for name in pair if name}


def nested() -> Iterator[str]:
    """The keys of the sections that have a schema."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.runtime import constants
    from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS, HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models: dict[str, Any] = {
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "compile": CompileConfig,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
    }
    for section, model in models.items():
        keys = (f"{section}.{field.alias or name}" for name, field in model.model_fields.items())
        yield from (key for key in keys if key not in models)
    seen: set[str] = set()
    parse_autoep_config(Recorded({"enabled": False}, seen))
    yield from (f"expert_parallel.{key}" for key in seen)
    yield from (f"aio.{key}" for key in AIO_DEFAULT_DICT)
    yield from (f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)
    for name in ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES"):
        yield f"data_types.{getattr(constants, name)}"


def without_row(keys: set[str], page: dict[str, str]) -> list[str]:
    return sorted(key for key in keys if not any(fnmatch.fnmatchcase(key, row) for row in page))


def test_every_key_has_a_row_and_every_row_a_key() -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS

    page, top, inner = rows(), top_level(), set(nested())
    assert set(page.values()) == STATES
    sections = {key for key in top if any(row.startswith(f"{key}.") for row in page)} | {"zero_optimization"}
    assert without_row((top - sections) | inner, page) == []
    known = top | {"ep_plan", "tp_plan"} | inner | {f"{key}." for key in sections}
    known |= {f"{key.rpartition('.')[0]}." for key in inner}
    assert [row for row in page if not any(fnmatch.fnmatchcase(key, row) for key in known)] == []
    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) == REMOVED
    assert top | {"ep_plan", "tp_plan"} == TOP_LEVEL | REMOVED


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensors": (
        {"tensor_parallel": {"autotp_size": 3}},
        "tensor_parallel=3 does not divide the 2 ranks",
    ),
    "AutoEP": ({"expert_parallel": {"enabled": True}}, "autoep_size=1, so that no ranks share experts"),
    "another router": (
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "top_k": 1}},
        "top_k=1, but the model itself decides how its experts run",
    ),
    "quantised": (
        {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}},
        "quantized_initialization",
    ),
    "removed": ({"amp": {"enabled": True}}, "'amp', which DeepSpeed has removed"),
    "LoCo": ({"zero_optimization": {"zeropp_loco_param": {}}}, "zeropp_loco_param asks for LoCo"),
    "a slip": ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
    "no section": ({"tensor_parallel": 2}, r"\['tensor_parallel'\] is not a dict"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "one rank": {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}},
    "switched off": {"expert_parallel": {"enabled": False, "autoep_size": 2}},
    "a note": {"owner": "someone", "comment": "of the user's own"},
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_refuses_what_no_load_serves(case: str, stage: int, checkpoints: TinyCheckpoints) -> None:
    config, text = REFUSED[case]
    with pytest.raises(zerostart.ZerostartError, match=text):
        zerostart.plan(checkpoints("qwen3"), world_size=2, zero_stage=stage, engine_config=config)


def refused_by_loads(path: Path) -> None:
    for config, text in REFUSED.values():
        for stage in (0, 2, 3):
            with pytest.raises(zerostart.ZerostartError, match=text):
                zerostart.load(path, zero_stage=stage, engine_config=config, progress=False)
    before = {"use_data_before_expert_parallelism": True}
    with pytest.raises(zerostart.ZerostartError, match="expert_parallel=2 with use_data_before_expert"):
        zerostart.load(path, expert_parallel=2, engine_config=before, progress=False)
    with pytest.raises(zerostart.ZerostartError, match="sequence_parallel_size=2, but the load for"):
        zerostart.load(path, engine_config={"sequence_parallel_size": 2}, progress=False)
    for stage in (1, 2, 3):
        unknown = {"zero_optimization": {"stage": stage, "round_robin_gradient": True}}
        with pytest.raises(zerostart.ZerostartError, match=r"(?s)DeepSpeed rejects.*round_robin_gradient"):
            zerostart.load(path, zero_stage=stage, engine_config=unknown, progress=False)
        for config in ACCEPTED.values():
            zerostart.load(path, zero_stage=stage, engine_config=config, progress=False)


def test_loads_refuse_it_on_every_rank(checkpoints: TinyCheckpoints) -> None:
    run_ranks(refused_by_loads, 2, checkpoints("mixtral"))


# A wrong value of a DeepSpeed configuration is the same error wherever the configuration is read.


WRONG = {
    "a size of groups": ({"zero_hpz_partition_size": "two"}, "zero_hpz_partition_size='two'"),
    "a bucket": ({"reduce_bucket_size": -1}, "reduce_bucket_size=-1"),
    "an offload that is no section": ({"offload_optimizer": "cpu"}, "'offload_optimizer'.* is not a dict"),
    "a device": ({"offload_optimizer": {"device": "disk"}}, "offload_optimizer to 'disk' is unknown"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "model.safetensors"
    save_file({"weight": torch.randn(4, 4), "bias": torch.zeros(4)}, file)
    return file


@pytest.mark.parametrize(("zero", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_wrong_value_is_told_alike(path: Path, stage: int, zero: dict[str, Any], message: str) -> None:
    config = {"zero_optimization": zero}
    model = torch.nn.Linear(4, 4, device="meta")
    given: dict[str, Any] = {"model": model, "zero_stage": stage, "engine_config": config}
    with pytest.raises(ConfigError, match=message):
        zerostart.plan(path, 2, **given)
    with pytest.raises(ConfigError, match=message):
        zerostart.load(path, progress=False, **given)
    with pytest.raises(ConfigError, match=message):
        EngineSetup.of("deepspeed", stage, config)


def test_what_a_trainer_fills_in_is_left_to_it(path: Path) -> None:
    zero = dict.fromkeys(("stage", "zero_hpz_partition_size", "reduce_bucket_size", "sub_group_size"), "auto")
    config = {"zero_optimization": zero}
    assert DeepSpeedSettings.of(config) == DeepSpeedSettings.of({})
    model = torch.nn.Linear(4, 4, device="meta")
    loaded = zerostart.load(path, model=model, engine_config=config, progress=False)
    assert dict(zerostart.full_tensors(loaded)).keys() == {"weight", "bias"}
