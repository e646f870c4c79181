"""A plain module is loaded as its own ``load_state_dict`` does it: hooks, versions, ties, shared buffers."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import zerostart
from tests.ranks import run_ranks

State = dict[str, torch.Tensor]


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Renaming(nn.Module):
    """Reads what an older version of it wrote: other names, rows in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old_")]:
            state[prefix + key.removeprefix(f"{prefix}old_")] = state.pop(key).flip(0)
        super()._load_from_state_dict(state, prefix, *rest)


class Versioned(nn.Module):
    """Since version 2 its weight is stored transposed."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Hooked(nn.Module):
    """Fuses two tensors on the way in; its table may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(4, 3))
        self.register_buffer("table", torch.arange(2.0))
        self.register_load_state_dict_pre_hook(self._fuse)
        self.register_load_state_dict_post_hook(self._forgive)

    @staticmethod
    def _fuse(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}fused"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])

    @staticmethod
    def _forgive(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("table")]


class Computing(Hooked):
    """Computes with its weights as soon as they are loaded."""

    @staticmethod
    def _forgive(module: Any, keys: Any) -> None:
        module.table.copy_(module.fused.sum(1)[:2])


class Keeping(nn.Module):
    """What the checkpoint lacks keeps the constructor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 3), 2.0))
        self.b = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("a", "table"):
            state.setdefault(prefix + name, getattr(self, name).detach())
        super()._load_from_state_dict(state, prefix, *rest)


class Growing(nn.Module):
    """Takes shapes, and a whole buffer, from the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1, 3))
        self.register_buffer("table", None)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.register_buffer("table", state[f"{prefix}table"].clone())
        self.a = nn.Parameter(state[f"{prefix}a"])
        super()._load_from_state_dict(state, prefix, *rest)


class Root(nn.Module):
    """Its ``load_state_dict`` takes a wrapper's prefix away."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        state = {key.removeprefix("module."): value for key, value in state_dict.items()}
        return super().load_state_dict(state, strict, assign)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)

    def get_extra_state(self) -> Any:
        return torch.tensor(3)

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        self.b.weight = self.a.weight


class Sharing(nn.Module):
    """A buffer of two modules; the first may keep it out of the state dict."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Module(), nn.Module(), nn.Linear(2, 2)
        table = torch.arange(4.0)
        self.a.register_buffer("table", table, persistent=persistent)
        self.b.register_buffer("table", table)


class BothPersistent(Sharing):
    def __init__(self) -> None:
        super().__init__(persistent=True)


class Views(nn.Module):
    """Buffers that look at one memory, before and after the one that holds all of it, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(12.0).view(3, 4)
        self.register_buffer("turned", table.t()[1:])
        self.register_buffer("table", table)
        self.register_buffer("rest", table[1:], persistent=False)
        self.register_buffer("left", table[:, :2])
        self.corner = table[:1, :1]
        self.weight = nn.Parameter(torch.zeros(3))


class Computed(nn.Module):
    """Holds a tensor that only its constructor knows how to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.cosines = torch.arange(3.0).cos()


def lost_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Computed()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(3, 4))


def spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 4))


def of(make: Callable[[], nn.Module], *without: str) -> State:
    """A state dict of the module with other values, ``_metadata`` included."""
    state: State = make().state_dict()
    for number, (name, t) in enumerate(list(state.items())):
        state[name] = tensor(*t.shape, seed=number) if t.is_floating_point() else torch.full_like(t, 7)
    for name in without:
        del state[name]
    return state


_LINEAR = {"a.weight": tensor(4, 3), "a.bias": tensor(4)}
_FUSED = {"q": tensor(1, 3), "k": tensor(3, 3, seed=1)}
CASES: dict[str, tuple[Callable[[], nn.Module], State]] = {
    "renaming": (Renaming, {f"old_{name}": t for name, t in _LINEAR.items()}),
    "version missing": (Versioned, dict(of(Versioned))),
    "version present": (Versioned, of(Versioned)),
    "hooks": (Hooked, _FUSED),
    "keeping": (Keeping, {"b": tensor(2)}),
    "growing": (Growing, {"a": tensor(5, 3), "table": tensor(7)}),
    "root": (Root, {f"module.{name}": t for name, t in _LINEAR.items()}),
    "contradictory ties": (Tied, {"a.weight": tensor(4, 3), "b.weight": tensor(4, 3, seed=1)}),
    "buffer under its second name": (Sharing, of(Sharing)),
    "contradictory buffers": (BothPersistent, {**of(BothPersistent), "a.table": tensor(4, seed=9)}),
    "views": (Views, of(Views)),
    "batch norm": (batch_norm, of(batch_norm)),
    "batch norm of old": (batch_norm, dict(of(batch_norm, "1.num_batches_tracked"))),
    "weight norm": (weight_norm, of(weight_norm)),
    "weight norm of old": (
        weight_norm,
        {"weight_g": tensor(4, 1), "weight_v": tensor(4, 3), "bias": tensor(4)},
    ),
    "spectral norm": (spectral_norm, of(spectral_norm)),
    "scalar of old": (lambda: nn.PReLU(1), {"weight": tensor(1)}),
    "attention": (lambda: nn.MultiheadAttention(4, 2), of(lambda: nn.MultiheadAttention(4, 2))),
}
#: Refused by torch too where the first part says so, and the name in our message.
REFUSED: dict[str, tuple[Any, State, str]] = {
    "computed on meta": (lost_on_meta(), {"weight": tensor(3)}, "cosines"),
    "values": (Computing, {**_FUSED, "table": tensor(2)}, "Computing calls aten.sum"),
    "extra state": (
        Extra,
        {**of(lambda: nn.Linear(3, 4)), "_extra_state": torch.tensor(3)},
        "in state, whose",
    ),
    "no extra state": (Extra, of(lambda: nn.Linear(3, 4)), "_extra_state"),
    "no count": (batch_norm, of(batch_norm, "1.num_batches_tracked"), "1.num_batches_tracked"),
    "shape": (lambda: nn.Linear(3, 4), {"weight": tensor(4, 4), "bias": tensor(4)}, r"weight is \[4, 4\]"),
}


def tensors_of(model: nn.Module) -> State:
    return {
        **{name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)},
        **dict(model.named_buffers(remove_duplicate=False)),
        **{name: t for name, t in vars(model).items() if isinstance(t, torch.Tensor) and name == "corner"},
    }


def load_cases(folder: Path) -> list[str]:
    engines = (("fsdp2", 3), ("deepspeed", 3), ("deepspeed", 2))
    return [line for engine in engines for line in load_on(*engine, folder)]


def load_on(engine: str, zero_stage: int, folder: Path) -> list[str]:
    """Each case from a mapping and from a file, compared with torch; one line for each difference."""
    lines = []
    for case, (make, state) in CASES.items():
        expected = make()
        expected.load_state_dict(state)
        wanted = tensors_of(expected)
        for source in (state, folder / f"{case}.pt"):
            model = zerostart.load(source, make, engine=engine, zero_stage=zero_stage, progress=False)
            found = {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}
            found |= {n: t for n, t in tensors_of(model).items() if n not in found}
            lines += [
                f"{case}: {name}"
                for name, t in wanted.items()
                if name not in found or not torch.equal(found[name], t)
            ]
            memory = [{id_of(t) for t in tensors_of(m).values()} for m in (expected, model)]
            if case == "views" and len(memory[0]) != len(memory[1]):
                lines.append(f"{case}: {len(memory[1])} memories")
    return lines


def id_of(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def refused_cases() -> list[str]:
    lines = []
    for case, (make, state, said) in REFUSED.items():
        try:
            zerostart.load(state, make, engine="fsdp2", progress=False)
        except zerostart.ZerostartError as error:
            lines += [] if re.search(said, str(error)) else [f"{case}: {error}"]
        else:
            lines.append(f"{case} is not refused")
    return lines


def test_as_load_state_dict(tmp_path: Path) -> None:
    for case, (_, state) in CASES.items():
        torch.save(state, tmp_path / f"{case}.pt")
    for lines in run_ranks(load_cases, 2, tmp_path):
        assert not lines, "\n".join(lines)


@pytest.mark.slow
def test_what_cannot_run_before_the_load_is_refused() -> None:
    for lines in run_ranks(refused_cases, 2):
        assert not lines, "\n".join(lines)
