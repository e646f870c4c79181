"""Train, save and resume small models on several ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.parity import VOCABULARY

#: Rows of a batch (divisible by 1 to 4 ranks) and tokens of a row.
ROWS, LENGTH = 12, 8
RATE = 1e-2
#: Number of steps before and after the state is saved.
FIRST, MORE = 2, 3
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True)
class Case:
    """One training; ``top`` and ``zero`` extend DeepSpeed's config."""

    engine: str
    stage: int = 3
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    groups: str = "one"
    experts: int = 1
    tensors: int = 1
    bf16: bool = False
    lora: bool = False
    kind: str = "qwen3"
    accumulate: int = 1
    stock: bool = False  # not loaded by zerostart
    cpu_adam: bool = False  # DeepSpeed's optimizer for offloaded state
    options: dict[str, Any] = field(default_factory=dict)  # FSDP2's options

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "bf16": {"enabled": self.bf16},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **self.top,
        }


FSDP2, ZERO = Case("fsdp2"), Case("deepspeed")


def batch(step: int, part: int, parts: int, tensors: int) -> torch.Tensor:
    """Return this rank's rows of a batch or accumulated part.

    Ranks that share ``tensors`` get the same rows.
    """
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator).chunk(parts)[part]
    return tokens.chunk(dist.get_world_size() // tensors)[dist.get_rank() // tensors]


class Run:
    """A model loaded from the checkpoint, and its optimizer."""

    def __init__(self, path: Path, case: Case) -> None:
        self.case = case
        self.model: Any = self._load_stock(path) if case.stock else self._load(path)
        if case.lora:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(5)
            self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["q_proj"]))
            if case.engine == "fsdp2":
                from zerostart.engines.fsdp2.units import shard_added

                shard_added(self.model, {}, fp32=False)
        self.model.train()
        if case.engine == "fsdp2" and case.stage == 0:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer: Any = _optimizer(case)(list(_groups(self.model, case.groups)), lr=RATE, eps=1e-4)
        if case.engine == "deepspeed":
            import deepspeed

            self.model, *_ = deepspeed.initialize(
                model=self.model, optimizer=self.optimizer, config=case.config
            )

    def _load(self, path: Path) -> Any:
        case = self.case
        config: dict[str, Any] | None = case.config
        if case.engine == "fsdp2":
            config = {**case.options}
            if case.bf16:
                from torch.distributed.fsdp import MixedPrecisionPolicy

                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                config["mp_policy"] = policy
        return zerostart.load(
            path,
            engine=case.engine,
            zero_stage=case.stage,
            engine_config=config,
            expert_parallel=case.experts,
            tensor_parallel=case.tensors,
            dtype=torch.bfloat16 if case.bf16 else None,
            progress=False,
        )

    def _load_stock(self, path: Path) -> Any:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if self.case.engine == "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        return model

    def step(self, number: int, parts: range | None = None) -> list[float]:
        """Take a step, or ``parts`` of it; return losses."""
        count = self.case.accumulate
        losses = []
        for part in parts or range(count):
            tokens = batch(number, part, count, self.case.tensors)
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            if self.case.engine == "deepspeed":
                self.model.backward(loss)
                self.model.step()
            else:
                (loss / count).backward()
                if part == count - 1:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            mean = loss.detach().float()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        return losses

    @property
    def state(self) -> tuple[Any, Any]:
        """Return the arguments of ``save_state`` and ``load_state``."""
        return self.model, None if self.case.engine == "deepspeed" else self.optimizer

    def end(self) -> None:
        """Free the engine before the next run."""
        if self.case.engine == "deepspeed":
            self.model.destroy()


def _optimizer(case: Case) -> Any:
    if not case.cpu_adam:
        return torch.optim.AdamW
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return partial(DeepSpeedCPUAdam, weight_decay=1e-2)  # torch's default


def _groups(model: nn.Module, kind: str) -> Iterator[Any]:
    named = list(model.named_parameters())
    if kind == "frozen":
        for name, parameter in named:
            parameter.requires_grad_("norm" not in name)
    trainable = [(n, p) for n, p in named if p.requires_grad]
    if kind == "one":
        yield from (p for _, p in trainable)
        return
    # The groups' parameters alternate in the model; "reversed" reverses the groups.
    halves = [[p for n, p in trainable if ("proj" in n) == is_projection] for is_projection in (True, False)]
    settings = [{"weight_decay": 0.1, "lr": 2 * RATE}, {"weight_decay": 0.0}]
    for parameters, setting in list(zip(halves, settings, strict=True))[:: -1 if kind == "reversed" else 1]:
        yield {"params": parameters, **setting}


def train(
    path: Path,
    case: Case,
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
    at: int = -1,
    wait: bool = True,
) -> list[float]:
    """Train ``steps`` after an optional load; save before step ``at``."""
    run = Run(path, case)
    if load is not None:
        extra = zerostart.load_state(load, *run.state)
        assert extra["step"] == steps.start
        assert torch.equal(extra["tensor"], torch.arange(7.0) / 3)
    losses = []
    handle: Any = None
    for number in steps:
        if number == at:
            extra = {"step": number, "tensor": torch.arange(7.0) / 3}
            handle = zerostart.save_state(save, *run.state, extra=extra, wait=wait)
        losses += run.step(number)
    if handle is not None:
        handle.wait()
    run.end()
    return losses


def train_on(path: Path, case: Case, folder: Path) -> list[float]:
    """Save a state; return the losses after the save."""
    return train(path, case, range(FIRST + MORE), save=folder, at=FIRST)[FIRST * case.accumulate :]


def resume(path: Path, case: Case, folder: Path) -> list[float]:
    return train(path, case, range(FIRST, FIRST + MORE), load=folder)


def find_differences(paths: dict[str, Path], cases: dict[str, Case], folder: Path) -> list[str]:
    """Return the cases with different losses after a resume."""
    differences = []
    for number, (name, case) in enumerate(cases.items()):
        state = folder / str(number)
        expected = train_on(paths[case.kind], case, state)
        actual = resume(paths[case.kind], case, state)
        if actual != expected:
            differences.append(f"{name}: {actual} for {expected}")
    return differences
