"""Write checkpoints of random weights in the hub's layout of an architecture.

For benchmarks and tests. The model is built without memory, and transformers' conversions are reversed (one
tensor per expert, for example). Then each tensor is filled and written separately.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from zerostart.checkpoint.formats.base import CONFIG_NAME
from zerostart.checkpoint.source import read_config
from zerostart.checkpoint.strict_json import JsonObject, read_json
from zerostart.checkpoint.write.shards import SaveLayout, plan_shards
from zerostart.checkpoint.write.staging import Staging
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.errors import BuildError, ConfigError, WriteError
from zerostart.models.libraries.transformers import list_parts
from zerostart.models.registry import library_of
from zerostart.models.shrink import tiny
from zerostart.recipe.dtypes import spelling, torch_dtype
from zerostart.upstream.transformers.models import ignorable_on_save, without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
#: transformers' mappings from configuration to class, in the order of search.
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_MAPPING",
)


@dataclass(frozen=True)
class Synthesised:
    """Result of ``synthesise``, with bytes of tensors and ``dropped`` fields."""

    path: Path
    architecture: str
    tensors: int
    parameters: int
    nbytes: int
    files: int
    dropped: tuple[str, ...]


def synthesise(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    size: str | None = None,
    sparse: bool = False,
    dtype: str | None = None,
    seed: int = 0,
    max_shard_size: int | str = "5GB",
) -> Synthesised:
    """Write random weights and configuration of an architecture to ``out``.

    ``source`` is a configuration file, a directory with ``config.json``, or a transformers model type.
    ``size`` is "tiny", or None for full size. ``sparse`` writes files of full size without data, which take
    no space. ``dtype`` is float32, bfloat16 or float16, by default the configuration's, then bfloat16. Equal
    seeds give equal bytes. A checkpoint in ``out`` is replaced.

    Raises ConfigError or CheckpointError for wrong arguments, BuildError if the architecture cannot be built,
    WriteError if writing fails.
    """
    raw = _read_source(source)
    # The weights are not quantised, so the configuration must not say so.
    dropped = ("quantization_config",) if raw.pop("quantization_config", None) is not None else ()
    config = _make_config(raw, source)
    if size not in (None, "tiny"):
        raise ConfigError(f"size {size!r} is not 'tiny'")
    if size is not None:
        # Expand first: sizes missing in the file have defaults.
        config = _make_config(tiny(config.to_dict()), source)
    chosen = _choose_dtype(dtype, config)
    kind = _find_class(config)
    layout, parameters = _plan_files(kind, config, chosen, max_shard_size)
    # No document, since this is a plain checkpoint.
    staging = Staging(out, marker="")
    try:
        with CheckpointWriter(staging.directory, layout, durable=False) as writer:
            if not sparse:
                _fill(writer, Noise(seed, _find_deviation(config)))
        _write_config(config, kind, staging.directory)
        staging.complete({})
    finally:
        staging.discard()
    return Synthesised(
        Path(out),
        kind.__name__,
        len(layout.tensors),
        parameters,
        layout.total_size,
        len(layout.files),
        dropped,
    )


def _read_source(source: str | os.PathLike[str]) -> JsonObject:
    import transformers

    path = Path(source)
    if path.is_file():
        return read_json(path, "configuration")
    config = read_config(path) if path.is_dir() else None
    if config is not None:
        return config
    name = os.fspath(source)
    if name in transformers.CONFIG_MAPPING:
        return {"model_type": name}
    raise ConfigError(
        f"{name}: neither a configuration file, nor a directory with a {CONFIG_NAME}, nor a model type of "
        f"transformers {transformers.__version__}"
    )


def _make_config(raw: dict[str, object], source: str | os.PathLike[str]) -> PreTrainedConfig:
    import transformers

    model_type = raw.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{os.fspath(source)}: transformers {transformers.__version__} has no model_type {model_type!r}"
        )
    try:
        return transformers.CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # each configuration validates itself in its own way
        raise ConfigError(f"{os.fspath(source)}: not a usable {model_type} configuration: {error}") from error


def _choose_dtype(name: str | None, config: object) -> torch.dtype:
    if name is not None:
        if name not in _DTYPES:
            raise ConfigError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[name]
    for part in list_parts(config):
        stated = getattr(part, "dtype", None)
        if stated is not None:
            return stated if isinstance(stated, torch.dtype) else _DTYPES.get(str(stated), torch.bfloat16)
    return torch.bfloat16


def _find_class(config: PreTrainedConfig) -> type[torch.nn.Module]:
    import transformers

    for name in config.architectures or ():
        entry = getattr(transformers, name, None)
        if isinstance(entry, type) and issubclass(entry, torch.nn.Module):
            return entry
        raise ConfigError(
            f"the configuration names the architecture {name}, which transformers {transformers.__version__} "
            "does not have; correct it, or leave it out to take the model type's own"
        )
    # For a model with a text part, the causal mapping may name only that part's class.
    mappings = reversed(_MAPPINGS[:-1]) if "text_config" in config.sub_configs else iter(_MAPPINGS)
    for mapping in (*mappings, _MAPPINGS[-1]):
        entry = getattr(transformers, mapping).get(type(config), None)
        kind: type[torch.nn.Module] | None = entry[0] if isinstance(entry, tuple) else entry
        if kind is not None:
            return kind
    raise ConfigError(f"transformers has no model for the model type {config.model_type}")


def _plan_files(
    kind: type[torch.nn.Module], config: object, dtype: torch.dtype, max_shard_size: int | str
) -> tuple[SaveLayout, int]:
    for part in list_parts(config):
        part.dtype = dtype
    try:
        with without_weights(dtype):
            model: PreTrainedModel = kind(config)
    except Exception as error:
        raise BuildError(
            f"{kind.__name__} cannot be built from this configuration: {type(error).__name__}: {error}"
        ) from error
    tensors = library_of(kind).revert(model, _get_stored(model, dtype))
    described = [(name, spelling(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return plan_shards(described, max_shard_size, total_parameters=parameters), parameters


def _get_stored(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    library = library_of(model)
    left_out = set(library.ties(model)) | set(ignorable_on_save(model))
    plan = library.dtype_plan(model, dtype)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name in left_out:
            continue
        own = next((dtype for pattern, dtype in plan if pattern.search(name)), None)
        # The model keeps some tensors in another dtype, as ``save_pretrained`` does.
        stored[name] = tensor.to(own) if own is not None and tensor.is_floating_point() else tensor
    return stored


def _fill(writer: CheckpointWriter, noise: Noise) -> None:
    entries = sorted(writer.layout.tensors.values(), key=lambda entry: (entry.file, entry.offset))
    for entry in entries:
        offset = 0
        for piece in noise.make_content(entry.name, torch_dtype(entry.dtype), entry.shape):
            writer.write(entry.name, piece, offset)
            offset += piece.nbytes


def _find_deviation(config: object) -> float:
    for part in list_parts(config):
        stated = getattr(part, "initializer_range", None)
        if isinstance(stated, float) and stated > 0:
            return stated
    return 0.02


def _write_config(config: PreTrainedConfig, kind: type[torch.nn.Module], out: Path) -> None:
    config.architectures = [kind.__name__]
    try:
        config.save_pretrained(out)
    except OSError as error:
        raise WriteError(f"{out / CONFIG_NAME}: cannot be written: {error.strerror}") from error


#: Elements of the block, a prime; 16 MB in fp32.
_PERIOD = 4_194_301


# Drawing every element would take minutes for a large model. A tensor is a window of one endlessly repeated
# block of normal values, from a position that depends on its name. The block's length is prime, so no two
# rows are equal.
class Noise:
    """Content for tensors, which depends only on ``seed`` and names."""

    def __init__(self, seed: int, std: float) -> None:
        self._seed = seed
        normal = np.random.default_rng(seed).standard_normal(_PERIOD, dtype=np.float32)
        self._normal = torch.from_numpy(normal).mul_(std)

    def make_content(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[memoryview]:
        """Yield a tensor's bytes, in pieces of at most one block.

        Matrices and larger tensors are normal with deviation ``std``. Biases, integers and truth values are
        zeros; other vectors and scalars are ones.
        """
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        # Pieces after the first start at the beginning of the block.
        start, left, block = int.from_bytes(digest, "little") % _PERIOD, math.prod(shape), self._normal
        if not dtype.is_floating_point or len(shape) < 2:
            is_one = dtype.is_floating_point and not name.endswith("bias")
            start, block = 0, torch.full((min(left, _PERIOD),), float(is_one), device="cpu")
        while left:
            piece = block[start : start + left].to(dtype)
            yield piece.view(torch.uint8).numpy().data
            left -= piece.numel()
            start = 0
