"""The configuration of ``zerostart train``, typed: its sections, what each key means, and the defaults.

It is read, and its sections held against each other, in ``training/config/load.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from zerostart.checkpoint.write.shards import parse_size
from zerostart.errors import ConfigError
from zerostart.loading.arguments import LoadArguments
from zerostart.training.config.sections import Count, Positive, Section, TaskConfig
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
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
# NumPy's seeds have 32 bits, and each rank has one of its own, of 65536 at most.
Seed = Annotated[int, Field(ge=0, le=2**32 - 2**16)]
# YAML reads a bare `no` as false.
Precision = Annotated[
    Literal["no", "bf16", "fp16"], BeforeValidator(lambda value: "no" if value is False else value)
]


def _as_path(value: object) -> object:
    """A text in the place of the section ``resume``."""
    return {"path": value} if isinstance(value, str) else value


class ModelConfig(Section):
    """Which pretrained weights: a directory, a file or a hub id, and the type they train in.

    ``component`` is the one that is trained where ``source`` is a pipeline of diffusers (transformer).
    ``dtype`` None means float32, or bfloat16 / float16 where DeepSpeed's mixed precision keeps the model
    in that type. ``bfloat16`` on FSDP2 is what the model computes in: what is trained is held in float32,
    and of a LoRA the frozen model in bfloat16. ``strict`` False initialises parameters that the checkpoint
    lacks (a new head). ``fp32_masters`` False has mixed precision start from weights that were rounded to 16
    bits first. ``trust_remote_code`` runs the code of a model or a tokenizer that lies beside its files;
    nobody is asked.
    """

    places: ClassVar[frozenset[str]] = frozenset({"source"})

    source: str
    component: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    strict: bool = LoadArguments.strict
    fp32_masters: bool = LoadArguments.fp32_masters
    trust_remote_code: bool = False


class DataConfig(Section):
    """Text to train on.

    ``source`` is a text file, a ``.jsonl`` file with ``text_field`` in every line, a directory of both, a
    list of those, or ``stdlib-docstrings``: the docstrings of the running Python's standard library. A
    text file is one document; ``documents`` limits how many are taken (0: all). ``tokenizer`` defaults to
    the model's. ``packing`` joins documents and cuts them into sequences of ``sequence_length`` tokens
    (special tokens included); without it each document is one sequence, cut at that length. A part
    ``held_out`` of the sequences is kept out of training and evaluated before and after.
    """

    places: ClassVar[frozenset[str]] = frozenset({"source", "tokenizer"})

    source: str | list[str]
    text_field: str = "text"
    documents: Count = 0
    tokenizer: str | None = None
    sequence_length: Annotated[int, Field(ge=8)] = 512
    packing: bool = True
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0


class EngineConfig(Section):
    """Which engine shards the model. ``config`` is its own configuration, merged over ours.

    For DeepSpeed that is a ``ds_config`` dictionary (or the path of a JSON file), in which the batch
    sizes, clipping, stage and precision are filled in and ``auto`` means just that; for FSDP2,
    ``reshard_after_forward``, ``replicate`` (the number of replicas) and ``wrap`` (names of the module
    classes to shard as units). ``zero_stage`` 0 keeps the model whole on every rank: with ``fsdp2`` that is
    DistributedDataParallel. ``expert_parallel`` ranks share the experts of a mixture, each with batches of
    its own; ``sequence_parallel`` ranks share each sequence, and see one batch. An engine that another
    package has registered is known by its name, too.
    """

    places: ClassVar[frozenset[str]] = frozenset({"config"})  # whose content is compared

    name: str = "deepspeed"
    zero_stage: int = LoadArguments.zero_stage
    expert_parallel: Positive = LoadArguments.expert_parallel
    sequence_parallel: Positive = LoadArguments.sequence_parallel
    config: dict[str, Any] | str = Field(default_factory=dict)

    def chosen(self) -> Engine:
        """The engine at its stage, not configured yet; raises :class:`ConfigError` for an unknown one."""
        from zerostart.engines import check_choice
        from zerostart.geometry.layout import Mesh

        return check_choice(self.name, self.zero_stage).for_stage(self.zero_stage, None, Mesh(1), None)


class TrainingConfig(Section):
    """The optimisation: ``steps`` optimizer steps of AdamW.

    A step sees ``batch_size`` sequences a rank, ``accumulation`` times over. ``schedule`` (as
    ``transformers.get_scheduler`` knows it) shapes the learning rate, after ``warmup_steps`` that rise evenly
    to ``learning_rate``, the first of them above 0; ``max_grad_norm`` 0 turns clipping off.
    ``evaluate_every`` 0 evaluates at the start and the end only. With ``checkpoint_blocks`` the model's
    blocks are run again in the backward in the place of keeping their activations; ``offload``: with what is
    kept of them in host memory. After ``patience_nonfinite`` steps on end whose loss or gradient norm is not
    finite the run fails. ``trainable`` names the modules or parameters (``blocks.*.attn1``) that are
    trained, all others being frozen; None: all are trained, or a LoRA.
    """

    steps: Positive
    batch_size: Positive = 8
    accumulation: Positive = 1
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-5
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    schedule: Schedule = "linear"
    warmup_steps: Count = 0
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    mixed_precision: Precision = "no"
    seed: Seed = 42
    evaluate_every: Count = 0
    checkpoint_blocks: bool | Literal["offload"] = False
    patience_nonfinite: Positive = 3
    trainable: Annotated[list[str], Field(min_length=1)] | None = None


class OutputConfig(Section):
    """Where the trained model goes, in files of at most ``max_shard_size`` (such as ``5GB``).

    A directory that holds anything is refused, unless ``overwrite`` says that a model in it may go.
    ``pipeline`` puts the trained component into a whole pipeline there, whose other parts are copied.
    ``format`` is how trained tensors alone, or a LoRA, are written: for diffusers, for PEFT or for
    DiffSynth-Studio; None: as the library of the model has it. ``trainable_only`` leaves out what was frozen,
    ``remove_prefix`` takes this from the beginning of the names in such a file, and ``merge`` saves the whole
    model with the LoRA in its weights. ``every`` so many steps there is an export in ``exports`` (0: none).
    """

    places: ClassVar[frozenset[str]] = frozenset({"directory"})

    directory: str
    max_shard_size: str = "5GB"
    overwrite: bool = False
    pipeline: bool = False
    format: Literal["diffusers", "peft", "diffsynth"] | None = None
    trainable_only: bool = False
    remove_prefix: str = ""
    merge: bool = False
    every: Count = 0

    @field_validator("max_shard_size")
    @classmethod
    def _bytes(cls, value: str) -> str:
        try:
            parse_size(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value


class CheckpointConfig(Section):
    """Training checkpoints, from which ``resume`` goes on: one ``every`` so many steps (0: none).

    They are in ``checkpoints`` of the output directory, of which the last ``keep`` stay, and the ``best``
    ones by held-out loss, which then has to be known of each (``train.evaluate_every``). ``background``
    writes them while training goes on, from copies in host memory.
    """

    every: Count = 0
    keep: Positive = 2
    best: Count = 0
    background: bool = False


class ResumeConfig(Section):
    """The checkpoint that a run goes on from, and in what it may be another run than the one that saved it.

    ``path`` ``auto`` is the newest complete one in the output directory; there is none yet: the run starts
    anew. ``accept`` ``data``: it goes on with other data, from the beginning of the next epoch; ``lr``: with
    another ``train.learning_rate``, ``schedule``, ``warmup_steps`` or ``steps``. A text alone is the
    ``path``.
    """

    path: str = "auto"
    accept: list[Literal["data", "lr"]] = Field(default_factory=list)


class TrackingConfig(Section):
    """accelerate's trackers by name (``tensorboard``, ``wandb``, ...) and the project they log to."""

    places: ClassVar[frozenset[str]] = frozenset({"project"})

    trackers: list[str] = Field(default_factory=list)
    project: str = "zerostart"


class LoggingConfig(Section):
    """A plain log line every ``every`` steps where no terminal shows the live display."""

    every: Positive = 10


class LoraConfig(Section):
    """Low-rank adapters, trained in the place of the model, which stays as it was loaded.

    Each gives its module ``alpha / rank`` times the product of two factors of rank ``rank``; ``alpha`` None:
    as much. ``targets`` is ``auto`` (those of DiffSynth's scripts for its families, else every linear layer
    of the model's repeated blocks), the name of a preset, a list of names (``to_q`` is every module that is
    called so, ``blocks.*.attn1.to_q`` one of each block), or DiffSynth's comma-separated list as it is, in
    the names of DiffSynth's model. What ``exclude`` names is left out. ``init``: the first factor is drawn as
    PEFT draws it, or from a normal distribution; the second is zero, so that training starts from the model.
    ``start_from`` is a LoRA file, or its directory, that training goes on from: of PEFT, diffusers or
    DiffSynth.
    """

    places: ClassVar[frozenset[str]] = frozenset({"start_from"})

    rank: Positive = 32
    alpha: Annotated[float, Field(gt=0.0)] | None = None
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: str | list[str] = "auto"
    exclude: list[str] = Field(default_factory=list)
    init: Literal["default", "gaussian"] = "default"
    start_from: str | None = None

    @property
    def scaling(self) -> float:
        """What the product of the factors is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class EmaConfig(Section):
    """An average of the weights, as diffusers' ``EMAModel`` has it: saved in ``ema`` of the output directory.

    Update ``n`` (from 1) keeps the part ``d`` of what there was: ``d`` is 0 up to update
    ``update_after_step + 1``, then, with ``k = n - update_after_step - 1``, ``(1 + k) / (10 + k)``, or with
    ``warmup`` ``1 - (1 + k / inv_gamma) ** -power``; at most ``decay``, at least ``min_decay``. There is one
    update ``every`` so many steps. The average is in fp32, where the weights are or in host memory
    (``place``). ``evaluate``: the held-out loss is that of the average.
    """

    decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9999
    min_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    update_after_step: Annotated[int, Field(ge=0)] = 0
    warmup: bool = False
    inv_gamma: Annotated[float, Field(gt=0.0)] = 1.0
    power: Annotated[float, Field(gt=0.0)] = 2 / 3
    every: Positive = 1
    place: Literal["device", "host"] = "device"
    evaluate: bool = False

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


Dtype = Literal["float32", "bfloat16", "float16"]
Kind = Literal["shard", "replicate", "offload"]


class CacheConfig(Section):
    """Latents and embeddings, computed once.

    ``directory`` None is ``cache`` in the output directory. ``source`` is the pipeline whose encoders are
    used; None: that of ``model.source``. Text and image encoders are placed as ``placement`` says
    (``shard``, ``replicate`` or ``offload``, or one for each by name), None: ``replicate`` on one rank,
    ``shard`` by ``engine`` on several; the autoencoder is whole on every rank unless it is offloaded.
    ``device_memory_limit`` is as for a pipeline, in bytes or as ``24GB``.

    ``dtype`` is that of the encoders, ``vae_dtype`` that of the autoencoder; None: that of their files.
    ``max_sequence_length`` None is the pipeline's own default. ``posterior`` ``sample`` draws latents from
    what the autoencoder gives, by ``seed`` and the number of the item; ``mode`` takes the most likely ones.
    ``last_frame`` gives a model of image to video the last frame of each video, too. ``prompts`` are
    further texts whose embeddings are kept; that of the empty text always is. ``file_size`` is what the
    items of one file take, which a rank holds until they are written.
    """

    places: ClassVar[frozenset[str]] = frozenset({"directory", "source"})

    directory: str | None = None
    source: str | None = None
    placement: Kind | dict[str, Kind] | None = None
    engine: str = "fsdp2"
    device_memory_limit: int | str | None = None
    dtype: Dtype | None = None
    vae_dtype: Dtype | None = None
    max_sequence_length: Positive | None = None
    posterior: Literal["sample", "mode"] = "sample"
    seed: Count = 0
    last_frame: bool = False
    prompts: list[str] = Field(default_factory=list)
    file_size: int | str = "256MB"

    @field_validator("device_memory_limit", "file_size")
    @classmethod
    def _bytes(cls, value: int | str | None) -> int | str | None:
        try:
            return value if value is None else parse_size(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("placement")
    @classmethod
    def _whole_vae(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if isinstance(value, dict) and value.get("vae") == "shard":
            raise ValueError(
                "vae cannot be sharded: items of different lengths call it differently often on different "
                "ranks; write replicate or offload"
            )
        return value

    @property
    def limit(self) -> int | None:
        """``device_memory_limit`` in bytes."""
        return None if self.device_memory_limit is None else parse_size(self.device_memory_limit)

    @property
    def bytes_of_a_file(self) -> int:
        """``file_size`` in bytes."""
        return parse_size(self.file_size)


class SamplesConfig(Section):
    """What a run draws with the model in training: before the first step, after the last, ``every`` steps.

    ``every`` 0 leaves out those in between. The pipeline of ``model.source`` draws each of ``prompts`` in
    ``steps`` steps, at ``height`` and ``width`` in pixels and ``num_frames`` frames (each its own default
    where it is not given). ``guidance`` is the pipeline's ``true_cfg_scale``, or its ``guidance_scale`` where
    it has no such or the transformer embeds its guidance; ``negative_prompt`` is what it guides away from.
    The prompts are gone through ``count`` times, and ``batch_size`` samples are drawn at once. The noise of
    sample ``i`` is drawn from ``seed`` + ``i``, the same every time. ``with_ema`` draws with
    the averaged weights of the section ``ema``. Videos are played at ``fps`` frames a
    second.
    """

    prompts: Annotated[list[str], Field(min_length=1)]
    every: Count = 0
    negative_prompt: str = ""
    steps: Positive = 28
    guidance: Annotated[float, Field(ge=0.0)] | None = None
    height: Positive | None = None
    width: Positive | None = None
    num_frames: Positive | None = None
    seed: Count = 0
    count: Positive = 1
    batch_size: Positive = 1
    with_ema: bool = False
    fps: Positive = 16


class TrainConfig(Section):
    """All of it.

    ``data`` and the sections after ``logging`` are taken by some tasks and refused by others. ``resume`` None
    starts anew.
    """

    #: The sections that each task says for itself whether it takes.
    of_tasks: ClassVar[tuple[str, ...]] = ("data", "media", "cache", "samples")

    model: ModelConfig
    data: DataConfig | None = None
    task: SerializeAsAny[TaskConfig]
    train: TrainingConfig
    output: OutputConfig
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: Annotated[ResumeConfig | None, BeforeValidator(_as_path)] = None
    tracking: TrackingConfig = TrackingConfig()
    logging: LoggingConfig = LoggingConfig()
    media: MediaConfig | None = None
    lora: LoraConfig | None = None
    ema: EmaConfig | None = None
    samples: SamplesConfig | None = None
    cache: CacheConfig | None = None

    @property
    def kept_dtype(self) -> str | None:
        """The type in which the engine keeps the model in this precision, if it has one, by name."""
        kept = self.engine.chosen().training_dtype(self.train.mixed_precision)
        return None if kept is None else str(kept).removeprefix("torch.")

    @property
    def in_masters(self) -> bool:
        """Whether ``model.dtype`` is what is computed in, and what is trained is held in fp32 nevertheless.

        Steps of a common size are lost in weights of 16 bits, and the engine has no other masters than these.
        """
        return self.model.dtype == "bfloat16" and self.engine.chosen().steps_parameters

    @property
    def precision(self) -> str:
        """``train.mixed_precision``, or the mixed precision that ``model.dtype`` asks for."""
        return "bf16" if self.in_masters else self.train.mixed_precision

    @property
    def dtype(self) -> str:
        """The type in which the parameters are loaded, as the name of a ``torch.dtype``."""
        if self.in_masters and self.lora is None:
            return "float32"
        # An engine that keeps no dtype of its own casts when it gathers, from weights in full precision.
        return self.model.dtype or self.kept_dtype or "float32"
