"""Compare pipelines with placements with the unsharded pipeline, bit for bit."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import zerostart
from tests.integrations.pipelines.tiny_pipelines import CALLS, FAMILIES, equal_but_for_rounding, make_pipeline
from tests.ranks import run_ranks
from zerostart.errors import BuildError, CheckpointError, ConfigError

#: Engine, stage, placement of the transformer, and resident share of the text encoder.
WAYS: Mapping[str, tuple[str, int, str, float | None]] = {
    "ZeRO-3": ("deepspeed", 3, "shard", 0.6),
    "FSDP2": ("fsdp2", 3, "shard", None),
    "ZeRO-2": ("deepspeed", 2, "shard", 0.6),
    "nothing but layers": ("fsdp2", 3, "offload", 0.7),
}


#: Bytes of each family's largest module, with a margin.
LARGEST_MODULE_BYTES = {
    "wan": 1 << 18,
    "wan_of_two": 1 << 18,
    "flux2": 1 << 18,
    "qwen_image": 1 << 18,
    "flux": 1 << 18,
    "z_image": 5 << 18,
    "hunyuan_video": 1 << 18,
    "ltx2": 1 << 18,
}


def picture(pipe: Any, key: str) -> torch.Tensor:
    """Run the pipeline on a prompt for two steps."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    prompt = "a cat sees the sea"
    output = pipe(prompt=prompt, num_inference_steps=2, output_type="pt", generator=generator, **CALLS[key])
    image = torch.as_tensor(output[0])
    assert image.isfinite().all()
    return image


def placements(pipe: Any, transformer: str) -> dict[str, str]:
    """Offload encoders, replicate the VAE, and place the transformer as given."""
    models = [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
    kinds = {"vae": "replicate", "transformer": transformer, "transformer_2": transformer}
    return {name: kinds.get(name, "offload") for name in models}


def encoder_bytes(pipe: Any) -> int:
    encoder = getattr(pipe, "text_encoder_2", None) or pipe.text_encoder
    return sum(p.numel() * p.element_size() for p in encoder.parameters())


def compare(path: Path, key: str, ways: list[str], dtype: torch.dtype | None = None) -> list[str]:
    """List the ways whose picture on this rank differs from diffusers'."""
    plain = diffusers.DiffusionPipeline.from_pretrained(str(path), torch_dtype=dtype)
    lines = []
    for way in ways:
        engine, stage, transformer, share = WAYS[way]
        limit = share and max(1, int(share * encoder_bytes(plain)))
        if transformer == "offload":
            limit = LARGEST_MODULE_BYTES[key]
        pipe = zerostart.load_pipeline(
            path,
            placements(plain, transformer),
            engine,
            stage,
            device_memory_limit=limit,
            dtype=dtype,
            progress=False,
        )
        assert type(pipe) is type(plain)
        assert {n: type(c).__name__.removeprefix("FSDP") for n, c in pipe.components.items()} == {
            n: type(c).__name__ for n, c in plain.components.items()
        }
        # After the load: starting DeepSpeed can change bf16 results in a process.
        expected = picture(plain, key)
        for time in ("first", "second"):
            if not equal_but_for_rounding(picture(pipe, key), expected, 1e-4 if dtype is None else 2e-2):
                lines.append(f"{way}, the {time} time")
    return lines


def save_pipelines(path: Path, out: Path) -> None:
    """Save the sharded pipeline by diffusers' method, on both engines."""
    for engine in ("deepspeed", "fsdp2"):
        pipe = zerostart.load_pipeline(path, engine=engine, progress=False)
        pipe.save_pretrained(out / engine)


@pytest.mark.slow
def test_a_sharded_pipeline_is_saved_by_diffusers(paths: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(save_pipelines, 2, paths["wan"], tmp_path)
    index = diffusers.WanPipeline.load_config(paths["wan"])
    for engine in ("deepspeed", "fsdp2"):
        written = diffusers.WanPipeline.load_config(tmp_path / engine)
        assert {n: v for n, v in written.items() if n != "_name_or_path"} == index
        for name in ("transformer", "vae", "text_encoder"):
            difference = zerostart.diff(paths["wan"] / name, tmp_path / engine / name)
            assert difference.equal, (engine, name, str(difference))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {"wan": make_pipeline("wan", root / "wan")}


def test_a_sharded_pipeline_equals_the_unsharded_one(paths: dict[str, Path]) -> None:
    assert run_ranks(compare, 2, paths["wan"], "wan", ["ZeRO-3", "FSDP2"]) == [[], []]


def train_composite(path: Path, engine: str) -> list[float]:
    """Train two components in one module for two steps; return the losses."""
    parts = ("transformer", "text_encoder")
    if engine == "none":
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(path))
    else:
        pipe = zerostart.load_pipeline(
            path, {"vae": "offload"}, engine=engine, trainable=parts, progress=False
        )
    both = nn.ModuleDict({name: getattr(pipe, name) for name in parts}).eval().requires_grad_(True)
    optimizer = torch.optim.SGD(both.parameters(), lr=1e-2)
    stepping: Any = None
    if engine == "deepspeed":
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config |= {"zero_allow_untested_optimizer": True}
        both.forward = lambda: None
        stepping, *_ = deepspeed.initialize(model=both, optimizer=optimizer, config=config)
    generator, losses = torch.Generator().manual_seed(4), []
    latents = torch.randn(1, 4, 2, 4, 4, generator=generator)
    for _ in range(2):
        text = pipe.text_encoder(torch.tensor([[4, 5, 6, 7]])).last_hidden_state
        sample = pipe.transformer(latents, torch.tensor([500.0]), text).sample
        loss = sample.square().mean()
        if stepping is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            stepping.backward(loss)
            stepping.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_components_train_as_children_of_one_module(engine: str, paths: dict[str, Path]) -> None:
    expected = train_composite(paths["wan"], "none")
    assert expected[1] < expected[0]
    for losses in run_ranks(train_composite, 2, paths["wan"], engine):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_encoders_are_dropped_after_caching(paths: dict[str, Path]) -> None:
    placement = {"text_encoder": "drop", "vae": "replicate", "transformer": "offload"}
    pipe = zerostart.load_pipeline(paths["wan"], placement, progress=False)
    text, negative = pipe.encode_prompt("a cat", max_sequence_length=12)
    assert zerostart.drop_components(pipe) == ("text_encoder",)
    assert pipe.text_encoder is None
    assert zerostart.drop_components(pipe) == ()
    arguments = {**CALLS["wan"], "num_inference_steps": 1, "output_type": "latent"}
    pipe.set_progress_bar_config(disable=True)
    latents = pipe(prompt_embeds=text, negative_prompt_embeds=negative, **arguments)[0]
    assert latents.isfinite().all()
    assert zerostart.drop_components(pipe, "transformer") == ("transformer",)
    with pytest.raises(ConfigError, match="no component 'unet'"):
        zerostart.drop_components(pipe, "unet")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"placement": {"unet": "shard"}},
            "placement names 'unet', which is no model of .*; its models are .*text_encoder",
        ),
        ({"placement": "shard"}, "placement='shard' is not accepted; give a dictionary or None"),
        ({"trainable": "transformer"}, "trainable='transformer' is not accepted; give a list of strings"),
        ({"placement": {"vae": "elsewhere"}}, r"placement\['vae'\] is 'elsewhere'; there are 'shard'"),
        ({"trainable": ("unet",)}, "trainable names 'unet'"),
        (
            {"trainable": ("vae",), "placement": {"vae": "offload"}},
            "vae is to be trained, but is placed 'offload'",
        ),
        ({"device_memory_limit": -1}, "device_memory_limit=-1 must be a number of bytes"),
        (
            {"device_memory_limit": 999, "placement": {"vae": "offload"}},
            "needs .* bytes at once, .* leaves 999",
        ),
        (
            {"placement": {"vae": zerostart.Placement("shard", storage_dtype=torch.float8_e4m3fn)}},
            "a component placed 'shard' is stored in the dtype in which it computes",
        ),
        (
            {"placement": {"vae": zerostart.Placement("offload", "disk", torch.float8_e4m3fn)}},
            "on disk a weight has the dtype of its file",
        ),
        (
            {"placement": {"vae": zerostart.Placement("replicate", "host")}},
            "store='host' is for 'offload'",
        ),
    ],
)
def test_impossible_placements_are_refused_by_name(
    options: dict[str, Any], words: str, paths: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        zerostart.load_pipeline(paths["wan"], **{"engine": "fsdp2", **options}, progress=False)


def test_incomplete_pipelines_are_named(paths: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"zerostart\.load takes a single model"):
        zerostart.load_pipeline(paths["wan"] / "vae", progress=False)
    incomplete = shutil.copytree(paths["wan"], tmp_path / "incomplete")
    shutil.rmtree(incomplete / "scheduler")
    with pytest.raises(
        BuildError, match=r"incomplete: diffusers cannot make a WanPipeline.*restore its tokenizers"
    ):
        zerostart.load_pipeline(incomplete, engine="fsdp2", progress=False)
    with pytest.raises(ConfigError, match=r"source=\{\} is not accepted; give a string or a path"):
        zerostart.load_pipeline({}, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as stored", "bf16"])
@pytest.mark.parametrize("key", FAMILIES)
def test_every_family_on_every_way(key: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    path = make_pipeline(key, tmp_path / key)
    assert run_ranks(compare, 2, path, key, list(WAYS), dtype, timeout=200) == [[], []]
