"""Weights that DiffSynth's training scripts put into a pipeline after it was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard, first_rank_shard
from zerostart.errors import ConfigError, CoverageError
from zerostart.integrations.saving import in_shards
from zerostart.live.model import LiveModel, loaded_parts
from zerostart.loading.source import open_source
from zerostart.recipe import spelling
from zerostart.state.resuming.load_state import planned_reads
from zerostart.state.saving.writing import agreed_place, plain, publishing, write_tensors
from zerostart.transfer import Progress
from zerostart.transfer.collective import execute_together
from zerostart.upstream.types import Accelerator, ModelLogger, TrainingModule

Original = Callable[[], object]


def resume(
    original: Original, *, self: nn.Module, path: str | None, remove_prefix_in_ckpt: str | None, **_: object
) -> object:
    """``DiffusionTrainingModule.resume_from_checkpoint``: each rank reads its own bytes of the file.

    Raises CoverageError for tensors that the pipeline does not have, and what ``zerostart.load`` raises for
    a file that cannot be read.
    """
    module, prefix = self, remove_prefix_in_ckpt or ""
    # Nothing to resume from, or a pipeline in one piece: DiffSynth's own way is right.
    if path is None or not _shared_out(module):
        return original()
    world = current_world()
    with world.phase("resuming from a file of weights"):
        catalog = open_source(path, world)
        with world.phase("looking at what is resumed"):
            live = LiveModel(module, world)
            shards = live.named_shards()
            unexpected = sorted(name for name in catalog.weights if prefix + name not in shards)
            if unexpected:
                raise CoverageError(
                    f"{path} has {len(unexpected)} tensors that the pipeline does not have, among them "
                    f"{unexpected[0]}; pass the prefix that was removed from their names when they were "
                    f"saved (--remove_prefix_in_ckpt, {prefix!r} here)",
                    (),
                    unexpected,
                    {},
                )
            # The file has names without the prefix, the pipeline with it.
            given = [(name, shards[prefix + name]) for name in catalog.weights]
            wanted = [(name, shard.layout, shard.storage) for name, shard in given]
            plan, storages, tuning = planned_reads(catalog, wanted)
        with torch.no_grad():
            execute_together(plan, storages, Progress(plan.read_bytes, False), tuning, world)
        live.drop_gathered()
    return None


def load_lora(original: Original, *, module: nn.Module, **_: object) -> object:
    """``BasePipeline.load_lora``, which adds a LoRA to whole weights.

    Raises ConfigError for a model of which each rank has a part.
    """
    if in_shards(module):
        raise ConfigError(
            "load_lora (--preset_lora_path) adds a LoRA to the weights of "
            f"{type(module).__name__}, of which each rank holds only a part: train that LoRA "
            "further with --lora_checkpoint, or fuse it in one process and load the resulting "
            "file"
        )
    return original()


def _shared_out(module: nn.Module) -> bool:
    return any(in_shards(part) for _, part, _ in loaded_parts(module))


_SUFFIX = ".safetensors"
#: Bytes: whatever its size, what is trained is one file.
_ONE_FILE = 1 << 62


def save_trained(
    original: Original,
    *,
    self: ModelLogger,
    accelerator: Accelerator,
    model: nn.Module,
    file_name: str,
    **_: object,
) -> object:
    """``ModelLogger.save_model``, which every rank calls: each writes its own bytes of the one file.

    DiffSynth gathers the whole pipeline and keeps what is trained. Its names, its prefix and the script's
    converter are asked with tensors that hold nothing. Raises ConfigError for a converter that calculates
    with the weights, and WriteError as ``save`` does.
    """
    logger, module = self, accelerator.unwrap_model(model)
    if not loaded_parts(module):
        return original()
    world = current_world()
    with world.phase("saving what is trained"):
        place = Path(agreed_place(Path(logger.output_path) / file_name, world))
        with world.phase("looking at what is trained"):
            shards = _stored(logger, module, world)
            entries = [(n, spelling(s.storage.dtype, n), s.layout.shape) for n, s in shards.items()]
        with publishing(place.parent, world, marker="") as publication:
            write_tensors(
                publication,
                entries,
                [plain(name, shard) for name, shard in shards.items()],
                world,
                stem=place.name.removesuffix(_SUFFIX),
                max_shard_size=_ONE_FILE,
            )
    return None


def _stored(logger: ModelLogger, module: nn.Module, world: World) -> Mapping[str, Shard]:
    """What the file has, by the names that it has there."""
    shards = LiveModel(module, world).named_shards()
    # The script renames what it saves. It is given tensors without values, told apart by identity after.
    twins: dict[str, torch.Tensor] = {}
    by_twin: dict[int, Shard] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            own = shards[name]
            twins[name] = torch.empty(own.layout.shape, dtype=own.storage.dtype, device="meta")
            by_twin[id(twins[name])] = own
    exported = cast("TrainingModule", module).export_trainable_state_dict
    made = logger.state_dict_converter(exported(dict(twins), remove_prefix=logger.remove_prefix_in_ckpt))
    found: dict[str, Shard] = {}
    for name, tensor in made.items():
        held = by_twin.get(id(tensor))
        # Made by the converter out of a twin: there are no values that it could have calculated with.
        if held is None and tensor.is_meta:
            raise ConfigError(
                f"the script's state_dict_converter computes {name} from the weights, of which each "
                "rank holds only a part; let it only rename tensors, and convert the file after it is "
                "saved"
            )
        # A tensor with values that the converter adds itself: as the first rank has it.
        found[name] = first_rank_shard(name, tensor, world) if held is None else held
    return found
