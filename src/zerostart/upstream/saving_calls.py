"""The calls by which scripts save and resume: of the libraries of models, PEFT, accelerate and DeepSpeed.

While a :class:`SavingCalls` is open, each goes to a function that is given the original and the call's
arguments by name. What is imported late is replaced as soon as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from zerostart.upstream.on_import import enter_when_imported
from zerostart.upstream.patches import RefCountedPatches, fits, replaced
from zerostart.upstream.registry import Lasts, PatchPoint
from zerostart.upstream.shapes import Function, Shape, resolve
from zerostart.upstream.versions import ACCELERATE, DEEPSPEED, DIFFSYNTH, DIFFUSERS, PEFT, TRANSFORMERS

_MODEL = "transformers.modeling_utils:PreTrainedModel"
_MIXIN = "diffusers.models.modeling_utils:ModelMixin"
_DIFFUSERS_PIPELINE = "diffusers.pipelines.pipeline_utils:DiffusionPipeline"
_PEFT_MODEL = "peft.peft_model:PeftModel"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_TRAINER = "transformers.trainer:Trainer"
_LOGGER = "diffsynth.diffusion.logger:ModelLogger"
_TRAINED = "diffsynth.diffusion.training_module:DiffusionTrainingModule"
_PIPELINE = "diffsynth.diffusion.base_pipeline:BasePipeline"
_SAVE_PRETRAINED = PatchPoint(
    library=TRANSFORMERS,
    owner=_MODEL,
    names=("save_pretrained", "push_to_hub"),
    why="a sharded model is saved by all ranks, each its own bytes, and not uploaded by any",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_MODEL}.save_pretrained",
            leads=("save_directory", "is_main_process", "state_dict"),
            takes=("max_shard_size", "push_to_hub", "variant", "save_original_format", "save_peft_format"),
        ),
    ),
)
_SAVE_MIXIN = PatchPoint(
    library=DIFFUSERS,
    owner=_MIXIN,
    names=("save_pretrained", "push_to_hub"),
    why="a sharded model is saved by all ranks, each its own bytes, and not uploaded by any",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_MIXIN}.save_pretrained",
            leads=("save_directory", "is_main_process"),
            takes=("safe_serialization", "variant", "max_shard_size", "push_to_hub"),
        ),
    ),
)
_SAVE_PIPELINE = PatchPoint(
    library=DIFFUSERS,
    owner=_DIFFUSERS_PIPELINE,
    names=("save_pretrained", "push_to_hub"),
    why="the index names the classes of models as the library has them, not as FSDP2 makes them; no upload",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_DIFFUSERS_PIPELINE}.save_pretrained",
            leads=("save_directory",),
            has=("model_index_dict = dict(self.config)", "self.save_config(save_directory)"),
        ),
    ),
)
_SAVE_ADAPTERS = PatchPoint(
    library=PEFT,
    owner=_PEFT_MODEL,
    names=("save_pretrained", "push_to_hub"),
    why="the same for adapters of a sharded model",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_PEFT_MODEL}.save_pretrained",
            leads=("save_directory", "safe_serialization", "selected_adapters"),
            takes=("is_main_process", "save_embedding_layers"),
        ),
    ),
)
_SAVE_MODEL = PatchPoint(
    library=ACCELERATE,
    owner=_ACCELERATOR,
    names=("save_model", "get_state_dict"),
    why="a model that zerostart loaded is saved without a gather; experts that ranks share are put together",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_ACCELERATOR}.save_model",
            leads=("model", "save_directory", "max_shard_size"),
            takes=("safe_serialization",),
        ),
        Shape(f"{_ACCELERATOR}.get_state_dict", leads=("model", "unwrap")),
    ),
)
_FSDP = PatchPoint(
    library=ACCELERATE,
    owner="accelerate.accelerator",
    names=(
        "save_fsdp_model",
        "save_fsdp_optimizer",
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "load_accelerator_state",
    ),
    why="save_state and load_state, for any number of ranks: of FSDP2 models, and of the step, which ranks "
    "that were not there when it was saved learn",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_ACCELERATOR}.save_state",
            has=(
                "save_fsdp_model(self.state.fsdp_plugin, self, model, output_dir, i)",
                "save_fsdp_optimizer(self.state.fsdp_plugin, self, opt, self._models[i], output_dir, i)",
            ),
        ),
        Shape(
            f"{_ACCELERATOR}.load_state",
            has=(
                "load_fsdp_model(self.state.fsdp_plugin, self, model, input_dir, i)",
                "load_fsdp_optimizer(self.state.fsdp_plugin, self, opt, self._models[i], input_dir, i)",
                "X = load_accelerator_state(...)",
                "if 'step' in X: ...",
            ),
        ),
    ),
)
_WAITING = PatchPoint(
    library=ACCELERATE,
    owner="accelerate.state:PartialState",
    names=("wait_for_everyone",),
    why="a rank that waits there is known not to come to a save that one rank has called alone",
    lasts=Lasts.MODEL,
)
_CHECKPOINTS = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("save_checkpoint", "load_checkpoint"),
    why="checkpoints of accelerate and the Trainer are for any number of ranks, stage and engine",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_ENGINE}.save_checkpoint",
            leads=("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
        ),
        Shape(
            f"{_ENGINE}.load_checkpoint",
            leads=("load_dir", "tag", "load_module_strict", "load_optimizer_states"),
            takes=("load_lr_scheduler_states", "load_module_only", "custom_load_fn"),
        ),
    ),
)
_TRAINER_MODEL = PatchPoint(
    library=TRANSFORMERS,
    owner=_TRAINER,
    names=("save_model", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
    why="the model is saved without a gather; a checkpoint is resumed from whichever engine has written it",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(f"{_TRAINER}.save_model", leads=("output_dir", "_internal_call")),
        Shape(f"{_TRAINER}._save", leads=("output_dir", "state_dict")),
        Shape(
            f"{_TRAINER}._save_checkpoint",
            has=(
                "self.save_model(output_dir, _internal_call=True)",
                "self._save_optimizer_and_scheduler(...)",
            ),
        ),
        Shape(f"{_TRAINER}._load_from_checkpoint", leads=("resume_from_checkpoint", "model")),
        Shape(f"{_TRAINER}._load_optimizer_and_scheduler", leads=("checkpoint",)),
        Shape(
            f"{_TRAINER}._prepare_for_training",
            has=(
                "deepspeed_load_checkpoint(self.model_wrapped, X, ...)",
                "self._load_from_checkpoint(X, self.model_wrapped)",
                "self._load_optimizer_and_scheduler(X)",
            ),
        ),
    ),
)
_TRAINER_STATE = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.trainer",
    names=(
        "deepspeed_load_checkpoint",
        "save_fsdp_model",
        "save_fsdp_optimizer",
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "get_last_checkpoint",
    ),
    why="the same functions of accelerate; the one that knows DeepSpeed's checkpoints by their names; and "
    "the one that finds the last, where what a killed run has left half written is passed over",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_TRAINER}._save_optimizer_and_scheduler",
            has=("self.model_wrapped.save_checkpoint(output_dir)", "save_fsdp_model(...)"),
        ),
        Shape(
            "transformers.trainer:deepspeed_load_checkpoint", leads=("deepspeed_engine", "checkpoint_path")
        ),
        Shape("transformers.trainer:get_last_checkpoint", leads=("folder",)),
        Shape(f"{_TRAINER}.train", has=("get_last_checkpoint(args.output_dir)",)),
    ),
)
_TRAINER_LOSS = PatchPoint(
    library=TRANSFORMERS,
    owner="transformers.trainer",
    names=("deepspeed_sp_compute_loss",),
    why="what it does to sequences that ranks share is told, where one process would train otherwise",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            "transformers.trainer:deepspeed_sp_compute_loss",
            leads=("accelerator", "model", "inputs", "return_outputs", "pc"),
            has=("loss = total_loss / total_good_tokens.clamp(min=1)",),
        ),
    ),
)
_SAVE_TRAINED = PatchPoint(
    library=DIFFSYNTH,
    owner=_LOGGER,
    names=("save_model",),
    why="what is trained is saved by all ranks, each its own bytes: the pipeline would be gathered",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_LOGGER}.save_model",
            leads=("accelerator", "model", "file_name"),
            has=(
                "X = accelerator.get_state_dict(model)",
                "X = accelerator.unwrap_model(model).export_trainable_state_dict("
                "X, remove_prefix=self.remove_prefix_in_ckpt)",
                "X = self.state_dict_converter(X)",
                "X = os.path.join(self.output_path, file_name)",
                "accelerator.save(X, Y, safe_serialization=True)",
            ),
        ),
    ),
)
_RESUME_TRAINED = PatchPoint(
    library=DIFFSYNTH,
    owner=_TRAINED,
    names=("resume_from_checkpoint",),
    why="what was trained before is read by each rank, its own bytes, into its shards",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_TRAINED}.resume_from_checkpoint",
            leads=("path", "remove_prefix_in_ckpt"),
            has=("X, Y = self.load_state_dict(Z, strict=False)",),
        ),
    ),
)
_LOAD_LORA = PatchPoint(
    library=DIFFSYNTH,
    owner=_PIPELINE,
    names=("load_lora",),
    why="it adds a LoRA to whole weights, and is refused by name where each rank has a part",
    lasts=Lasts.MODEL,
    shapes=(Shape(f"{_PIPELINE}.load_lora", leads=("module",)),),
)
TOUCHED = (
    _SAVE_PRETRAINED,
    _SAVE_MIXIN,
    _SAVE_PIPELINE,
    _SAVE_ADAPTERS,
    _SAVE_MODEL,
    _FSDP,
    _WAITING,
    _CHECKPOINTS,
    _TRAINER_MODEL,
    _TRAINER_STATE,
    _TRAINER_LOSS,
    _SAVE_TRAINED,
    _RESUME_TRAINED,
    _LOAD_LORA,
)

_REMEDY = "zerostart cannot take over this call; use zerostart.save and save_state"

#: ``replacement(original, **arguments)``: the call's arguments by name, those of ``**kwargs`` among them, and
#: ``self`` where it is a method.
Replacement = Callable[..., object]


class SavingCalls(RefCountedPatches):
    """Sends calls to ``replacements``, by names as in "PreTrainedModel.save_pretrained"."""

    def __init__(self, replacements: Mapping[str, Replacement]) -> None:
        super().__init__(self._enter)
        self._replacements = replacements

    def _enter(self, stack: ExitStack) -> None:
        # Only points of which some call has a replacement; a library that is not imported yet is patched when
        # it is.
        by_module: dict[str, list[PatchPoint]] = {}
        for point in TOUCHED:
            if not any(called in self._replacements for called in _called(point)):
                continue
            by_module.setdefault(point.owner.partition(":")[0], []).append(point)
        for module, points in by_module.items():
            enter_when_imported(stack, module, functools.partial(self._imported, points))

    def _imported(self, points: list[PatchPoint], stack: ExitStack, module: ModuleType) -> None:
        for point in points:
            if not fits(stack, self, (point,), _REMEDY):
                continue
            # Looked up now: the module is there, and what it holds may be somebody else's patch already.
            owner = resolve(point.owner)
            for name, called in zip(point.names, _called(point), strict=True):
                # Statically: a method is wanted as it lies in the class, not bound to it.
                new = _sent(inspect.getattr_static(owner, name), self._replacements[called])
                stack.enter_context(replaced(point, owner, name, new))


def _called(point: PatchPoint) -> list[str]:
    """What the calls of a point are called: by their class, or by their module."""
    return [f"{point.owner.rpartition(':')[2]}.{name}" for name in point.names]


def _sent(original: Function, replacement: Replacement) -> Function:
    signature = inspect.signature(original)
    # The name of ``**kwargs``, whose items become arguments of their own.
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> object:
        # By name, whichever way they were passed, so that a replacement need not know their order.
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which says what is wrong with the arguments
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments |= arguments.pop(rest, {}) if rest is not None else {}
        return replacement(functools.partial(original, *args, **kwargs), **arguments)

    return call
