"""DiffSynth's ``load_model`` with zerostart enabled: arguments, saved files, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.diffusion.engine_results import compare, fill
from tests.diffusion.families import FAMILIES
from tests.diffusion.oracle import import_diffsynth, needs_diffsynth
from tests.diffusion.saved_files import ENGINES, catch_error, save_and_resume
from tests.ranks import run_ranks

pytestmark = needs_diffsynth
WAN = FAMILIES["wan2.1 t2v"]


def write_files(folder: Path) -> dict[str, torch.Tensor]:
    """Write the model in both formats, nested, and without one weight."""
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


def fail_torch_load(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a torch file is read as a whole")


def collect_results(folder: str) -> dict[str, Any]:
    import_diffsynth()
    from diffsynth.configs import MODEL_CONFIGS
    from diffsynth.core.loader import file, model
    from diffsynth.models.model_loader import ModelPool

    from zerostart.upstream.diffsynth import loading as diffsynth_loading
    from zerostart.upstream.patches import active

    root, kind, config = Path(folder), WAN.model(), dict(WAN.config)
    state, output = write_files(root), {}
    stock = model.load_model
    output["hash"] = {name: file.hash_model_file(str(root / name)) for name in ("wan.pth", "wan.safetensors")}
    path = str(root / "wan.safetensors")
    stock_model = stock(kind, path, config, torch.bfloat16, "cpu", WAN.find_converter())
    expected = dict(stock_model.state_dict())
    output["misfit"] = [point.find_misfit() for point in diffsynth_loading.TOUCHED]
    # DiffSynth has such a row for each release that it knows.
    row = {"model_hash": output["hash"]["wan.pth"], "model_name": "small", "extra_kwargs": config}
    MODEL_CONFIGS.append({**row, "model_class": "diffsynth.models.wan_video_dit.WanModel"})
    for name, settings in ENGINES.items():
        with zerostart.enabled(progress=False, **settings):
            sharded = model.load_model(
                kind, path, config, torch.bfloat16, "cpu", WAN.find_converter(), use_disk_map=True
            )
            pool = ModelPool()
            pool.auto_load_model(str(root / "wan.pth"))
        lines = compare(dict(zerostart.full_tensors(sharded, rank=None)), expected)
        lines += compare(dict(zerostart.full_tensors(pool.fetch_model("small"), rank=None)), expected)
        report = zerostart.report(sharded)
        output[name] = (lines, report.read_bytes, report.engine, sharded.training, report.computed)
    with zerostart.enabled(progress=False, engine="fsdp2"):
        loaded = model.load_model(kind, "nowhere.safetensors", config, torch.float32, state_dict=dict(state))
        output["in hand"] = compare(dict(zerostart.full_tensors(loaded, rank=None)), dict(state))
        converted = model.load_model(
            kind, None, config, torch.float32, state_dict_converter=WAN.find_converter(),
            state_dict={"model." + n: t for n, t in state.items()},
        )  # fmt: skip
        output["in hand, converted"] = compare(
            dict(zerostart.full_tensors(converted, rank=None)), dict(state)
        )
        lacking = str(root / "lacking.safetensors")
        output["lacking"] = catch_error(model.load_model, kind, lacking, config, torch.float32)
        output["quantize"] = catch_error(model.load_model, kind, path, config, quantize=object())
        original, torch.load = torch.load, fail_torch_load
        output["headers"] = {
            name: file.hash_model_file(str(root / name)) for name in ("wan.pth", "wan.safetensors")
        }
        output["nested headers"] = file.load_keys_dict(str(root / "nested.pth"))
        torch.load = original
    output["nested"] = file.load_keys_dict(str(root / "nested.pth"))
    patch_names = {name.rpartition(".")[2] for name in active()}
    output["restored"] = model.load_model is stock and "load_model" not in patch_names
    return output | {"files": save_and_resume(root / "files")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load_model")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Results of one process group for all tests: importing DiffSynth takes seconds."""
    output: list[dict[str, Any]] = run_ranks(collect_results, 2, str(folder), timeout=240)
    return output


@pytest.mark.slow
def test_arguments_of_load_model(ranks: list[dict[str, Any]], folder: Path) -> None:
    size = (folder / "wan.safetensors").stat().st_size
    for output in ranks:
        assert output["misfit"] == ["", "", ""]
        for name in ENGINES:
            lines, read, engine, training, computed = output[name]
            assert (lines, engine, training, computed) == ([], ENGINES[name]["engine"], False, ())
            assert read < 0.75 * size or name == "zero2"
        assert output["in hand"] == output["in hand, converted"] == []
        assert output["lacking"].startswith("CoverageError: ")
        assert "head.head.bias" in output["lacking"]
        assert output["quantize"].startswith("ConfigError: load_model(quantize=...) is not available under")
        assert output["headers"] == output["hash"]
        assert json.dumps(output["nested headers"]) == json.dumps(output["nested"])
        assert output["restored"]
    assert {key: value for key, value in ranks[0].items() if isinstance(value, str)} == {
        key: value for key, value in ranks[1].items() if isinstance(value, str)
    }


def test_trained_files_are_saved_and_resumed_without_a_gather(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    for output in (rank["files"] for rank in ranks):
        for engine in ENGINES:
            assert output[engine] == [True, True, []], engine
        assert output["calculated"].startswith("ConfigError: the script's state_dict_converter computes")
        assert output["prefix"].startswith("CoverageError: ")
        assert "--remove_prefix_in_ckpt, 'dit.' here" in output["prefix"]
        assert output["fused"].startswith("ConfigError: load_lora (--preset_lora_path)")
    assert not (folder / "files" / "none.safetensors").exists()
