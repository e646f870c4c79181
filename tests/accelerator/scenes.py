"""What ranks on an accelerator do beside the verbs: share sequences, be adopted, draw pictures."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerostart
from tests.accelerator.verbs import join, places
from tests.parity import CLIP, Trace, differences, optimizer
from tests.sequences import IGNORED, ROWS, alone, loss_of, part_of, shifted, steps

SIZE = 2


def shared_sequences(path: Path, engine: str, stage: int, kind: str) -> list[str]:
    """Where training on sequences that two ranks share differs from one process on the host."""
    device = join(None, False)
    wanted = alone(path, kind)
    found = (ring if engine == "fsdp2" else heads)(path, stage, kind, device)
    wanted.gradients.clear()
    return differences(found, wanted)


def heads(path: Path, stage: int, kind: str, device: torch.device) -> Trace:
    """DeepSpeed's Ulysses."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    rank, trace = dist.get_rank(), Trace()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    options: Any = {"engine_config": config, "sequence_parallel": SIZE, "progress": False}
    model = zerostart.load(path, engine="deepspeed", zero_stage=stage, **options)
    model.train()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", SIZE, ROWS)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config, mpu=mpu)
    for batch in steps(kind):
        predicted = (shifted(batch["labels"]) != IGNORED).sum().item()
        own = {key: value.to(device) for key, value in part_of(batch, rank, SIZE).items()}
        logits = engine(own["input_ids"], position_ids=own["position_ids"], use_cache=False).logits
        loss = loss_of(logits, own["labels"]) / predicted
        engine.backward(loss * (SIZE if stage == 3 else 1))
        engine.step()
        trace.losses.append(summed(loss))
        trace.norms.append(float(engine.get_global_grad_norm()))
    return ended(engine, trace)


def ring(path: Path, stage: int, kind: str, device: torch.device) -> Trace:
    """torch's ring attention."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    options: Any = {"zero_stage": stage, "sequence_parallel": SIZE, "progress": False}
    model: Any = zerostart.load(path, engine="fsdp2", **options)
    _attach_context_parallel_hooks(model)
    model.train()
    mesh = init_device_mesh(device.type, (SIZE,), mesh_dim_names=("cp",))
    optim, trace = optimizer(model), Trace()
    for batch in steps(kind):
        wanted = shifted(batch["labels"])
        predicted = (wanted != IGNORED).sum().item()
        own = [value.to(device) for value in (batch["input_ids"], batch["position_ids"], wanted)]
        with context_parallel(mesh, buffers=own, buffer_seq_dims=[1] * 3, no_restore_buffers=set(own)):
            logits = model(own[0], position_ids=own[1], use_cache=False).logits
            loss = loss_of(logits, own[2]) / predicted
            (loss * SIZE).backward()
        trace.losses.append(summed(loss))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        trace.norms.append(norm.full_tensor().item())  # type: ignore[attr-defined]  # a DTensor
        optim.step()
        optim.zero_grad()
    return ended(model, trace)


def summed(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def ended(model: Any, trace: Trace) -> Trace:
    trace.weights = {n: t for n, t in zerostart.full_tensors(model, rank=None) if t is not None}
    dist.destroy_process_group()
    return trace


def adopted(
    path: Path, out: Path, library: str, environment: dict[str, str], adopt: dict[str, Any] | None
) -> dict[str, Any]:
    """A script over the Trainer or accelerate; with ``adopt``, and the line that is added."""
    from tests.integrations import scripts

    torch.manual_seed(3)
    if library == "trainer":
        found = scripts.trainer_script(path, out, environment, {"ddp_backend": None}, adopt, {})
    else:
        adapter = library == "peft"
        found = scripts.accelerate_script(path, environment, adopt, "no", adapter=adapter, on_host=False)
    found.pop("report", None)
    return found


def drawn(path: Path, key: str, engine: str, stage: int, placement: dict[str, str]) -> float:
    """How far a pipeline's picture is from that of diffusers on the host."""
    import diffusers

    from tests.integrations.pipelines.tiny_pipelines import CALLS

    device = join(None, False)

    def picture(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        made = pipe(
            prompt="a cat sees the sea",
            num_inference_steps=2,
            output_type="pt",
            generator=generator,
            **CALLS[key],
        )
        return torch.as_tensor(made[0]).cpu()

    pipe = zerostart.load_pipeline(path, placement, engine, stage, progress=False)
    lying = {at for name in placement for _, at in places(getattr(pipe, name))}
    assert lying <= {device, torch.device("cpu")}, lying
    found = picture(pipe)
    wanted = picture(diffusers.DiffusionPipeline.from_pretrained(str(path)))
    dist.destroy_process_group()
    return float((found - wanted).abs().max() / wanted.abs().max())
