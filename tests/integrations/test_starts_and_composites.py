"""Train models without a checkpoint, and models of several loads.

The reference is one process with the whole model and the batches of all ranks.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.scripts import SEQUENCES, Data, fsdp2, zero3
from tests.ranks import run_ranks
from tests.tiny import TINY, TinyCheckpoints
from zerostart.errors import ConfigError

SEED, STEPS = 13, 3
#: Epsilon larger than the rounding of very small gradients.
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}


def configuration() -> Any:
    from transformers import AutoConfig

    name, sizes = TINY["qwen3"]
    return AutoConfig.for_model(name, **sizes)


class Captioner(nn.Module):
    """An encoder from a checkpoint, a decoder from a configuration, and other layers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        from transformers import AutoModel, AutoModelForCausalLM

        self.encoder = AutoModel.from_pretrained(path)
        torch.manual_seed(SEED)
        self.decoder = AutoModelForCausalLM.from_config(configuration())
        self.bridge = nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, use_cache=False).last_hidden_state
        embedded = self.bridge(hidden) * self.scale
        loss: torch.Tensor = self.decoder(inputs_embeds=embedded, labels=labels, use_cache=False).loss
        return loss


def train_in_one_process(path: Path) -> dict[str, Any]:
    """Train the whole model on the batches of all ranks."""
    model = Captioner(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        batch = SEQUENCES[4 * step : 4 * step + 4]
        loss = model(batch, batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


def buffers(model: Captioner) -> set[int]:
    """Return the addresses of the encoder's parameters or partitions."""
    tensors = [getattr(p, "ds_tensor", p) for p in model.encoder.parameters()]
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def script(path: Path, environment: dict[str, str]) -> dict[str, Any]:
    os.environ.update(environment)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from torch.distributed.fsdp import FSDPModule

    import zerostart

    zerostart.enable(progress=False)
    wraps = "FSDP_VERSION" not in environment
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(kwargs_handlers=handlers) if wraps else Accelerator(cpu=True)
    captioner = Captioner(path).train()
    assert zerostart.report(captioner.decoder).initialised
    assert zerostart.report(captioner.encoder).read_bytes
    addresses = buffers(captioner) if wraps else set()
    optimizer = torch.optim.AdamW(captioner.parameters(), **ADAMW)
    loader: Any = torch.utils.data.DataLoader(Data(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(captioner, optimizer, loader)
    assert buffers(captioner) == addresses if wraps else isinstance(model, FSDPModule)
    losses, norms = [], []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(batch["input_ids"], batch["labels"])
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        norms.append(float(norm))
    weights = dict(zerostart.full_tensors(model, rank=None))
    return {"losses": losses, "norms": norms, "weights": weights}


def check_composite(path: Path, environment: dict[str, str]) -> None:
    expected = train_in_one_process(path)
    for result in run_ranks(script, 2, path, environment, process_group=False, timeout=200):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["weights"].keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_composite_trains_on_fsdp2(checkpoints: TinyCheckpoints) -> None:
    check_composite(checkpoints("qwen3"), fsdp2())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_composite_trains_on_deepspeed(stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    more = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000}
    check_composite(checkpoints("qwen3"), zero3(tmp_path, **more, zero_optimization=zero))


def check_starts(engine: str, stage: int) -> None:
    """Build models from configurations while zerostart is enabled."""
    from accelerate import init_empty_weights
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        BertConfig,
        EncoderDecoderConfig,
        EncoderDecoderModel,
    )
    from transformers.integrations import HfDeepSpeedConfig

    import zerostart

    def start() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(SEED)
        return AutoModelForCausalLM.from_config(configuration()), torch.rand(3)

    whole, next_random = start()
    expected = zerostart.digest(whole)
    with zerostart.enabled(engine=engine, zero_stage=stage, progress=False):
        model, random = start()
        assert zerostart.report(model).initialised
        assert zerostart.digest(model) == expected
        assert torch.equal(random, next_random)
        assert model.training
        # Parts of a model that transformers builds, and modules on meta, do not change.
        sizes = {"hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
        part = BertConfig(vocab_size=11, intermediate_size=8, **sizes)
        both = EncoderDecoderConfig.from_encoder_decoder_configs(part, part)
        with pytest.raises(zerostart.ZerostartError, match="was not loaded by zerostart"):
            zerostart.report(EncoderDecoderModel(config=both).encoder)
        for empty in (torch.device("meta"), init_empty_weights()):
            with empty:
                assert next(AutoModel.from_config(configuration()).parameters()).device.type == "meta"
        check_one_rank(start)
        assert zerostart.digest(start()[0]) == expected
    # transformers partitions new models while a ZeRO-3 configuration is active.
    keep = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    torch.manual_seed(SEED)
    loaded = zerostart.load(None, lambda: AutoModelForCausalLM.from_config(configuration()), progress=False)
    assert zerostart.digest(loaded) == expected
    del keep


def check_one_rank(start: Callable[[], object]) -> None:
    """Call ``start`` on one rank while the other waits for everyone."""
    from accelerate import PartialState

    state, start_time = PartialState(cpu=True), time.monotonic()
    if state.is_main_process:
        text = r"was called on this rank, but not on rank 1 \(on .*\), where one waits for everyone"
        with pytest.raises(ConfigError, match=text):
            start()
    state.wait_for_everyone()
    assert time.monotonic() - start_time < 20


@pytest.mark.slow
def test_models_without_a_checkpoint_start_sharded() -> None:
    run_ranks(check_starts, 2, "deepspeed", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 3), ("fsdp2", 0), ("deepspeed", 2)])
def test_models_without_a_checkpoint_start_on_any_engine(engine: str, stage: int) -> None:
    run_ranks(check_starts, 2, engine, stage)
