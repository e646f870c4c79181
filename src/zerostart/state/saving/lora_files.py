"""Reading LoRA files: PEFT's, diffusers', DiffSynth's, kohya's, and a training run's checkpoints.

They hold the two factors of each adapted module. How modules are called, and where what the product is
multiplied by is written down, is each library's own.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.formats.saved_state import open_saved_state
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import load_json, read_json
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from zerostart.state.resuming.training_state import MARKER, MODEL
from zerostart.state.resuming.values import decoded
from zerostart.state.saving.diffsynth_names import PREFIX, names_for

logger = logging.getLogger("zerostart")

#: What PEFT and diffusers call their files in a directory; DiffSynth's are called by their step.
_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
#: What names of modules begin with: in PEFT's files, diffusers' (two of them), DiffSynth's.
_BEFORE = ("base_model.model.", "transformer.", "diffusion_model.", PREFIX)
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>A|B|down|up)(\.[^.]+)?\.weight")
#: Where diffusers keeps the configuration of an adapter in the header of its file.
_METADATA = "lora_adapter_metadata"
#: What kohya's scripts put before the name of a module, whose dots are underscores there.
_KOHYA = ("lora_unet_", "lora_transformer_")


@dataclass(frozen=True)
class Factors:
    """The factors [rank, inputs] and [outputs, rank] of one module, and what scales their product."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class LoraFile:
    """What a file holds: tensors under its own names, and what it says of the adapter.

    ``named`` is what messages call it.
    """

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Any]
    named: str

    def checksum(self) -> str:
        """The same for files of the same contents, on every rank."""
        return _checksum(self.tensors, self.metadata)

    def factors(self, known: Iterable[str], model: nn.Module) -> tuple[dict[str, Factors], list[str]]:
        """Factors by the modules of ``model`` that are ``known``, and the names in the file that are none.

        Raises CheckpointError for what is no pair of factors, ConfigError for more than factors and a scale.
        """
        return _by_module(_parsed(self.tensors, self.metadata, self.named), list(known), model)


def read_lora(source: str | os.PathLike[str], asked: str = "") -> LoraFile:
    """What lies at ``source``: a file, a directory with one, or a training checkpoint of a LoRA.

    Messages have ``asked``, what has named it, before the path. Raises CheckpointNotFoundError,
    CheckpointError, and ConfigError for a checkpoint that does not say its scale.
    """
    path = expanded(source)
    # A training checkpoint first: its folders hold safetensors files as well, which say no alpha.
    if (state := state_of(path)) is not None:
        return LoraFile(*_read_state(state, f"{asked}{state}"), f"{asked}{state}")
    file = _file_of(path, f"{asked}{path}")
    return LoraFile(*_read(file, f"{asked}{file}"), f"{asked}{file}")


def _checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(repr(metadata).encode(), digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # The bytes themselves: a sum would not tell tensors apart whose elements have changed places.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_of(path: Path) -> Path | None:
    """The training checkpoint that ``path`` is, or lies in; None where it is no part of one."""
    # The state itself, its folder of the model, or a file in that: what a user may have copied the path of.
    return next((one for one in (path, path.parent, path.parent.parent) if (one / MARKER).is_file()), None)


def _read_state(state: Path, named: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The adapters in a checkpoint of a run, and the alpha that its document says."""
    document, (weights,) = open_saved_state(state, [MODEL])
    extra = document.get("extra")
    course = extra.get("course") if isinstance(extra, dict) else None
    # The course is what a run has noted of its settings; `zerostart.save_state` in a script notes none.
    alpha = decoded(course, {}).get("lora.alpha") if isinstance(course, dict) else None
    if not isinstance(alpha, int | float):
        raise ConfigError(
            f"{named} is a training state without lora.alpha, so the scale of its "
            "factors is unknown; save the adapter alone (zerostart.save with adapters_only), and "
            "name that"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in weights.files:  # the state's own, of all that may lie there
        tensors |= _read(Path(file), f"{named}: {file}")[0]
    return tensors, {"lora_alpha": alpha}


def _file_of(path: Path, named: str) -> Path:
    if path.is_file():
        return path
    usual = [path / name for name in _FILES if (path / name).is_file()]
    files = usual or (sorted(path.glob("*.safetensors")) if path.is_dir() else [])
    if len(files) != 1:
        what = (
            "has several safetensors files; name one"
            if files
            else "is neither a LoRA file nor a directory with one"
        )
        raise CheckpointNotFoundError(f"{named} {what}")
    return files[0]


def _read(path: Path, named: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The tensors of a file, and the configuration of the adapter that lies in it or beside it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            # Read whole, on the host: factors are small, and every rank needs all of them until they are
            # sharded.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            written = (file.metadata() or {}).get(_METADATA)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{named} cannot be read: {error}") from error
    if written is not None:
        settings = load_json(written.encode("utf-8", "surrogatepass"), str(path), _METADATA)
        # diffusers puts the name of the component before each key.
        return tensors, {key.rpartition(".")[2]: value for key, value in settings.items()}
    beside = path.with_name("adapter_config.json")
    return tensors, read_json(beside, "configuration of an adapter") if beside.is_file() else {}


def _parsed(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object], named: str
) -> dict[str, Factors]:
    """Factors by the names of modules in the file."""
    # Each of these means that a product is more than `scale * B @ A` with one rank for all modules.
    for key in ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "modules_to_save"):
        if metadata.get(key):
            raise ConfigError(f"{named} has {key}, which is not available in a run")
    factors: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}}
    alphas: dict[str, float] = {}
    for name, tensor in tensors.items():
        if name.endswith(".alpha") and tensor.numel() == 1:
            alphas[name.removesuffix(".alpha")] = float(tensor)
            continue
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() < 2:
            raise CheckpointError(f"{named} has {name}, which is not a factor of an adapter")
        # kohya's `down` is A ([rank, inputs]) and `up` is B ([outputs, rank]).
        those = factors["A" if match["kind"] in ("A", "down") else "B"]
        if match["module"] in those:
            raise CheckpointError(
                f"{named} has several adapters, such as two of {match['module']}: save one by itself"
            )
        those[match["module"]] = tensor
    if single := sorted(factors["A"].keys() ^ factors["B"].keys()):
        raise CheckpointError(f"{named} has only one of the two factors of {single[0]}")
    whole = metadata.get("lora_alpha")
    if whole is None and not alphas and any(name.startswith(_BEFORE[0]) for name in factors["A"]):
        logger.warning(
            "%s has PEFT's names but no adapter_config.json beside it: its alpha "
            "is assumed to equal its rank",
            named,
        )
    return {
        module: Factors(a, factors["B"][module], _scaling(a.shape[0], alphas.get(module), metadata, named))
        for module, a in factors["A"].items()
    }


def _scaling(rank: int, alpha: float | None, metadata: Mapping[str, object], named: str) -> float:
    """What scales the product of two factors: a module's own ``alpha`` counts before the whole adapter's."""
    if alpha is not None:
        return alpha / rank
    whole = metadata.get("lora_alpha")
    if whole is None:
        return 1.0
    if not isinstance(whole, int | float):
        raise CheckpointError(f"{named}: lora_alpha is {whole!r}, not a number")
    # Rank-stabilised LoRA divides by the square root.
    return whole / (math.sqrt(rank) if metadata.get("use_rslora") else rank)


def _by_module(
    found: Mapping[str, Factors], adapted: list[str], model: nn.Module
) -> tuple[dict[str, Factors], list[str]]:
    """The same by the names of the model's modules, and the names that are of none of them."""
    # What a module may be called in a file: by diffusers, by DiffSynth, and both as kohya writes names.
    names = names_for(model)
    known = {name: name for name in adapted}
    if names is not None and not names.fused:
        known |= {names.of(name): name for name in adapted}
    # Last, over what is known by then: kohya writes the names of either with underscores.
    known |= {before + name.replace(".", "_"): known[name] for name in [*known] for before in _KOHYA}
    factors: dict[str, Factors] = {}
    unexpected = []
    for in_file, pair in found.items():
        # The name as it stands comes first: a model may have a module that is called `transformer`.
        candidates = (in_file, *(in_file.removeprefix(one) for one in _BEFORE if in_file.startswith(one)))
        name = next((known[candidate] for candidate in candidates if candidate in known), None)
        if name is None:
            unexpected.append(in_file)
        else:
            factors[name] = pair
    return factors, unexpected
