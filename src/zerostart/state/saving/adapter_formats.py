"""Formats of adapters' files by name: PEFT's, diffusers', DiffSynth's, ComfyUI's, and kohya's scripts'.

Whoever saves adapters takes a format from here: ``zerostart.save``, a training run, and ``zerostart export``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from zerostart.errors import ConfigError
from zerostart.state.saving.adapters import PEFT_FORMAT, AdapterFormat
from zerostart.state.saving.diffsynth_names import PREFIX, names_for
from zerostart.state.saving.tool_names import comfyui_names, kohya_names

#: Formats for other tools: what gives the names of factors there, of a model and of what asks for it.
TOOLS: Mapping[str, Callable[[nn.Module, str], Callable[[str], str]]] = {
    "comfyui": comfyui_names,
    "kohya": kohya_names,
}
#: Of diffusers' LoRA files: the name, what names begin with, and where PEFT's configuration is in the header.
_LORA_WEIGHTS, _COMPONENT, _METADATA = "pytorch_lora_weights", "transformer.", "lora_adapter_metadata"


def adapter_format(
    kind: str, model: nn.Module, *, key: str = "adapter_format", stem: str = _LORA_WEIGHTS, prefix: str = ""
) -> AdapterFormat:
    """The format ``kind``, one of ``ADAPTER_FORMATS``, for adapters of ``model``, which nothing is around.

    ``stem`` names DiffSynth's file, which there is called as one likes. ``prefix`` is left out of the names
    that begin with it. Raises ConfigError, in which ``key`` asks for the format, for an unknown one and for a
    model whose names it does not have.
    """
    if kind not in ADAPTER_FORMATS:
        raise ConfigError(f"{key} {kind!r} is unknown: it is one of {', '.join(ADAPTER_FORMATS)}")
    if kind in TOOLS:
        # These tools read the scale from an alpha beside each pair of factors, not from a configuration.
        return AdapterFormat(_LORA_WEIGHTS, TOOLS[kind](model, key), False, configured=False, alphas=True)
    return _OF_LIBRARIES[kind].made(model, key, stem, prefix)


def _of_peft(model: nn.Module, key: str, stem: str, prefix: str) -> AdapterFormat:
    return replace(PEFT_FORMAT, renamed=without(prefix, lambda name: name))


def _of_diffusers(model: nn.Module, key: str, stem: str, prefix: str) -> AdapterFormat:
    component = without(prefix, lambda name: _COMPONENT + name)
    described = functools.partial(_described, component)
    return AdapterFormat(_LORA_WEIGHTS, component, False, described, configured=False)


def _of_diffsynth(model: nn.Module, key: str, stem: str, prefix: str) -> AdapterFormat:
    names = names_for(model)
    renamed = without(prefix, lambda name: _COMPONENT + name)
    # Of modules that are one there, its loader puts together what diffusers' names stand for.
    if names is None or not names.fused:
        of = diffsynth_names(model, key)
        renamed = without(prefix, lambda name: PREFIX + _with_adapter(of(name)))
    # DiffSynth reads no alpha: what scales the product is folded into the factors.
    return AdapterFormat(stem, renamed, False, configured=False, folded=True)


class _Format(NamedTuple):
    """A format that a library opens again; ``made`` takes what follows ``kind`` in ``adapter_format``."""

    name: str
    made: Callable[[nn.Module, str, str, str], AdapterFormat]


_OF_LIBRARIES = {
    one.name: one
    for one in (
        _Format("peft", _of_peft),
        _Format("diffusers", _of_diffusers),
        _Format("diffsynth", _of_diffsynth),
    )
}
ADAPTER_FORMATS = (*_OF_LIBRARIES, *TOOLS)


def diffsynth_names(model: nn.Module, key: str) -> Callable[[str], str]:
    """From names of tensors of ``model`` to DiffSynth's; ``key`` is what asks for the format.

    Raises ConfigError for a model whose modules are others there.
    """
    names = names_for(model)
    if names is None or names.fused:
        raise ConfigError(
            f"{key} diffsynth: DiffSynth has no {type(model).__name__} with the same "
            f"modules; leave {key} out to save in the format of the model's own library"
        )
    return names.of


def without(prefix: str, named: Callable[[str], str]) -> Callable[[str], str]:
    """``named``, without ``prefix`` before what it gives."""
    return lambda name: named(name).removeprefix(prefix)


def _with_adapter(name: str) -> str:
    """DiffSynth's names have that of the adapter in them, as the parameters of PEFT's layers have."""
    return name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


def _described(named: Callable[[str], str], config: Any) -> dict[str, str]:
    """PEFT's configuration as diffusers writes it into the header of a LoRA file."""
    values = {
        # Lists of modules are sets in PEFT, which JSON has not; sorted, so that equal runs give equal files.
        named(key): sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return {"format": "pt", _METADATA: json.dumps(values, indent=2, sort_keys=True)}
