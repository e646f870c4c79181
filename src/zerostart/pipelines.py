"""Load whole diffusers pipelines: ``load``, ``Placement`` and ``drop``.

``zerostart`` has them as ``load_pipeline``, ``Placement`` and ``drop_components``. Heavy imports wait for the
first call.
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
    """Load a diffusers pipeline with a placement for each of its models; collective.

    diffusers loads schedulers, tokenizers and processors itself. See ``docs/pipelines.md``.

    Args:
        source: the directory of a pipeline (with a ``model_index.json``), or a hub id in the local cache.
        placement: ``"shard"`` (default), ``"replicate"``, ``"offload"`` or ``"drop"`` by component, or a
            ``Placement`` with store and dtypes.
        engine: engine of sharded components, as in ``load``, like ``zero_stage`` and ``engine_config``.
        device_memory_limit: maximum memory of shards, replicas and fetched layers on this rank's device, in
            bytes; without a device, of fetched layers. None: two layers at a time.
        dtype: floating dtype of all components; None keeps the dtype of each checkpoint.
        trainable: components that you pass to ``deepspeed.initialize``, ``accelerator.prepare`` or an FSDP2
            loop, one by one or in one module. Other components are frozen, and can be called directly.
        memory_limit: as in ``load``.
        without: models that are not loaded and are None in the pipeline (such as the transformer).

    Returns:
        A pipeline of the class in ``model_index.json``.

    Raises:
        ZerostartError: the same type and text on every rank. ConfigError if the limit is too small for an
            offloaded module.

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

    pipeline: DiffusionPipeline = load_whole(PipelineRequest(**arguments))
    return pipeline


def drop_components(pipe: DiffusionPipeline, *names: str) -> tuple[str, ...]:
    """Free components of a pipeline, such as encoders after their results are cached.

    Not collective. Without ``names``: the components that ``load_pipeline`` placed ``"drop"``. Freed
    components are None in the pipeline.

    Returns:
        The names of the freed components.

    Raises:
        ConfigError: if the pipeline has no component of that name.

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
