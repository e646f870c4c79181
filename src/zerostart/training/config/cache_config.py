"""The section ``cache`` of a training configuration: what encoders make of media, and where it is kept."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from zerostart.checkpoint.write.shards import parse_size
from zerostart.errors import ConfigError
from zerostart.training.config.sections import Count, Positive, Section

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
