"""Writes, conjugates and memory in converters, compared with eager torch."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recipe.shards import compare, module_with, recipe_of, symbols_of
from zerostart.checkpoint.memory import memory_catalog
from zerostart.errors import ConversionError
from zerostart.models import Built, library_of
from zerostart.models.operator_log import OperatorLog
from zerostart.recipe import SymbolicTensor, Target
from zerostart.recipe.recording import trace_call
from zerostart.recipe.symbolic import snapshot

Tensors = dict[str, torch.Tensor]


def source() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    real = torch.randn(8, 6, generator=generator)
    return {"w": real, "u": real.flip(0) + 1, "c": torch.complex(real, real.flip(1) - 0.5)}


def check(convert: Callable[[Tensors], Tensors], tensors: Tensors | None = None) -> None:
    """Load a converter's result on three ranks in small chunks, and compare with eager torch."""
    tensors = tensors or source()
    expected = {n: t.resolve_conj() for n, t in convert({n: t.clone() for n, t in tensors.items()}).items()}

    def run() -> dict[str, SymbolicTensor]:
        return {name: snapshot(tensor) for name, tensor in convert(dict(symbols_of(tensors))).items()}

    result = trace_call("the converter", run)
    compare({name: recipe_of(name, tensor) for name, tensor in result.items()}, expected, tensors, 3, 64)


def test_what_shares_memory_changes_together() -> None:
    def convert(d: Tensors) -> Tensors:
        early = d["w"].view(6, 8).T
        part = d["w"][2:4]
        both = copy.deepcopy([d["u"], d["u"].T])
        d["w"].mul_(3)
        part.view(-1)[::2] = 0
        both[0][0] = 7
        again = d["u"].detach()
        again.t_()
        again[1] = d["w"].data[0, 0]
        return {
            "early": early,
            "part": part,
            "w": d["w"],
            "turned": both[1],
            "u": d["u"],
            "again": again,
        }

    check(convert)


def test_results_of_operators_with_a_place_for_them() -> None:
    def convert(d: Tensors) -> Tensors:
        place, empty = torch.zeros(8, 6), torch.empty(0)
        torch.add(d["w"], 1, out=place)
        torch.cat([d["w"], d["u"]], out=empty)
        torch._foreach_add_([place, d["u"]], 2)
        d["w"].index_put_((torch.tensor([1, 0]),), d["u"][:2]).masked_fill_(torch.arange(6) > 3, 0)
        d["w"].scatter_(1, torch.zeros(8, 1, dtype=torch.long), 5.0)
        return {"place": place, "empty": empty, **d}

    check(convert)


def test_conjugates_are_conjugates() -> None:
    check(
        lambda d: {
            "conj": d["c"].conj(),
            "mH": d["c"].mH,
            "adjoint": d["c"].adjoint(),
            "resolved": d["c"].conj().resolve_conj()[2:],
            "twice": d["c"].conj().T.conj(),
            "imag": d["c"].conj().imag,
            "real": torch.view_as_real(d["c"])[..., 0] + 1,
            "parts": torch.view_as_real(d["c"].conj().clone()),
            "made": torch.view_as_complex(d["w"].view(8, 3, 2)),
            "joined": torch.cat([d["c"].conj(), d["c"]]),
        }
    )

    def written(d: Tensors) -> Tensors:
        d["c"].conj()[0] = d["c"][1]
        d["c"].imag[2] = 4
        torch.view_as_real(d["c"])[3, :, 0].zero_()
        return {"c": d["c"]}

    check(written)


def test_constants_have_values_and_may_be_results() -> None:
    def convert(d: Tensors) -> Tensors:
        order = torch.arange(8).numpy()[::-1].copy()
        scale = torch.ones(6)
        scale[1::2] = 3
        rows = [row for row in torch.arange(8).tolist() if row % 2]
        mask = torch.tensor([True, False] * 4)
        half = torch.tensor(8).item() // 2
        return {
            "w": d["w"][torch.from_numpy(order)] * scale,
            "rows": d["u"][rows],
            "masked": d["u"][mask],
            "half": d["u"][:half],
            "zeros": torch.zeros(3, 5),
            "scale": scale,
        }

    check(convert)


def test_a_converter_may_read_files_of_its_own(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0), "b": torch.ones(8, 1)}, tmp_path / "more.pt")
    save_file({"c": torch.arange(48.0).view(8, 6)}, tmp_path / "more.safetensors")
    np.save(tmp_path / "more.npy", np.full((8, 6), 3, np.float32))

    def convert(d: Tensors) -> Tensors:
        more = torch.load(tmp_path / "more.pt") | load_file(tmp_path / "more.safetensors")
        more["b"] *= 2
        array = torch.from_numpy(np.load(tmp_path / "more.npy"))
        return {
            "w": (d["w"] + more["a"]) * more["b"],
            "u": d["u"] - more["c"],
            "array": array[1:] + d["u"][1:],
        }

    check(convert)


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "numpy": lambda t: t.numpy(),
    "numpy unbound": lambda t: torch.Tensor.numpy(t),
    "asarray": lambda t: np.asarray(t),
    "array": lambda t: np.array(t),
    "ufunc": lambda t: np.add(t, 1),
    "data_ptr": lambda t: t.data_ptr(),
    "data_ptr unbound": lambda t: torch.Tensor.data_ptr(t),
    "untyped_storage": lambda t: t.untyped_storage().data_ptr(),
    "storage unbound": lambda t: bytes(torch.Tensor.untyped_storage(t)),
    "storage": lambda t: t.storage(),
    "__dlpack__": lambda t: t.__dlpack__(),
    "to_dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "numpy from_dlpack": lambda t: np.from_dlpack(t),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t[0, 0]),
    "format": lambda t: f"{t[0, 0]}",
    "branch": lambda t: bool((t > 0).all()),
    "pickle": lambda t: t.__reduce_ex__(2),
    "share_memory_": lambda t: t.share_memory_(),
    "apply_": lambda t: t.apply_(lambda x: x),
    "into numpy": lambda t: torch.from_numpy(np.zeros((8, 6), np.float32)).copy_(t),
    "into a shared array": lambda t: [a := torch.zeros(6), a.numpy(), a.copy_(t[0])],
    "equal": lambda t: torch.equal(t, t),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_asks_for_values_or_memory_is_refused(name: str) -> None:
    """The refusal holds after a write, and if the converter catches it."""

    def convert(d: Tensors) -> Tensors:
        d["w"][0] = 1
        try:
            READS[name](d["w"])
        except ConversionError:
            return {"w": d["w"] + 1}
        return {"w": d["w"]}

    catalog = memory_catalog({"w": source()["w"]})
    targets = {"w": Target("w", (8, 6), torch.float32)}
    model = module_with({"w": source()["w"]})
    built = Built(model, OperatorLog(), None, False, library_of(model))
    with pytest.raises(ConversionError, match=r"memory|values"):
        built.recipes(catalog, targets, convert)


def test_writes_to_what_was_not_made_in_the_converter_are_refused() -> None:
    outside = torch.zeros(8, 6)
    with pytest.raises(ConversionError, match="did not make"):
        check(lambda d: {"w": outside.copy_(d["w"])})
    with pytest.raises(ConversionError, match="share memory"):
        check(lambda d: {"w": d["w"][0].expand(3, 6).fill_(2)})


OVERLAPS: dict[str, Callable[[torch.Tensor], object]] = {
    "turned": lambda w: w[:6].copy_(w[:6].T),
    "next rows": lambda w: w[1:].add_(w[:-1]),
    "next rows with gaps": lambda w: w[1:, :3].add_(w[:-1, :3]),
    "columns": lambda w: w[:, 1:].copy_(w[:, :-1]),
    "in a list": lambda w: torch._foreach_add_([w[:4], w[4:]], [w[4:], w[:4]]),
    "bytes": lambda w: w.view(torch.int32)[1:].copy_(w[:-1]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_reads_what_it_writes_is_refused_as_torch_refuses_it_or_leaves_it_open(name: str) -> None:
    def run() -> None:
        w = symbols_of(source())["w"]
        with contextlib.suppress(RuntimeError):
            OVERLAPS[name](w)

    with pytest.raises(ConversionError, match="memory that it also writes to"):
        trace_call("the converter", run)
