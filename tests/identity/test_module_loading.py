"""Plain modules load like by ``load_state_dict``."""

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
    """Reads names and row order of an older version."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old_")]:
            state[prefix + key.removeprefix(f"{prefix}old_")] = state.pop(key).flip(0)
        super()._load_from_state_dict(state, prefix, *arguments)


class Versioned(nn.Module):
    """Stores its weight transposed since version 2."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *arguments: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *arguments)


class Hooked(nn.Module):
    """Fuses two tensors; its table may be missing."""

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
    """Computes with its weights right after loading."""

    @staticmethod
    def _forgive(module: Any, keys: Any) -> None:
        module.table.copy_(module.fused.sum(1)[:2])


class Keeping(nn.Module):
    """Keeps the constructor's values of missing tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 3), 2.0))
        self.b = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0))

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        for name in ("a", "table"):
            state.setdefault(prefix + name, getattr(self, name).detach())
        super()._load_from_state_dict(state, prefix, *arguments)


class Growing(nn.Module):
    """Takes shapes and a whole buffer from the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1, 3))
        self.register_buffer("table", None)

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        self.register_buffer("table", state[f"{prefix}table"].clone())
        self.a = nn.Parameter(state[f"{prefix}a"])
        super()._load_from_state_dict(state, prefix, *arguments)


class Root(nn.Module):
    """Removes a wrapper's prefix in ``load_state_dict``."""

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
    """Two modules share a buffer."""

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
    """Buffers and an attribute that share memory."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(12.0).view(3, 4)
        self.register_buffer("transposed", table.t()[1:])
        self.register_buffer("table", table)
        self.register_buffer("tail", table[1:], persistent=False)
        self.register_buffer("columns", table[:, :2])
        self.corner = table[:1, :1]
        self.weight = nn.Parameter(torch.zeros(3))


class Computed(nn.Module):
    """Holds a tensor that only its constructor can compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.cosines = torch.arange(3.0).cos()


def computed_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Computed()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(3, 4))


def spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 4))


def random_state(make: Callable[[], nn.Module], *missing_names: str) -> State:
    """Return a state dict with other values, ``_metadata`` included."""
    state: State = make().state_dict()
    for number, (name, t) in enumerate(list(state.items())):
        state[name] = tensor(*t.shape, seed=number) if t.is_floating_point() else torch.full_like(t, 7)
    for name in missing_names:
        del state[name]
    return state


_LINEAR = {"a.weight": tensor(4, 3), "a.bias": tensor(4)}
_FUSED = {"q": tensor(1, 3), "k": tensor(3, 3, seed=1)}
CASES: dict[str, tuple[Callable[[], nn.Module], State]] = {
    "renaming": (Renaming, {f"old_{name}": t for name, t in _LINEAR.items()}),
    "version missing": (Versioned, dict(random_state(Versioned))),
    "version present": (Versioned, random_state(Versioned)),
    "hooks": (Hooked, _FUSED),
    "keeping": (Keeping, {"b": tensor(2)}),
    "growing": (Growing, {"a": tensor(5, 3), "table": tensor(7)}),
    "root": (Root, {f"module.{name}": t for name, t in _LINEAR.items()}),
    "contradictory ties": (Tied, {"a.weight": tensor(4, 3), "b.weight": tensor(4, 3, seed=1)}),
    "buffer under its second name": (Sharing, random_state(Sharing)),
    "contradictory buffers": (BothPersistent, {**random_state(BothPersistent), "a.table": tensor(4, seed=9)}),
    "views": (Views, random_state(Views)),
    "batch norm": (batch_norm, random_state(batch_norm)),
    "batch norm of old": (batch_norm, dict(random_state(batch_norm, "1.num_batches_tracked"))),
    "weight norm": (weight_norm, random_state(weight_norm)),
    "weight norm of old": (
        weight_norm,
        {"weight_g": tensor(4, 1), "weight_v": tensor(4, 3), "bias": tensor(4)},
    ),
    "spectral norm": (spectral_norm, random_state(spectral_norm)),
    "scalar of old": (lambda: nn.PReLU(1), {"weight": tensor(1)}),
    "attention": (lambda: nn.MultiheadAttention(4, 2), random_state(lambda: nn.MultiheadAttention(4, 2))),
}
#: Refused cases: model, state dict, and part of the message.
REFUSED_CASES: dict[str, tuple[Any, State, str]] = {
    "computed on meta": (computed_on_meta(), {"weight": tensor(3)}, "cosines"),
    "values": (Computing, {**_FUSED, "table": tensor(2)}, "Computing calls aten.sum"),
    "extra state": (
        Extra,
        {**random_state(lambda: nn.Linear(3, 4)), "_extra_state": torch.tensor(3)},
        "in state, whose",
    ),
    "no extra state": (Extra, random_state(lambda: nn.Linear(3, 4)), "_extra_state"),
    "no count": (batch_norm, random_state(batch_norm, "1.num_batches_tracked"), "1.num_batches_tracked"),
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
    return [line for engine in engines for line in load_cases_on(*engine, folder)]


def load_cases_on(engine: str, zero_stage: int, folder: Path) -> list[str]:
    """Load each case twice; list differences to torch."""
    differences = []
    for case, (make, state) in CASES.items():
        expected = make()
        expected.load_state_dict(state)
        expected_tensors = tensors_of(expected)
        for source in (state, folder / f"{case}.pt"):
            model = zerostart.load(source, make, engine=engine, zero_stage=zero_stage, progress=False)
            tensors = {name: t for name, t in zerostart.full_tensors(model, rank=None) if t is not None}
            tensors |= {n: t for n, t in tensors_of(model).items() if n not in tensors}
            differences += [
                f"{case}: {name}"
                for name, t in expected_tensors.items()
                if name not in tensors or not torch.equal(tensors[name], t)
            ]
            storages = [{storage_id(t) for t in tensors_of(m).values()} for m in (expected, model)]
            if case == "views" and len(storages[0]) != len(storages[1]):
                differences.append(f"{case}: {len(storages[1])} storages")
    return differences


def storage_id(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def refused_cases() -> list[str]:
    errors = []
    for case, (make, state, message) in REFUSED_CASES.items():
        try:
            zerostart.load(state, make, engine="fsdp2", progress=False)
        except zerostart.ZerostartError as error:
            errors += [] if re.search(message, str(error)) else [f"{case}: {error}"]
        else:
            errors.append(f"{case} is not refused")
    return errors


def test_equals_load_state_dict(tmp_path: Path) -> None:
    for case, (_, state) in CASES.items():
        torch.save(state, tmp_path / f"{case}.pt")
    for differences in run_ranks(load_cases, 2, tmp_path):
        assert not differences, "\n".join(differences)


@pytest.mark.slow
def test_unloadable_modules_are_refused() -> None:
    for errors in run_ranks(refused_cases, 2):
        assert not errors, "\n".join(errors)
