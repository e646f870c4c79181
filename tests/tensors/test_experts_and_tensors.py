"""Experts and tensors that DeepSpeed's ranks share: each reads its part, and all train as one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharing import SHARING, whole_gradients

import zerostart
from parity import CLIP, Trace, alone, batches, checkpoint, differences, optimizer
from ranks import run_ranks

SLOW = pytest.mark.slow


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
        if ".experts." in name:
            group = groups._get_expert_parallel_group(f"ep_size_{experts}")
            parts = [torch.empty_like(gradient) for _ in range(experts)]
            dist.all_gather(parts, gradient.contiguous(), group=group)
            gradient = torch.cat(parts)
        found[name] = gradient
    return found


def check(courses: list[Course], world: int, folder: Path) -> None:
    """Compare each course on every rank with one process, and what is saved with what was trained."""
    from transformers import AutoModelForCausalLM

    for number, traces in enumerate(zip(*run_ranks(trained, world, courses, folder), strict=True)):
        path = courses[number][0]
        wanted = run_ranks(alone, 1, path)[0]
        for trace in traces:
            assert (courses[number], differences(trace, wanted)) == (courses[number], [])
        saved = AutoModelForCausalLM.from_pretrained(folder / f"{number}-saved").state_dict()
        assert saved.keys() == traces[0].weights.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in traces[0].weights.items())


def test_experts_and_tensors_train_as_one_process(tmp_path: Path) -> None:
    check([(checkpoint("qwen3_moe", tmp_path), Layout(3, 2), Layout(1, 4))], 4, tmp_path)


@SLOW
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage(kind: str, stage: int, tmp_path: Path) -> None:
    path = checkpoint(kind, tmp_path)
    check([(path, Layout(stage, 2), Layout(stage, 2)), (path, Layout(stage, 4), None)], 4, tmp_path)
    check([(path, Layout(stage, 2), Layout(3, 2))], 2, tmp_path / "two")


@SLOW
def test_more_ranks_share_tensors_than_experts(tmp_path: Path) -> None:
    path = checkpoint("deepseek_v3", tmp_path)
    check([(path, Layout(stage, 2, 4), None) for stage in (2, 3)], 4, tmp_path)


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    """Tensors whose rows are longer than what is read through between two of them."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "head_dim": 512, "num_hidden_layers": 1}
    path = checkpoint("mixtral", tmp_path, **sizes)
    experts = 8 * 3 * 8 * 1024 * 4
    tensors = (2 * 4 * 512 + 2 * 2 * 512 + 96) * 1024 * 4
    rest = (96 + 8 + 3) * 1024 * 4  # The embedding, the router and the norms.
    assert zerostart.plan(path, world_size=1).ranks[0].read_bytes == experts + tensors + rest
    options = {"expert_parallel": 4, "tensor_parallel": 2, "world_size": 4}
    for rank in zerostart.plan(path, zero_stage=2, **options).ranks:
        assert rank.read_bytes <= 1.01 * (experts / 4 + tensors / 2 + rest)
    for rank in zerostart.plan(path, zero_stage=3, **options).ranks:
        assert rank.read_bytes <= 1.01 * (experts + tensors + 2 * rest) / 4
