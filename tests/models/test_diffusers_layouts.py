"""Layouts of diffusers checkpoints, and files with several components."""

from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import zerostart
from tests.conformance.diffusion_suite import family, write_original
from zerostart.errors import ConversionError, CoverageError

State = dict[str, torch.Tensor]


def released(key: str, path: Path, edit: Callable[[State], None]) -> tuple[Path, type]:
    """Return the family's original file with edited tensors, and its class."""
    model = write_original(family(key), path, torch.float32)
    file = path / "release.safetensors"
    state = load_file(file)
    edit(state)
    save_file(state, file)
    return file, type(model)


def own(key: str, path: Path, edit: Callable[[State], None]) -> Path:
    """Return a directory in diffusers' own layout with edited tensors."""
    model = write_original(family(key), path / "original", torch.float32)
    model.save_pretrained(path / "own")
    file = path / "own" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    edit(state)
    save_file(state, file)
    return path / "own"


def misspell(state: State) -> None:
    state["blocks.0.attn1.to_qq.weight"] = state.pop("blocks.0.attn1.to_q.weight")


def test_own_layout_that_lacks_a_tensor_is_not_converted(tmp_path: Path) -> None:
    """Wan's converter swaps norm2 and norm3, which would be wrong for the model's own names."""
    source = own("wan", tmp_path, misspell)
    with pytest.raises(CoverageError) as raised:
        zerostart.load(source, engine="fsdp2", progress=False)
    assert raised.value.missing == ("blocks.0.attn1.to_q.weight",)
    assert raised.value.unexpected == ("blocks.0.attn1.to_qq.weight",)
    model = zerostart.load(source, engine="fsdp2", strict=False, progress=False)
    assert zerostart.report(model).converted == ()
    stored = load_file(source / "diffusion_pytorch_model.safetensors")
    for name, tensor in zerostart.full_tensors(model):
        if name in stored:
            assert torch.equal(tensor, stored[name]), name


def test_own_layout_with_a_tensor_too_many_is_not_converted(tmp_path: Path) -> None:
    source = own("wan", tmp_path, lambda state: state.update(extra=torch.ones(3)))
    with pytest.raises(CoverageError) as raised:
        zerostart.load(source, engine="fsdp2", progress=False)
    assert raised.value.unexpected == ("extra",)
    assert raised.value.missing == ()


def test_names_that_the_model_ignores_are_not_unexpected(tmp_path: Path) -> None:
    name = "blocks.0.attn2.norm_added_q.weight"
    source = own("wan", tmp_path, lambda state: state.update({name: torch.ones(3)}))
    model = zerostart.load(source, engine="fsdp2", progress=False)
    assert zerostart.report(model).ignored == (name,)


def test_original_layout_that_lacks_a_tensor_names_it(tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    file, kind = released(
        "wan", tmp_path / "a", lambda state: state.pop(prefix + "blocks.1.self_attn.q.weight")
    )
    with pytest.raises(CoverageError) as raised:
        zerostart.load(file, model=kind, engine="fsdp2", progress=False)
    assert raised.value.missing == ("blocks.1.attn1.to_q.weight",)
    # FLUX.1's converter looks up every key, and only names the missing one.
    file, kind = released("flux", tmp_path / "b", lambda state: state.pop(prefix + "txt_in.weight"))
    with pytest.raises(
        ConversionError, match=r"0 of the 112 tensors of FluxTransformer2DModel.*txt_in\.weight"
    ):
        zerostart.load(file, model=kind, engine="fsdp2", progress=False)


def test_another_model_s_file_is_told_by_its_names(tmp_path: Path) -> None:
    write_original(family("z_image"), tmp_path / "z", torch.float32)
    write_original(family("wan"), tmp_path / "wan", torch.float32)
    (tmp_path / "z" / "config.json").write_text((tmp_path / "wan" / "config.json").read_text())
    with pytest.raises(CoverageError, match=r"does not match WanTransformer3DModel(.|\n)*missing \(69\)"):
        zerostart.load(tmp_path / "z" / "release.safetensors", engine="fsdp2", progress=False)


@pytest.mark.parametrize("key", ["qwen_image", "flux2"])
def test_a_prefix_that_the_converter_does_not_know(key: str, tmp_path: Path) -> None:
    def add(state: State) -> None:
        for name in list(state):
            state["model.diffusion_model." + name.removeprefix("model.diffusion_model.")] = state.pop(name)

    file, kind = released(key, tmp_path / key, add)
    state = load_file(file)
    state["vae.decoder.weight"] = torch.ones(5)
    save_file({name: t for name, t in state.items() if "another.component" not in name}, file)
    model = zerostart.load(file, model=kind, engine="fsdp2", progress=False)
    assert zerostart.report(model).ignored == ("vae.decoder.weight",)
    assert zerostart.report(model).missing == ()


def test_of_several_components_only_the_wanted_one_is_read(tmp_path: Path) -> None:
    """LTX-2 is released as one file with transformer, VAE and audio VAE."""
    state: State = {"text_encoder.embedding": torch.zeros(100_000)}
    sizes = {}
    for key in ("ltx2", "ltx2_vae", "ltx2_audio_vae"):
        write_original(family(key), tmp_path / key, torch.float32)
        part = load_file(tmp_path / key / "release.safetensors")
        part.pop("text_encoders.of.another.component")
        state |= part
        sizes[key] = sum(t.nbytes for t in part.values())
    for key, size in sizes.items():
        file = tmp_path / key / "release.safetensors"
        save_file(state, file)
        plan = zerostart.plan(file, world_size=2, model=getattr(diffusers, family(key).kind))
        assert (plan.missing, plan.unexpected) == ((), ())
        # A rank also reads small gaps and whole buffers.
        assert sum(rank.read_bytes for rank in plan.ranks) <= 1.05 * size + 512 * sum(
            rank.read_ops for rank in plan.ranks
        )
