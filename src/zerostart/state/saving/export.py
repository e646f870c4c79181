"""From files to files: what a run left as a plain directory, in bounded memory and by one process."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zerostart.checkpoint.catalog import Assembled, Catalog, TensorEntry
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.manifest import STATE_MARKER
from zerostart.checkpoint.paths import inside, located
from zerostart.checkpoint.source import open_catalog, read_config
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, read_json
from zerostart.checkpoint.write.shards import plan_shards
from zerostart.distributed.world import World
from zerostart.errors import CheckpointNotFoundError, ConfigError
from zerostart.geometry.layout.flat import flat_run
from zerostart.recipe import Recipe, Target, torch_dtype
from zerostart.recipe.dtypes import spelling
from zerostart.state.resuming.retention import complete
from zerostart.state.saving.writing import publishing
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, join

#: Bytes that are in memory at a time.
BATCH = 64 << 20
#: What the Trainer calls the checkpoints of a run.
_STEP = re.compile(r"checkpoint-(\d+)")
#: Files beside the weights that belong to a model: of these names, or with these ends.
_BESIDE = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
#: What of them a training run leaves, and no model has.
_OF_THE_RUN = (
    "state.json",
    "zerostart.json",
    "trainer_state.json",
    "all_results.json",
    "zero_to_fp32.py",
    "zero_to_torch.py",
)
#: Types whose elements mean the same in another floating type; others are quantised.
_PLAIN_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Exported:
    """What was written: the directory or URL, its files of weights, tensors, and bytes of tensors."""

    path: Path | str
    files: tuple[str, ...]
    tensors: int
    bytes: int


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> Exported:
    """Write the model that lies at ``source`` as an ordinary directory ``out``, by this process alone.

    ``source`` is whatever ``zerostart.load`` takes that lies in files: checkpoints of training above all, of
    zerostart, DeepSpeed, torch or accelerate, or a run's directory, whose newest checkpoint counts where no
    model lies in it. Tensors have the names and shapes that they have there;
    ``dtype`` is for floating tensors that are not quantised, None leaves each as it is stored. Configuration,
    tokenizer and code files beside the weights come along. Memory holds 64 MiB of tensors at a time. ``out``
    appears whole or not at all. Raises what opening a source raises, ConfigError for a checkpoint of a LoRA
    alone, ReadError and WriteError.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and spelling(dtype) in _PLAIN_FLOATS):
        raise ConfigError(f"dtype={dtype!r} is not a floating type that weights are stored in")
    catalog = _opened(source)
    _check_whole(catalog)
    config = read_config(catalog.root) if catalog.root else None
    weights = _once(catalog.weights, bool((config or {}).get("tie_word_embeddings")))
    entries = [(t.name, _kept(t.dtype, dtype), t.shape) for t in weights.values()]
    stem = "diffusion_pytorch_model" if "_class_name" in (config or {}) else "model"
    layout = plan_shards(
        entries, max_shard_size, stem, total_parameters=sum(t.numel for t in weights.values())
    )
    digests = Digests(entries)
    with publishing(out, World(0, 1, None)) as publication:
        _copy_beside(Path(catalog.root or "."), publication.directory, config, dtype)
        # In the order of the files: what is uploaded is given from its beginning to its end.
        ordered = {name: weights[name] for name in layout.tensors}
        with publication.place.alone(layout) as writer:
            for name, first, part in _read(catalog, ordered, {name: kind for name, kind, _ in entries}):
                digests.add(name, first, part)
                writer.write(name, part.view(torch.uint8).numpy().data, first * part.itemsize)
        publication.add_digests(digests.summed(World(0, 1, None)))
    written = [file.name for file in layout.files]
    return Exported(
        located(out), tuple(publication.names.get(n, n) for n in written), len(entries), layout.total_size
    )


def _opened(source: str | os.PathLike[str]) -> Catalog:
    """The catalog of ``source``, or of the newest complete checkpoint of the run that it is."""
    try:
        return open_catalog(source)
    except CheckpointNotFoundError:
        place = located(source)
        folders = [place, inside(place, "checkpoints")]
        states = [state for folder in folders for state in complete(folder)]
        steps = {}
        if isinstance(place, Path):
            steps = {int(m[1]): entry for entry in place.glob("*") if (m := _STEP.fullmatch(entry.name))}
        if not states and not steps:
            raise
        return open_catalog(states[-1] if states else steps[max(steps)])


def _check_whole(catalog: Catalog) -> None:
    """Raise ConfigError for a training state without the parameters that were frozen."""
    root = Path(catalog.root or ".")
    for folder in (root.parent,) if root.name == "model" else ():
        marker = folder / STATE_MARKER
        if marker.is_file() and read_json(marker, "training state", MAX_DOCUMENT_BYTES).get("left_out"):
            raise ConfigError(
                f"{folder} holds only the trained tensors, not the whole model: export the output "
                "directory of its run instead, or a LoRA with --adapter-format"
            )


def _once(weights: Mapping[str, TensorEntry | Assembled], tied: bool) -> dict[str, TensorEntry | Assembled]:
    """The tensors to write; of one that has several names the first, where the model ties them itself."""
    if not tied:
        return dict(weights)
    seen: set[object] = set()
    out = {}
    for name, tensor in weights.items():
        # In shares of ranks the same pieces are the same tensor; in ordinary files each name is one that
        # somebody wrote.
        place = (tensor.pieces, tensor.shape)
        key: object = place if isinstance(tensor, Assembled) else name
        if key not in seen:
            seen.add(key)
            out[name] = tensor
    return out


def _kept(stored: str, dtype: torch.dtype | None) -> str:
    return stored if dtype is None or stored not in _PLAIN_FLOATS else spelling(dtype)


def _read(
    catalog: Catalog,
    weights: Mapping[str, TensorEntry | Assembled],
    dtypes: Mapping[str, str],
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """All elements, in the dtypes of the files: tensor, first element, and a row that is gone afterwards."""
    for batch in _batches(weights.values()):
        wanted, storages = [], []
        for tensor, first, count in batch:
            dtype = torch_dtype(dtypes[tensor.name], tensor.name)
            recipe = Recipe(Target(tensor.name, tensor.shape, dtype), tensor.pieces)
            layout = flat_run(tensor.shape, first, first + count)
            wanted.append((recipe, layout, Destination(tensor.name, count, count, dtype, True)))
            storages.append(torch.empty(count, dtype=dtype, device="cpu"))
        # The machinery of a load with a single rank: conversions of dtype and shares of a training state come
        # with it.
        plan = join(catalog, wanted)
        execute(plan, storages, Progress(plan.read_bytes, shown=False))
        for (tensor, first, _), storage in zip(batch, storages, strict=True):
            yield tensor.name, first, storage


def _batches(
    tensors: Iterable[TensorEntry | Assembled],
) -> Iterator[list[tuple[TensorEntry | Assembled, int, int]]]:
    """Runs of tensors, ``BATCH`` bytes (as stored) at a time."""
    batch: list[tuple[TensorEntry | Assembled, int, int]] = []
    room = BATCH
    for tensor in tensors:
        width = tensor.nbytes // max(1, tensor.numel)
        first = 0
        while first < tensor.numel:
            count = min(tensor.numel - first, max(1, room // width))
            batch.append((tensor, first, count))
            first, room = first + count, room - count * width
            if room < width:
                yield batch
                batch, room = [], BATCH
    if batch:
        yield batch


def _copy_beside(root: Path, out: Path, config: dict[str, object] | None, dtype: torch.dtype | None) -> None:
    """Configuration, tokenizer and code; in the configuration the dtype that the weights have now."""
    if config is None:
        return
    for path in sorted(root.iterdir()):
        wanted = path.name.endswith(_BESIDE) and not path.name.endswith(".index.json")
        if path.is_file() and wanted and path.name not in _OF_THE_RUN:
            shutil.copyfile(path, out / path.name)
    if dtype is not None and "_class_name" not in config:
        kept = {key: value for key, value in config.items() if key != "torch_dtype"}
        text = json.dumps({**kept, "dtype": str(dtype).removeprefix("torch.")}, indent=2, ensure_ascii=False)
        (out / "config.json").write_text(text + "\n", encoding="utf-8")
