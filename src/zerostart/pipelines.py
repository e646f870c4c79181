"""Whole diffusers pipelines: ``load``, ``Placement`` and ``drop``.

``zerostart`` has them under longer names: ``load_pipeline``, ``Placement``, ``drop_components``.
Nothing heavy is imported before one is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zerostart.loading.placement import Placement

if TYPE_CHECKING:
    import os

    import torch
    from diffusers import DiffusionPipeline

    from zerostart.loading.request import EngineConfig

__all__ = ["Placement", "drop", "drop_components", "load", "load_pipeline"]


def load_pipeline(
    source: str | os.PathLike[str],
    placement: Mapping[str, str | Placement] | None = None,
    engine: str | None = "deepspeed",
    zero_stage: int = 3,
    device_memory_limit: int | None = None,
    engine_config: EngineConfig | None = None,
    dtype: torch.dtype | str | None = None,
    trainable: Sequence[str] = (),
    memory_limit: int | None = None,
    progress: bool = True,
    without: Sequence[str] = (),
) -> DiffusionPipeline:
    """Load a diffusers pipeline and shard, copy, offload or drop each of its models; collective.

    Schedulers, tokenizers and processors are loaded by diffusers itself. See ``docs/pipelines.md``.

    Args:
        source: the directory of a pipeline (with a ``model_index.json``), or a hub id in the local cache.
        placement: by component ``"shard"`` (what is not named), ``"replicate"``, ``"offload"``, ``"drop"``,
            or a ``Placement``, which also says where offloaded weights are at rest, and precisions.
        engine: for what is sharded, as in ``load``; so are ``zero_stage`` and ``engine_config``.
        device_memory_limit: most bytes that shards, replicas and what is brought in of offloaded components
            take of this rank's device; without a device, that what is brought in takes. None: what layers
            need, two at a time.
        dtype: floating dtype of all components; None keeps each checkpoint's own.
        trainable: components that are left to ``deepspeed.initialize``, ``accelerator.prepare`` or an FSDP2
            loop of yours, one by one or as children of one module. The others are frozen, and can be called
            as they are.
        memory_limit: as in ``load``.
        without: models that are not loaded, and None in the pipeline (such as the transformer).

    Returns:
        A pipeline of the class that ``model_index.json`` names.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError for a limit with which one of the
            offloaded modules cannot run, naming it and what it needs.

    Example:
        >>> import tempfile, diffusers, zerostart
        >>> unet = diffusers.UNet2DModel(
        ...     sample_size=8, block_out_channels=(4,), norm_num_groups=2, layers_per_block=1,
        ...     down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        ... )
        >>> folder = tempfile.TemporaryDirectory()
        >>> diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(folder.name)
        >>> pipe = zerostart.load_pipeline(folder.name, {"unet": "offload"}, progress=False)
        >>> type(pipe).__name__
        'DDPMPipeline'
    """
    arguments = locals()
    from zerostart.integrations.diffusers import PipelineRequest
    from zerostart.integrations.diffusers import load_pipeline as load_whole

    made: DiffusionPipeline = load_whole(PipelineRequest(**arguments))
    return made


def drop_components(pipe: DiffusionPipeline, *names: str) -> tuple[str, ...]:
    """Free the components of a pipeline that are no longer needed; each rank by itself.

    Without ``names`` those that ``load_pipeline`` placed ``"drop"``: encoders whose results are cached. They
    are None in the pipeline afterwards.

    Returns:
        The names of those that were there.

    Raises:
        ConfigError: for a name that the pipeline does not have.

    Example:
        >>> import tempfile, diffusers, zerostart
        >>> folder = tempfile.TemporaryDirectory()
        >>> unet = diffusers.UNet2DModel(
        ...     sample_size=8, block_out_channels=(4,), norm_num_groups=2, layers_per_block=1,
        ...     down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        ... )
        >>> diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(folder.name)
        >>> pipe = zerostart.load_pipeline(folder.name, {"unet": "drop"}, progress=False)
        >>> zerostart.drop_components(pipe)
        ('unet',)
    """
    from zerostart.integrations.diffusers import drop_components as drop

    return drop(pipe, *names)


load = load_pipeline
drop = drop_components
