"""Check one family of diffusers in every shard."""

import contextlib
import functools
import json
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conformance.checkpoints import randomise
from tests.conformance.diffusion import FAMILIES, Family
from tests.conformance.saving import round_trip
from tests.conformance.sharded import Reference, compare

_HALF = (torch.bfloat16, torch.float16)
#: Width in FLUX.1's converter, and width of the small model.
_FLUX_WIDTH, _SMALL_WIDTH = 3072, 32


@dataclass(frozen=True)
class DiffusionResult:
    """Results of a family in float32 and half precision, in the original and its own layout."""

    family: Family
    converter: str
    dtypes: tuple[str, ...]
    parameters: int
    tensors: int
    differences: tuple[str, ...]


def family(key: str) -> Family:
    """Return the family of a name."""
    return next(one for one in FAMILIES if one.key == key)


@functools.cache
def check_family(key: str) -> DiffusionResult:
    """Write the family's checkpoints, load them in shards and compare with diffusers."""
    item = family(key)
    differences: list[str] = []
    half = _HALF[sum(map(ord, key)) % len(_HALF)]
    with small_converters(), tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, half):
            path = Path(folder) / str(dtype)
            result = write_original(item, path / "original", dtype)
            converter = explicit_converter(item, result)
            expected = _reference(item, path, result, dtype)
            file = path / "original" / "release.safetensors"
            lines, tensors = compare(type(result), file, expected, result, converter)
            differences += [f"original, {dtype}: {line}" for line in lines]
            if not expected.missing:
                lines, _ = compare(type(result), path / "own", expected, result)
                differences += [f"own layout, {dtype}: {line}" for line in lines]
        name = getattr(_converter(item), "__name__", "")
    return DiffusionResult(
        family=item,
        converter="the identity" if name == "<lambda>" else f"`{name}`",
        dtypes=("float32", str(half).removeprefix("torch.")),
        parameters=sum(1 for _ in result.parameters()),
        tensors=tensors,
        differences=tuple(differences),
    )


def check_saving(key: str, worlds: tuple[int, ...]) -> list[str]:
    """Return differences between a family's checkpoints and saves of their shards."""
    item = family(key)
    with small_converters(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        result = write_original(item, path / "original", torch.float32)
        result.save_pretrained(path / "own")
        converter = explicit_converter(item, result)
        file = path / "original" / "release.safetensors"
        actual = [f"original: {line}" for line in round_trip(type(result), file, worlds, converter)]
        return [*actual, *(f"own layout: {line}" for line in round_trip(type(result), path / "own", worlds))]


def write_original(item: Family, path: Path, dtype: torch.dtype) -> Any:
    """Write a random model as ``release.safetensors``, next to its diffusers configuration.

    With a prefix, the file also has a tensor of another component.
    """
    import diffusers

    torch.manual_seed(3)
    model = getattr(diffusers, item.kind).from_config(dict(item.config))
    randomise(model)
    state = {name: _cast(tensor, dtype) for name, tensor in model.state_dict().items()}
    original = {item.prefix + name: t.contiguous() for name, t in item.original(state).items()}
    if item.prefix:
        original["text_encoders.of.another.component"] = torch.ones(7)
    path.mkdir(parents=True)
    save_file(original, path / "release.safetensors")
    model.save_config(path)
    return model.eval()


def explicit_converter(item: Family, model: Any) -> Callable[[Any], Any] | None:
    """Return the converter that users pass if diffusers registers none."""
    if not item.explicit:
        return None
    return functools.partial(_converter(item), config=dict(model.config))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _converter(item: Family) -> Any:
    from diffusers.loaders import single_file_model, single_file_utils

    if item.explicit:
        return getattr(single_file_utils, item.explicit)
    return single_file_model.SINGLE_FILE_LOADABLE_CLASSES[item.kind]["checkpoint_mapping_fn"]


def _reference(item: Family, path: Path, model: Any, dtype: torch.dtype) -> Reference:
    """Load the original file by diffusers.

    ``from_single_file`` serves float32. In lower precisions it also casts modules that the model keeps in
    float32, so the eagerly converted tensors are saved and read by ``from_pretrained``.
    """
    from safetensors.torch import load_file

    file = path / "original" / "release.safetensors"
    whole = {name: t for name, t in load_file(file).items() if name.startswith(item.prefix)}
    converted = _converter(item)(config=dict(model.config), checkpoint=whole)
    missing = sorted(model.state_dict().keys() - converted.keys())
    own = path / "own"
    model.save_config(own)
    save_file(
        {name: t.contiguous() for name, t in converted.items()}, own / "diffusion_pytorch_model.safetensors"
    )
    if dtype == torch.float32 and not item.explicit and hasattr(model, "from_single_file"):
        loaded = type(model).from_single_file(str(file), config=str(path / "original"))
    else:
        loaded = type(model).from_pretrained(own, torch_dtype=dtype)
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    return Reference(loaded, missing, [], [])


@contextlib.contextmanager
def small_converters() -> Iterator[None]:
    """Set the width in FLUX.1's converter to the small model's."""
    from diffusers.loaders import single_file_model

    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    function = entry["checkpoint_mapping_fn"]
    constants = tuple(_SMALL_WIDTH if c == _FLUX_WIDTH else c for c in function.__code__.co_consts)
    assert constants != function.__code__.co_consts, "the width is no constant of the converter any more"
    small = types.FunctionType(function.__code__.replace(co_consts=constants), function.__globals__)
    entry["checkpoint_mapping_fn"] = small
    try:
        yield
    finally:
        entry["checkpoint_mapping_fn"] = function


def pipeline(path: Path, parts: dict[str, Any]) -> Path:
    """Write a pipeline directory with the models ``parts`` by component name."""
    index: dict[str, Any] = {"_class_name": "AnyPipeline", "_diffusers_version": "0.42.1"}
    for name, model in parts.items():
        model.save_pretrained(path / name)
        index[name] = [type(model).__module__.partition(".")[0], type(model).__name__]
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (path / "scheduler").mkdir(parents=True)
    (path / "scheduler" / "scheduler_config.json").write_text("{}")
    (path / "model_index.json").write_text(json.dumps(index))
    return path
