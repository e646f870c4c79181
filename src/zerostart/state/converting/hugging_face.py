"""Hugging Face directories: safetensors with an index, named as in the source or as in a model's release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from zerostart.checkpoint.source import read_config
from zerostart.checkpoint.write.images import Image, Row
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.errors import ConfigError
from zerostart.models import ModelLibrary
from zerostart.recipe import SymbolicTensor, one_thread
from zerostart.recipe.dtypes import spelling, torch_dtype
from zerostart.state.converting.contents import Contents, Stored, once
from zerostart.state.converting.models import built_model
from zerostart.state.converting.targets import (
    Options,
    Target,
    TargetFormat,
    kept_dtype,
    optimizer_left_out,
)


class HuggingFace(TargetFormat):
    """What ``from_pretrained`` opens where the names are those of the model."""

    name = "hf"
    indexed = True

    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """Weights as they are called in the source; of tied names the first."""
        config = read_config(contents.root) if contents.root else None
        tied = bool((config or {}).get("tie_word_embeddings"))
        weights = once(contents.weights, contents.catalogs[0], tied)
        return _safetensors_files(contents, weights, options)


class Original(TargetFormat):
    """A Hugging Face directory in which conversions of the model's library have been taken back.

    Experts that a training has fused are one tensor each again.
    """

    name = "original"
    indexed = True

    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """Weights as the library's own way back lays them out, which is run on symbols instead of values.

        Raises ConfigError for a model whose library knows no way back.
        """
        built, recipes = built_model(contents)
        if type(built.library).revert is ModelLibrary.revert:
            raise ConfigError(
                f"{type(built.model).__name__} is of {built.library.name}, which has no way back to the "
                "layout of a release: convert to hf, which keeps the names that the source has"
            )
        with one_thread():
            symbols = {
                name: SymbolicTensor.filled(recipe.pieces, recipe.target.shape, recipe.target.dtype)
                for name, recipe in recipes.by_name.items()
            }
            made = built.library.revert(built.model, dict(symbols))
            weights = {}
            for name, tensor in made.items():
                if not isinstance(tensor, SymbolicTensor):
                    raise ConfigError(f"the way back of {built.library.name} gives values for {name}")
                value = tensor.value
                shape = tuple(tensor.shape)
                weights[name] = Stored(name, spelling(tensor.dtype, name), shape, value.pieces)
        target = _safetensors_files(contents, weights, options)
        target.dequantised = built.quantizer is not None
        return target


def _safetensors_files(contents: Contents, weights: Mapping[str, Stored], options: Options) -> Target:
    """Files of safetensors with ``weights`` under these names, and the index if there are several."""
    config = read_config(contents.root) if contents.root else None
    target = Target(left_out=optimizer_left_out(contents))
    target.entries = [(n, kept_dtype(stored, options.dtype), stored.shape) for n, stored in weights.items()]
    stem = "diffusion_pytorch_model" if "_class_name" in (config or {}) else "model"
    total = sum(stored.numel for stored in weights.values())
    layout = plan_shards(target.entries, options.max_shard_size, stem, total_parameters=total)
    numbers = {name: target.source(stored, name) for name, stored in weights.items()}
    rows: list[list[Row]] = [[] for _ in layout.files]
    for name, entry in layout.tensors.items():
        dtype = torch_dtype(entry.dtype, name)
        if entry.numel:
            rows[entry.file].append(Row(numbers[name], 0, entry.numel, entry.offset, dtype))
    for file, of in zip(layout.files, rows, strict=True):
        target.images.append(Image(file.name, file.size, ((0, file.header),), tuple(of)))
    if layout.index is not None:
        text = (json.dumps(layout.index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        target.images.append(Image(layout.index_name, len(text), ((0, text),)))
    target.layout = layout
    target.tensors, target.nbytes = len(target.entries), layout.total_size
    return target
