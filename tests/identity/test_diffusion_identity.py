"""Loads of diffusers models equal diffusers' own."""

import json
from pathlib import Path

import diffusers
import pytest
import torch

import zerostart
from tests.conformance.diffusion_suite import family, pipeline, write_original
from tests.identity.snapshots import Snapshot, differences
from tests.ranks import run_ranks

Sources = dict[str, tuple[Path, str | None, Path]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Source, class, and expected snapshot of each case."""
    root = tmp_path_factory.mktemp("diffusion")
    wan = write_original(family("wan"), root / "wan", torch.float32)
    qwen = write_original(family("qwen_image"), root / "qwen", torch.float32)
    vae = write_original(family("wan_vae"), root / "vae", torch.float32)
    folder = pipeline(root / "pipeline", {"transformer": wan, "vae": vae, "other": qwen})
    file = root / "wan" / "release.safetensors"
    expected = {
        "original file": diffusers.WanTransformer3DModel.from_single_file(
            str(file), config=str(root / "wan")
        ),
        "pipeline": diffusers.AutoencoderKLWan.from_pretrained(str(folder / "vae")),
        "component": diffusers.QwenImageTransformer2DModel.from_pretrained(str(folder / "other")),
    }
    inputs = {
        "original file": (file, "WanTransformer3DModel"),
        "pipeline": (folder, "AutoencoderKLWan"),
        "component": (folder / "other", None),
    }
    for case, model in expected.items():
        torch.save(Snapshot.of(model), root / f"{case}.pt")
    return {case: (*inputs[case], root / f"{case}.pt") for case in inputs}


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_equals_diffusers_load(engine: str, sources: Sources) -> None:
    for errors in run_ranks(load_on_rank, 2, engine, sources):
        assert not errors, "\n".join(errors)


def load_on_rank(engine: str, sources: Sources) -> list[str]:
    errors = []
    for case, (source, kind, reference) in sources.items():
        model = zerostart.load(source, kind and getattr(diffusers, kind), engine=engine, progress=False)
        expected = torch.load(reference, weights_only=False)
        errors += [f"{case}: {line}" for line in differences(model, expected, engine)]
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_applied_like_by_from_pretrained(dtype: torch.dtype, sources: Sources) -> None:
    """Wan keeps its time embedder and modulation in float32."""
    source = sources["pipeline"][0] / "transformer"
    expected = diffusers.WanTransformer3DModel.from_pretrained(str(source), torch_dtype=dtype)
    (dtypes,) = {frozenset(p.dtype for p in expected.parameters())}
    assert dtypes == {dtype, torch.float32}
    model = zerostart.load(source, engine="fsdp2", dtype=dtype, progress=False)
    assert not differences(model, Snapshot.of(expected), "fsdp2")


def test_variant_is_found(sources: Sources, tmp_path: Path) -> None:
    """Files and index have the variant's name."""
    source = sources["pipeline"][0] / "transformer"
    model = diffusers.WanTransformer3DModel.from_pretrained(source, torch_dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "one", variant="bf16")
    model.save_pretrained(tmp_path / "many", variant="bf16", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    for folder in ("one", "many"):
        expected = diffusers.WanTransformer3DModel.from_pretrained(
            str(tmp_path / folder), variant="bf16", torch_dtype=torch.bfloat16
        )
        loaded = zerostart.load(tmp_path / folder, engine="fsdp2", progress=False)
        assert not differences(loaded, Snapshot.of(expected), "fsdp2")


def test_tensor_names_of_old_releases(tmp_path: Path) -> None:
    """diffusers renames the attention tensors of old VAEs."""
    from safetensors.torch import load_file, save_file

    model = write_original(family("flux_vae"), tmp_path / "new", torch.float32)
    model.save_pretrained(tmp_path / "old")
    file = tmp_path / "old" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        state = {name.replace(f"attentions.0.{new}.", f"attentions.0.{old}."): t for name, t in state.items()}
    save_file(state, file)
    expected = diffusers.AutoencoderKL.from_pretrained(str(tmp_path / "old"))
    loaded = zerostart.load(tmp_path / "old", engine="fsdp2", progress=False)
    assert not differences(loaded, Snapshot.of(expected), "fsdp2")
    assert len(zerostart.report(loaded).converted) == 16


def test_explicit_converter_takes_precedence(sources: Sources) -> None:
    source = sources["original file"][0]
    names = []

    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

        names.extend(state)
        state.pop("text_encoders.of.another.component")
        return convert_wan_transformer_to_diffusers(state)

    config = json.loads((source.parent / "config.json").read_text())
    model = zerostart.load(
        source,
        model=lambda: diffusers.WanTransformer3DModel.from_config(config),
        engine="fsdp2",
        converter=convert,
        progress=False,
    )
    assert names
    assert zerostart.report(model).ignored == ()
    assert not differences(model, torch.load(sources["original file"][2], weights_only=False), "fsdp2")
