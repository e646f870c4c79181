"""LoRA files for ComfyUI and of kohya's style: read back by diffusers' own converters, scaling and all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.diffusion.components import COMPONENTS
from tests.training.diffusion.flow_items import FAMILIES, build
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.state.saving.save import save_model
from zerostart.training.adapt.export import check_export, save_request
from zerostart.training.adapt.lora import add_lora
from zerostart.training.adapt.lora_files import start_from
from zerostart.training.config.configuration import LoraConfig
from zerostart.training.config.load import parse_config

#: The pipeline whose loader reads the file, and what its names begin with.
READERS = {
    ("wan", "comfyui"): ("WanPipeline", "diffusion_model.blocks.0.self_attn.q."),
    ("wan", "kohya"): ("WanPipeline", "lora_unet_blocks_0_self_attn_q."),
    ("qwen-image", "comfyui"): ("QwenImagePipeline", "diffusion_model.transformer_blocks.0.attn.to_q."),
    ("qwen-image", "kohya"): ("QwenImagePipeline", "lora_unet_transformer_blocks_0_attn_to_q."),
    ("z-image", "comfyui"): ("ZImagePipeline", "diffusion_model.layers.0.attention.to_q."),
    ("z-image", "kohya"): ("ZImagePipeline", "lora_unet_layers_0_attention_to_q."),
    ("flux", "comfyui"): ("FluxPipeline", "transformer.transformer_blocks.0.attn.to_q."),
}
RANK, ALPHA = 4, 6


def adapted(family: str, folder: Path, form: str):
    """The tiny transformer with trained adapters, and the configuration of its run."""
    model = build(family)
    values = {
        "model": {"source": str(folder)},
        "task": {"name": "flow-matching"},
        "media": {"source": str(folder)},
        "train": {"steps": 1},
        "lora": {"rank": RANK, "alpha": ALPHA},
        "output": {"directory": str(folder / "out"), "format": form},
    }
    config = parse_config(values)
    add_lora(model, config.lora, 3)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if ".lora_" in name:
            draws = torch.Generator().manual_seed(number)
            parameter.data = torch.randn(parameter.shape, generator=draws)
    return model, config


def products(model) -> dict[str, torch.Tensor]:
    """What the adapters add to each weight, by module."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            (adapter,) = module.lora_A
            scaled = module.lora_B[adapter].weight @ module.lora_A[adapter].weight
            found[name] = scaled.detach() * module.scaling[adapter]
    return found


@pytest.mark.parametrize(("family", "form"), READERS)
def test_diffusers_reads_what_was_trained(family: str, form: str, tmp_path: Path) -> None:
    import diffusers

    model, config = adapted(family, tmp_path, form)
    check_export(model, config)
    save_model(model, tmp_path / "out", save_request(model, config, 1))
    file = tmp_path / "out" / "pytorch_lora_weights.safetensors"
    kind, begins = READERS[family, form]
    stored = load_file(file)
    factors = ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
    assert {begins + rest for rest in ("alpha", *(f"{one}.weight" for one in factors))} <= stored.keys()
    alphas = [tensor for name, tensor in stored.items() if name.endswith(".alpha")]
    assert [float(alpha) for alpha in alphas] == [ALPHA] * (len(stored) // 3)

    pipeline = getattr(diffusers, kind)
    found = pipeline.lora_state_dict(str(tmp_path / "out"), return_alphas=True) if family == "flux" else None
    again = getattr(diffusers, COMPONENTS[FAMILIES[family][0]].kind).from_config(model.config)
    if found is not None:
        pipeline.load_lora_into_transformer(*found, again)
    else:
        state = pipeline.lora_state_dict(str(tmp_path / "out"))
        pipeline.load_lora_into_transformer(state, again)
    expected, read = products(model), products(again)
    assert read.keys() == expected.keys()
    for name, product in expected.items():
        torch.testing.assert_close(read[name], product, rtol=1e-5, atol=1e-5, msg=name)


def test_a_run_goes_on_from_such_a_file(tmp_path: Path) -> None:
    """With another alpha, which the second factor makes up for."""
    model, config = adapted("wan", tmp_path, "kohya")
    save_model(model, tmp_path / "out", save_request(model, config, 1))
    again = build("wan")
    lora = LoraConfig(rank=RANK, alpha=2 * ALPHA, start_from=str(tmp_path / "out"))
    names = add_lora(again, lora, 4)
    start_from(again, names, lora, current_world())
    expected, read = products(model), products(again)
    for name, product in expected.items():
        torch.testing.assert_close(read[name], product, rtol=1e-5, atol=1e-5, msg=name)


def test_models_whose_names_are_not_known_are_refused(tmp_path: Path) -> None:
    model, config = adapted("flux", tmp_path, "kohya")
    with pytest.raises(ConfigError, match=r"output\.format kohya: the names of FluxTransformer2DModel there"):
        check_export(model, config)
