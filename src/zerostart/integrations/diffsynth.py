"""Load DiffSynth-Studio's models in shards; resume, extend and save their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerostart import engines
from zerostart.checkpoint.formats.torch_zip import read_torch_file
from zerostart.checkpoint.source import WeightFiles
from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard, first_rank_shard
from zerostart.errors import ConfigError, CoverageError
from zerostart.integrations.loading import InterceptedLoad
from zerostart.integrations.saving import is_sharded
from zerostart.live.model import LiveModel, find_loaded_parts
from zerostart.loading.run import run
from zerostart.loading.source import open_source
from zerostart.recipe import spelling
from zerostart.state.resuming.load_state import plan_reads
from zerostart.state.saving.writing import agree_on_place, describe_share, open_publication, write_tensors
from zerostart.transfer import Progress
from zerostart.transfer.collective import execute_together
from zerostart.upstream.deepspeed.zero3_start import keep_whole
from zerostart.upstream.types import Accelerator, ModelLogger, TrainingModule

if TYPE_CHECKING:
    from zerostart.loading.request import Source

#: Keys of a torch file below which DiffSynth looks for the weights.
_UNWRAPPED = ("state_dict", "module", "model_state")


class DiffSynthLoad(InterceptedLoad):
    """Load by DiffSynth's rules: one dtype for all weights, none missing, none unexpected.

    ``use_disk_map`` and ``device`` have no effect: weights are never read whole, and the engine places the
    shards. ``vram_config`` and ``vram_limit`` belong to ``module_map``.
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
        """True for an autoencoder at ZeRO-3, which ranks call a different number of times."""
        sharded = self._setup.family.owns_optimizer and not self._setup.is_whole
        return sharded and "VAE" in self.arguments["model_class"].__name__

    @property
    def _left_to_diffsynth(self) -> bool:
        arguments = self.arguments
        if self._stays_whole:
            return True
        if arguments["module_map"] is None and arguments["quantize"] is None:
            return False
        on_disk = arguments["quantize"] is None and arguments["vram_config"]["offload_device"] == "disk"
        return self._setup.is_whole or on_disk

    def check(self) -> None:
        """Check the arguments of a sharded load, as ``InterceptedLoad.check``."""
        if not self._left_to_diffsynth:
            super().check()

    def load_model(self, original: Callable[[], nn.Module]) -> nn.Module:
        """Build and load a model; collective. Leave other ways to keep weights to ``original``.

        Raises ConfigError for unsupported arguments, CoverageError for missing or unexpected weights, and the
        errors of ``zerostart.load``.
        """
        if self._left_to_diffsynth:
            with engines.suspended_contexts():
                model = original()
            if self._stays_whole:
                keep_whole(model)
            return model
        arguments, setup = self.arguments, self._setup
        requested: torch.dtype | None = arguments["torch_dtype"]
        # DeepSpeed trains the given parameters; in mixed precision FSDP2 trains fp32 copies.
        dtype = requested if setup.family.owns_optimizer else setup.dtype or requested
        kind, config = arguments["model_class"], arguments["config"] or {}

        def build() -> nn.Module:
            model: nn.Module = kind(**config)
            return model if dtype is None else _without_integers(model, dtype)

        # Errors name the model by this function.
        build.__name__ = kind.__name__
        with self.agreeing():
            request = replace(
                self._request(self._source(), build, "attention that zerostart knows nothing of"),
                dtype=dtype,
                converter=arguments["state_dict_converter"],
            )
            model = run(request)
            # Buffers are computed in the default dtype and cast last, as by DiffSynth's model.to(dtype=...).
            if requested is not None:
                _cast_buffers(model, requested)
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
        return WeightFiles(tuple(map(str, paths)), ", ".join(map(str, paths)))


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
    """Return names and shapes of a torch file's tensors, from its headers.

    They are nested as in DiffSynth. Raises CheckpointError and ReadError.
    """
    entries, notes, _ = read_torch_file(path)
    shapes = {entry.name: list(entry.shape) for entry in entries}
    wrapper = notes.get("state_dict")
    return shapes if wrapper is None or wrapper in _UNWRAPPED else {wrapper: shapes}


Original = Callable[[], object]


def resume(
    original: Original, *, self: nn.Module, path: str | None, remove_prefix_in_ckpt: str | None, **_: object
) -> object:
    """Replace ``resume_from_checkpoint``: each rank reads only its bytes of the file.

    Raises CoverageError for tensors that the pipeline does not have, and the errors of ``zerostart.load``.
    """
    module, prefix = self, remove_prefix_in_ckpt or ""
    # Without a file or without shards DiffSynth's function is correct.
    if path is None or not _has_shards(module):
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
            # Names in the file have no prefix.
            targets = [(name, shards[prefix + name]) for name in catalog.weights]
            reads = [(name, shard.layout, shard.storage) for name, shard in targets]
            plan, storages, tuning = plan_reads(catalog, reads)
        with torch.no_grad():
            execute_together(plan, storages, Progress(plan.read_bytes, False), tuning, world)
        live.drop_gathered()
    return None


def load_lora(original: Original, *, module: nn.Module, **_: object) -> object:
    """Replace ``BasePipeline.load_lora``; raise ConfigError for a sharded model."""
    if is_sharded(module):
        raise ConfigError(
            "load_lora (--preset_lora_path) adds a LoRA to the weights of "
            f"{type(module).__name__}, of which each rank holds only a part: train that LoRA "
            "further with --lora_checkpoint, or fuse it in one process and load the resulting "
            "file"
        )
    return original()


def _has_shards(module: nn.Module) -> bool:
    return any(is_sharded(part) for _, part, _ in find_loaded_parts(module))


_SUFFIX = ".safetensors"
#: Maximum size of a file, in bytes: the trained weights are always one file.
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
    """Replace ``ModelLogger.save_model``: each rank writes its bytes of the one file; collective.

    DiffSynth would gather the whole pipeline. Here its names, prefix and the script's converter are applied
    to meta tensors. Raises ConfigError for a converter that computes values, and WriteError.
    """
    logger, module = self, accelerator.unwrap_model(model)
    if not find_loaded_parts(module):
        return original()
    world = current_world()
    with world.phase("saving what is trained"):
        place = Path(agree_on_place(Path(logger.output_path) / file_name, world))
        with world.phase("looking at what is trained"):
            shards = _collect_shards(logger, module, world)
            entries = [(n, spelling(s.storage.dtype, n), s.layout.shape) for n, s in shards.items()]
        with open_publication(place.parent, world, marker="") as publication:
            write_tensors(
                publication,
                entries,
                [describe_share(name, shard) for name, shard in shards.items()],
                world,
                stem=place.name.removesuffix(_SUFFIX),
                max_shard_size=_ONE_FILE,
            )
    return None


def _collect_shards(logger: ModelLogger, module: nn.Module, world: World) -> Mapping[str, Shard]:
    shards = LiveModel(module, world).named_shards()
    # The script renames tensors. It gets meta tensors, which are identified by id afterwards.
    twins: dict[str, torch.Tensor] = {}
    by_twin: dict[int, Shard] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            own = shards[name]
            twins[name] = torch.empty(own.layout.shape, dtype=own.storage.dtype, device="meta")
            by_twin[id(twins[name])] = own
    exported = cast("TrainingModule", module).export_trainable_state_dict
    converted = logger.state_dict_converter(exported(dict(twins), remove_prefix=logger.remove_prefix_in_ckpt))
    saved: dict[str, Shard] = {}
    for name, tensor in converted.items():
        shard = by_twin.get(id(tensor))
        # The converter computed a tensor from meta tensors.
        if shard is None and tensor.is_meta:
            raise ConfigError(
                f"the script's state_dict_converter computes {name} from the weights, of which each "
                "rank holds only a part; let it only rename tensors, and convert the file after it is "
                "saved"
            )
        # The converter added a tensor with values: save that of rank 0.
        saved[name] = first_rank_shard(name, tensor, world) if shard is None else shard
    return saved
