"""LoRA of tiny diffusion transformers equals plain PEFT; every library opens the files."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.diffusion.components import COMPONENTS
from tests.diffusion.oracle import import_diffsynth, needs_diffsynth
from tests.ranks import run_ranks
from tests.training.adapt.test_lora_runs import count_data_bytes
from tests.training.diffusion.flow_items import (
    FAMILIES,
    load_transformer,
    make_config,
    predict_velocity,
    run_and_record,
    train_model,
)
from tests.training.diffusion.test_flow_runs import group_by_step

#: Relative error of the losses.
RTOL = 1e-5
LORA = {"rank": 2, "alpha": 4}


def train_with_peft(values, family, steps):
    """Train with plain PEFT in one process; return losses, adapters and the model."""
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

    model, targets = load_transformer(values, family), values["lora"]["targets"]
    torch.manual_seed(values["train"].get("seed", 42))
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=targets), model)
    losses = train_model(model, values, family, steps)
    return losses, get_peft_model_state_dict(model), model


def train_both(folder, family, engine, stage, ranks=2, output=None, **train):
    """Run on ranks and in one process; return the output folder, adapters and model."""
    values = make_config(folder, family, engine, stage, **{"learning_rate": 1e-2, **train})
    values["lora"] = {**LORA, "targets": ["to_q", "to_k", "to_v"]}
    values["output"] |= output or {}
    results = run_ranks(run_and_record, ranks, values, timeout=280)
    steps = group_by_step(results, 1)[-len(results[0]["losses"]) :]
    losses, adapters, model = train_with_peft(values, family, steps)
    assert results[0]["losses"] == pytest.approx(losses, rel=RTOL)
    return Path(results[0]["directory"]), adapters, model


def predict(model, family, path):
    item = torch.load(path)[0]
    with torch.no_grad():
        return predict_velocity(family, model.eval(), item["latents"], 0.5, item)


def assert_adapters(path, adapters, rename):
    tensors = load_file(path)
    assert tensors.keys() == {rename(name) for name in adapters}
    for name, tensor in adapters.items():
        torch.testing.assert_close(tensors[rename(name)], tensor, rtol=0, atol=1e-4, msg=name)
    assert count_data_bytes(path) == 4 * sum(tensor.numel() for tensor in adapters.values())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True, "offload"])
@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_steps_equal_peft(family, engine, stage, checkpointing, tmp_path):
    """Diffusers opens the file, which has only trained tensors."""
    import diffusers

    out, adapters, model = train_both(
        tmp_path, family, engine, stage, steps=30, checkpoint_blocks=checkpointing, learning_rate=1e-3
    )
    assert_adapters(out / "pytorch_lora_weights.safetensors", adapters, lambda name: f"transformer.{name}")
    kind = getattr(diffusers, COMPONENTS[FAMILIES[family][0]].kind)
    reloaded = kind.from_pretrained(tmp_path / family / "transformer")
    reloaded.load_lora_adapter(out, weight_name="pytorch_lora_weights.safetensors")
    assert reloaded.peft_config["default_0"].lora_alpha == 4
    examples = tmp_path / family / "examples.pt"
    expected = predict(model, family, examples)
    torch.testing.assert_close(predict(reloaded, family, examples), expected, rtol=0, atol=1e-4)


#: The pipelines of diffusers that the families' transformers belong to.
PIPELINES = {
    "wan": "WanPipeline",
    "qwen-image": "QwenImagePipeline",
    "flux": "FluxPipeline",
    "flux2": "Flux2Pipeline",
    "z-image": "ZImagePipeline",
    "hunyuan-video": "HunyuanVideoPipeline",
    "ltx2": "LTX2Pipeline",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_of_diffusers_open_the_file(family, tmp_path):
    """A pipeline loads the default format, and PEFT loads its own."""
    import diffusers
    from peft import PeftModel

    out, _, model = train_both(tmp_path, family, "fsdp2", 3, ranks=1, output={"format": None})
    kind = getattr(diffusers, COMPONENTS[FAMILIES[family][0]].kind)
    reloaded = kind.from_pretrained(tmp_path / family / "transformer")
    pipeline = getattr(diffusers, PIPELINES[family])
    absent = [n for n in inspect.signature(pipeline.__init__).parameters if n not in ("self", "transformer")]
    pipeline(**dict.fromkeys(absent), transformer=reloaded).load_lora_weights(out)
    examples = tmp_path / family / "examples.pt"
    expected = predict(model, family, examples)
    torch.testing.assert_close(predict(reloaded, family, examples), expected, rtol=0, atol=1e-4)
    out, _, model = train_both(tmp_path, family, "fsdp2", 3, ranks=1, output={"format": "peft"})
    wrapped = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / family / "transformer"), out)
    actual = predict(wrapped.get_base_model(), family, examples)
    torch.testing.assert_close(actual, predict(model, family, examples), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "engine", "stage"),
    [
        ("wan", "deepspeed", 3),
        ("wan", "fsdp2", 3),
        ("qwen-image", "deepspeed", 2),
        ("flux2", "fsdp2", 3),
        ("z-image", "deepspeed", 3),
    ],
)
def test_files_with_names_of_diffsynth(family, engine, stage, tmp_path):
    """The scale is part of the second factor, as in files of its scripts."""
    prefix = {"format": "diffsynth", "remove_prefix": "pipe.dit."}
    out, adapters, _ = train_both(tmp_path, family, engine, stage, output=prefix)
    from zerostart.state.saving.adapter_formats import find_known_names

    names = find_known_names(COMPONENTS[FAMILIES[family][0]].build())
    tensors = load_file(out / "step-3.safetensors")
    assert len(tensors) == len(adapters)
    assert count_data_bytes(out / "step-3.safetensors") == 4 * sum(
        tensor.numel() for tensor in adapters.values()
    )
    for name, tensor in adapters.items():
        stored = (
            names.of(name).replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        )
        scaled = tensor * 2 if ".lora_B." in name else tensor  # alpha / rank, which the file does not store
        torch.testing.assert_close(tensors[stored], scaled, rtol=0, atol=2e-4, msg=name)


def fuse_with_diffsynth(file, source):
    """Fuse the file into DiffSynth's model by its own loader; return the weights."""
    from diffusers import WanTransformer3DModel

    import_diffsynth()
    from diffsynth.models.wan_video_dit import WanModel
    from diffsynth.utils.lora.general import GeneralLoRALoader

    from zerostart.state.saving.adapter_formats import find_known_names

    theirs = WanModel(
        dim=24,
        in_dim=4,
        ffn_dim=32,
        out_dim=4,
        text_dim=16,
        freq_dim=64,
        eps=1e-6,
        patch_size=(1, 2, 2),
        num_heads=2,
        num_layers=2,
        has_image_input=False,
    )
    ours = WanTransformer3DModel.from_pretrained(source)
    names = find_known_names(ours)
    theirs.load_state_dict({names.of(name): tensor for name, tensor in ours.state_dict().items()})
    GeneralLoRALoader().fuse_lora_to_base_model(theirs, load_file(file))
    fused = theirs.state_dict()
    return {name: fused[names.of(name)].numpy() for name in ours.state_dict()}


@needs_diffsynth
@pytest.mark.slow
def test_diffsynth_fuses_the_file(tmp_path):
    """The fused weights equal the base plus the product of the factors."""
    output = {"format": "diffsynth", "remove_prefix": "pipe.dit."}
    out, adapters, _ = train_both(tmp_path, "wan", "deepspeed", 3, output=output)
    source = tmp_path / "wan" / "transformer"
    (fused,) = run_ranks(fuse_with_diffsynth, 1, out / "step-3.safetensors", source)
    before = load_file(source / "diffusion_pytorch_model.safetensors")
    for name, tensor in before.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in adapters:
            tensor += 2 * adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(torch.from_numpy(fused[name]), tensor, rtol=0, atol=2e-4, msg=name)


def convert_with_diffsynth(file):
    import_diffsynth()
    from diffsynth.models.flux_dit import FluxDiT
    from diffsynth.utils.lora.flux import FluxLoRALoader

    with torch.device("meta"):
        modules = {name for name, _ in FluxDiT().named_modules()}
    return sorted(FluxLoRALoader().convert_state_dict(load_file(file))), modules


@needs_diffsynth
@pytest.mark.slow
def test_diffsynth_joins_split_projections(tmp_path):
    """Diffusers splits the fused projections of FLUX.1."""
    out, *_ = train_both(tmp_path, "flux", "fsdp2", 3, output={"format": "diffsynth"})
    ((names, modules),) = run_ranks(convert_with_diffsynth, 1, out / "step-3.safetensors")
    assert {name.partition(".lora_")[0] for name in names} <= modules
    assert "blocks.0.attn.a_to_qkv.lora_A.weight" in names
    assert "single_blocks.0.to_qkv_mlp.lora_B.weight" in names


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diffusers", "diffsynth"])
def test_run_starts_from_its_own_file(form, tmp_path):
    """The next run starts with an equal held-out loss, whose draws repeat."""
    values = make_config(tmp_path, "wan", "deepspeed", 3, learning_rate=1e-2)
    values["task"] |= {"held_out": 0.25}
    values["lora"] = {**LORA, "targets": "q,k,v,o"}
    values["output"] |= {"format": form}
    first = run_ranks(run_and_record, 2, values)[0]
    values["lora"] |= {"start_from": first["directory"]}
    values["output"] = {"directory": str(tmp_path / "again")}
    second = run_ranks(run_and_record, 1, values)[0]
    assert second["held_out"][0] == pytest.approx(first["held_out"][3], rel=1e-5)


@pytest.mark.slow
def test_full_model_with_names_of_diffsynth(tmp_path):
    """Files have the names of the release, as after full fine-tuning by its scripts."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    values = make_config(tmp_path, "wan", "fsdp2", 3)
    values["output"] |= {"format": "diffsynth", "remove_prefix": "pipe.dit.", "every": 2}
    out = Path(run_ranks(run_and_record, 2, values)[0]["directory"])
    state = convert_wan_transformer_to_diffusers(load_file(out / "step-3.safetensors"))
    model = COMPONENTS["wan2.1 t2v"].build()
    assert {n: t.shape for n, t in state.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert (out / "exports" / "step-2" / "step-2.safetensors").is_file()
    assert json.loads((out / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
