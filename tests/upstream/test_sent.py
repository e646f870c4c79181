"""Each patch in docs/patches fits what is installed, changes nothing for others, and replaces one of ours."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import nn

from tests.ranks import run_ranks
from tests.upstream.sent import Patch, applied, patches, use
from zerostart.upstream.versions import LIBRARIES

pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")
LIBRARY = {library.name: library for library in LIBRARIES}


@pytest.mark.slow
@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.name)
def test_it_fits_what_is_installed(patch: Patch, tmp_path: Path) -> None:
    """By itself, to be sent by itself."""
    sources = applied([patch], tmp_path)
    for name, source in sources.items():
        compile(source, name, "exec")
    library, version = patch.against.split(" ")
    assert version in SpecifierSet(LIBRARY[library].specifier)


@pytest.mark.slow
@pytest.mark.parametrize("library", sorted({patch.library for patch in patches()}))
def test_all_of_a_library_fit_together(library: str, tmp_path: Path) -> None:
    applied(patches(library), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["0", "1", "2", "2-offload", "2-adagrad", "3", "3-param", "3-optimizer", "3-adagrad"]
)
def test_stock_deepspeed_trains_as_before(kind: str, tmp_path: Path) -> None:
    """A model of zero.Init that zerostart has never seen: the same losses, weights and norms, to the bit."""
    stock = run_ranks(train, 2, kind, None, timeout=200)
    assert run_ranks(train, 2, kind, tmp_path, timeout=200) == stock


def train(kind: str, folder: Path | None) -> list[Any]:
    import deepspeed

    if folder is not None:
        use(patches("deepspeed"), folder / str(dist.get_rank()))
    stage, _, how = kind.partition("-")
    zero: dict[str, Any] = {"stage": int(stage), "reduce_bucket_size": 1000}
    if how in ("offload", "optimizer", "param"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if how == "param":
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == "3"):
        model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5), nn.Linear(5, 3))
    kinds = {"adagrad": torch.optim.Adagrad}
    optimizer = kinds.get(how, torch.optim.AdamW)(model.parameters(), lr=0.01)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    seen: list[Any] = []
    rows = torch.randn(3, 2, 2, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    for batch in rows:
        loss = engine(batch[dist.get_rank()]).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == "3"):
        seen += [p.detach().float().tolist() for p in model.parameters()]
    seen += [float(engine.get_global_grad_norm() or 0)] if stage != "0" else []
    engine.destroy()
    return seen


@pytest.mark.slow
def test_deepspeed_begins_with_less(tmp_path: Path) -> None:
    """No gather for a hook, no text of the model, no gradients that are dropped, one copy for a master."""
    for stage, gathers, texts, spared in ((3, 4, 2, 4 + 4), (2, 0, 0, 2 + 4)):
        stock, patched = (run_ranks(beginning, 2, stage, folder) for folder in (None, tmp_path))
        for before, after in zip(stock, patched, strict=True):
            assert (before["gathers"], before["texts"]) == (gathers, texts)
            assert (after["gathers"], after["texts"]) == (0, 0)
            assert before["bytes"] - after["bytes"] == spared * SHARE  # a clone, and zeros in fp32


SIDE = 64
SHARE = 4 * SIDE * SIDE // 2  # elements of a rank


class _Copies(torch.overrides.TorchFunctionMode):
    """Bytes that ``clone``, ``to``, ``zeros`` and ``empty`` make of what is as large as a share."""

    bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = (torch.Tensor.clone, torch.Tensor.to, torch.zeros, torch.empty)
        if func in made and result.numel() == SHARE and all(result is not arg for arg in args):
            self.bytes += result.numel() * result.element_size()
        return result


class _Texts(nn.Sequential):
    texts = 0

    def __repr__(self) -> str:
        _Texts.texts += 1
        return super().__repr__()


def beginning(stage: int, folder: Path | None) -> dict[str, int]:
    import deepspeed

    if folder is not None:
        use(patches("deepspeed"), folder / str(dist.get_rank()) / str(stage))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = _Texts(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)))
    gathers = 0
    for parameter in model.parameters() if stage == 3 else ():

        def all_gather(*args: Any, original: Any = parameter.all_gather, **kwargs: Any) -> Any:
            nonlocal gathers
            gathers += 1
            return original(*args, **kwargs)

        parameter.all_gather = all_gather  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters())
    with _Copies() as copies:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    found = {"gathers": gathers, "texts": _Texts.texts, "bytes": copies.bytes}
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True])
def test_accelerate_prepares_what_is_sharded(patched: bool, tmp_path: Path) -> None:
    """An empty shard's address is that of every other one; a class of fully_shard has another name."""
    for found in run_ranks(prepare, 2, tmp_path if patched else None):
        assert found == {"sharded": "kept" if patched else ERROR, "whole": "sharded"}


ERROR = "ValueError: Could not find the transformer layer class Layer in the model."


class Layer(nn.Linear):
    pass


def prepare(folder: Path | None) -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if folder is not None:
        use(patches("accelerate"), folder / str(dist.get_rank()))
        from accelerate.accelerator import Accelerator
        from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for kind in ("sharded", "whole"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator: Any = Accelerator.__new__(Accelerator)
        accelerator.state = SimpleNamespace(
            fsdp_plugin=plugin,
            dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO),
            deepspeed_plugin=None,
            device=torch.device("cpu"),
            device_mesh=None,
            is_fsdp2=True,
            mixed_precision="no",
        )
        accelerator._models = []
        accelerator.has_fp8_handler = False
        accelerator._prepare_one = lambda item, first_pass=False: item
        torch.manual_seed(0)
        model = nn.Sequential(Layer(3, 1, bias=False), Layer(1, 1, bias=False), Layer(1, 5, bias=False))
        if kind == "sharded":
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = list(model.parameters())
        try:
            ready, _ = accelerator._prepare_fsdp2(model, optimizer)
        except ValueError as error:
            found[kind] = f"{type(error).__name__}: {error}"
            continue
        after, stepped = list(ready.parameters()), optimizer.param_groups[0]["params"]
        assert isinstance(ready, FSDPModule)
        assert all(a is b for a, b in zip(after, stepped, strict=True))
        found[kind] = "kept" if all(a is b for a, b in zip(before, after, strict=True)) else "sharded"
    return found
