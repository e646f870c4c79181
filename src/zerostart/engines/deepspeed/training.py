"""DeepSpeed in a training run: configuration, start by accelerate, and weight decay."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerostart.distributed.world import default_device
from zerostart.engines.training import AccelerateSetup, TrainingJob
from zerostart.errors import ConfigError
from zerostart.upstream.deepspeed.steps import steps_of
from zerostart.upstream.types import DeepSpeedConfig

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

#: The dtype in which DeepSpeed keeps the model, by the precision that is mixed with fp32 masters.
MODEL_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: DeepSpeed calls collectives by names that torch is about to rename; nobody here can change that.
_RENAMED = (r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
#: Hosts without an accelerator: told ``cpu=True``, accelerate forgets DeepSpeed; told a backend it does not.
HOST_BACKEND = "gloo"


def training_config(stage: int, job: TrainingJob, user_config: DeepSpeedConfig) -> dict[str, object]:
    """A complete ``ds_config`` of ``job``, and the user's ``user_config`` over it.

    ``auto`` is replaced by our value. A value that contradicts the job raises ConfigError: DeepSpeed would
    train with one, and the schedule and the logs follow the other.
    """
    filled: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "train_batch_size": job.train_batch_size,
        # Always stated: DeepSpeed clips at 1.0 when the key is absent, and 0.0 means no clipping.
        "gradient_clipping": job.max_grad_norm,
        "bf16": {"enabled": job.mixed_precision == "bf16"},
        "fp16": {"enabled": job.mixed_precision == "fp16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,  # the live display is ours
    }
    for key in ("optimizer", "scheduler"):
        if key in user_config:
            raise ConfigError(f"engine.config.{key}: set the optimizer and the schedule in the section train")
    # The user's keys last: what he adds is taken, what contradicts is refused there.
    _merge(filled, user_config, "engine.config")
    _fill_hidden_size_values(filled["zero_optimization"], job.hidden_size)
    return filled


def accelerate_setup(
    mixed_precision: str, config: DeepSpeedConfig, sequence_parallel: int, world_size: int
) -> AccelerateSetup:
    """accelerate's plugin with the configuration ``config``, and Ulysses, which accelerate starts.

    ``world_size`` ranks in groups of ``sequence_parallel``, each of which sees one batch.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, InitProcessGroupKwargs

    on_cpu = not torch.accelerator.is_available()
    return AccelerateSetup(
        {
            "mixed_precision": mixed_precision,
            # zero3_init_flag would make transformers partition models that are loaded later in this process.
            "deepspeed_plugins": DeepSpeedPlugin(
                hf_ds_config=copy.deepcopy(dict(config)), zero3_init_flag=False
            ),
            "parallelism_config": ParallelismConfig(
                sp_size=sequence_parallel,
                # accelerate computes the size of a step from it, and DeepSpeed compares that with its own.
                dp_shard_size=world_size // sequence_parallel,
                sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
            )
            if sequence_parallel > 1
            else None,
            "kwargs_handlers": [InitProcessGroupKwargs(backend=HOST_BACKEND)] if on_cpu else None,
        },
        {"ACCELERATE_USE_CPU": "false"},
        (_RENAMED,),
    )


def _merge(base: dict[str, Any], overrides: DeepSpeedConfig, where: str) -> None:
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, f"{where}.{key}")
        elif key not in base:
            base[key] = value
        elif value not in ("auto", base[key]):
            raise ConfigError(
                f"{where}.{key} is {value!r}, but the other sections make it {base[key]!r}; leave it out, "
                "or write auto"
            )


def _fill_hidden_size_values(zero: dict[str, object], hidden_size: int | None) -> None:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    for key in keys:
        if zero.get(key) == "auto":
            if hidden_size is None:
                raise ConfigError(
                    f"engine.config.zero_optimization.{key}: auto needs a hidden size, which this model does "
                    "not declare; give a number"
                )
            # The formulas that transformers and accelerate use.
            area = hidden_size * hidden_size
            values = {keys[0]: area, keys[1]: int(0.9 * area), keys[2]: 10 * hidden_size}
            zero[key] = values[key]


# No weight decay for parameters without a gradient, as in torch's optimizers. DeepSpeed steps flat tensors. A
# missing gradient is zero there, and the parameter would decay.


def exempt_unreached(engine: DeepSpeedEngine) -> None:
    """Exempt parameters from weight decay until a backward reaches them on any rank.

    A parameter that was reached once is stepped from then on, as DeepSpeed does, even without a gradient.
    """
    steps = steps_of(engine)
    decayed = [step for step in steps if step.optimizer.param_groups[step.group].get("weight_decay")]
    if decayed:
        # One object for all optimizers, since being reached is a property of the parameter.
        unreached = _UnreachedParameters(
            engine, {id(m.parameter): m.parameter for step in decayed for m in step.members}
        )
        for optimizer in {id(step.optimizer): step.optimizer for step in decayed}.values():
            optimizer.register_step_pre_hook(unreached.before)
            optimizer.register_step_post_hook(unreached.after)


class _UnreachedParameters:
    """Parameters that no backward reached on any rank, and their values before a step."""

    def __init__(self, engine: DeepSpeedEngine, parameters: dict[int, Any]) -> None:
        self._engine = engine
        self._reached: set[int] = set()  # on this rank, by ids
        self._hooks = {
            key: parameter.register_hook(functools.partial(self._reach, key))
            for key, parameter in parameters.items()
        }
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _reach(self, key: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._reached.add(key)

    def _agree(self) -> None:
        flags = [key in self._reached for key in self._hooks]
        flags_of_ranks = torch.tensor(flags, dtype=torch.int32, device=default_device())
        dist.all_reduce(flags_of_ranks, dist.ReduceOp.MAX)
        for key, flag in zip(list(self._hooks), flags_of_ranks.tolist(), strict=True):
            if flag:
                # Reached once, stepped for ever: its hook has nothing more to say.
                self._hooks.pop(key).remove()

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before a step of one flat tensor, or of several."""
        if not self._hooks:
            return
        self._agree()
        # DeepSpeed may step one flat tensor at a time, with ``param_groups`` cut down to it.
        now = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for step in steps_of(self._engine) if self._hooks else ():
            for member in step.members if id(step.tensor) in now else ():
                if id(member.parameter) in self._hooks:
                    share = step.tensor.detach().view(-1)[member.at : member.at + member.count]
                    # Put back after the step. Not left out of it: the flat tensor is one, and cannot be
                    # stepped in part.
                    self._before.append((share, share.clone()))

    @torch.no_grad()
    def after(self, *_: object) -> None:
        """After it."""
        for share, before in self._before:
            share.copy_(before)
        self._before.clear()
