"""DiffSynth's ``load_model`` while zerostart is enabled: what its arguments mean, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.diffusion.families import FAMILIES
from tests.diffusion.oracle import import_diffsynth, needs_diffsynth
from tests.diffusion.sharded import differing, fill
from tests.diffusion.trained_files import ENGINES, refusal
from tests.diffusion.trained_files import tried as tried_files
from tests.ranks import run_ranks

pytestmark = needs_diffsynth
WAN = FAMILIES["wan2.1 t2v"]


def write(folder: Path) -> dict[str, torch.Tensor]:
    """A file of several models in both formats, one that lacks a weight, and a nested torch file."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    state = fill(WAN.model()(**WAN.config)).state_dict()
    if dist.get_rank() == 0:
        save_file({"model." + n: t for n, t in state.items()}, folder / "wan.safetensors")
        torch.save({"model_state": state}, folder / "wan.pth")
        save_file({n: t for n, t in state.items() if n != "head.head.bias"}, folder / "lacking.safetensors")
        torch.save({"model": state}, folder / "nested.pth")
    dist.barrier()
    return state


def no_torch_load(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a torch file is read as a whole")


def tried(folder: str) -> dict[str, Any]:
    import_diffsynth()
    from diffsynth.configs import MODEL_CONFIGS
    from diffsynth.core.loader import file, model
    from diffsynth.models.model_loader import ModelPool

    from zerostart.upstream.diffsynth import loading as diffsynth_loading
    from zerostart.upstream.patches import active

    root, kind, config = Path(folder), WAN.model(), dict(WAN.config)
    state, found = write(root), {}
    stock = model.load_model
    found["hash"] = {name: file.hash_model_file(str(root / name)) for name in ("wan.pth", "wan.safetensors")}
    path = str(root / "wan.safetensors")
    whole = stock(kind, path, config, torch.bfloat16, "cpu", WAN.convert())
    wanted = dict(whole.state_dict())
    found["misfit"] = [point.misfit() for point in diffsynth_loading.TOUCHED]
    # A row of data, as DiffSynth has one for each release that it knows.
    row = {"model_hash": found["hash"]["wan.pth"], "model_name": "small", "extra_kwargs": config}
    MODEL_CONFIGS.append({**row, "model_class": "diffsynth.models.wan_video_dit.WanModel"})
    for name, settings in ENGINES.items():
        with zerostart.enabled(progress=False, **settings):
            made = model.load_model(
                kind, path, config, torch.bfloat16, "cpu", WAN.convert(), use_disk_map=True
            )
            pool = ModelPool()
            pool.auto_load_model(str(root / "wan.pth"))
        lines = differing(dict(zerostart.full_tensors(made, rank=None)), wanted)
        lines += differing(dict(zerostart.full_tensors(pool.fetch_model("small"), rank=None)), wanted)
        report = zerostart.report(made)
        found[name] = (lines, report.read_bytes, report.engine, made.training, report.computed)
    with zerostart.enabled(progress=False, engine="fsdp2"):
        given = model.load_model(kind, "nowhere.safetensors", config, torch.float32, state_dict=dict(state))
        found["in hand"] = differing(dict(zerostart.full_tensors(given, rank=None)), dict(state))
        renamed = model.load_model(
            kind, None, config, torch.float32, state_dict_converter=WAN.convert(),
            state_dict={"model." + n: t for n, t in state.items()},
        )  # fmt: skip
        found["in hand, converted"] = differing(dict(zerostart.full_tensors(renamed, rank=None)), dict(state))
        lacking = str(root / "lacking.safetensors")
        found["lacking"] = refusal(model.load_model, kind, lacking, config, torch.float32)
        found["quantize"] = refusal(model.load_model, kind, path, config, quantize=object())
        original, torch.load = torch.load, no_torch_load
        found["headers"] = {
            name: file.hash_model_file(str(root / name)) for name in ("wan.pth", "wan.safetensors")
        }
        found["nested headers"] = file.load_keys_dict(str(root / "nested.pth"))
        torch.load = original
    found["nested"] = file.load_keys_dict(str(root / "nested.pth"))
    left = {name.rpartition(".")[2] for name in active()}
    found["restored"] = model.load_model is stock and "load_model" not in left
    return found | {"files": tried_files(root / "files")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load_model")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """One group for all that is quick: to import DiffSynth takes seconds."""
    found: list[dict[str, Any]] = run_ranks(tried, 2, str(folder), timeout=240)
    return found


@pytest.mark.slow
def test_what_the_arguments_of_load_model_mean(ranks: list[dict[str, Any]], folder: Path) -> None:
    size = (folder / "wan.safetensors").stat().st_size
    for found in ranks:
        assert found["misfit"] == ["", "", ""]
        for name in ENGINES:
            lines, read, engine, training, computed = found[name]
            assert (lines, engine, training, computed) == ([], ENGINES[name]["engine"], False, ())
            assert read < 0.75 * size or name == "zero2"
        assert found["in hand"] == found["in hand, converted"] == []
        assert found["lacking"].startswith("CoverageError: ")
        assert "head.head.bias" in found["lacking"]
        assert found["quantize"].startswith("ConfigError: load_model(quantize=...) is not available under")
        assert found["headers"] == found["hash"]
        assert json.dumps(found["nested headers"]) == json.dumps(found["nested"])
        assert found["restored"]
    assert {key: value for key, value in ranks[0].items() if isinstance(value, str)} == {
        key: value for key, value in ranks[1].items() if isinstance(value, str)
    }


def test_what_is_trained_is_saved_and_resumed_without_a_gather(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    for found in (rank["files"] for rank in ranks):
        for engine in ENGINES:
            assert found[engine] == [True, True, []], engine
        assert found["calculated"].startswith("ConfigError: the script's state_dict_converter computes")
        assert found["prefix"].startswith("CoverageError: ")
        assert "--remove_prefix_in_ckpt, 'dit.' here" in found["prefix"]
        assert found["fused"].startswith("ConfigError: load_lora (--preset_lora_path)")
    assert not (folder / "files" / "none.safetensors").exists()
