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
        seen = self.encoder(input_ids=input_ids, use_cache=False).last_hidden_state
        embedded = self.bridge(seen) * self.scale
        loss: torch.Tensor = self.decoder(inputs_embeds=embedded, labels=labels, use_cache=False).loss
        return loss


def alone(path: Path) -> dict[str, Any]:
    """One process, which has all of it."""
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
    """Return the addresses of the encoder's parameters, or of their partitions."""
    held = [getattr(p, "ds_tensor", p) for p in model.encoder.parameters()]
    return {t.untyped_storage().data_ptr() for t in held if t.numel()}


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
    made = Captioner(path).train()
    assert zerostart.report(made.decoder).initialised
    assert zerostart.report(made.encoder).read_bytes
    places = buffers(made) if wraps else set()
    optimizer = torch.optim.AdamW(made.parameters(), **ADAMW)
    loader: Any = torch.utils.data.DataLoader(Data(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(made, optimizer, loader)
    assert buffers(made) == places if wraps else isinstance(model, FSDPModule)
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
    expected = alone(path)
    for found in run_ranks(script, 2, path, environment, process_group=False, timeout=200):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_composite_is_prepared_on_fsdp2(checkpoints: TinyCheckpoints) -> None:
    check_composite(checkpoints("qwen3"), fsdp2())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_composite_is_prepared_on_deepspeed(
    stage: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    more = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000}
    check_composite(checkpoints("qwen3"), zero3(tmp_path, **more, zero_optimization=zero))


def starts(engine: str, stage: int) -> None:
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

    whole, after = start()
    wanted = zerostart.digest(whole)
    with zerostart.enabled(engine=engine, zero_stage=stage, progress=False):
        model, drawn = start()
        assert zerostart.report(model).initialised
        assert zerostart.digest(model) == wanted
        assert torch.equal(drawn, after)
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
        check_alone(start)
        assert zerostart.digest(start()[0]) == wanted
    # With an active configuration of ZeRO-3, transformers partitions what it builds.
    keep = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    torch.manual_seed(SEED)
    made = zerostart.load(None, lambda: AutoModelForCausalLM.from_config(configuration()), progress=False)
    assert zerostart.digest(made) == wanted
    del keep


def check_alone(start: Callable[[], object]) -> None:
    """Make a call on one rank while the other waits for everyone."""
    from accelerate import PartialState

    state, begun = PartialState(cpu=True), time.monotonic()
    if state.is_main_process:
        text = r"was called on this rank, but not on rank 1 \(on .*\), where one waits for everyone"
        with pytest.raises(ConfigError, match=text):
            start()
    state.wait_for_everyone()
    assert time.monotonic() - begun < 20


@pytest.mark.slow
def test_models_of_a_configuration_start_in_shards() -> None:
    run_ranks(starts, 2, "deepspeed", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 3), ("fsdp2", 0), ("deepspeed", 2)])
def test_models_of_a_configuration_start_on_any_engine(engine: str, stage: int) -> None:
    run_ranks(starts, 2, engine, stage)
