"""The configuration of ``zerostart train``, typed: its sections, what each key means, and the defaults.

The text below a key is its description: the first sentence is the comment in the files that ``zerostart
config`` writes, all of it stands in the reference. A file is read, and its sections held against each other,
in ``training/config/load.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from zerostart.checkpoint.write.shards import parse_size
from zerostart.errors import ConfigError
from zerostart.training.config.sections import Count, PathText, Positive, Proportion, Section, TaskConfig
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
# NumPy's seeds have 32 bits, and each rank has one of its own, of 65536 at most.
Seed = Annotated[int, Field(ge=0, le=2**32 - 2**16)]
# YAML reads a bare `no` as false.
Precision = Annotated[
    Literal["no", "bf16", "fp16"], BeforeValidator(lambda value: "no" if value is False else value)
]
Dtype = Literal["float32", "bfloat16", "float16"]
Placement = Literal["shard", "replicate", "offload"]


def _default_engine() -> str:
    """The engine of a configuration that names none; raises ConfigError."""
    from zerostart.engines import default_engine

    return default_engine()


def _size(value: int | str) -> int:
    """Bytes in ``value``. Raises ValueError where it is no size."""
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class ModelConfig(Section):
    """Which pretrained weights, and the type in which they are trained."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"source"})

    source: PathText
    """What is trained: a directory, a file, or a hub id in the local cache."""
    component: str | None = None
    """Of a pipeline of diffusers: the component that is trained (transformer, transformer_2)."""
    dtype: Dtype | None = None
    """Type of the weights; null: float32, or the type of mixed precision.

    On DeepSpeed null is the 16 bits of mixed precision, where the engine keeps the model in them. On FSDP2
    ``bfloat16`` is what the model computes in: what is trained is held in float32, and the frozen model of a
    LoRA in bfloat16.
    """
    strict: bool = True
    """false: initialise parameters that the checkpoint lacks, such as a new head."""
    fp32_masters: bool = True
    """false: start mixed precision from weights that were rounded to 16 bits first."""


class EngineConfig(Section):
    """Which engine shards the model. An engine that another package has registered is known by its name."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"config"})  # whose content is compared

    name: str = Field(default_factory=_default_engine)
    """deepspeed, fsdp2, or another package's; null: the launcher's, else deepspeed where it is installed.

    Where neither a launcher has set up an engine nor DeepSpeed is installed, null is ``fsdp2``.
    """
    zero_stage: int = 3
    """3: weights in shards; 1, 2: gradients and optimizer; 0: nothing.

    At 0 the model is whole on every rank: with ``fsdp2`` that is DistributedDataParallel.
    """
    config: dict[str, Any] | str = Field(default_factory=dict)
    """The engine's own configuration, or the path of a JSON file with it, merged over ours.

    For DeepSpeed a ``ds_config``, in which the batch sizes, clipping, stage and precision are filled in and
    ``auto`` means just that; for FSDP2 ``reshard_after_forward``, ``replicate`` (the number of replicas) and
    ``wrap`` (names of the module classes to shard as units).
    """

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name", "") is None:
            return {key: value for key, value in values.items() if key != "name"}
        return values

    @property
    def given(self) -> str | None:
        """The engine that the configuration names; None where it was chosen by what is there."""
        return self.name if "name" in self.model_fields_set else None

    def chosen(self) -> Engine:
        """The engine at its stage, not configured yet; raises :class:`ConfigError` for an unknown one."""
        from zerostart.engines import Mesh, check_choice

        return check_choice(self.name, self.zero_stage).for_stage(self.zero_stage, None, Mesh(1), None)


class TrainingConfig(Section):
    """The optimisation, of ``batch_size * accumulation`` examples of each rank in a step."""

    steps: Positive | None = None
    """Steps of the optimizer. Either these or ``epochs`` are given."""
    epochs: Positive | None = None
    """How often the data are gone over, in the place of ``steps``.

    As many steps as that takes are what everything else goes by. A run that resumes on other ranks has as
    many only where its step has as many examples.
    """
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
    """The optimizer's, of matrices; biases and norms have none."""
    betas: tuple[Proportion, Proportion] = (0.9, 0.999)
    """The optimizer's, where it has two."""
    schedule: Schedule = "linear"
    """Of the learning rate: linear, cosine, constant, ... as transformers.get_scheduler has them."""
    warmup_steps: Count = 0
    """Steps in which the rate rises evenly to learning_rate, the first of them above 0."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Gradients are clipped to this norm; 0: no clipping."""
    mixed_precision: Precision = "no"
    """no, bf16; fp16 with deepspeed."""
    seed: Seed = 42
    """Of the order of the data, noise, dropout and new weights."""
    evaluate_every: Count = 0
    """Steps between evaluations; 0: at the start and the end alone."""
    checkpoint_blocks: bool | Literal["offload"] = False
    """true: run blocks again in the backward, to keep no activations; offload: and keep less on the device.

    With ``offload`` what is still kept of the blocks is in host memory.
    """
    patience_nonfinite: Positive = 3
    """Steps in a row without a finite loss or gradient norm after which the run fails."""
    trainable: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of what is trained, all else being frozen; null: everything, or a LoRA.

    A name is that of a module or a parameter, with ``*`` for any characters (``blocks.*.attn1``).
    """

    @property
    def last_step(self) -> int:
        """``steps``, which are known once the data are read where ``epochs`` were given."""
        assert self.steps is not None, "they were counted before the model was loaded"
        return self.steps

    @model_validator(mode="after")
    def _long(self) -> TrainingConfig:
        if (self.steps is None) == (self.epochs is None):
            given = "neither is given" if self.steps is None else "both are given"
            raise ValueError(
                f"give either steps or epochs for the length of the run, not both or neither ({given})"
            )
        return self


class OutputConfig(Section):
    """Where the trained model goes, and in what form."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"directory"})

    directory: PathText
    """The trained model, metrics.jsonl and checkpoints; a directory, or a URL of a store."""
    max_shard_size: str = "5GB"
    """Most bytes of one file."""
    overwrite: bool = False
    """true: a model that is in the directory may be replaced. Without it a directory has to be empty."""
    pipeline: bool = False
    """true: save the whole pipeline, with what is trained in it."""
    format: Literal["diffusers", "peft", "diffsynth"] | None = None
    """diffusers, peft, diffsynth, of a LoRA (or trained tensors); null: the library's."""
    trainable_only: bool = False
    """true: leave out what is frozen."""
    remove_prefix: str = ""
    """Removed from the beginning of names in a file of what was trained."""
    merge: bool = False
    """true: save the whole model, with the LoRA in its weights."""
    every: Count = 0
    """Steps between exports, in exports; 0: at the end alone."""

    @field_validator("max_shard_size")
    @classmethod
    def _bytes(cls, value: str) -> str:
        _size(value)
        return value


class CheckpointConfig(Section):
    """Training checkpoints, from which ``resume`` continues, in ``checkpoints`` of the output directory."""

    every: Count = 0
    """Steps between checkpoints; 0: none."""
    keep: Positive = 2
    """How many of the last checkpoints stay."""
    best: Count = 0
    """How many of the lowest held-out loss stay besides; see train.evaluate_every."""
    background: bool = False
    """true: write them while training continues, from copies in host memory."""


class TrackingConfig(Section):
    """Where figures go besides ``metrics.jsonl``."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"project"})

    trackers: list[str] = Field(default_factory=list)
    """accelerate's trackers by name, such as tensorboard and wandb."""
    project: str = "zerostart"
    """The project that they log to."""


class LoggingConfig(Section):
    """Where no terminal shows the live display."""

    every: Positive = 10
    """Steps between plain lines."""


class LoraConfig(Section):
    """Low-rank adapters, trained in the place of the model, which stays as it was loaded.

    Each gives its module ``alpha / rank`` times the product of two factors of rank ``rank``.
    """

    path_keys: ClassVar[frozenset[str]] = frozenset({"start_from"})

    rank: Positive = 32
    """Of the adapters."""
    alpha: Annotated[float, Field(gt=0.0)] | None = None
    """The factor of an adapter times its rank; null: as rank."""
    dropout: Proportion = 0.0
    """Of what goes into an adapter."""
    targets: str | list[str] = "auto"
    """Layers that have an adapter: auto, names, or DiffSynth's comma-separated list.

    ``auto`` is those of DiffSynth's scripts for its families, else every linear layer of the model's repeated
    blocks. Of names, ``to_q`` is every module that is called so, ``blocks.*.attn1.to_q`` one of each block.
    DiffSynth's list is taken as it is, in the names of DiffSynth's model.
    """
    exclude: list[str] = Field(default_factory=list)
    """Names of layers that are left out."""
    init: Literal["default", "gaussian"] = "default"
    """The first factor: as PEFT draws it, or gaussian. The second is zero: training starts from the model."""
    start_from: PathText | None = None
    """A LoRA file, or its directory, to start from: of PEFT, diffusers, DiffSynth, kohya or ComfyUI."""

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class EmaConfig(Section):
    """An average of the weights, as diffusers' ``EMAModel`` has it: saved in ``ema`` of the output directory.

    Update ``n`` (from 1) keeps the part ``d`` of what there was: ``d`` is 0 up to update
    ``update_after_step + 1``, then, with ``k = n - update_after_step - 1``, ``(1 + k) / (10 + k)``, or with
    ``warmup`` ``1 - (1 + k / inv_gamma) ** -power``; at most ``decay``, at least ``min_decay``. The average
    is in fp32.
    """

    decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9999
    """The highest part of the average that an update keeps."""
    min_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The lowest part of the average that an update keeps."""
    update_after_step: Count = 0
    """Updates before which the average is the weights themselves."""
    warmup: bool = False
    """true: the decay rises by inv_gamma and power."""
    inv_gamma: Annotated[float, Field(gt=0.0)] = 1.0
    """Updates by which a warm-up is stretched."""
    power: Annotated[float, Field(gt=0.0)] = 2 / 3
    """The exponent of a warm-up."""
    every: Positive = 1
    """Steps between updates."""
    place: Literal["device", "host"] = "device"
    """Where the average is: device, host."""
    evaluate: bool = False
    """true: the held-out loss is that of the average."""

    @model_validator(mode="after")
    def _ordered(self) -> EmaConfig:
        if self.min_decay > self.decay:
            raise ValueError(f"min_decay {self.min_decay} is more than decay {self.decay}")
        return self

    def decay_of(self, update: int) -> float:
        """What part of the average the update number ``update`` (from 1) keeps."""
        step = max(0, update - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        rising = 1 - (1 + step / self.inv_gamma) ** -self.power if self.warmup else (1 + step) / (10 + step)
        return max(min(rising, self.decay), self.min_decay)


class CacheConfig(Section):
    """Latents and embeddings of media, computed once, by ``zerostart cache`` or before training."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"directory", "source"})

    directory: PathText | None = None
    """Latents and embeddings, made by `zerostart cache` or before training; null: cache, in the output."""
    source: PathText | None = None
    """The pipeline with the encoders; null: model.source."""
    placement: Placement | dict[str, Placement] | None = None
    """Of the encoders: shard, replicate, offload, or one for each by name.

    Null: ``replicate`` on one rank, ``shard`` by ``engine`` on several. The autoencoder is whole on every
    rank unless it is offloaded.
    """
    engine: str = "fsdp2"
    """The engine of encoders in shards."""
    device_memory_limit: int | str | None = None
    """Most device memory of a rank for the encoders, in bytes or as 24GB."""
    dtype: Dtype | None = None
    """Of the text and image encoders; null: that of their files."""
    vae_dtype: Dtype | None = None
    """Of the autoencoder; null: that of its files."""
    max_sequence_length: Positive | None = None
    """Tokens of a text; null: the pipeline's own default."""
    long_prompts: Literal["cut", "refuse"] = "cut"
    """What becomes of a text that is longer: cut, as pipelines do, or refuse.

    Its row is named in either case.
    """
    posterior: Literal["sample", "mode"] = "sample"
    """Latents are drawn from what the autoencoder gives (sample), or the likeliest ones (mode)."""
    seed: Count = 0
    """Of these draws, together with the number of the item."""
    last_frame: bool = False
    """Of image to video: give the model the last frame of each video, too."""
    prompts: list[str] = Field(default_factory=list)
    """Further texts whose embeddings are kept; that of the empty text always is."""

    @field_validator("device_memory_limit")
    @classmethod
    def _bytes(cls, value: int | str | None) -> int | None:
        return value if value is None else _size(value)

    @field_validator("placement")
    @classmethod
    def _whole_vae(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if isinstance(value, dict) and value.get("vae") == "shard":
            raise ValueError(
                "vae cannot be sharded: ranks call it a different number of times for items of "
                "different lengths; write replicate or offload"
            )
        return value

    @property
    def limit(self) -> int | None:
        """``device_memory_limit`` in bytes."""
        return None if self.device_memory_limit is None else parse_size(self.device_memory_limit)


class SamplesConfig(Section):
    """What a run draws with the model in training: before the first step, after the last, and in between.

    The pipeline of ``model.source`` draws. What is null is the pipeline's own default.
    """

    path_keys: ClassVar[frozenset[str]] = frozenset({"images"})

    prompts: Annotated[list[str], Field(min_length=1)]
    """What is drawn with the model in training."""
    images: list[str | Annotated[list[str], Field(min_length=1)]] | None = None
    """For pipelines that start from pictures: for each prompt the file of one, or a list of files.

    The picture that is edited, or a video's first frame, and in a list its last one. Such samples are drawn
    one at a time.
    """
    every: Count = 0
    """Steps between samples; 0: at the start and the end alone."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    steps: Positive = 28
    """Steps of the pipeline for one sample."""
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    """null: the pipeline's own.

    It is the ``true_cfg_scale``, or the ``guidance_scale`` where the pipeline has no such or the transformer
    embeds its guidance.
    """
    height: Positive | None = None
    """Pixels."""
    width: Positive | None = None
    """Pixels."""
    num_frames: Positive | None = None
    """Of a video."""
    seed: Count = 0
    """Of the noise: that of sample i is drawn from seed + i, the same every time."""
    count: Positive = 1
    """How often the prompts are gone through."""
    batch_size: Positive = 1
    """Samples that are drawn at once."""
    with_ema: bool = False
    """true: draw with the averaged weights of the section ema."""
    fps: Positive = 16
    """Frames a second at which videos are played."""

    @model_validator(mode="after")
    def _one_for_each(self) -> SamplesConfig:
        if self.images is not None and len(self.images) != len(self.prompts):
            raise ValueError(
                f"images has entries for {len(self.images)} prompts, and there are {len(self.prompts)}: name "
                "one file, or a list of files, for each"
            )
        return self


class TrainConfig(Section):
    """All sections. A task takes some of ``media``, ``cache`` and ``samples``, and refuses the others."""

    #: Sections that only some tasks take.
    of_tasks: ClassVar[tuple[str, ...]] = ("media", "cache", "samples")

    model: ModelConfig
    task: SerializeAsAny[TaskConfig]
    train: TrainingConfig
    output: OutputConfig
    engine: EngineConfig = Field(default_factory=EngineConfig)  # each time: its engine may be another
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
        """The type in which the engine keeps the model in this precision, if it has one, by name."""
        kept = self.engine.chosen().training_dtype(self.train.mixed_precision)
        return None if kept is None else str(kept).removeprefix("torch.")

    @property
    def trains_masters(self) -> bool:
        """Whether ``model.dtype`` is what is computed in, and what is trained is held in fp32 nevertheless.

        Steps of a common size are lost in weights of 16 bits, and the engine has no other masters than these.
        """
        return self.model.dtype == "bfloat16" and self.engine.chosen().steps_parameters

    @property
    def precision(self) -> str:
        """``train.mixed_precision``, or the mixed precision that ``model.dtype`` asks for."""
        return "bf16" if self.trains_masters else self.train.mixed_precision

    @property
    def dtype(self) -> str:
        """The type in which the parameters are loaded, as the name of a ``torch.dtype``."""
        if self.trains_masters and self.lora is None:
            return "float32"
        # An engine that keeps no dtype of its own casts when it gathers, from weights in full precision.
        return self.model.dtype or self.engine_dtype or "float32"
