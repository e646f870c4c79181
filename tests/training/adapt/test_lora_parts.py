"""Parts of LoRA training in one process: targets, names, start files, averages, exports."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.diffusion.components import COMPONENTS
from tests.training.language import CAUSAL
from zerostart.distributed.world import current_world
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from zerostart.state.saving.adapter_formats import find_known_names
from zerostart.training.adapt import ema
from zerostart.training.adapt.ema import Ema
from zerostart.training.adapt.export import Exporter
from zerostart.training.adapt.lora import add_lora, lora_targets
from zerostart.training.adapt.lora_files import start_from
from zerostart.training.adapt.trained import freeze_others
from zerostart.training.config.configuration import EmaConfig, LoraConfig
from zerostart.training.config.load import parse_config
from zerostart.training.loop.session import check_trackers

#: Targets of DiffSynth's scripts by model, and the number of layers that they adapt.
SCRIPTS = {
    "wan2.1 t2v": ("q,k,v,o,ffn.0,ffn.2", 2 * 10),
    "wan2.1 i2v": ("q,k,v,o,ffn.0,ffn.2", 2 * 10),
    "qwen-image": (
        "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,"
        "txt_mlp.net.2,txt_mod.1",
        2 * 12,
    ),
    "flux.1": (
        "a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear,norm1_a.linear,"
        "norm1_b.linear,to_qkv_mlp",
        (6 + 2 + 4 + 2) + (4 + 1 + 1),
    ),
    "flux.2 dev": (
        "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_qkv_mlp_proj,to_out.0,to_add_out,linear_in,"
        "linear_out,single_transformer_blocks.0.attn.to_out",
        (8 + 4) + 2,
    ),
    "z-image": ("to_q,to_k,to_v,to_out.0,w1,w2,w3", 3 * 7),
}


@pytest.mark.parametrize("family", SCRIPTS)
def test_targets_of_diffsynths_scripts(family: str) -> None:
    """The targets are accepted as they are, and are the default of the family."""
    model, (targets, count) = COMPONENTS[family].build(), SCRIPTS[family]
    layers = lora_targets(model, LoraConfig(targets=targets))
    assert len(layers) == count
    assert lora_targets(model, LoraConfig()) == layers
    assert add_lora(model, LoraConfig(targets=targets, rank=2), 0) == layers
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * count
    assert all(".lora_" in name for name in trained)


def test_target_patterns() -> None:
    model = COMPONENTS["wan2.1 t2v"].build()
    layers = lora_targets(model, LoraConfig(targets=["blocks.*.attn1.to_q"]))
    assert layers == ("blocks.0.attn1.to_q", "blocks.1.attn1.to_q")
    assert (
        lora_targets(model, LoraConfig(targets=["to_q"], exclude=["blocks.1.*", "attn2.to_q"])) == layers[:1]
    )
    with pytest.raises(ConfigError, match=r"'to_qq', but the name of no layer .*did you mean to_q\?"):
        lora_targets(model, LoraConfig(targets=["to_q", "to_qq"]))
    with pytest.raises(ConfigError, match=r"lora\.exclude has 'nobody'"):
        lora_targets(model, LoraConfig(targets=["to_q"], exclude=["nobody"]))
    plain = nn.Sequential(
        nn.Embedding(3, 4), nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]), nn.Linear(4, 2)
    )
    assert lora_targets(plain, LoraConfig()) == ("1.0",)


@pytest.mark.parametrize("family", ["wan2.1 t2v", "wan2.1 i2v"])
def test_names_of_wan_are_those_of_its_release(family: str) -> None:
    """Diffusers converts DiffSynth's names back to those of the model."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    model = COMPONENTS[family].build()
    names = find_known_names(model)
    assert names is not None
    state = model.state_dict()
    theirs = {names.of(name): tensor for name, tensor in state.items()}
    assert len(theirs) == len(state)
    back = convert_wan_transformer_to_diffusers(dict(theirs))
    assert {name: tuple(t.shape) for name, t in back.items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert all(back[name] is tensor for name, tensor in state.items())
    # Diffusers' converter lacks the embedding of two frames (FLF2V); this is DiffSynth's name.
    assert names.of("condition_embedder.image_embedder.pos_embed") == "img_emb.emb_pos"


def make_lora_model(
    rank: int = 2, alpha: float | None = None
) -> tuple[nn.Module, LoraConfig, tuple[str, ...]]:
    model = COMPONENTS["wan2.1 t2v"].build()
    config = LoraConfig(rank=rank, alpha=alpha, targets=["attn1.to_q"])
    return model, config, add_lora(model, config, 3)


def test_start_from_files_of_every_library(tmp_path: Path) -> None:
    """Names and scales of each library are applied; other adapters are refused."""
    model, config, names = make_lora_model(alpha=4)
    factors = {n: (torch.randn(2, 24), torch.randn(24, 2)) for n in names}
    diffsynth = {n: n.replace("attn1.to_q", "self_attn.q") for n in names}
    files = {
        "peft": {"base_model.model.{}.lora_A.weight": 0, "base_model.model.{}.lora_B.weight": 1},
        "diffusers": {"transformer.{}.lora_A.weight": 0, "transformer.{}.lora_B.weight": 1},
        "diffsynth": {"pipe.dit.{}.lora_A.default.weight": 0, "pipe.dit.{}.lora_B.default.weight": 1},
        "removed": {"{}.lora_A.default.weight": 0, "{}.lora_B.default.weight": 1},
        "older": {"diffusion_model.{}.lora_down.weight": 0, "diffusion_model.{}.lora_up.weight": 1},
        "configured": {"base_model.model.{}.lora_A.weight": 0, "base_model.model.{}.lora_B.weight": 1},
    }
    for kind, keys in files.items():
        layer_names = diffsynth if kind in ("diffsynth", "removed", "older") else {n: n for n in names}
        tensors = {key.format(layer_names[n]): factors[n][at] for n in names for key, at in keys.items()}
        if kind == "older":
            tensors |= {f"diffusion_model.{layer_names[n]}.alpha": torch.tensor(6.0) for n in names}
        (tmp_path / kind).mkdir()
        if kind == "configured":
            (tmp_path / kind / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 5}))
        metadata = {"transformer.r": 2, "transformer.lora_alpha": 8}
        header = {"lora_adapter_metadata": json.dumps(metadata)} if kind == "diffusers" else None
        save_file(tensors, tmp_path / kind / "file.safetensors", header)
        scaling = {"diffusers": 4.0, "older": 3.0, "configured": 2.5}.get(kind, 1.0)
        start = config.model_copy(update={"start_from": str(tmp_path / kind)})
        start_from(model, names, start, current_world())
        for name in names:
            layer = model.get_submodule(name)
            delta = layer.get_delta_weight("default")
            torch.testing.assert_close(delta, factors[name][1] @ factors[name][0] * scaling)
    other, narrow, _ = make_lora_model(rank=1)
    cases = [
        (other, names, narrow, "peft", CheckpointError, r"lora\.rank 1 gives .* set lora\.rank to 2"),
        (
            model,
            [*names, "proj_out"],
            config,
            "peft",
            CheckpointError,
            r"does not fit lora\.targets: it lacks 1 of their",
        ),
        (model, names, config, "no", CheckpointNotFoundError, "is neither a LoRA file"),
    ]
    for target, layers, base_config, file, error, message in cases:
        start = base_config.model_copy(update={"start_from": str(tmp_path / file)})
        with pytest.raises(error, match=message):
            start_from(target, layers, start, current_world())


#: Modules in files of other tools, by family, and the modules of diffusers that they fuse.
QKV = ("to_q", "to_k", "to_v")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
FLUX = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.{name}" for name in QKV],
    "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.{name}" for name in ADDED],
    "double_blocks.0.img_attn.proj": ["transformer_blocks.0.attn.to_out.0"],
    "double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.net.2"],
    "single_blocks.0.linear1": [
        *(f"single_transformer_blocks.0.attn.{name}" for name in QKV),
        "single_transformer_blocks.0.proj_mlp",
    ],
    "single_blocks.0.linear2": ["single_transformer_blocks.0.proj_out"],
}
Z_IMAGE = {
    "layers.0.attention.qkv": [f"layers.0.attention.{name}" for name in QKV],
    "layers.0.attention.out": ["layers.0.attention.to_out.0"],
    "context_refiner.0.feed_forward.w2": ["context_refiner.0.feed_forward.w2"],
}
FLUX2 = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.{name}" for name in QKV],
    "double_blocks.0.txt_mlp.0": ["transformer_blocks.0.ff_context.linear_in"],
    "single_blocks.0.linear1": ["single_transformer_blocks.0.attn.to_qkv_mlp_proj"],
}
HUNYUAN = {
    "double_blocks.0.img_attn_qkv": [f"transformer_blocks.0.attn.{name}" for name in QKV],
    "double_blocks.0.txt_attn_qkv": [f"transformer_blocks.0.attn.{name}" for name in ADDED],
    "double_blocks.0.img_mlp.fc1": ["transformer_blocks.0.ff.net.0.proj"],
    "single_blocks.0.linear1": FLUX["single_blocks.0.linear1"],
}
LTX2 = {"patchify_proj": ["proj_in"], "transformer_blocks.0.attn1.to_q": ["transformer_blocks.0.attn1.to_q"]}


@pytest.mark.parametrize(
    ("family", "layout", "tool"),
    [
        ("flux.1", FLUX, "kohya"),
        ("flux.1", FLUX, "comfyui"),
        ("z-image", Z_IMAGE, "kohya"),
        ("z-image", Z_IMAGE, "comfyui"),
        ("flux.2 dev", FLUX2, "kohya"),
        ("flux.2 dev", FLUX2, "comfyui"),
        ("hunyuan-video", HUNYUAN, "comfyui"),
        ("ltx-2", LTX2, "comfyui"),
    ],
)
def test_files_of_other_tools_with_fused_modules(
    family: str, layout: dict[str, list[str]], tool: str, tmp_path: Path
) -> None:
    """The parts of a fused module share its first factor and split its rows."""
    torch.manual_seed(4)
    model = COMPONENTS[family].build()
    config = LoraConfig(rank=2, alpha=8, targets=[name for parts in layout.values() for name in parts])
    names = add_lora(model, config, 3)
    rows = {name: model.get_submodule(name).base_layer.out_features for name in names}
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for module, parts in layout.items():
        a = torch.randn(2, model.get_submodule(parts[0]).base_layer.in_features)
        b = torch.randn(sum(rows[part] for part in parts), 2)
        scale = 3.0 if tool == "kohya" else 1.0
        expected |= dict(zip(parts, (b @ a * scale).split([rows[part] for part in parts]), strict=True))
        if tool == "kohya":
            prefix = f"lora_unet_{module.replace('.', '_')}"
            tensors |= {f"{prefix}.lora_down.weight": a, f"{prefix}.lora_up.weight": b}
            tensors[f"{prefix}.alpha"] = torch.tensor(6.0)
        else:
            prefix = f"diffusion_model.{module}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(tensors, tmp_path / "file.safetensors")
    start_from(model, names, config.model_copy(update={"start_from": str(tmp_path)}), current_world())
    for name in names:
        delta = model.get_submodule(name).get_delta_weight("default")
        torch.testing.assert_close(delta, expected[name], msg=name)
    # Unknown modules raise an error that names a way out.
    save_file(
        tensors | {"x.lora_A.weight": a.clone(), "x.lora_B.weight": b.clone()}, tmp_path / "file.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"does not fit lora\.targets.*save_lora_weights"):
        start_from(model, names, config.model_copy(update={"start_from": str(tmp_path)}), current_world())


@pytest.mark.parametrize(
    "rules",
    [
        {"decay": 0.99},
        {"decay": 0.99, "use_ema_warmup": True, "power": 0.8, "inv_gamma": 1.5, "update_after_step": 3},
        {"decay": 0.5, "min_decay": 0.4},
    ],
)
def test_average_equals_diffusers(rules: dict[str, float]) -> None:
    """Compare to the bit over twenty steps of AdamW."""
    from diffusers.training_utils import EMAModel

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ema, expected = (
        Ema(_make_ema_config(rules), model, optimizer, current_world()),
        EMAModel(model.parameters(), **rules),
    )
    for step in range(20):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.step(model.parameters())
        ema.update()
        assert ema.updates == step + 1
    averages = {average.name: average.shard.storage for average in ema.averages}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for (name, parameter), shadow in zip(model.named_parameters(), expected.shadow_params, strict=True):
        assert torch.equal(averages[name], shadow.reshape(-1))
        assert not torch.equal(shadow, parameter)
    with ema.applied(model, current_world()):
        for parameter, shadow in zip(model.parameters(), expected.shadow_params, strict=True):
            assert torch.equal(parameter, shadow)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def _make_ema_config(rules: dict[str, float]) -> EmaConfig:
    settings = dict(rules)
    return EmaConfig(warmup=bool(settings.pop("use_ema_warmup", False)), **settings)


def test_freezing() -> None:
    model = COMPONENTS["wan2.1 t2v"].build()
    trained = freeze_others(model, ["blocks.*.attn1", "proj_out.bias"])
    assert {name.split(".to_")[0].split(".norm_")[0] for name in trained} == {
        "blocks.0.attn1",
        "blocks.1.attn1",
        "proj_out.bias",
    }
    assert set(trained) == {n for n, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(ConfigError, match=r"train\.trainable has 'block\.0'"):
        freeze_others(model, ["blocks.0", "block.0"])


def test_impossible_output_is_refused_before_training() -> None:
    class FluxTransformer2DModel(nn.Module):
        """Model that only shares its class name with diffusers."""

    base = {"model": {"source": "a"}, "task": {"name": CAUSAL, "source": "b"}}
    base |= {"train": {"steps": 1}}

    def check(model: nn.Module, **output: object) -> None:
        sections = {"output": {"directory": "c", **output}, "lora": {"targets": ["0"]}}
        if "merge" not in output:
            del sections["lora"]
        config = parse_config({**base, **sections})
        Exporter(model, config.output, config.lora is not None, None, Path("c"))

    check(FluxTransformer2DModel())
    with pytest.raises(ConfigError, match="DiffSynth has no FluxTransformer2DModel"):
        check(FluxTransformer2DModel(), format="diffsynth")
    with pytest.raises(ConfigError, match="'5 gigs' is not a size"):
        check(FluxTransformer2DModel(), max_shard_size="5 gigs")
    for layer, can_merge in ((nn.Linear(2, 2), True), (nn.Conv2d(2, 2, 1), False)):
        model = nn.Sequential(layer)
        add_lora(model, LoraConfig(rank=1, targets=["0"]), 0)
        if can_merge:
            check(model, merge=True)
        else:
            with pytest.raises(ConfigError, match=r"0\.lora_A\.default\.weight belongs to a convolution"):
                check(model, merge=True)


def test_excluded_layer_with_an_equal_ending_is_not_adapted() -> None:
    """PEFT matches the ends of names, and would adapt the excluded layer."""
    blocks = nn.ModuleList([nn.ModuleDict({"proj_out": nn.Linear(2, 2)})])
    model = nn.ModuleDict({"blocks": blocks, "proj_out": nn.Linear(2, 2)})
    config = LoraConfig(rank=1, targets=["proj_out"], exclude=["blocks.*.proj_out"])
    assert add_lora(model, config, 0) == ("proj_out",)
    names = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert names == {"proj_out.lora_A.default.weight"}


def test_an_error_with_averaged_weights_is_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank may fail, while the others wait in a forward."""
    average, writes = Ema.__new__(Ema), []
    average._averaged = []
    monkeypatch.setattr(ema, "_write_weights", lambda *arguments: writes.append(arguments))
    with average.applied(nn.Linear(1, 1), current_world()):
        pass
    assert len(writes) == 2
    with pytest.raises(MemoryError), average.applied(nn.Linear(1, 1), current_world()):
        raise MemoryError
    assert len(writes) == 3


def test_contradictions_are_refused() -> None:
    base = {
        "model": {"source": "a"},
        "task": {"name": CAUSAL, "source": "b"},
        "train": {"steps": 1},
        "output": {"directory": "c"},
    }
    lora = {"lora": {"rank": 2}}
    cases = [
        ({**lora, "train": {"steps": 1, "trainable": ["a"]}}, "train.trainable and lora exclude each other"),
        ({**lora, "train": {"steps": 1, "trainable": []}}, "train.trainable: List should have at least 1"),
        ({"output": {"directory": "c", "merge": True}}, "output.merge merges a LoRA"),
        (
            {**lora, "ema": {}, "output": {"directory": "c", "merge": True}},
            "output.merge is not available with ema",
        ),
        (
            {"output": {"directory": "c", "format": "diffsynth", "pipeline": True}},
            "output.pipeline needs a whole model",
        ),
        (
            {**lora, "output": {"directory": "c", "merge": True, "remove_prefix": "a."}},
            "output.remove_prefix is for files of trained tensors",
        ),
        ({"output": {"directory": "c", "format": "peft"}}, "output.format peft is for adapters"),
        (
            {"output": {"directory": "c", "remove_prefix": "a."}},
            "output.remove_prefix is for files of trained tensors",
        ),
        ({"lora": {"ranks": 2}}, "unknown key lora.ranks; did you mean lora.rank?"),
        ({"ema": {"decays": 2}}, "unknown key ema.decays; did you mean ema.decay?"),
        ({"ema": {"evaluate": True}}, "ema.evaluate needs held-out examples, but there are none: set task.h"),
        ({"train": {"steps": 1, "evaluate_every": 5}}, "train.evaluate_every needs held-out examples"),
    ]
    for changed, message in cases:
        with pytest.raises(ConfigError) as caught:
            parse_config({**base, **changed})
        assert message in str(caught.value)


def test_missing_trackers_are_named():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    for name in LOGGER_TYPE_TO_CLASS.keys() - set(map(str, get_available_trackers())):
        with pytest.raises(ConfigError, match=rf"tracking\.trackers: {name} is not installed: pip install"):
            check_trackers([name])


def test_saved_config_names_the_diffusers_class(tmp_path: Path) -> None:
    """FSDP2 changes the class of a sharded module, which no library could load."""
    import zerostart

    COMPONENTS["z-image"].build().save_pretrained(tmp_path / "model")
    model = zerostart.load(tmp_path / "model", engine="fsdp2", progress=False)
    zerostart.save(model, tmp_path / "saved")
    expected, written = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("model", "saved"))
    assert written["_class_name"] == expected["_class_name"] == "ZImageTransformer2DModel"
