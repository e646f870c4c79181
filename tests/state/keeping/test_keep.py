"""Models in memory that outlives their ranks: read by other ranks of other engines, through deaths."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostart
from tests.checkpoint.test_kept import SECRET, Cut, ends, guard_of
from tests.ranks import rank_outcomes, run_ranks
from tests.tiny import TinyCheckpoints
from zerostart.checkpoint.channel import PEERS
from zerostart.checkpoint.kept import folder as kept
from zerostart.distributed.world import current_world
from zerostart.errors import WriteError

ROOT = Path(__file__).resolve().parents[3]
ZERO3: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}
FSDP2: dict[str, Any] = {"engine": "fsdp2"}


@pytest.fixture
def name() -> Iterator[str]:
    made = f"test-{secrets.token_hex(6)}"
    yield made
    kept.remove(kept.folder_of(made))


def scaled(model: torch.nn.Module, factor: float) -> None:
    """Other values, without a step of an optimizer."""
    for parameter in model.parameters():
        held = getattr(parameter, "ds_tensor", None)
        local = held.data if held is not None else getattr(parameter.data, "_local_tensor", parameter.data)
        local.mul_(factor)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in zerostart.full_tensors(model, rank=None) if t is not None}


def expected(path: Path, factor: float) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return dict(model.state_dict())


def check(model: torch.nn.Module, path: Path, factor: float) -> None:
    wanted = expected(path, factor)
    for tensor, values in zerostart.full_tensors(model, rank=None):
        assert values is not None
        assert torch.equal(values, wanted.pop(tensor)), tensor
    assert not wanted


def keep_and_go_on(path: Path, name: str, options: dict[str, Any]) -> None:
    model = zerostart.load(path, progress=False, **options)
    scaled(model, -2.0)
    first = zerostart.keep(model, name)
    assert (first.version, first.source, first.addresses) == (1, f"peer:///{name}", ())
    # Digests are those of the tensors as a save has them; a step meanwhile changes nothing that is kept.
    reading = zerostart.load(first.source, progress=False, **FSDP2)
    scaled(model, -1.0)
    check(reading, path, -2.0)
    second = zerostart.keep(model, name)
    assert second.version == 2
    assert second.digests != first.digests
    terms = (kept.folder_of(name) / kept.TERMS).read_bytes()
    with pytest.raises(WriteError, match="budget=1000 allows"):
        zerostart.keep(model, name, budget=1000, expires_after=1.0, secret="another")
    with pytest.raises(WriteError, match="budget=1000 allows"):
        zerostart.keep(model, f"{name}-first", budget=1000)
    if current_world().rank == 0:  # which removes it
        assert not kept.folder_of(f"{name}-first").exists()
    # Fails on one rank, when the terms of the new version are there.
    with pytest.MonkeyPatch.context() as patch:
        from zerostart.state import keeping

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        if current_world().rank == 1:
            patch.setattr(keeping._Writer, "_put", fail)
        for tried in (name, f"{name}-first"):
            with pytest.raises(
                WriteError, match=r"rank 1: .*No space left on device; what was kept before stays"
            ):
                zerostart.keep(model, tried, expires_after=1.0, secret="another")
    if current_world().rank == 0:
        assert not kept.folder_of(f"{name}-first").exists()
        assert (kept.folder_of(name) / kept.TERMS).read_bytes() == terms
    current_world().all_gather_object(None, "the end of the job")
    os.kill(os.getpid(), signal.SIGKILL)


def restarted(path: Path, name: str, options: dict[str, Any], factor: float) -> None:
    model = zerostart.load(f"peer:///{name}", progress=False, **options)
    check(model, path, factor)


def test_a_killed_job_starts_again_from_memory(name: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    killed = rank_outcomes(keep_and_go_on, 2, path, name, FSDP2, timeout=120)
    assert [outcome.exit_code for outcome in killed] == [-signal.SIGKILL] * 2, killed
    assert [version.number for version in kept.versions(kept.folder_of(name))] == [2]
    run_ranks(restarted, 1, path, name, ZERO3, 2.0)
    pid = guard_of(name)
    kept.remove(kept.folder_of(name))
    assert ends(pid)


def numbered(folder: Path) -> Path:
    """A model with tied embeddings, of which each element is a number of its own."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    count, found = 0, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        found[name] = torch.arange(count, count + tensor.numel()).reshape(tensor.shape).float()
        count += tensor.numel()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


def keep_flat(path: Path, name: str) -> None:
    import deepspeed

    for stage in (1, 2):
        model = zerostart.load(path, engine="deepspeed", zero_stage=stage, progress=False)
        zerostart.keep(model, f"{name}-{stage}")
        model.train()
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        settings |= {"zero_allow_untested_optimizer": True}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        engine.backward(engine(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss)
        engine.step()
        zerostart.keep(engine, f"{name}-{stage}-trained")


@pytest.mark.slow
def test_a_second_drop_leaves_what_another_job_keeps(name: str) -> None:
    weights, folder = {"weight": torch.ones(2, 3)}, kept.folder_of(name)
    model = zerostart.load(weights, lambda: torch.nn.Linear(3, 2, bias=False), progress=False, **FSDP2)
    first = zerostart.keep(model, name)
    first.drop()
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    first.drop()
    assert folder.exists()
    zerostart.keep(model, name).drop()
    assert not folder.exists()


@pytest.mark.slow
def test_flat_buffers_and_tied_weights(name: str, tmp_path: Path) -> None:
    """What is kept of ZeRO-1 and 2 are the numbers of all elements, tied ones once."""
    from safetensors.torch import load_file

    path = numbered(tmp_path)
    wanted = load_file(path / "model.safetensors")
    names = [f"{name}-{stage}{then}" for stage in (1, 2) for then in ("", "-trained")]
    try:
        run_ranks(keep_flat, 2, path, name, timeout=280)
        for one in names:
            (version,) = kept.versions(kept.folder_of(one))
            found = load_file(version.path / kept.WEIGHTS)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[n], wanted[n]) for n in wanted), one
            run_ranks(restarted, 1, path, one, FSDP2, 1.0)
    finally:
        for one in names:
            kept.remove(kept.folder_of(one))


FULL = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
import zerostart
from tests.state.keeping.test_keep import check
from zerostart.checkpoint.kept import folder as kept
from zerostart.errors import WriteError
from zerostart.state import keeping
path, name = json.loads(sys.argv[1])
model = zerostart.load(path, engine="fsdp2", progress=False)
first = zerostart.keep(model, name)
# Somebody else takes what has been found free, but for so much.
look = keeping.check_space
def taken(place, nbytes, what):
    look(place, nbytes, what)
    free = os.statvfs("/dev/shm")
    with open("/dev/shm/filled", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, free.f_bavail * free.f_frsize - left))
keeping.check_space = taken
for left in (0, 4096, 12288, nbytes := first.kept_bytes // 2, first.kept_bytes, first.kept_bytes + 8192):
    try:
        zerostart.keep(model, name)
    except WriteError as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError(f"kept in {left} bytes")
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink("/dev/shm/filled")
        assert [version.number for version in kept.versions(kept.folder_of(name))] == [1]
        assert len([*kept.folder_of(name).glob("0*")]) == 1
    dist.barrier()
    check(zerostart.load(f"peer:///{name}", engine="fsdp2", progress=False), Path(path), 1.0)
keeping.check_space = look
assert zerostart.keep(model, name).version >= 2
if dist.get_rank() == 0:
    kept.remove(kept.folder_of(name))
print("WHOLE", flush=True)
"""


@pytest.mark.slow
def test_memory_that_runs_out_is_one_error_and_the_version_before_stays(
    name: str, checkpoints: TinyCheckpoints
) -> None:
    """In a small /dev/shm of its own, filled by somebody else at each step of a version."""
    path = checkpoints("qwen3", torch.bfloat16)
    apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"', "sh"]
    trial = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"no mount namespaces here: {trial.stderr.strip()}")
    launched = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), "--no-python"]
    command = [*apart, *launched, sys.executable, "-c", FULL, json.dumps([str(path), name])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.count("WHOLE") == 2, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(ZERO3, FSDP2), (FSDP2, ZERO3)])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3"])
def test_four_ranks_of_one_engine_and_two_of_the_other(
    kind: str, before: dict[str, Any], after: dict[str, Any], name: str, checkpoints: TinyCheckpoints
) -> None:
    path = checkpoints(kind, torch.bfloat16)
    killed = rank_outcomes(keep_and_go_on, 4, path, name, before, timeout=240)
    assert [outcome.exit_code for outcome in killed] == [-signal.SIGKILL] * 4, killed
    run_ranks(restarted, 2, path, name, after, 2.0, timeout=240)
    run_ranks(restarted, 4, path, name, before, 2.0, timeout=240)


def keep_and_die_within(path: Path, name: str) -> None:
    model = zerostart.load(path, progress=False, **FSDP2)
    zerostart.keep(model, name)
    scaled(model, 3.0)
    if current_world().rank == 1:
        from zerostart.state import keeping

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        keeping._Writer._put = die  # type: ignore[assignment]
    zerostart.keep(model, name)


@pytest.mark.slow
def test_a_death_within_keep_leaves_the_version_before(name: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    outcomes = rank_outcomes(keep_and_die_within, 2, path, name, timeout=240)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].error.endswith("PeerError"), outcomes[0].describe()
    folder = kept.folder_of(name)
    until = time.monotonic() + 20
    while len([*folder.glob("0*")]) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    assert [path.name[:10] for path in folder.glob("0*")] == ["0000000001"]
    run_ranks(restarted, 2, path, name, FSDP2, 1.0, timeout=240)


def load_through(places: list[str], name: str, path: Path) -> list[str]:
    """What a load by each way ends with: "" where it is whole."""
    os.environ[PEERS.variable] = SECRET
    found = []
    for place in places:
        begin = time.monotonic()
        try:
            check(zerostart.load(f"peer://{place}/{name}", progress=False, **FSDP2), path, 1.0)
            found.append("")
        except zerostart.ZerostartError as error:
            found.append(f"{type(error).__name__}: {error}".replace(place, ""))
        assert time.monotonic() - begin < 60
    return found


def keep_served(path: Path, name: str) -> str:
    model = zerostart.load(path, progress=False, **ZERO3)
    (address,) = zerostart.keep(model, name, address="tcp://127.0.0.1:0", secret=SECRET).addresses
    return address


@pytest.mark.slow
def test_a_peer_that_dies_at_any_message_is_one_error_on_all_ranks(
    name: str, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    address = run_ranks(keep_served, 4, path, name, timeout=240)[0].removeprefix("tcp://")
    (version,) = kept.versions(kept.folder_of(name))
    # As on another machine: asked, and not looked at; found by the way that is named, and by no other.
    document = {**version.document, "memory": "elsewhere", "nodes": []}
    kept.write_json(version.path / kept.DOCUMENT, document)
    ways = [Cut(address, after) for after in range(0, 48, 2)]
    both = [f"{Cut(address, after).place},{address}" for after in range(0, 48, 6)]
    first, second = run_ranks(load_through, 2, [way.place for way in ways] + both, name, path, timeout=280)
    assert first == second
    assert first[-len(both) :] == [""] * len(both)
    assert all(
        text.startswith(("ReadError", "CheckpointNotFoundError"))
        for text, way in zip(first, ways, strict=False)
        if text
    ), first
    assert first[0]
    # An answer may be cut that nobody needs any more.
    assert any(first[: len(ways)]), first


NODE = """
import json, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
import zerostart
from tests.state.keeping.test_keep import check, scaled
from pathlib import Path
doing, path, name, source, options = json.loads(sys.argv[1])
if doing == "keep":
    model = zerostart.load(path, progress=False, **options)
    scaled(model, -4.0)
    kept = zerostart.keep(model, name)
    assert kept.kept_bytes < kept.total_bytes, "a machine has what its ranks have"
    if dist.get_rank() == 0:
        print("SOURCE", kept.source, flush=True)
else:
    model = zerostart.load(source, progress=False, **options)
    check(model, Path(path), -4.0)
    print("CHECKED", zerostart.report(model).read_bytes, flush=True)
"""


def start_rank(
    rank: int, size: int, port: int, within: list[str], told: list[Any]
) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Within another mount namespace a process begins in its root.
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("LOCAL_WORLD_SIZE", None)
    return subprocess.Popen(
        [*within, sys.executable, "-c", NODE, json.dumps(told)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(ranks: "list[subprocess.Popen[str]]") -> str:
    texts = []
    try:
        for rank in ranks:
            text, _ = rank.communicate(timeout=200)
            texts.append(text)
    finally:
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(texts)
    return "\n".join(texts)


def command_of(process: Path) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return (process / "cmdline").read_text(errors="replace")
    return ""


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.mark.slow
def test_machines_read_their_own_and_fetch_the_rest(name: str, checkpoints: TinyCheckpoints) -> None:
    path = checkpoints("qwen3", torch.bfloat16)
    # A machine of its own has shared memory of its own.
    apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    trial = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"no mount namespaces here: {trial.stderr.strip()}")
    port = free_port()
    told = ["keep", str(path), name, "", ZERO3]
    text = ended([start_rank(rank, 2, port, apart if rank else [], told) for rank in range(2)])
    source = next(line.split()[1] for line in text.splitlines() if line.startswith("SOURCE"))
    assert source.count(":") == 3
    guards = [process for process in Path("/proc").glob("[0-9]*") if f"-{name}" in command_of(process)]
    assert len(guards) == 2
    inside = next(g for g in guards if (g / "ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink())
    there = ["nsenter", "--mount", "--target", inside.name]
    try:
        # The next generation, on the same machines; and one with a machine that has none of it.
        for places in ([[], there], [[]], [[], apart]):
            port = free_port()
            told = ["load", str(path), name, f"peer:///{name}", FSDP2]
            ranks = [start_rank(r, len(places), port, within, told) for r, within in enumerate(places)]
            assert ended(ranks).count("CHECKED") == len(places)
    finally:
        os.kill(int(inside.name), signal.SIGTERM)
    # The other machine is lost, and nothing is told to stand in for it.
    failing = start_rank(0, 1, free_port(), [], ["load", str(path), name, f"peer:///{name}", FSDP2])
    text, _ = failing.communicate(timeout=200)
    assert "no whole version of a kept model is there" in text
    assert "no peer listens at" in text
