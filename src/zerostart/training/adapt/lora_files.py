"""Start a LoRA training from the values in a LoRA file.

Files of PEFT, diffusers and DiffSynth have the two factors of each adapted module under their own names.
Other names (kohya, ComfyUI) and fused modules are converted by diffusers.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import load_json, read_json
from zerostart.distributed.world import World
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from zerostart.state.saving.adapter_formats import PREFIX, find_known_names
from zerostart.training.adapt.lora import ADAPTER
from zerostart.training.config.configuration import LoraConfig
from zerostart.training.loop.course import agree
from zerostart.upstream.diffusers.weights import is_diffusers, lora_converter

logger = logging.getLogger("zerostart")

#: Names of PEFT's and diffusers' files in a directory; DiffSynth's are named by step.
_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
#: Prefixes of module names: PEFT's, diffusers' (two), DiffSynth's.
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.", PREFIX)
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>A|B|down|up)(\.[^.]+)?\.weight")
#: Spellings of the two factors, and prefixes of names with underscores for dots (kohya).
_SPELLINGS = (("lora_A", "lora_B"), ("lora_down", "lora_up"))
_FLAT = ("lora_unet_", "lora_te", "lora_transformer_")
#: Fused modules in files, and their parts in diffusers in the order of their rows. diffusers' converters
#: leave them fused (Z-Image), or split them only at the sizes of one release (FLUX.1).
_FUSED = (
    (
        r"(?:base_model\.model\.)?(?:diffusion_model\.|lora_unet_)?single_blocks[._](\d+)[._]linear1",
        r"single_transformer_blocks.\1.attn.to_q single_transformer_blocks.\1.attn.to_k "
        r"single_transformer_blocks.\1.attn.to_v single_transformer_blocks.\1.proj_mlp",
    ),
    (r"(?:transformer\.)?(.+)\.qkv", r"\1.to_q \1.to_k \1.to_v"),
)
#: Key of diffusers' configuration of an adapter in the header of its file.
_METADATA = "lora_adapter_metadata"
#: Settings with which a product is more than ``scale * B @ A`` with one rank for all modules.
_UNSUPPORTED = ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "modules_to_save")


@dataclass(frozen=True)
class Factors:
    """The two factors of one module, and the scale of their product."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scaling: float


def start_from(model: nn.Module, adapted: Iterable[str], config: LoraConfig, world: World) -> None:
    """Fill the adapters of ``model`` from the file ``config.start_from``, which every rank reads.

    The modules ``adapted`` have adapters, still whole. Raises CheckpointNotFoundError, CheckpointError for a
    file of other adapters, and ConfigError for a file with more than factors and their scale.
    """
    assert config.start_from is not None, "the caller has checked it"
    with world.phase("reading the LoRA file"):
        path = _find_file(expanded(config.start_from))
        named = f"lora.start_from {path}"
        tensors, metadata = _read(path, named)
        checksum = zlib.crc32(path.read_bytes() + repr(metadata).encode())
    agree({"the checksum of lora.start_from": checksum}, world)
    with world.phase("starting from the LoRA file"):
        names = list(adapted)
        factors, unexpected = _match_modules(_parse(tensors, metadata, named), names, model)
        missing = [name for name in names if name not in factors]
        if missing or unexpected:
            raise CheckpointError(
                f"{named} does not fit lora.targets: it lacks {len(missing)} of their "
                f"adapters, and has {len(unexpected)} others, such as {(missing or unexpected)[0]}; "
                "set the targets that it was trained with, or save it with diffusers' save_lora_weights"
            )
        with torch.no_grad():
            for name, pair in factors.items():
                _fill(model.get_submodule(name), name, pair, config, named)


def _fill(layer: Any, name: str, factors: Factors, config: LoraConfig, named: str) -> None:
    if ADAPTER not in getattr(layer, "lora_A", {}):
        raise ConfigError(
            f"lora.start_from: the adapter of {name} ({type(layer).__name__}) cannot be filled "
            "from a file; leave that layer out of lora.targets"
        )
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    if a.shape != factors.a.shape or b.shape != factors.b.shape:
        raise CheckpointError(
            f"{named} has factors of the shapes {tuple(factors.a.shape)} and "
            f"{tuple(factors.b.shape)} for {name}, and lora.rank {config.rank} gives {tuple(a.shape)} and "
            f"{tuple(b.shape)}; set lora.rank to {factors.a.shape[0]}, or name another file"
        )
    # The second factor makes up for another scale in the configuration.
    times = factors.scaling / config.scaling
    a.copy_(factors.a)
    b.copy_(factors.b if times == 1.0 else factors.b.float() * times)


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    usual = [path / name for name in _FILES if (path / name).is_file()]
    files = usual or (sorted(path.glob("*.safetensors")) if path.is_dir() else [])
    if len(files) != 1:
        several = "has several safetensors files; name one"
        problem = several if files else "is neither a LoRA file nor a directory with one"
        raise CheckpointNotFoundError(f"lora.start_from {path} {problem}")
    return files[0]


def _read(path: Path, named: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            written = (file.metadata() or {}).get(_METADATA)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{named} cannot be read: {error}") from error
    if written is not None:
        settings = load_json(written.encode("utf-8", "surrogatepass"), str(path), _METADATA)
        # diffusers puts the name of the component before each key.
        return tensors, {key.rpartition(".")[2]: value for key, value in settings.items()}
    config = path.with_name("adapter_config.json")
    return tensors, read_json(config, "configuration of an adapter") if config.is_file() else {}


def _parse(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object], named: str
) -> dict[str, Factors]:
    """Return the factors by the names of modules in the file."""
    if others := [key for key in _UNSUPPORTED if metadata.get(key)]:
        raise ConfigError(f"{named} has {others[0]}, which is not available in a run")
    factors: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}}
    alphas: dict[str, float] = {}
    for name, tensor in tensors.items():
        if name.endswith(".alpha") and tensor.numel() == 1:
            alphas[name.removesuffix(".alpha")] = float(tensor)
            continue
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() < 2:
            raise CheckpointError(f"{named} has {name}, which is not a factor of an adapter")
        # Older files call A ([rank, inputs]) `down` and B ([outputs, rank]) `up`.
        those = factors["A" if match["kind"] in ("A", "down") else "B"]
        if match["module"] in those:
            raise CheckpointError(
                f"{named} has several adapters, such as two of {match['module']}: save one by itself"
            )
        those[match["module"]] = tensor
    if single := sorted(factors["A"].keys() ^ factors["B"].keys()):
        raise CheckpointError(f"{named} has only one of the two factors of {single[0]}")
    whole = metadata.get("lora_alpha")
    if whole is None and not alphas and any(name.startswith(_PREFIXES[0]) for name in factors["A"]):
        logger.warning(
            "%s has PEFT's names but no adapter_config.json next to it: its alpha is assumed to be its rank",
            named,
        )
    return {
        module: Factors(a, factors["B"][module], _scaling(a.shape[0], alphas.get(module), metadata, named))
        for module, a in factors["A"].items()
    }


def _scaling(rank: int, alpha: float | None, metadata: Mapping[str, object], named: str) -> float:
    """Return the scale of a product, by the module's own ``alpha`` or the adapter's."""
    if alpha is not None:
        return alpha / rank
    whole = metadata.get("lora_alpha")
    if whole is None:
        return 1.0
    if not isinstance(whole, int | float):
        raise CheckpointError(f"{named}: lora_alpha is {whole!r}, not a number")
    # Rank-stabilised LoRA divides by the square root.
    return whole / (math.sqrt(rank) if metadata.get("use_rslora") else rank)


def _match_modules(
    parsed: Mapping[str, Factors], adapted: list[str], model: nn.Module
) -> tuple[dict[str, Factors], list[str]]:
    """Return the factors by adapted module, and the file's names without a module."""
    matched = _match_names(parsed, adapted, model)
    if matched[1] and is_diffusers(model):
        converted = (_match_names(factors, adapted, model) for factors in _convert(parsed, model))
        return next((other for other in converted if not other[1]), matched)
    return matched


def _convert(parsed: Mapping[str, Factors], model: nn.Module) -> Iterator[Mapping[str, Factors]]:
    """Yield the factors under diffusers' names, converted from both spellings of factors."""
    parts, whole = _split(parsed, model)
    if (convert := lora_converter(model)) is None:
        return
    for spelling in _SPELLINGS:
        tensors: dict[str, torch.Tensor] = {}
        for name, pair in whole.items():
            plain = name.removeprefix(_PREFIXES[0]).removeprefix("diffusion_model.")
            module = name if name.startswith(_FLAT) else f"diffusion_model.{plain}"
            # The scale is in the second factor: alpha becomes the rank.
            factors = (pair.a.float(), pair.b.float() * pair.scaling)
            tensors |= {f"{module}.{key}.weight": one for key, one in zip(spelling, factors, strict=True)}
            if spelling == _SPELLINGS[1]:
                tensors[f"{module}.alpha"] = torch.tensor(float(pair.a.shape[0]), device="cpu")
        try:
            converted = _parse(convert(tensors) if tensors else {}, {}, "the converted LoRA file")
        except Exception as error:  # of any type, for names that this spelling does not have
            logger.debug("diffusers does not convert the LoRA file: %s", error)
            continue
        # diffusers leaves out unknown names, so all rows are counted.
        rows = [sum(len(pair.b) for pair in factors.values()) for factors in (whole, converted)]
        if rows[0] == rows[1]:
            yield parts | dict(ChainMap(*_split(converted, model)))


def _split(parsed: Mapping[str, Factors], model: nn.Module) -> tuple[dict[str, Factors], dict[str, Factors]]:
    """Split fused modules that diffusers' converters leave whole; return parts and other factors."""
    parts: dict[str, Factors] = {}
    whole: dict[str, Factors] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, pair in parsed.items():
        names = next((m.expand(p).split() for f, p in _FUSED if (m := re.fullmatch(f, name))), [])
        layers: list[Any] = [modules.get(part) for part in names]
        rows = [layer.lora_B[ADAPTER].weight.shape[0] for layer in layers if hasattr(layer, "lora_B")]
        if len(rows) == len(names) > 0 and sum(rows) == pair.b.shape[0]:
            split = torch.split(pair.b, rows)
            parts |= {part: replace(pair, b=b) for part, b in zip(names, split, strict=True)}
        else:
            whole[name] = pair
    return parts, whole


def _match_names(
    parsed: Mapping[str, Factors], adapted: list[str], model: nn.Module
) -> tuple[dict[str, Factors], list[str]]:
    names = find_known_names(model)
    by_name = {name: name for name in adapted}
    if names is not None and not names.fused:
        by_name |= {names.of(name): name for name in adapted}
    factors: dict[str, Factors] = {}
    unexpected = []
    for in_file, pair in parsed.items():
        # The unchanged name comes first: a model may have a module called `transformer`.
        candidates = (in_file, *(in_file.removeprefix(prefix) for prefix in _PREFIXES))
        name = next((by_name[candidate] for candidate in candidates if candidate in by_name), None)
        if name is None:
            unexpected.append(in_file)
        else:
            factors[name] = pair
    return factors, unexpected
