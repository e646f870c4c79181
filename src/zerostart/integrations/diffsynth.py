"""DiffSynth-Studio's ``load_model`` in shards, and the weights that its scripts resume, add and save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerostart import engines
from zerostart.checkpoint.formats.torch_zip import read_torch_file
from zerostart.checkpoint.source import Files
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard, first_rank_shard
from zerostart.errors import ConfigError, CoverageError
from zerostart.integrations.loading import InterceptedLoad
from zerostart.integrations.saving import in_shards
from zerostart.live.model import LiveModel, find_loaded_parts
from zerostart.loading.run import run
from zerostart.loading.source import open_source
from zerostart.recipe import spelling
from zerostart.state.resuming.load_state import planned_reads
from zerostart.state.saving.writing import agreed_place, plain, publishing, write_tensors
from zerostart.transfer import Progress
from zerostart.transfer.collective import execute_together
from zerostart.upstream.deepspeed.zero3_start import keep_whole
from zerostart.upstream.types import Accelerator, ModelLogger, TrainingModule

if TYPE_CHECKING:
    from zerostart.loading.request import Source

#: Under these DiffSynth looks for a torch file's weights, where it has nothing else.
_UNWRAPPED = ("state_dict", "module", "model_state")


class DiffSynthLoad(InterceptedLoad):
    """By DiffSynth's rules: every weight in the one dtype, and none missing or too much.

    Weights are never read as a whole, so ``use_disk_map`` says nothing new; where shards lie the engine says,
    and not ``device``. ``vram_config`` and ``vram_limit`` belong to a ``module_map``.
    """

    refused: Mapping[str, str] = {
        "module_map": "it moves whole weights between devices and dtypes, and those of a shard are on other "
        "ranks (it comes from --fp8_models, or from a ModelConfig with offload_dtype and offload_device; "
        "ZeRO-2 takes it, and offload_device='disk' is taken everywhere)",
        "quantize": "quantised weights are whole on every rank, as ZeRO-2 has them",
    }
    function = "load_model"

    @property
    def _stays_whole(self) -> bool:
        """True for an autoencoder at ZeRO-3: it is small, and ranks call it unequally often."""
        sharded = self._setup.family.owns_optimizer and not self._setup.whole
        return sharded and "VAE" in self.arguments["model_class"].__name__

    @property
    def _left_to_diffsynth(self) -> bool:
        given = self.arguments
        if self._stays_whole:
            return True
        if given["module_map"] is None and given["quantize"] is None:
            return False
        on_disk = given["quantize"] is None and given["vram_config"]["offload_device"] == "disk"
        return self._setup.whole or on_disk

    def check(self) -> None:
        """As ``InterceptedLoad.check``, where weights are to be in shards."""
        if not self._left_to_diffsynth:
            super().check()

    def load_model(self, original: Callable[[], nn.Module]) -> nn.Module:
        """Build and load, collectively; ``original`` does where weights are kept in DiffSynth's own way.

        Raises ConfigError for arguments that cannot be honoured, CoverageError for weights that are missing
        or too much, and what ``zerostart.load`` raises besides.
        """
        if self._left_to_diffsynth:
            with engines.contexts_aside():
                model = original()
            if self._stays_whole:
                keep_whole(model)
            return model
        given, setup = self.arguments, self._setup
        asked: torch.dtype | None = given["torch_dtype"]
        # DeepSpeed trains what it gets; accelerate's FSDP2 fp32 copies, wherever the precision is mixed.
        dtype = asked if setup.family.owns_optimizer else setup.dtype or asked
        kind, config = given["model_class"], given["config"] or {}

        def build() -> nn.Module:
            made: nn.Module = kind(**config)
            return made if dtype is None else _without_integers(made, dtype)

        # Errors name the model by the name of what builds it.
        build.__name__ = kind.__name__
        with self.agreeing():
            request = replace(
                self._request(self._source(), build, "attention that zerostart knows nothing of"),
                dtype=dtype,
                converter=given["state_dict_converter"],
            )
            model = run(request)
            # Parameters are read in their dtype; buffers are computed in the default one, and cast last, as
            # DiffSynth's model.to(dtype=...) does.
            if asked is not None:
                _cast_buffers(model, asked)
        self._on_loaded(model, self.setup)
        return model

    def _source(self) -> Source:
        state_dict, path = self.arguments["state_dict"], self.arguments["path"]
        if state_dict is not None:
            if not isinstance(state_dict, Mapping):
                raise ConfigError(
                    f"load_model(state_dict=...) is a {type(state_dict).__name__}, which zerostart.enabled() "
                    "does not read; pass a dict of tensors, or the path of the file"
                )
            return state_dict
        paths = [path] if isinstance(path, str) else list(path)
        return Files(tuple(map(str, paths)), ", ".join(map(str, paths)))


def _without_integers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (parameter.is_floating_point() or parameter.is_complex()):
                module._parameters[name] = nn.Parameter(parameter.data.to(dtype), requires_grad=False)
    return model


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() or buffer.is_complex():
                module._buffers[name] = buffer.to(dtype)


def keys_of_torch_file(path: str) -> dict[str, Any]:
    """Names and shapes of a torch file's tensors, nested as DiffSynth finds them; reads its headers alone.

    Raises CheckpointError and ReadError as a load does.
    """
    entries, notes, _ = read_torch_file(path)
    found = {entry.name: list(entry.shape) for entry in entries}
    wrapper = notes.get("state_dict")
    return found if wrapper is None or wrapper in _UNWRAPPED else {wrapper: found}


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
    return any(in_shards(part) for _, part, _ in find_loaded_parts(module))


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
    if not find_loaded_parts(module):
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
