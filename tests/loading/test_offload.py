"""Offloaded models: outputs equal to the resident model's, within the limit of a window."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5EncoderModel

import zerostart
from tests.contract.test_oversized import memory_cap
from tests.integrations.pipelines.tiny_pipelines import umt5
from tests.ranks import run_ranks
from zerostart.errors import ConfigError, EngineError, ReadError
from zerostart.loading.offload import Window, load_offloaded, release
from zerostart.loading.request import Request
from zerostart.models.synth import synthesise
from zerostart.transfer import PeakMeter

MIB = 1 << 20
CPU = torch.device("cpu")
IDS = torch.tensor([[4, 5, 119, 0, 0], [7, 7, 1, 2, 3]])


def load_model(
    source: Path,
    model: Any,
    limit: int | Window | None,
    dtype: torch.dtype | None = None,
    kind: str = "offload",
    **placement_options: Any,
) -> tuple[Any, Window]:
    window = limit if isinstance(limit, Window) else Window(limit or 0, CPU)
    placement = zerostart.Placement(kind, **placement_options)
    request = Request(
        source=str(source), model=model, engine="fsdp2", zero_stage=0, dtype=dtype, progress=False
    )
    return load_offloaded(request, placement, window, limit is None), window


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    model, path = umt5().eval().requires_grad_(False), tmp_path_factory.mktemp("offload") / "umt5"
    model.save_pretrained(path)
    return path, model


def count_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize("store", ["disk", "host"])
@pytest.mark.parametrize("share", [None, 2.0, 0.6, 0.3])
def test_outputs_equal_the_resident_model_within_any_limit(
    share: float | None, store: str, encoder: tuple[Path, nn.Module]
) -> None:
    path, whole = encoder
    limit = None if share is None else int(share * count_bytes(whole))
    model, window = load_model(path, UMT5EncoderModel, limit, store=store)
    assert {n: (p.shape, p.dtype, p.device) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype, p.device) for n, p in whole.named_parameters()
    }
    fetches = []
    for grad in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with grad:
            output = model(IDS).last_hidden_state
        assert torch.equal(output, whole(IDS).last_hidden_state)
        assert window.used <= window.highest <= window.limit
        fetches.append(window.fetches)
    assert limit is None or window.limit == limit
    if share == 2.0:
        assert fetches[0] == fetches[2]  # all weights stay resident
    if share == 0.6:
        assert fetches[2] - fetches[1] < fetches[0]  # some weights stay resident
    release(model)
    assert window.used == 0


def test_models_share_a_window(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    whole = CLIPVisionModel(CLIPVisionConfig(image_size=8, patch_size=4, **sizes)).eval()
    whole.save_pretrained(tmp_path)
    path, text = encoder
    pixels = torch.randn(1, 3, 8, 8)
    for limit in (None, count_bytes(text) // 4):
        window = Window(limit or 0, CPU)
        request = {"engine": "fsdp2", "zero_stage": 0, "progress": False}
        first, second = (
            load_offloaded(
                Request(source=str(source), model=kind, **request),
                zerostart.Placement("offload"),
                window,
                limit is None,
            )
            for source, kind in ((tmp_path, CLIPVisionModel), (path, UMT5EncoderModel))
        )
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(second(IDS).last_hidden_state, text(IDS).last_hidden_state)
                assert torch.equal(first(pixels).last_hidden_state, whole(pixels).last_hidden_state)
        assert window.highest <= window.limit


@pytest.mark.parametrize("kind", ["offload", "replicate"])
def test_storage_and_compute_dtype_may_differ(kind: str, encoder: tuple[Path, nn.Module]) -> None:
    """Weights stored in fp8 and computed in bf16 equal those rounded to fp8."""
    path, _ = encoder
    fp8 = torch.float8_e4m3fn
    plain = UMT5EncoderModel.from_pretrained(path, dtype=torch.bfloat16)
    stored = UMT5EncoderModel.from_pretrained(path)
    with torch.no_grad():
        for (name, parameter), (_, before) in zip(
            plain.named_parameters(), stored.named_parameters(), strict=True
        ):
            if parameter.dim() > 1 and parameter.dtype == torch.bfloat16:
                parameter.copy_(before.to(fp8).to(torch.bfloat16))
                assert not torch.equal(parameter.float(), before), name
    store = {"store": "host"} if kind == "offload" else {}
    model, _ = load_model(
        path,
        UMT5EncoderModel,
        count_bytes(plain) // 2,
        torch.bfloat16,
        kind=kind,
        storage_dtype=fp8,
        compute_dtype=torch.bfloat16,
        **store,
    )
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, plain(IDS).last_hidden_state)


def test_unsupported_uses_are_refused(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, whole = encoder
    with pytest.raises(ConfigError, match=r"shared needs \d+ bytes at once.*raise it by \d+"):
        load_model(path, UMT5EncoderModel, 400)
    model, window = load_model(path, UMT5EncoderModel, count_bytes(whole) // 3)
    weight = model.encoder.block[0].layer[1].DenseReluDense.wo.weight
    with pytest.raises(
        EngineError, match=r"block\.0.*wo\.weight is offloaded, and its values are in memory only during"
    ):
        weight.sum()
    inputs = torch.randn(1, 3, 16, requires_grad=True)
    with pytest.raises(EngineError, match="an input needs a gradient, and its weights do not stay"):
        model(inputs_embeds=inputs)
    with torch.no_grad():
        assert torch.equal(
            model(inputs_embeds=inputs).last_hidden_state, whole(inputs_embeds=inputs).last_hidden_state
        )
    with pytest.raises(EngineError, match="offloaded, and its values are in memory only during"):
        model.to(torch.bfloat16)
    with pytest.raises(EngineError, match="offloaded, and its values are in memory only during"):
        model.save_pretrained(tmp_path / "saved")
    assert model.to("cpu") is model
    with pytest.raises(IndexError), torch.no_grad():
        model(torch.tensor([[5, 120]]))
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, whole(IDS).last_hidden_state)
    assert all(weight.users == 0 for weight in window._resident)


def test_changed_file_is_refused(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    _, whole = encoder
    whole.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, UMT5EncoderModel, count_bytes(whole) // 3)
    file = tmp_path / "model.safetensors"
    os.utime(file, ns=(1, 1))
    with pytest.raises(ReadError, match=r"model\.safetensors was changed.*keep it as it is"), torch.no_grad():
        model(IDS)


def test_missing_tensors_are_refused(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    _, whole = encoder
    whole.config.save_pretrained(tmp_path)
    state = {n: t.clone() for n, t in whole.state_dict().items() if "block.1" not in n and "embed" not in n}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(zerostart.ZerostartError, match=r"block\.1"):
        load_model(tmp_path, UMT5EncoderModel, 1 << 20)


def write_sparse_encoder(path: Path, **sizes: Any) -> Path:
    """Write a UMT5 encoder of zeros in sparse files."""
    from transformers import UMT5Config

    config = UMT5Config(**sizes)
    config.architectures = ["UMT5EncoderModel"]
    config.save_pretrained(path / "config")
    synthesise(path / "config", path / "model", sparse=True, dtype=sizes.get("dtype", "float32"))
    return path / "model"


def measure_peaks(path: Path, limit: int, cap: int) -> tuple[int, int]:
    """Return the peak bytes of host memory and of the window over two forwards."""
    small = write_sparse_encoder(
        path / f"small-{os.getpid()}", vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1
    )
    for source, window_bytes in ((small, 1 << 20), (path / "model", limit)):  # the first run does the imports
        with memory_cap(cap), PeakMeter(CPU, interval=0.005) as meter, torch.no_grad():
            model, window = load_model(source, UMT5EncoderModel, window_bytes, store="disk")
            for _ in range(2):
                assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.isfinite().all()
    return meter.host_bytes, window.highest


@pytest.mark.slow
def test_resident_memory_stays_within_the_limit(tmp_path: Path) -> None:
    """A model of 134 MB in blocks of 33 MB may hold 24 MB."""
    sizes = {"vocab_size": 64, "d_model": 1024, "d_kv": 64, "num_heads": 8, "d_ff": 2048, "num_layers": 4}
    write_sparse_encoder(tmp_path, **sizes)
    ((peak, highest),) = run_ranks(measure_peaks, 1, tmp_path, 24 * MIB, 160 * MIB)
    assert 12 * MIB < highest <= 24 * MIB
    assert peak <= (24 + 64) * MIB
