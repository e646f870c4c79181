"""Functions of other libraries by which scripts save and resume."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from zerostart.upstream.guard import Function, Use, resolve
from zerostart.upstream.patches import RefCountedPatches, check_compatible, enter_on_import, wrap

TOUCHED = (
    Use(
        "transformers.modeling_utils:PreTrainedModel",
        "save_pretrained(save_directory, is_main_process, state_dict, *, max_shard_size, push_to_hub, "
        "variant, save_original_format, save_peft_format), push_to_hub",
        "a sharded model is saved by all ranks",
    ),
    Use(
        "diffusers.models.modeling_utils:ModelMixin",
        "save_pretrained(save_directory, is_main_process, *, safe_serialization, variant, max_shard_size, "
        "push_to_hub), push_to_hub",
        "a sharded model is saved by all ranks",
    ),
    Use(
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline",
        "save_pretrained(save_directory), push_to_hub",
        "the index names the classes of models as the library has them",
    ),
    Use(
        "peft.peft_model:PeftModel",
        "save_pretrained(save_directory, safe_serialization, selected_adapters, *, is_main_process, "
        "save_embedding_layers), push_to_hub",
        "the same for adapters of a sharded model",
    ),
    Use(
        "accelerate.accelerator:Accelerator",
        "save_model(model, save_directory, max_shard_size, *, safe_serialization), "
        "get_state_dict(model, unwrap)",
        "a model that zerostart loaded is saved without a gather",
    ),
    Use(
        "accelerate.accelerator",
        "save_fsdp_model, save_fsdp_optimizer, load_fsdp_model, load_fsdp_optimizer, load_accelerator_state",
        "save_state and load_state work for any number of ranks",
    ),
    Use(
        "accelerate.state:PartialState",
        "wait_for_everyone",
        "a rank that waits there is known not to come to a save that one rank has called alone",
    ),
    Use(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters), "
        "load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, *, "
        "load_lr_scheduler_states, load_module_only, custom_load_fn)",
        "checkpoints of accelerate and the Trainer are for any number of ranks",
    ),
    Use(
        "transformers.trainer:Trainer",
        "save_model(output_dir, _internal_call), _load_from_checkpoint(resume_from_checkpoint, model), "
        "_load_optimizer_and_scheduler(checkpoint), "
        "_prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint), "
        "evaluation_loop(dataloader)",
        "the model is saved without a gather, and evaluated before it is trained",
    ),
    Use(
        "transformers.trainer",
        "deepspeed_load_checkpoint(deepspeed_engine, checkpoint_path), save_fsdp_model, "
        "save_fsdp_optimizer, load_fsdp_model, load_fsdp_optimizer, get_last_checkpoint(folder)",
        "the same functions, as the Trainer imports them",
    ),
    Use(
        "diffsynth.diffusion.logger:ModelLogger",
        "save_model(accelerator, model, file_name)",
        "what is trained is saved by all ranks",
    ),
    Use(
        "diffsynth.diffusion.training_module:DiffusionTrainingModule",
        "resume_from_checkpoint(path, remove_prefix_in_ckpt)",
        "what was trained before is read by each rank",
    ),
    Use(
        "diffsynth.diffusion.base_pipeline:BasePipeline",
        "load_lora(module)",
        "refused where each rank has a part of the weights",
    ),
)

_REMEDY = "zerostart cannot take over this call; use zerostart.save and save_state"

#: ``replacement(original, **arguments)``: all arguments by name, with ``self`` of a method.
Replacement = Callable[..., object]


class SavingCalls(RefCountedPatches):
    """Sends calls to ``replacements``, by names as in "PreTrainedModel.save_pretrained"."""

    def __init__(self, replacements: Mapping[str, Replacement]) -> None:
        super().__init__(self._enter)
        self._replacements = replacements

    def _enter(self, stack: ExitStack) -> None:
        by_module: dict[str, list[Use]] = {}
        for use in TOUCHED:
            if any(called in self._replacements for called, _ in _called(use)):
                by_module.setdefault(use.owner.partition(":")[0], []).append(use)
        for module, uses in by_module.items():
            enter_on_import(stack, module, functools.partial(self._imported, uses))

    def _imported(self, uses: list[Use], stack: ExitStack, module: ModuleType) -> None:
        for use in uses:
            if not check_compatible(stack, self, (use,), _REMEDY):
                continue
            owner = resolve(use.owner)
            for called, name in _called(use):
                if called in self._replacements:
                    wrap(stack, owner, name, _sender(self._replacements[called]))


def _called(use: Use) -> list[tuple[str, str]]:
    return [(f"{use.owner.rpartition(':')[2]}.{name}", name) for name in use.functions]


def _sender(replacement: Replacement) -> Function:
    def call(original: Function, *args: Any, **kwargs: Any) -> object:
        signature = inspect.signature(original)
        name_of_rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # it raises the TypeError
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments |= arguments.pop(name_of_rest, {}) if name_of_rest is not None else {}
        return replacement(functools.partial(original, *args, **kwargs), **arguments)

    return call
