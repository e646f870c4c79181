"""Quantised checkpoints with scales are multiplied or refused, for any ``strict``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import zerostart
from tests.conformance.diffusion_suite import family, small_converters, write_original
from zerostart.errors import ConversionError, CoverageError
from zerostart.recipe import scales

FLOAT8 = torch.float8_e4m3fn
State = dict[str, torch.Tensor]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def quantised() -> State:
    torch.manual_seed(0)
    state = layers().state_dict()
    return {name: tensor.to(FLOAT8) if "weight" in name else tensor for name, tensor in state.items()}


@given(st.from_regex(scales._OF_WEIGHT, fullmatch=True) | st.from_regex(scales._OF_TENSOR, fullmatch=True))
def test_no_name_of_a_quantised_tensor_is_skipped(name: str) -> None:
    assert scales._MAY_QUANTISE.search(name)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["0.scale_weight", "0.weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)], ids=str)
def test_a_known_scale_is_multiplied(name: str, shape: tuple[int, ...], strict: bool) -> None:
    state, scale = quantised(), torch.rand(shape) + 0.5
    state |= {name: scale, "0.input_scale": torch.ones(()), "0.comfy_quant": torch.ones(9, dtype=torch.uint8)}
    state["scaled_fp8"] = torch.empty(0, dtype=FLOAT8)
    model = zerostart.load(
        state, model=layers, engine="fsdp2", strict=strict, dtype=torch.float32, progress=False
    )
    tensors = dict(zerostart.full_tensors(model))
    rows = scale if scale.numel() == 1 else scale.view(6, 1)
    assert torch.equal(tensors["0.weight"], state["0.weight"].float() * rows)
    assert torch.equal(tensors["1.weight"], state["1.weight"].float())
    assert zerostart.report(model).unexpected == ()


REFUSED: dict[str, State] = {
    "0.weight_scale": {"0.weight_scale": torch.ones(3, 2)},
    "0.weight_scale_inv": {"0.weight_scale_inv": torch.ones(1, 1)},
    "0.weight_scale_2": {"0.weight_scale": torch.ones(()), "0.weight_scale_2": torch.ones(())},
    "0.comfy_quant": {"0.comfy_quant": torch.ones(9, dtype=torch.uint8)},
    "0.weight.absmax": {"0.weight.absmax": torch.ones(3)},
    "0.weight_zero_point": {"0.weight_zero_point": torch.ones(6)},
    "0.bias_scale": {"0.bias_scale": torch.ones(())},
    "0.scale": {"0.scale": torch.ones(())},
    "0.weight.scale": {"0.weight.scale": torch.ones(())},
    "0.weight_descale": {"0.weight_descale": torch.ones(())},
    "0.scale_weight": {"0.scale_weight": torch.ones(()), "0.weight_scale": torch.full((), 0.5)},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_scale_is_refused(name: str, strict: bool) -> None:
    with pytest.raises(ConversionError, match=rf"^{name} .*quantised tensor 0\.(weight|bias)"):
        zerostart.load(
            quantised() | REFUSED[name],
            model=layers,
            engine="fsdp2",
            strict=strict,
            dtype=torch.float32,
            progress=False,
        )


@pytest.mark.parametrize("strict", [True, False])
def test_weight_norm_of_an_expected_weight_is_refused(strict: bool) -> None:
    state = quantised()
    state |= {"0.weight_v": state.pop("0.weight").float(), "0.weight_g": torch.ones(6, 1)}
    with pytest.raises(ConversionError, match=r"^0\.weight_[gv] "):
        zerostart.load(
            state, model=layers, engine="fsdp2", strict=strict, dtype=torch.float32, progress=False
        )


def test_the_models_own_scales_are_no_quantisation() -> None:
    module = nn.utils.weight_norm(nn.Linear(4, 6))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = zerostart.load(
        state, lambda: nn.utils.weight_norm(nn.Linear(4, 6)), engine="fsdp2", progress=False
    )
    assert torch.equal(dict(zerostart.full_tensors(model))["weight_g"], state["weight_g"])


@pytest.fixture
def small() -> Iterator[None]:
    with small_converters():
        yield


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("key", ["flux", "wan", "z_image"])
def test_scales_of_original_files(key: str, strict: bool, tmp_path: Path) -> None:
    """Original files are dequantised before conversion; FLUX.1's converter drops unknown names."""
    model = write_original(family(key), tmp_path / "whole", torch.float32)
    file = tmp_path / "whole" / "release.safetensors"
    state, whole = load_file(file), {}
    for name, tensor in list(state.items()):
        whole[name] = tensor
        if name.endswith(".weight") and tensor.dim() == 2:
            state[name], scale = tensor.to(FLOAT8), torch.full((), 0.02)
            state[name.removesuffix("weight") + "scale_weight"] = scale
            whole[name] = state[name].float() * scale
    save_file(whole, file)
    expected = type(model).from_single_file(str(file), config=str(file.parent), local_files_only=True)
    save_file(state, file)
    loaded = zerostart.load(
        file, type(model), engine="fsdp2", strict=strict, dtype=torch.float32, progress=False
    )
    tensors = dict(zerostart.full_tensors(loaded))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.usefixtures("small")
def test_what_a_converter_drops_is_unexpected(tmp_path: Path) -> None:
    model = write_original(family("flux"), tmp_path / "whole", torch.float32)
    file = tmp_path / "whole" / "release.safetensors"
    state = load_file(file) | {"model.diffusion_model.double_blocks.0.extra": torch.ones(2)}
    save_file(state, file)
    with pytest.raises(CoverageError) as raised:
        zerostart.load(file, type(model), engine="fsdp2", progress=False)
    assert raised.value.unexpected == ("model.diffusion_model.double_blocks.0.extra",)
