"""All combinations of ZeRO-3's placements: offload, secondary partitions, persistence.

The expectation is DeepSpeed's way for an existing module, ``zero.Init(module=...)``.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import zerostart
from tests import file_aio
from tests.identity.snapshots import same_bits
from tests.ranks import run_ranks

WIDTH = 747  # odd; half a layer in fp32 exceeds 1 MiB, the minimum to be swapped to NVMe
PLACEMENTS = ("none", "cpu", "nvme")
#: (Parameter placement, ranks of a secondary partition); DeepSpeed has none on NVMe.
GROUPS = [*((placement, 1) for placement in PLACEMENTS), ("none", 2), ("cpu", 2)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.small = nn.Linear(WIDTH, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return self.small(values).float().square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("matrix") / "model.safetensors"
    torch.manual_seed(3)
    save_file({name: p.detach().clone() for name, p in Layers().named_parameters()}, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("parameters", "secondary"), GROUPS)
def test_every_combination_trains_as_deepspeeds_own(
    parameters: str, secondary: int, path: Path, tmp_path: Path
) -> None:
    for results in run_ranks(train_both, 2, path, parameters, secondary, tmp_path, timeout=280):
        for case, (ours, theirs) in results.items():
            assert ours == theirs, case
            assert (ours[0] > 0) == (parameters == "nvme"), case
            assert (ours[1] > 0) == case.startswith("nvme"), case


def train_both(path: Path, parameters: str, secondary: int, folder: Path) -> dict[str, Any]:
    if not file_aio.is_compilable():
        file_aio.install()
    results = {}
    for optimizer, persistent, dtype in itertools.product(PLACEMENTS, (0, 2000), ("fp32", "bf16")):
        if dtype == "bf16" and "nvme" in (parameters, optimizer):
            continue  # too small to be swapped
        case = f"{optimizer}-{persistent}-{dtype}"
        settings = (parameters, optimizer, secondary, persistent, dtype)
        config = configuration(folder / case / "ours", *settings)
        ours = zerostart.load(
            path,
            model=Layers,
            dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
            fp32_masters=False,
            engine_config=config,
            progress=False,
        )
        results[case] = (
            train_and_measure(ours, config, path),
            train_and_measure(*stock(path, configuration(folder / case / "stock", *settings)), path),
        )
    return results


def stock(path: Path, config: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    import deepspeed

    model = Layers()
    model.load_state_dict(load_file(path))
    if config["bf16"]["enabled"]:
        model.bfloat16()
    complete = {**config, "train_batch_size": dist.get_world_size()}
    hierarchical = deepspeed.utils.groups._get_zero_param_intra_parallel_group()
    deepspeed.zero.Init(module=model, config_dict_or_path=complete, zero_param_parallel_group=hierarchical)
    return model, config


def configuration(
    folder: Path, parameters: str, optimizer: str, secondary: int, persistent: int, dtype: str
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 8, "pin_memory": False}
    host = {"device": "cpu", "pin_memory": False}
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": persistent,
        # With prefetching, DeepSpeed 0.19.8 requests a repeated partition twice.
        "stage3_prefetch_bucket_size": 0,
        "sub_group_size": WIDTH * WIDTH // 2,
        "zero_hpz_partition_size": secondary,
    }
    if parameters != "none":
        swapped = {**nvme, "buffer_size": WIDTH * WIDTH, "max_in_cpu": 0}
        zero["offload_param"] = swapped if parameters == "nvme" else host
    if optimizer != "none":
        zero["offload_optimizer"] = nvme if optimizer == "nvme" else host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
    }


def train_and_measure(model: nn.Module, config: dict[str, Any], path: Path) -> list[float]:
    """Return swapped counts, losses, norms and weight sums."""
    import deepspeed

    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    stored = load_file(path)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            assert same_bits(parameter.detach(), stored[name].to(dtype)), name
    partitions: Any = [p.ds_tensor for p in model.parameters()]
    swapped = sum(partition.final_location is not None for partition in partitions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(5)
    batches = torch.randn(2, dist.get_world_size(), 4, WIDTH, generator=generator).to(dtype)
    zero = engine.optimizer
    subgroups = sum(zero._swappable_optimizer_subgroup(n) for n in range(len(zero.fp16_groups)))
    numbers: list[float] = [swapped, subgroups]
    for batch in batches:
        loss = engine(batch[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        numbers += [loss.item(), float(engine.get_global_grad_norm())]
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            numbers.append(float(parameter.detach().double().abs().sum()))
    engine.destroy()
    return numbers
