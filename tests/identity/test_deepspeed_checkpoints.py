"""DeepSpeed saves and resumes zerostart's models like stock ones.

Each case trains two steps from either start and saves in every way. A third step follows, and again after
each checkpoint was loaded into a new engine of the other start.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerostart
from tests.parity import VOCABULARY, checkpoint
from tests.ranks import run_ranks

STARTS = ("ours", "stock")
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A DeepSpeed configuration, and the grouping of the parameters."""

    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    groups: str = "one"

    @property
    def config(self) -> dict[str, Any]:
        gather = {"stage3_gather_16bit_weights_on_model_save": True} if self.stage == 3 else {}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, **gather, **self.zero},
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **self.top,
        }


FAST = {f"stage {stage}": Case(stage, groups="two") for stage in (1, 2, 3)}
OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
SLOW = {
    "stage 1, BF16_Optimizer": Case(1, top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage 1, offloaded": Case(1, OFFLOADED, groups="two"),
    "stage 2, round robin": Case(2, {"round_robin_gradients": True}),
    "stage 2, frozen": Case(2, groups="frozen"),
    "stage 2 in fp32": Case(2, top={"bf16": {"enabled": False}}, groups="two"),
    "stage 3, offloaded": Case(3, {**OFFLOADED, "offload_param": {"device": "cpu"}}),
    "stage 3, frozen": Case(3, groups="frozen"),
    "stage 3, small sub-groups": Case(3, {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}),
}


def start_engine(path: Path, case: Case, start: str) -> Any:
    import deepspeed
    from transformers import AutoModelForCausalLM

    config = case.config
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    model: Any
    if start == "ours":
        # Stock masters of an fp32 checkpoint are rounded, too.
        options: dict[str, Any] = {"dtype": dtype, "fp32_masters": False, "progress": False}
        model = zerostart.load(path, zero_stage=case.stage, engine_config=config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if case.groups == "frozen":
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 3 > 0)
    trained: Any = [p for p in model.parameters() if p.requires_grad]
    if case.groups == "two":
        trained = [{"params": trained[1::2], "weight_decay": 0.1}, {"params": trained[::2], "lr": 2e-3}]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def step(engine: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(3, VOCABULARY, (1, 8), generator=generator)
    engine.train()
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()


def state_of(engine: Any) -> State:
    """Return weights, masters and moments of a rank."""
    import deepspeed

    values = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                values[name] = parameter.detach().clone()
        else:
            values[name] = parameter.detach().clone()
    for number, group in enumerate(engine.optimizer.optimizer.param_groups):
        for index, master in enumerate(group["params"]):
            values[f"master {number}.{index}"] = master.detach().clone()
            for key, value in engine.optimizer.optimizer.state[master].items():
                values[f"{key} {number}.{index}"] = torch.as_tensor(value).clone()
    return values


def differences(moment: str, actual: State, expected: State) -> list[str]:
    lines = [f"{moment}: {name} is missing or too much" for name in actual.keys() ^ expected.keys()]
    common = actual.keys() & expected.keys()
    return lines + [f"{moment}: {name}" for name in common if not torch.equal(actual[name], expected[name])]


def train_and_save(path: Path, root: Path, case: Case) -> tuple[list[str], State]:
    """Save from both starts; return differences and last state."""
    states, after = {}, {}
    for start in STARTS:
        engine = start_engine(path, case, start)
        for number in range(2):
            step(engine, number)
        states[start] = state_of(engine)
        engine.save_checkpoint(str(root / start), tag="two", client_state={"epoch": 3})
        assert engine.save_16bit_model(str(root / f"{start}-16"), "weights.bin")
        step(engine, 2)
        after[start] = state_of(engine)
        engine.destroy()
    lines = differences("two steps", states["ours"], states["stock"])
    return lines + differences("three steps", after["ours"], after["stock"]), after["stock"]


def resume(path: Path, folder: Path, case: Case, start: str) -> State:
    """Load into a new engine; return the next step's state."""
    engine = start_engine(path, case, start)
    loaded_path, client = engine.load_checkpoint(str(folder), tag="two")
    assert loaded_path is not None
    assert client["epoch"] == 3
    step(engine, 2)
    resumed_state = state_of(engine)
    engine.destroy()
    return resumed_state


def run(path: Path, root: Path, cases: dict[str, Case]) -> list[str]:
    lines = []
    for name, case in cases.items():
        folder = root / name.replace(" ", "-").replace(",", "")
        errors, after = train_and_save(path, folder, case)
        for start, other in (STARTS, STARTS[::-1]):
            errors += differences(f"{start} in {other}", resume(path, folder / start, case, other), after)
        weights = {s: torch.load(folder / f"{s}-16" / "weights.bin", weights_only=True) for s in STARTS}
        errors += differences("save_16bit_model", weights["ours"], weights["stock"])
        lines += [f"{name}: {line}" for line in errors]
    return lines


def test_checkpoints_equal_those_of_stock(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    assert run_ranks(run, 2, path, tmp_path / "saved", FAST) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_checkpoints_equal_those_of_stock_with_every_option(name: str, tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    assert run_ranks(run, 2, path, tmp_path / "saved", {name: SLOW[name]}) == [[], []]
