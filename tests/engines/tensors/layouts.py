"""Training of models whose experts and tensors DeepSpeed's ranks share, as traces to compare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests import file_aio
from tests.engines.tensors.sharing import SHARING, whole_gradients
from tests.parity import CLIP, Trace, batches, optimizer


@dataclass(frozen=True)
class Layout:
    """How a training is laid out: its stage, the ranks that share experts and tensors, other settings."""

    stage: int
    experts: int
    tensors: int = SHARING
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                **self.zero,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **self.config,
        }

    def engine(self, path: Path) -> Any:
        import deepspeed

        model = zerostart.load(
            path,
            zero_stage=self.stage,
            engine_config=self.settings(),
            expert_parallel=self.experts,
            tensor_parallel=self.tensors,
            progress=False,
        ).train()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=self.settings())
        return engine


#: Two steps of the first, the others of the second, by way of a training checkpoint.
Course = tuple[Path, Layout, Layout | None]


def trained(courses: list[Course], folder: Path) -> list[Trace]:
    if not file_aio.compiled():
        file_aio.install()
    found = []
    for number, (path, layout, then) in enumerate(courses):
        trace, engine = Trace(), layout.engine(path)
        parts, place = dist.get_world_size() // layout.tensors, dist.get_rank() // layout.tensors
        for step, batch in enumerate(batches(parts)):
            if then is not None and step == 2:
                zerostart.save_state(folder / f"{number}", engine)
                engine.destroy()
                engine = then.engine(path)
                zerostart.load_state(folder / f"{number}", engine)
            tokens = batch[place]
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            if not trace.gradients:
                trace.gradients = gradients(engine.module, layout.experts)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            trace.losses.append(total.item() / dist.get_world_size())
            trace.norms.append(float(engine.get_global_grad_norm()))
        trace.weights = {n: t for n, t in zerostart.full_tensors(engine, rank=None) if t is not None}
        zerostart.save(engine, folder / f"{number}-saved")
        engine.destroy()
        found.append(trace)
    return found


def gradients(model: torch.nn.Module, experts: int) -> dict[str, torch.Tensor]:
    """Whole gradients; experts put together by torch."""
    from deepspeed.utils import groups

    found = {}
    for name, gradient in whole_gradients(model):
        if ".experts." in name and experts > 1:
            group = groups._get_expert_parallel_group(f"ep_size_{experts}")
            parts = [torch.empty_like(gradient) for _ in range(experts)]
            dist.all_gather(parts, gradient.contiguous(), group=group)
            gradient = torch.cat(parts)
        found[name] = gradient
    return found
