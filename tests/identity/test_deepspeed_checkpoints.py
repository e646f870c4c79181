"""DeepSpeed's own ways to save and resume, over models that zerostart loaded: as with stock, to the bit.

Each case trains two steps from either start and saves in every way; a third step follows, and again after
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
    """One configuration of DeepSpeed, and how the client groups its parameters."""

    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    groups: str = "one"

    @property
    def config(self) -> dict[str, Any]:
        kept = {"stage3_gather_16bit_weights_on_model_save": True} if self.stage == 3 else {}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, **kept, **self.zero},
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


def started(path: Path, case: Case, start: str) -> Any:
    import deepspeed
    from transformers import AutoModelForCausalLM

    config = case.config
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    model: Any
    if start == "ours":
        # Of a checkpoint in fp32 the stock masters are those that were rounded.
        options: dict[str, Any] = {"dtype": dtype, "fp32_masters": False, "progress": False}
        model = zerostart.load(path, zero_stage=case.stage, engine_config=config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if case.groups == "frozen":
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 3 > 0)
    kept: Any = [p for p in model.parameters() if p.requires_grad]
    if case.groups == "two":
        kept = [{"params": kept[1::2], "weight_decay": 0.1}, {"params": kept[::2], "lr": 2e-3}]
    optimizer = torch.optim.AdamW(kept, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def step(engine: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(3, VOCABULARY, (1, 8), generator=generator)
    engine.train()
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()


def state(engine: Any) -> State:
    """Weights, masters and moments of a rank, wherever the engine keeps them."""
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach().clone()
    for number, group in enumerate(engine.optimizer.optimizer.param_groups):
        for place, master in enumerate(group["params"]):
            found[f"master {number}.{place}"] = master.detach().clone()
            for key, value in engine.optimizer.optimizer.state[master].items():
                found[f"{key} {number}.{place}"] = torch.as_tensor(value).clone()
    return found


def unlike(what: str, found: State, wanted: State) -> list[str]:
    lines = [f"{what}: {name} is missing or too much" for name in found.keys() ^ wanted.keys()]
    same = found.keys() & wanted.keys()
    return lines + [f"{what}: {name}" for name in same if not torch.equal(found[name], wanted[name])]


def saved(path: Path, root: Path, case: Case) -> tuple[list[str], State]:
    """Train and save from both starts. Returns what differs, and the state after the third step."""
    states, after = {}, {}
    for start in STARTS:
        engine = started(path, case, start)
        for number in range(2):
            step(engine, number)
        states[start] = state(engine)
        engine.save_checkpoint(str(root / start), tag="two", client_state={"epoch": 3})
        assert engine.save_16bit_model(str(root / f"{start}-16"), "weights.bin")
        step(engine, 2)
        after[start] = state(engine)
        engine.destroy()
    wrong = unlike("two steps", states["ours"], states["stock"])
    return wrong + unlike("three steps", after["ours"], after["stock"]), after["stock"]


def resumed(path: Path, folder: Path, case: Case, start: str) -> State:
    """What a new engine is after it has loaded a checkpoint of ``folder`` and done the third step."""
    engine = started(path, case, start)
    where, client = engine.load_checkpoint(str(folder), tag="two")
    assert where is not None
    assert client["epoch"] == 3
    step(engine, 2)
    found = state(engine)
    engine.destroy()
    return found


def run(path: Path, root: Path, cases: dict[str, Case]) -> list[str]:
    found = []
    for name, case in cases.items():
        folder = root / name.replace(" ", "-").replace(",", "")
        wrong, after = saved(path, folder, case)
        for start, other in (STARTS, STARTS[::-1]):
            wrong += unlike(f"{start} in {other}", resumed(path, folder / start, case, other), after)
        whole = {s: torch.load(folder / f"{s}-16" / "weights.bin", weights_only=True) for s in STARTS}
        wrong += unlike("save_16bit_model", whole["ours"], whole["stock"])
        found += [f"{name}: {line}" for line in wrong]
    return found


def test_checkpoints_are_those_of_stock(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    assert run_ranks(run, 2, path, tmp_path / "saved", FAST) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_checkpoints_are_those_of_stock_with_every_option(name: str, tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, tie_word_embeddings=False)
    assert run_ranks(run, 2, path, tmp_path / "saved", {name: SLOW[name]}) == [[], []]
