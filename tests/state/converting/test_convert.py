"""``zerostart convert``: what it writes is opened by those whose formats they are, and leads back."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerostart
from tests.parity import checkpoint
from tests.quantised import QUANTISED
from tests.ranks import run_ranks
from tests.state.resuming.trainings import Case, Run, uninterrupted
from tests.tiny import TinyCheckpoints
from tests.trained import build, write_dcp, write_deepspeed
from zerostart.checkpoint.formats.assembling import ParameterGroup
from zerostart.cli import main
from zerostart.errors import ConfigError, ZerostartError
from zerostart.state.converting.contents import Contents, Stored
from zerostart.state.converting.convert import convert
from zerostart.state.converting.models import as_model

BF16 = torch.bfloat16


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *arguments])
    return int(ended.value.code or 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def test_ways_there_and_back_end_with_the_same_bytes(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    folder = checkpoints("qwen3", BF16, sharded=True)
    straight = convert(folder, tmp_path / "straight", "hf", max_shard_size="20KB")
    assert len(straight.files) > 1
    ways: list[tuple[str, dict[str, Any]]] = [
        ("dcp", {}),
        ("zero", {"zero_stage": 2, "world_size": 3}),
        ("zero", {"zero_stage": 3, "world_size": 4}),
        ("universal", {}),
    ]
    for number, (to, options) in enumerate(ways):
        there, back = tmp_path / f"there-{number}", tmp_path / f"back-{number}"
        convert(folder, there, to, **options)
        convert(there, back, "hf", dtype=BF16, max_shard_size="20KB")
        assert same(weights(back), weights(folder)), to
        for path in there.rglob("*.pt"):  # with their checksums, which torch does not look at
            assert zipfile.ZipFile(path).testzip() is None, path
    # Of files in another order the same: to the byte where that is the source's.
    again = convert(tmp_path / "there-0", tmp_path / "again", "hf", max_shard_size="20KB")
    assert again.files == straight.files
    for file in straight.files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()
    zerostart.verify(tmp_path / "again")


def test_experts_are_fused_for_an_engine_and_single_in_the_original(
    tmp_path: Path, checkpoints: TinyCheckpoints
) -> None:
    folder = checkpoints("qwen3_moe", BF16)
    convert(folder, tmp_path / "zero", "zero", zero_stage=3, world_size=2)
    convert(tmp_path / "zero", tmp_path / "hf", "hf", dtype=BF16)
    assert any("gate_up_proj" in name for name in weights(tmp_path / "hf"))
    assert run(str(tmp_path / "zero"), str(tmp_path / "out"), "--to", "original", "--dtype", "bfloat16") == 0
    assert same(weights(tmp_path / "out"), weights(folder))


def test_torch_opens_a_distributed_checkpoint(tmp_path: Path, checkpoints: TinyCheckpoints) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = checkpoints("qwen3", BF16)
    convert(folder, tmp_path / "weights", "dcp")
    expected = weights(folder)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "weights", no_dist=True)
    assert same(found, expected)

    # With an optimizer: what two ranks of FSDP2 have saved, through a universal checkpoint.
    run_ranks(write_dcp, 2, str(tmp_path / "odd"), True)
    with pytest.raises(ConfigError, match="steps_seen, which is not trained"):
        convert(tmp_path / "odd", tmp_path / "universal", "universal")
    run_ranks(write_dcp, 2, str(tmp_path / "saved"), True, False)
    convert(tmp_path / "saved", tmp_path / "universal", "universal")
    convert(tmp_path / "universal", tmp_path / "dcp", "dcp")
    whole = []
    for place in ("saved", "dcp"):
        model = build()
        del model.steps_seen
        optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
        states, moments = get_state_dict(model, optimizer)
        dcp.load({"model": states, "optim": moments}, checkpoint_id=tmp_path / place, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        ids = torch.arange(7).view(1, 7)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        whole.append(dict(model.state_dict()))
    assert same(*whole)


def tensors_in(value: Any, at: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {at: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
    return {n: t for key, item in items for n, t in tensors_in(item, f"{at}/{key}").items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_zero_checkpoint_comes_back_from_universal_as_deepspeed_wrote_it(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from zerostart.state.converting import zero

    monkeypatch.setattr(zero, "SUB_GROUP", 5000)  # as what is written is told
    run_ranks(write_deepspeed, 2, str(tmp_path / "run"), stage, True, True, True)
    convert(tmp_path / "run", tmp_path / "universal", "universal", zero_stage=stage, world_size=2)
    convert(tmp_path / "universal", tmp_path / "zero", "zero", zero_stage=stage, world_size=2)
    step = "global_step2"
    names = sorted(path.name for path in (tmp_path / "run" / step).glob("*.pt"))
    assert names == sorted(path.name for path in (tmp_path / "zero" / step).glob("*.pt"))
    for name in names:
        theirs, ours = (
            torch.load(tmp_path / place / step / name, weights_only=False) for place in ("run", "zero")
        )
        a, b = tensors_in(theirs), tensors_in(ours)
        # DeepSpeed leaves what lies behind the last element of a rank as it is: no element of the model.
        assert a.keys() == b.keys(), name
        for key in a:
            if stage == 2 or "module" in key or "fragments" in key:
                assert a[key].shape == b[key].shape, (name, key)
    expected = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"))
    assert same(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "zero")), expected)
    # Of another stage, on five ranks, by which no group of parameters can be divided; and back from there.
    other = 5 - stage
    convert(tmp_path / "zero", tmp_path / "other", "zero", zero_stage=other, world_size=5)
    assert same(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "other")), expected)
    convert(tmp_path / "other", tmp_path / "again", "zero", zero_stage=stage, world_size=2)
    for name in names:
        assert (tmp_path / "again" / step / name).read_bytes() == (
            tmp_path / "zero" / step / name
        ).read_bytes()


UNCLIPPED = {"gradient_clipping": 0.0}
FIRST, MORE = 2, 2


def stock_run(path: Path, case: Case, out: Path) -> list[float]:
    """The losses of a run of DeepSpeed's own that saves in the middle."""
    run = Run(path, case)
    for number in range(FIRST):
        run.step(number)
    run.model.save_checkpoint(str(out))
    losses = [loss for number in range(FIRST, FIRST + MORE) for loss in run.step(number)]
    run.end()
    return losses


def resumed(path: Path, case: Case, source: Path) -> list[float]:
    """The losses of another run of DeepSpeed's own, from what its own ``load_checkpoint`` opens."""
    run = Run(path, case)
    place, _ = run.model.load_checkpoint(str(source))
    assert place is not None
    losses = [loss for number in range(FIRST, FIRST + MORE) for loss in run.step(number)]
    run.end()
    return losses


def test_deepspeed_goes_on_from_what_is_converted(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path)
    case = Case("deepspeed", 2, groups="two", stock=True, top=UNCLIPPED)
    wanted = run_ranks(stock_run, 2, path, case, tmp_path / "run")[0]
    convert(tmp_path / "run", tmp_path / "universal", "universal", zero_stage=1)
    universal = {**UNCLIPPED, "checkpoint": {"load_universal": True}}
    convert(tmp_path / "universal", tmp_path / "two", "zero", zero_stage=2, world_size=2)
    assert run_ranks(resumed, 2, path, case, tmp_path / "two")[0] == wanted
    one = Case("deepspeed", 1, groups="two", stock=True, top=universal)
    assert run_ranks(resumed, 2, path, one, tmp_path / "universal")[0] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "bf16"), [("deepspeed", False), ("deepspeed", True), ("fsdp2", False)])
def test_deepspeed_goes_on_from_states_of_ours(tmp_path: Path, engine: str, bf16: bool) -> None:
    path = checkpoint("qwen3", tmp_path)
    case = Case(engine, 3, groups="two", bf16=bf16, top=UNCLIPPED if engine == "deepspeed" else {})
    wanted = run_ranks(uninterrupted, 2, path, case, tmp_path / "state")[0][:MORE]
    convert(tmp_path / "state", tmp_path / "dcp", "dcp")
    for source in ("state", "dcp"):
        for stage in (1, 2, 3):
            out = tmp_path / f"{source}-{stage}"
            options = {"dtype": BF16} if bf16 else {}
            convert(tmp_path / source, out, "zero", zero_stage=stage, world_size=2, **options)
            stock = Case("deepspeed", stage, groups="two", stock=True, bf16=bf16, top=UNCLIPPED)
            assert run_ranks(resumed, 2, path, stock, out)[0] == wanted, (source, stage)
    convert(tmp_path / "state", tmp_path / "universal", "universal", zero_stage=2)
    universal = {**UNCLIPPED, "checkpoint": {"load_universal": True}}
    stock = Case("deepspeed", 2, groups="two", stock=True, bf16=bf16, top=universal)
    assert run_ranks(resumed, 2, path, stock, tmp_path / "universal")[0] == wanted


def write_odd(out: str, stage: int) -> None:
    """Save a run of DeepSpeed's own whose groups end with padding, one of them on the first rank."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7), torch.nn.Linear(7, 1))
    groups = [{"params": [*model[:2].parameters(), model[2].weight]}, {"params": [model[2].bias]}]
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    settings["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 5)).pow(2).mean())
        engine.step()
    engine.save_checkpoint(out, client_state={"universal_checkpoint_info": {}})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_universal_is_what_deepspeed_makes_of_it(tmp_path: Path, stage: int) -> None:
    run_ranks(write_odd, 2, str(tmp_path / "run"), stage)
    convert(tmp_path / "run", tmp_path / "ours", "universal", zero_stage=stage, world_size=2)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    made = tmp_path / "theirs" / "global_step2_universal"
    command += ["--input_folder", str(tmp_path / "run" / "global_step2"), "--output_folder", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    names = {p.relative_to(made) for p in made.rglob("*.pt")}
    ours = tmp_path / "ours" / "global_step2_universal"
    assert names == {p.relative_to(ours) for p in ours.rglob("*.pt")}
    for name in names - {Path("zero/optimizer_state.pt")}:  # which has the step as well, for stage 3
        a, b = (tensors_in(torch.load(place / name, weights_only=False)) for place in (made, ours))
        assert same(a, b), name
    convert(tmp_path / "ours", tmp_path / "zero", "zero", zero_stage=stage, world_size=2)
    for file in (tmp_path / "run" / "global_step2").glob("*optim_states.pt"):
        a, b = (
            torch.load(place / "global_step2" / file.name, weights_only=False)["optimizer_state_dict"]
            for place in (tmp_path / "run", tmp_path / "zero")
        )
        assert a["group_paddings"] == b["group_paddings"]
        key = "single_partition_of_fp32_groups"
        assert [t.tolist() for t in a[key]] == [t.tolist() for t in b[key]]


def test_what_a_format_cannot_hold_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(write_deepspeed, 2, str(tmp_path / "run"), 2, True, False, True)
    source = str(tmp_path / "run")
    assert run(source, str(tmp_path / "out"), "--to", "hf", "--strict") == 1
    told = capfd.readouterr().err
    assert "exp_avg of" in told
    assert "parameter groups" in told
    assert not (tmp_path / "out").exists()
    assert run(source, str(tmp_path / "out"), "--to", "hf", "--nproc", "2") == 0
    assert "Left out" in capfd.readouterr().out
    convert(source, tmp_path / "alone", "hf")
    assert same(weights(tmp_path / "out"), weights(tmp_path / "alone"))
    with pytest.raises(ConfigError, match="zero_stage=4"):
        convert(source, tmp_path / "z", "zero", zero_stage=4)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "latest").write_text("mine")
    with pytest.raises(ZerostartError, match="latest is there already"):
        convert(source, tmp_path / "taken", "zero")
    assert os.listdir(tmp_path / "taken") == ["latest"]  # noqa: PTH208
    # What is read is not replaced, nor is another model.
    for place in ("out", "alone"):
        kept = {path.name: path.read_bytes() for path in (tmp_path / place).iterdir()}
        with pytest.raises(ZerostartError, match=r"name another place|is there already"):
            convert(tmp_path / "out", tmp_path / place, "hf", dtype=torch.float16)
        assert kept == {path.name: path.read_bytes() for path in (tmp_path / place).iterdir()}
    # Files that are called as somebody's parameter is.
    import torch.distributed.checkpoint as dcp

    name, tensor = "../../../evil", torch.ones(2)
    optim = {"state": {name: {"exp_avg": tensor}}, "param_groups": [{"lr": 1.0, "params": [name]}]}
    dcp.save({"model": {name: tensor}, "optim": optim}, checkpoint_id=tmp_path / "evil", no_dist=True)
    with pytest.raises(ZerostartError, match="no new file can be called"):
        convert(tmp_path / "evil", tmp_path / "out-of", "universal")
    assert not [path for path in tmp_path.rglob("*evil*") if path != tmp_path / "evil"]


#: Ends itself at the call number ARGV[1] of one of these, as a kill from outside would.
KILLED = """
import os, shutil, signal, sys  # shutil asks at its import what these can do
left = int(sys.argv[1])
def counted(call):
    def made(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return made
if sys.argv[5:]:  # no file can have two names
    def link(*arguments, **options):
        raise PermissionError(1, "Operation not permitted")
    os.link = link
for name in ("pwrite", "ftruncate", "link", "unlink", "replace", "rename", "mkdir", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
from zerostart.state.converting import convert, to_directory
to_directory.UNIT = 1 << 14
made = convert.convert(sys.argv[2], sys.argv[3], sys.argv[4])
print("LEFT", left, "KEPT", made.kept_bytes)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("to", "what"), [("hf", ""), ("dcp", ""), ("zero", ""), ("hf", "no links"), ("dcp", "no elements")]
)
def test_a_kill_at_any_step_is_gone_on_from(
    tmp_path: Path, checkpoints: TinyCheckpoints, to: str, what: str
) -> None:
    folder = checkpoints("qwen3", BF16)
    if what == "no elements":
        folder = tmp_path / "empty"
        folder.mkdir()
        save_file({"a": torch.empty(0, 2, dtype=BF16)}, folder / "model.safetensors")
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_text("{}")

    def started(number: int, out: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(number), str(folder), str(out), to]
        command += [what] if what == "no links" else []
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    whole = started(10**6, tmp_path / "whole")
    total = 10**6 - int(whole.stdout.split()[1])
    files = {p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file()}
    kept = 0
    # What names are given by, and what goes then, step by step.
    last = 8 if to == "zero" else 16
    for number in sorted({*range(0, total, max(1, total // 10)), *range(max(0, total - last), total)}):
        out = tmp_path / str(number)
        assert started(number, out).returncode == -signal.SIGKILL
        try:  # whole, or nothing that a reader takes for a checkpoint
            convert(out, tmp_path / f"{number}-read", "hf", dtype=BF16)
            read = True
        except ZerostartError:
            read = False
        if read:
            assert same(weights(tmp_path / f"{number}-read"), weights(folder)), number
        done = started(10**6, out)
        if done.returncode == 0:
            kept += int(done.stdout.split()[3])
        else:  # it had ended but for what it had to remove
            assert read, (number, done.stderr)
            assert "is there already" in done.stderr, (number, done.stderr)
        assert {p.relative_to(out) for p in out.rglob("*") if p.is_file()} == files, number
        for name in files - {Path("zerostart.json")}:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (number, name)
    assert kept > 0 or what == "no elements"


def test_what_was_written_is_read_again_before_it_counts(
    tmp_path: Path, checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerostart.state.converting import to_directory, work

    folder, out = checkpoints("qwen3", BF16), tmp_path / "out"
    monkeypatch.setattr(to_directory, "UNIT", 1 << 14)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(work.Work, "publish", fail)
        with pytest.raises(ZerostartError, match="go on from there"):
            convert(folder, out, "dcp")
    [staged] = (out / work.PLACE).glob("files-*/__0_0.distcp")
    data = bytearray(staged.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    staged.write_bytes(data)
    made = convert(folder, out, "dcp")
    assert 0 < made.kept_bytes < made.bytes
    convert(out, tmp_path / "back", "hf")
    assert same(weights(tmp_path / "back"), weights(folder))
    assert not (out / ".zerostart").exists()
    index = json.loads((out / "config.json").read_text())
    assert index["model_type"] == "qwen3"


def test_what_others_have_put_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerostart.state.converting import work

    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    save_file({"a": torch.randn(1000)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(work.Work, "link_into", fail)
    staged = []
    for dtype in (None, BF16):
        with pytest.raises(ZerostartError, match="No space left"):
            convert(folder, out, "hf", dtype=dtype)
        # A rank of the first one that lives on would write to no file of the second.
        staged += (out / work.PLACE).glob("files-*/*.safetensors")
        assert [path.exists() for path in staged] == [*[False] * (len(staged) - 1), True]
    monkeypatch.undo()
    # Somebody saves there before the same conversion goes on.
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"model\.safetensors is there already"):
        convert(folder, out, "hf", dtype=BF16)
    assert (out / "model.safetensors").read_bytes() == b"mine"
    (out / "model.safetensors").unlink()
    # A configuration says how the other weights beside it are read.
    (out / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match=r"config\.json is there already"):
        convert(folder, out, "hf", dtype=BF16)
    (out / "config.json").unlink()
    assert convert(folder, out, "hf", dtype=BF16).kept_bytes == 2000

    (tmp_path / "elsewhere" / "files-").mkdir(parents=True)
    (tmp_path / "linked" / ".zerostart").mkdir(parents=True)
    (tmp_path / "linked" / work.PLACE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ZerostartError, match="is a link"):
        convert(folder, tmp_path / "linked", "dcp")
    assert (tmp_path / "elsewhere" / "files-").exists()


def test_tensors_without_elements_are_several(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    values = {"a": torch.empty(0, 2), "b": torch.empty(0, 2), "c": torch.ones(1)}
    dcp.save(values, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "config.json").write_text('{"tie_word_embeddings": true}')
    convert(tmp_path / "dcp", tmp_path / "hf", "hf")
    assert same(weights(tmp_path / "hf"), values)


def test_complex_parameters_have_no_masters() -> None:
    groups = [ParameterGroup({}, ("w",))]
    contents = Contents((), {"w": Stored("w", "C64", (2,), ())}, groups=groups, buffers=frozenset())
    with pytest.raises(ConfigError, match="w is complex"):
        as_model(contents)


class Counting(torch.optim.Optimizer):
    """Keeps of each parameter one number, and its learning rate in a tensor, as graphs want it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "named": "as it was"})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad)
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1


def test_numbers_alone_and_settings_in_tensors(tmp_path: Path) -> None:
    """Expect what torch opens to go on as the run that was saved, and its numbers in DeepSpeed's files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(place: Path | None, steps: int) -> tuple[torch.nn.Module, Counting]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = Counting(model.parameters())
        if place is not None:
            torch.nn.init.zeros_(model.weight)
            optimizer.param_groups[0]["lr"] = torch.tensor(9.0, dtype=torch.float64)
            states, kept = get_state_dict(model, optimizer)
            dcp.load({"model": states, "optim": kept}, checkpoint_id=place, no_dist=True)
            set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=kept)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).pow(2).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(None, 2)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05, dtype=torch.float64)
    states, kept = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optim": kept}, checkpoint_id=tmp_path / "saved", no_dist=True)
    convert(tmp_path / "saved", tmp_path / "again", "dcp")
    convert(tmp_path / "saved", tmp_path / "universal", "universal", zero_stage=1)
    convert(tmp_path / "universal", tmp_path / "back", "dcp")
    expected = trained(tmp_path / "saved", 1)[0].state_dict()
    for place in ("again", "back"):
        found, after = trained(tmp_path / place, 1)
        assert after.param_groups[0]["lr"].item() == 0.05
        assert {float(state["step"]) for state in after.state.values()} == {3.0}
        assert same(dict(found.state_dict()), dict(expected)), place
    for stage, key in ((1, "base_optimizer_state"), (3, "optimizer_state_dict")):
        made = convert(tmp_path / "again", tmp_path / f"zero-{stage}", "zero", zero_stage=stage)
        assert made.left_out == ()
        [path] = (tmp_path / f"zero-{stage}").rglob("*optim_states.pt")
        base = torch.load(path, weights_only=False)["optimizer_state_dict"][key]
        assert base["state"] == {0: {"step": torch.tensor(2.0)}}
        [group] = base["param_groups"]
        assert (group["lr"].item(), group["named"], group["params"]) == (0.05, "as it was", [0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*QUANTISED])
def test_what_is_dequantised_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    """Expect the library's own dequantised weights, of which the configuration says nothing else."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    how = FineGrainedFP8Config if kind.endswith("fp8") else Mxfp4Config
    QUANTISED[kind](tmp_path / "quantised")
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantised", quantization_config=how(dequantize=True)
    )
    for to in ("original", "zero", "universal", "hf"):
        convert(tmp_path / "quantised", tmp_path / to, to)
        config = json.loads((tmp_path / to / "config.json").read_text())
        assert ("quantization_config" in config) == (to == "hf"), to
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    assert same(dict(found.state_dict()), dict(expected.state_dict()))
