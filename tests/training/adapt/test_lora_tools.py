"""LoRA files for ComfyUI and of kohya's style: read back by diffusers' own converters, scaling and all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerostart
from tests.diffusion.components import COMPONENTS
from tests.ranks import run_ranks
from tests.training.diffusion.flow_items import FAMILIES, build
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointError, ConfigError
from zerostart.state.saving.export_adapters import export_adapters
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
#: What kohya's scripts adapt of each block of Wan, and diffusers' reader of their files expects.
MODULES = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")


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


def read_back(family: str, folder: Path, model) -> dict[str, torch.Tensor]:
    """What diffusers' own loader makes of the file in ``folder``, by module."""
    import diffusers

    pipeline = getattr(diffusers, READERS[family, "comfyui"][0])
    again = getattr(diffusers, COMPONENTS[FAMILIES[family][0]].kind).from_config(model.config)
    if family == "flux":
        pipeline.load_lora_into_transformer(*pipeline.lora_state_dict(str(folder), return_alphas=True), again)
    else:
        pipeline.load_lora_into_transformer(pipeline.lora_state_dict(str(folder)), again)
    return products(again)


def same(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert read.keys() == expected.keys()
    for name, product in expected.items():
        torch.testing.assert_close(read[name], product, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(("family", "form"), READERS)
def test_diffusers_reads_what_was_trained(family: str, form: str, tmp_path: Path) -> None:
    model, config = adapted(family, tmp_path, form)
    check_export(model, config)
    save_model(model, tmp_path / "out", save_request(model, config, 1))
    file = tmp_path / "out" / "pytorch_lora_weights.safetensors"
    begins = READERS[family, form][1]
    stored = load_file(file)
    factors = ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
    assert {begins + rest for rest in ("alpha", *(f"{one}.weight" for one in factors))} <= stored.keys()
    alphas = [tensor for name, tensor in stored.items() if name.endswith(".alpha")]
    assert [float(alpha) for alpha in alphas] == [ALPHA] * (len(stored) // 3)
    same(read_back(family, tmp_path / "out", model), products(model))


def saved_in_shards(folder: str, engine: str, form: str) -> None:
    """A model that is loaded in shards, inside a PeftModel of a script's own; and what it holds."""
    import peft

    import zerostart

    model = zerostart.load(f"{folder}/base", engine=engine, zero_stage=3, progress=False)
    torch.manual_seed(5)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES), init_lora_weights=False
    )
    model = peft.get_peft_model(model, settings)
    zerostart.save(model, f"{folder}/{form}", adapters_only=True, adapter_format=form)
    zerostart.save(model, f"{folder}/peft", adapters_only=True)


@pytest.mark.parametrize(("engine", "form"), [("deepspeed", "kohya"), ("fsdp2", "comfyui")])
def test_a_script_saves_and_exports_them(engine: str, form: str, tmp_path: Path) -> None:
    """From shards of two ranks, and later from what was saved as PEFT has it: the same file to the byte."""
    import peft

    from zerostart.cli import main

    build("wan").save_pretrained(tmp_path / "base")
    run_ranks(saved_in_shards, 2, str(tmp_path), engine, form)
    plain = build("wan")
    whole = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")
    expected = {name.removeprefix("base_model.model."): one for name, one in products(whole).items()}
    same(read_back("wan", tmp_path / form, plain), expected)

    options = ["--adapter-format", form, "--base", str(tmp_path / "base")]
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "peft"), str(tmp_path / "again"), *options])
    assert not ended.value.code
    file = "pytorch_lora_weights.safetensors"
    first, second = ((tmp_path / folder / file).read_bytes() for folder in (form, "again"))
    assert first == second


def test_from_each_format_to_each(tmp_path: Path) -> None:
    """Round through all of them the products stay; PEFT and diffusers open what is theirs."""
    import peft

    model, config = adapted("wan", tmp_path, "peft")
    build("wan").save_pretrained(tmp_path / "base")
    save_model(model, tmp_path / "first", save_request(model, config, 1))
    before = "first"
    for form in ("kohya", "diffsynth", "comfyui", "diffusers", "peft"):
        made = export_adapters(tmp_path / before, tmp_path / form, form, tmp_path / "base")
        assert made.tensors == (3 if form in ("kohya", "comfyui") else 2) * len(products(model))
        before = form
        if form in ("kohya", "comfyui", "diffusers"):
            same(read_back("wan", tmp_path / form, model), products(model))
    again = peft.PeftModel.from_pretrained(build("wan"), tmp_path / "peft")
    same({n.removeprefix("base_model.model."): p for n, p in products(again).items()}, products(model))


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    model, config = adapted("wan", tmp_path, "diffusers")
    save_model(model, tmp_path / "lora", save_request(model, config, 1))
    with pytest.raises(ConfigError, match="does not say which model it is for"):
        export_adapters(tmp_path / "lora", tmp_path / "out", "kohya")
    build("flux").save_pretrained(tmp_path / "flux")
    with pytest.raises(CheckpointError, match="which FluxTransformer2DModel has not: name the model"):
        export_adapters(tmp_path / "lora", tmp_path / "out", "kohya", tmp_path / "flux")
    build("wan").save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="adapter_format 'cohya' is unknown: it is one of peft, diffusers"):
        export_adapters(tmp_path / "lora", tmp_path / "out", "cohya", tmp_path / "base")
    with pytest.raises(ConfigError, match="pass adapters_only=True as well"):
        zerostart.save(model, tmp_path / "out", adapter_format="kohya")
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_from_such_a_file(tmp_path: Path) -> None:
    """With another alpha, which the second factor makes up for."""
    model, config = adapted("wan", tmp_path, "kohya")
    save_model(model, tmp_path / "out", save_request(model, config, 1))
    again = build("wan")
    lora = LoraConfig(rank=RANK, alpha=2 * ALPHA, start_from=str(tmp_path / "out"))
    names = add_lora(again, lora, 4)
    start_from(again, names, lora, current_world())
    same(products(again), products(model))


def test_models_whose_names_are_not_known_are_refused(tmp_path: Path) -> None:
    model, config = adapted("flux", tmp_path, "kohya")
    with pytest.raises(ConfigError, match=r"output\.format kohya: the names of FluxTransformer2DModel there"):
        check_export(model, config)
