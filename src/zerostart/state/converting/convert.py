"""``zerostart convert``: a checkpoint of any format that is read, written in another; collective."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from zerostart.checkpoint.paths import located, shown_record
from zerostart.checkpoint.storage import uploads_at
from zerostart.distributed.world import current_world
from zerostart.state.converting.targets import Asked, Options, check_dtype, target_format
from zerostart.state.converting.to_directory import ToDirectory
from zerostart.state.converting.to_store import ToStore
from zerostart.state.saving.writing import agreed_place


@dataclass(frozen=True)
class Converted:
    """What was written: the directory or URL, its files of tensors, tensors, and bytes of tensors.

    ``left_out`` names what the source has and the format does not hold. ``kept_bytes`` were there of a
    conversion that was killed. ``staged_bytes`` were on the disks of the ranks' machines first, where a store
    takes files whole.
    """

    path: Path | str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    left_out: tuple[str, ...] = ()
    kept_bytes: int = 0
    staged_bytes: int = 0

    def __repr__(self) -> str:
        return shown_record(self)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    world_size: int = 1,
    zero_stage: int = 3,
    strict: bool = False,
) -> Converted:
    """Write the checkpoint at ``source`` as the format ``to`` to ``out``; collective.

    ``source`` is whatever ``zerostart.load`` takes that lies in files or behind a URL, or a run's
    directory, whose newest checkpoint counts where no model lies in it. ``to`` is one of "hf", "dcp",
    "zero", "universal" and "original". Masters, states and numbers of an optimizer, and settings of its
    groups, go along where both formats have them; ``strict`` makes an error of what is left out. ``dtype``
    is for floating weights that are not quantised, None leaves each as it is stored; masters are fp32.
    ``max_shard_size`` is for "hf" and "original", ``world_size`` and ``zero_stage`` for "zero" and
    "universal". Configuration, tokenizer and code beside the weights come along. ``out`` is a directory, or
    the URL of one in a store.

    Each rank of the job, or one process alone, does a share of the work, in some 100 MiB of memory. ``out``
    appears whole or not at all. A conversion to a directory that was killed goes on where it stopped when it
    is called again with the same arguments, after what it had written has been read and compared with its
    journal; one to a store begins anew. Raises what opening a source raises; ConfigError for options that
    do not fit, for what ``strict`` refuses, for a name in ``out`` that is taken, and for a training state
    without its frozen weights; what building the model raises where the configuration has to say what is
    trained ("zero", "universal") or how a release lays it out ("original"); ReadError and WriteError.
    """
    check_dtype(dtype)
    options = Options(dtype, max_shard_size, world_size, zero_stage)
    return converted(Asked(source, target_format(to), options, strict), out)


def converted(asked: Asked, out: str | os.PathLike[str]) -> Converted:
    """Write what is ``asked`` for to ``out``; see ``convert``. Raises what that raises."""
    world = current_world()
    with world.phase("converting"):
        place = agreed_place(out, world, "converting to")
        uploads = uploads_at(place)
        if uploads is not None:
            target, names, kept = ToStore(str(place), uploads, asked, world).write()
            staged = sum(image.size for image in target.images if image.rows) if uploads.staged else 0
        else:
            staged = 0
            target, names, kept = ToDirectory(Path(os.path.realpath(place)), asked, world).write()
    files = tuple(names[image.name] for image in target.images if image.rows)
    return Converted(located(out), files, target.tensors, target.nbytes, tuple(target.left_out), kept, staged)
