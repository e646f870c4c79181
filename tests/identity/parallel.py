"""Train with expert or tensor parallelism, and record a trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import zerostart
from tests.engines.tensors.sharing import whole_gradients
from tests.parity import CLIP, LENGTH, Trace, batches, optimizer

HOST = {"device": "cpu", "pin_memory": False}
#: DeepSpeed's settings by name: (`zero_optimization`, other keys).
SETTINGS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "parameters on the host": ({"offload_param": HOST}, {}),
    "states on the host": ({"offload_optimizer": HOST}, {}),
    "all on the host": (
        {"offload_param": HOST, "offload_optimizer": HOST, "stage3_param_persistence_threshold": 600},
        {},
    ),
    "some persistent": ({"stage3_param_persistence_threshold": 600}, {}),
    "all persistent": ({"stage3_param_persistence_threshold": 10**6}, {}),
    "reduced whole": ({"reduce_scatter": False}, {"gradient_predivide_factor": 3.0}),
    "scattered gradients": ({"contiguous_gradients": False}, {}),
    "overlapping": ({"overlap_comm": True}, {}),
    "in turn": ({"round_robin_gradients": True}, {}),
}


def last_dimension(parameter: nn.Parameter) -> Shard | None:
    """Shard all but vectors along the last dimension."""
    return Shard(-1) if parameter.dim() > 1 else None


def offload_options() -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


#: FSDP2's settings by name.
FSDP2_SETTINGS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "": dict,
    "offload": offload_options,
    "replicas": lambda: {"replicate": 2},
    "dimensions": lambda: {"shard_placement_fn": last_dimension},
    "all": lambda: {"replicate": 2, "shard_placement_fn": last_dimension, **offload_options()},
    "half": lambda: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
}


@dataclass(frozen=True)
class Layout:
    """Parallel layout: engine, axes, and name of further settings."""

    engine: str = "deepspeed"
    stage: int = 3
    experts: int = 1
    tensors: int = 1
    settings: str = ""
    accumulation: int = 1

    def config(self) -> dict[str, Any]:
        """Return the engine's configuration."""
        if self.engine == "fsdp2":
            return FSDP2_SETTINGS[self.settings]()
        zero, top = SETTINGS[self.settings]
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0, **zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **top,
        }

    def options(self) -> dict[str, Any]:
        """Return the arguments of `load` and `plan`."""
        return {
            "engine": self.engine,
            "zero_stage": self.stage,
            "engine_config": self.config(),
            "expert_parallel": self.experts,
            "tensor_parallel": self.tensors,
        }


class Training:
    """One rank's part of a training run."""

    def __init__(self, path: Path, layout: Layout, parts: str = "") -> None:
        self.layout = layout
        model: Any = zerostart.load(path, progress=False, **layout.options()).train()
        plan = zerostart.plan(path, world_size=dist.get_world_size(), **layout.options())
        assert plan.ranks[dist.get_rank()].read_bytes == zerostart.report(model).read_bytes
        self.model = choose_parts(model, parts)
        self.optimizer = optimizer(self.model)
        self.engine: Any = self.model
        if layout.engine == "deepspeed":
            import deepspeed

            self.engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=self.optimizer, config=layout.config()
            )

    def step(self, batch: torch.Tensor, trace: Trace) -> None:
        """Train on this rank's rows of ``batch`` [ROWS, LENGTH]."""
        layout = self.layout
        groups, index = dist.get_world_size() // layout.tensors, dist.get_rank() // layout.tensors
        rows = batch.view(groups * layout.accumulation, -1, LENGTH)
        total = torch.zeros(())
        for part in range(layout.accumulation):
            tokens, last = rows[index * layout.accumulation + part], part == layout.accumulation - 1
            total += self._accumulate(tokens, last, trace)
        dist.all_reduce(total)
        trace.losses.append(total.item() / dist.get_world_size())
        if layout.engine == "deepspeed":
            trace.norms.append(float(self.engine.get_global_grad_norm()))
            return
        trace.norms.append(clip_gradients(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _accumulate(self, tokens: torch.Tensor, last: bool, trace: Trace) -> torch.Tensor:
        deepspeed = self.layout.engine == "deepspeed"
        if not deepspeed:
            self.engine.set_requires_gradient_sync(last)
        loss = self.engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        part: torch.Tensor = loss / self.layout.accumulation
        if deepspeed:
            self.engine.backward(loss)
        else:
            part.backward()
        if last and not trace.gradients and self.layout.settings != "in turn":
            trace.gradients = (
                gather_gradients(self.model, self.layout.experts)
                if deepspeed
                else {n: full_tensor(p.grad) for n, p in self.model.named_parameters() if p.requires_grad}
            )
        if deepspeed:
            self.engine.step()
        return part.detach()

    def state(self) -> tuple[Any, ...]:
        """Return the arguments of `save_state` and `load_state`."""
        return (self.engine,) if self.layout.engine == "deepspeed" else (self.model, self.optimizer)

    def close(self) -> None:
        if self.layout.engine == "deepspeed":
            self.engine.destroy()


def train(path: Path, layout: Layout, second: Layout | None, folder: Path | None, parts: str = "") -> Trace:
    """Train five steps, the last three in layout ``second``."""
    trace, training = Trace(), Training(path, layout, parts)
    for number, batch in enumerate(batches(1)):
        if second is not None and folder is not None and number == 2:
            zerostart.save_state(folder / "state", *training.state())
            training.close()
            training = Training(path, second)
            zerostart.load_state(folder / "state", *training.state())
        training.step(batch[0], trace)
    if not parts:
        trace.weights = {n: t for n, t in zerostart.full_tensors(training.engine, rank=None) if t is not None}
    if folder is not None:
        zerostart.save(training.engine, folder / "saved")
    training.close()
    return trace


#: Adapters of experts, and no others.
ONLY_EXPERTS = "only expert adapters"


def choose_parts(model: Any, parts: str) -> Any:
    """Train only "adapters", "expert adapters" (with others), "experts", "dense", or "" for everything."""
    if "adapters" in parts:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj", "q_b_proj", "o_proj"]}
        if parts == ONLY_EXPERTS:
            options["target_modules"] = []
        if "expert adapters" in parts:
            options["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return get_peft_model(model, LoraConfig(**options, init_lora_weights="gaussian"))
    if parts:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_((".experts." in name) == (parts == "experts"))
    return model


def gather_gradients(model: nn.Module, experts: int) -> dict[str, torch.Tensor]:
    """Gather gradients by DeepSpeed's functions, experts by torch."""
    from deepspeed.utils import groups

    by_name = {}
    for name, gradient in whole_gradients(model):
        if ".experts." in name and experts > 1:
            group = groups._get_expert_parallel_group(f"ep_size_{experts}")
            parts = [torch.empty_like(gradient) for _ in range(experts)]
            dist.all_gather(parts, gradient.contiguous(), group=group)
            gradient = torch.cat(parts)
        by_name[name] = gradient
    return by_name


def full_tensor(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def clip_gradients(model: nn.Module) -> float:
    """Clip by one norm over all meshes, as accelerate does."""
    meshes: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            meshes.setdefault(mesh, []).append(parameter)
    norms = [full_tensor(torch.nn.utils.get_total_norm([p.grad for p in group])) for group in meshes.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in meshes.values():
        torch._foreach_mul_([p.grad for p in group], min(1.0, CLIP / (total.item() + 1e-6)))
    return total.item()
