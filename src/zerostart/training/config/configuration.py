"""The configuration of ``zerostart train``: its sections, keys, defaults and their descriptions.

The text below a key is its description in the reference; its first sentence is the comment in the files that
``zerostart config`` writes. ``training/config/load.py`` reads a file and compares its sections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from zerostart.checkpoint.write.shards import parse_size
from zerostart.training.config.sections import (
    ConfigSection,
    Count,
    PathText,
    Positive,
    Proportion,
    TaskConfig,
)
from zerostart.training.data.media_config import MediaConfig

if TYPE_CHECKING:
    from zerostart.engines import Engine


# The schedules of ``transformers.get_scheduler`` that need no further arguments.
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]
# NumPy's seeds have 32 bits, and each of at most 65536 ranks adds its number.
Seed = Annotated[int, Field(ge=0, le=2**32 - 2**16, strict=True)]
# YAML reads a bare `no` as false.
Precision = Annotated[
    Literal["no", "bf16", "fp16"], BeforeValidator(lambda value: "no" if value is False else value)
]
Dtype = Literal["float32", "bfloat16", "float16"]
Placement = Literal["shard", "replicate", "offload"]


class ModelConfig(ConfigSection):
    """The pretrained weights, and the type in which they are trained."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"source"})

    source: PathText
    """A directory, a file, or a hub id in the local cache."""
    component: str | None = None
    """The trained component of a diffusers pipeline (transformer, transformer_2)."""
    dtype: Dtype | None = None
    """Type of the weights; null: float32, or the 16 bits in which DeepSpeed keeps the model.

    With ``bfloat16`` FSDP2 computes in it, and holds trained weights in float32.
    """
    strict: bool = True
    """false: initialise parameters that the checkpoint lacks, such as a new head."""
    fp32_masters: bool = True
    """false: start mixed precision from weights rounded to 16 bits."""


class EngineConfig(ConfigSection):
    """The engine that shards the model."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"config"})  # its content is compared

    name: str | None = None
    """deepspeed, fsdp2, or another package's; null: the launcher's, deepspeed if installed, or fsdp2."""
    zero_stage: int = 3
    """3: weights in shards; 1, 2: gradients and optimizer; 0: nothing (fsdp2: DistributedDataParallel)."""
    config: dict[str, Any] | str = Field(default_factory=dict)
    """The engine's own configuration, or the path of a JSON file with it, merged over ours.

    DeepSpeed: a ``ds_config``. FSDP2: ``reshard_after_forward``, ``replicate`` (the number of replicas) and
    ``wrap`` (class names of the modules to shard as units).
    """

    def chosen(self) -> Engine:
        """Return the engine at its stage, not configured yet; raises ConfigError."""
        from zerostart.engines import Mesh, check_choice, choose_engine

        family = check_choice(self.name or choose_engine().name, self.zero_stage)
        return family.for_stage(self.zero_stage, None, Mesh(1), None)


class TrainingConfig(ConfigSection):
    """The optimisation; a step has ``batch_size * accumulation`` examples of each rank."""

    steps: Positive | None = None
    """Optimizer steps; give either these or ``epochs``."""
    epochs: Positive | None = None
    """Passes over the data, instead of ``steps``, which are computed from them."""
    batch_size: Positive = 8
    """Examples of a batch, on each rank."""
    accumulation: Positive = 1
    """Batches of each rank in one step."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-5
    """The highest rate, after the warm-up."""
    optimizer: str = "adamw"
    """adamw, another of torch's (sgd, radam), or package.module:Class."""
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer's class, such as ``{momentum: 0.9}``."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight decay of matrices; biases and norms have none."""
    betas: tuple[Proportion, Proportion] = (0.9, 0.999)
    """The two betas of Adam and its relatives."""
    schedule: Schedule = "linear"
    """Schedule of the learning rate: linear, cosine, constant, ... of transformers.get_scheduler."""
    warmup_steps: Count = 0
    """Steps in which the rate rises linearly to learning_rate; the first is above 0."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Gradients are clipped to this norm; 0: no clipping."""
    mixed_precision: Precision = "no"
    """no, bf16; fp16 with deepspeed."""
    seed: Seed = 42
    """Seed of the order of the data, of noise, dropout and new weights."""
    evaluate_every: Count = 0
    """Steps between evaluations; 0: only at the start and the end."""
    checkpoint_blocks: bool | Literal["offload"] = False
    """true: recompute blocks in the backward; offload: also keep their inputs in host memory."""
    patience_nonfinite: Positive = 3
    """Consecutive steps without a finite loss or gradient norm after which the run fails."""
    trainable: Annotated[list[str], Field(min_length=1)] | None = None
    """Modules or parameters to train (``blocks.*.attn1``), all others frozen; null: all, or a LoRA."""

    @property
    def last_step(self) -> int:
        """``steps``; with ``epochs`` they are known once the data are read."""
        assert self.steps is not None, "they were counted before the model was loaded"
        return self.steps

    @model_validator(mode="after")
    def _check_length(self) -> TrainingConfig:
        if (self.steps is None) == (self.epochs is None):
            problem = "neither is given" if self.steps is None else "both are given"
            raise ValueError(
                f"give either steps or epochs for the length of the run, not both or neither ({problem})"
            )
        return self


class OutputConfig(ConfigSection):
    """Directory and format of the trained model."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"directory"})

    directory: PathText
    """Local directory of the trained model, metrics.jsonl and checkpoints."""
    max_shard_size: Annotated[int | str, AfterValidator(parse_size)] = "5GB"
    """Maximum size of one file."""
    overwrite: bool = False
    """true: replace a model in the directory; false: the directory must be empty."""
    pipeline: bool = False
    """true: save the whole pipeline with the trained model in it."""
    format: Literal["diffusers", "peft", "diffsynth"] | None = None
    """Format of a LoRA or of trained tensors: diffusers, peft, diffsynth; null: the library's."""
    trainable_only: bool = False
    """true: leave out frozen tensors."""
    remove_prefix: str = ""
    """Prefix to remove from the names in a file of trained tensors."""
    merge: bool = False
    """true: save the whole model with the LoRA merged into its weights."""
    every: Count = 0
    """Steps between exports to the folder exports; 0: only at the end."""


class CheckpointConfig(ConfigSection):
    """Training checkpoints for ``resume``, in ``checkpoints`` of the output directory."""

    every: Count = 0
    """Steps between checkpoints; 0: none."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    best: Count = 0
    """Number of checkpoints with the lowest held-out loss to keep too; see train.evaluate_every."""
    background: bool = False
    """true: write checkpoints while training continues, from copies in host memory."""


class TrackingConfig(ConfigSection):
    """Trackers that get the figures of ``metrics.jsonl``."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"project"})

    trackers: list[str] = Field(default_factory=list)
    """Names of accelerate's trackers, such as tensorboard and wandb."""
    project: str = "zerostart"
    """Project of the trackers."""


class LoggingConfig(ConfigSection):
    """Output without a terminal."""

    every: Positive = 10
    """Steps between plain lines."""


class LoraConfig(ConfigSection):
    """Low-rank adapters, trained instead of the model.

    An adapter is ``alpha / rank`` times a product of two factors.
    """

    path_keys: ClassVar[frozenset[str]] = frozenset({"start_from"})

    rank: Positive = 32
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0.0)] | None = None
    """Scale of an adapter times its rank; null: rank."""
    dropout: Proportion = 0.0
    """Dropout of the inputs of adapters."""
    targets: str | list[str] = "auto"
    """Layers that get an adapter: auto, names, or DiffSynth's comma-separated list.

    ``auto``: those of DiffSynth's scripts, or all linear layers of repeated blocks. A name (``to_q``,
    ``blocks.*.attn1.to_q``) matches the ends of module names.
    """
    exclude: list[str] = Field(default_factory=list)
    """Names of layers to leave out."""
    init: Literal["default", "gaussian"] = "default"
    """The first factor: PEFT's default, or gaussian. The second is zero."""
    start_from: PathText | None = None
    """A LoRA file of PEFT, diffusers, DiffSynth, kohya or ComfyUI to start from, or its directory."""

    @property
    def scaling(self) -> float:
        """The scale of the product of the factors."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class EmaConfig(ConfigSection):
    """An fp32 average of the weights like that of diffusers' ``EMAModel``.

    It is saved in ``ema`` of the output directory. Update ``n`` (from 1) keeps the part ``d`` of the average:
    0 up to update ``update_after_step + 1``, then, with ``k = n - update_after_step - 1``, ``(1 + k) / (10 +
    k)``, or with ``warmup`` ``1 - (1 + k / inv_gamma) ** -power``; at most ``decay``, at least ``min_decay``.
    """

    decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9999
    """Largest part of the average that an update keeps."""
    min_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Smallest part of the average that an update keeps."""
    update_after_step: Count = 0
    """Updates in which the average equals the weights."""
    warmup: bool = False
    """true: the decay rises by inv_gamma and power."""
    inv_gamma: Annotated[float, Field(gt=0.0)] = 1.0
    """Updates by which the warm-up is stretched."""
    power: Annotated[float, Field(gt=0.0)] = 2 / 3
    """Exponent of the warm-up."""
    every: Positive = 1
    """Steps between updates."""
    place: Literal["device", "host"] = "device"
    """Memory of the average: device, host."""
    evaluate: bool = False
    """true: compute the held-out loss with the average."""

    def decay_of(self, update: int) -> float:
        """Return the part of the average that update number ``update`` (from 1) keeps."""
        step = max(0, update - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        rising = 1 - (1 + step / self.inv_gamma) ** -self.power if self.warmup else (1 + step) / (10 + step)
        return max(min(rising, self.decay), self.min_decay)


class CacheConfig(ConfigSection):
    """Latents and embeddings of media, computed once by ``zerostart cache`` or before training."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"directory", "source"})

    directory: PathText | None = None
    """Directory of latents and embeddings; null: the folder cache of the output directory."""
    source: PathText | None = None
    """The pipeline with the encoders; null: model.source."""
    placement: Placement | dict[str, Placement] | None = None
    """Placement of all encoders, or by name: shard, replicate, offload; null: shard on several ranks.

    The autoencoder is never sharded.
    """
    engine: str = "fsdp2"
    """Engine of sharded encoders."""
    device_memory_limit: Annotated[int, BeforeValidator(parse_size)] | None = None
    """Maximum device memory of a rank for the encoders, in bytes or as 24GB."""
    dtype: Dtype | None = None
    """Type of the text and image encoders; null: that of their files."""
    vae_dtype: Dtype | None = None
    """Type of the autoencoder; null: that of its files."""
    max_sequence_length: Positive | None = None
    """Maximum number of tokens of a text; the rest is dropped; null: the pipeline's default."""
    posterior: Literal["sample", "mode"] = "sample"
    """Latents: drawn from the autoencoder's distribution (sample), or its mode."""
    seed: Count = 0
    """Seed of these draws, together with the number of the item."""
    last_frame: bool = False
    """Image to video: true also gives the model the last frame of each video."""
    prompts: list[str] = Field(default_factory=list)
    """Further texts to encode; the empty text always is."""

    @field_validator("placement")
    @classmethod
    def _refuse_sharded_vae(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("vae") == "shard":
            raise ValueError("vae cannot be sharded: ranks call it unequally often; replicate or offload it")
        return value


class SamplesConfig(ConfigSection):
    """Samples drawn by the pipeline of ``model.source`` with the model in training.

    A null key is the pipeline's default.
    """

    path_keys: ClassVar[frozenset[str]] = frozenset({"images"})

    prompts: Annotated[list[str], Field(min_length=1)]
    """Texts of the samples."""
    images: list[str | Annotated[list[str], Field(min_length=1)]] | None = None
    """For each prompt the file of the picture to start from, or a list (to edit, or first and last frame)."""
    every: Count = 0
    """Steps between samples; 0: only at the start and the end."""
    negative_prompt: str = ""
    """Text that guidance leads away from."""
    steps: Positive = 28
    """Inference steps of a sample."""
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    """The pipeline's ``true_cfg_scale``, or its ``guidance_scale``."""
    height: Positive | None = None
    """Pixels."""
    width: Positive | None = None
    """Pixels."""
    num_frames: Positive | None = None
    """Frames of a video."""
    seed: Count = 0
    """Seed of the noise: sample i uses seed + i every time."""
    count: Positive = 1
    """Samples of each prompt."""
    batch_size: Positive = 1
    """Samples drawn at once."""
    with_ema: bool = False
    """true: draw with the averaged weights of the section ema."""
    fps: Positive = 16
    """Frames a second of written videos."""

    @model_validator(mode="after")
    def _check_images(self) -> SamplesConfig:
        if self.images is not None and len(self.images) != len(self.prompts):
            raise ValueError(
                f"images has entries for {len(self.images)} prompts, and there are {len(self.prompts)}: name "
                "one file, or a list of files, for each"
            )
        return self


class TrainConfig(ConfigSection):
    """All sections.

    A task uses some of ``media``, ``cache`` and ``samples`` and refuses the others.
    """

    #: Sections that only some tasks use.
    per_task: ClassVar[tuple[str, ...]] = ("media", "cache", "samples")

    model: ModelConfig
    task: SerializeAsAny[TaskConfig]
    train: TrainingConfig
    output: OutputConfig
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: Annotated[str, Field(min_length=1)] | None = None
    """auto: the newest checkpoint in the output directory, if there is one; or a path."""
    tracking: TrackingConfig = TrackingConfig()
    logging: LoggingConfig = LoggingConfig()
    media: MediaConfig | None = None
    lora: LoraConfig | None = None
    ema: EmaConfig | None = None
    samples: SamplesConfig | None = None
    cache: CacheConfig | None = None

    @property
    def engine_dtype(self) -> str | None:
        """Name of the type in which the engine keeps the model, if it has one."""
        dtype = self.engine.chosen().training_dtype(self.train.mixed_precision)
        return None if dtype is None else str(dtype).removeprefix("torch.")

    @property
    def trains_masters(self) -> bool:
        """True if trained weights are held in fp32 although ``model.dtype`` is bfloat16.

        Small steps are lost in weights of 16 bits, and the engine keeps no masters.
        """
        return self.model.dtype == "bfloat16" and self.engine.chosen().steps_parameters

    @property
    def precision(self) -> str:
        """``train.mixed_precision``, or the mixed precision that ``model.dtype`` implies."""
        return "bf16" if self.trains_masters else self.train.mixed_precision

    @property
    def dtype(self) -> str:
        """Name of the ``torch.dtype`` in which the parameters are loaded."""
        if self.trains_masters and self.lora is None:
            return "float32"
        # Other engines cast when they gather, from weights in full precision.
        return self.model.dtype or self.engine_dtype or "float32"
