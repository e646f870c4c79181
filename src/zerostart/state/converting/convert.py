"""``zerostart convert``: a checkpoint of any format that is read, written in another; collective."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from zerostart.checkpoint.digest import DEFINITION, Digests
from zerostart.checkpoint.paths import located, shown_url
from zerostart.checkpoint.source import read_config
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.images import Image
from zerostart.checkpoint.write.space import check_space
from zerostart.checkpoint.write.staging import write_errors
from zerostart.distributed.world import World, current_world
from zerostart.errors import ConfigError
from zerostart.state.converting.contents import Contents, opened
from zerostart.state.converting.formats import target_format
from zerostart.state.converting.moving import Mover, give, image_bytes, units_of, write_checksums
from zerostart.state.converting.targets import Options, Target, TargetFormat, check_dtype
from zerostart.state.converting.work import PLACE, Work
from zerostart.state.saving.writing import agreed_place, publishing

#: Files beside the weights that belong to a model: of these names, or with these ends.
_BESIDE = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
#: What of them a training run leaves, and no model has.
_OF_THE_RUN = (
    "state.json",
    "zerostart.json",
    "trainer_state.json",
    "all_results.json",
    "zero_to_fp32.py",
    "zero_to_torch.py",
)


@dataclass(frozen=True)
class Converted:
    """What was written: the directory or URL, its files of tensors, tensors, and bytes of tensors.

    ``left_out`` names what the source has and the format does not hold. ``kept_bytes`` were there of a
    conversion that was killed.
    """

    path: Path | str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    left_out: tuple[str, ...] = ()
    kept_bytes: int = 0


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
    weights_alone: bool = False,
) -> Converted:
    """Write the checkpoint at ``source`` as the format ``to`` to ``out``; collective.

    ``source`` is whatever ``zerostart.load`` takes that lies in files or behind a URL, or a run's
    directory, whose newest checkpoint counts where no model lies in it. ``to`` is one of "hf", "dcp",
    "zero", "universal" and "original". Masters, states and numbers of an optimizer, and settings of its
    groups, go along where both formats have them; ``strict`` makes an error of what is left out, and
    ``weights_alone`` leaves out all but weights, unread and untold. ``dtype``
    is for floating weights that are not quantised, None leaves each as it is stored; masters are fp32.
    ``max_shard_size`` is for "hf" and "original", ``world_size`` and ``zero_stage`` for "zero" and
    "universal". Configuration, tokenizer and code beside the weights come along. ``out`` is a directory, or
    for "hf" and "original" also a URL of a store, to which one process uploads.

    Each rank of the job, or one process alone, does a share of the work, with two units of 64 MiB in
    memory. ``out`` appears whole or not at all; a conversion to a directory that was killed goes on where
    it stopped when it is called again with the same arguments, after what it had written has been read and
    compared with its journal. Raises what opening a source raises; ConfigError for options that do not fit,
    for what ``strict`` refuses, for a name in ``out`` that is taken, and for a training state without its
    frozen weights; what building the model raises where the configuration has to say what is trained
    ("zero", "universal") or how a release lays it out ("original"); ReadError and WriteError.
    """
    check_dtype(dtype)
    format_ = target_format(to)
    options = Options(dtype, max_shard_size, world_size, zero_stage)
    world = current_world()
    work: Work | None = None
    done: dict[int, list[list[int]]] = {}
    with world.phase("converting"):
        place = agreed_place(out, world, "converting to")
        if isinstance(place, str):
            return _uploaded(source, place, format_, options, strict, weights_alone, world)
        root = Path(os.path.realpath(place))

        def begin() -> tuple[Contents, Target]:
            nonlocal work, done
            contents = opened(source, weights_alone)
            with write_errors(root, "nothing was converted"):
                if root.exists() and not root.is_dir():
                    raise ConfigError(f"{root} is a file; name a directory")
                work = Work.led(root)
                try:
                    target = format_.target(contents, options, work.place)
                    _check_strict(source, format_, target, strict)
                    if not format_.indexed:
                        _check_free(root, target.images)
                    left = image_bytes(target.images) - work.allocated()
                    check_space(root, left, "what is converted")
                    done = work.begin(_digest(contents, target), target.images)
                except BaseException:
                    work.discard_empty()
                    work.close()
                    raise
            return contents, target

        try:
            contents, target = world.broadcast_slow(begin, "looking at what is converted")
            own = work or Work(root)
            units = units_of(target)
            known = world.broadcast_object(lambda: done, "looking at what is done")
            digests = Digests(target.entries)
            mover = Mover(target, contents.catalogs, own, digests)
            with world.phase("writing the files"), write_errors(root, _GOES_ON):
                mine = range(world.rank, len(units), world.size)
                kept = {n: known[n] for n in mine if n in known and mover.check(units[n], known[n])}
                left = [(n, units[n]) for n in mine if n not in kept]
                made = kept | mover.move(left, known.keys() - kept.keys())
            sums = {
                n: of for part in world.all_gather_object(made, "what was written") for n, of in part.items()
            }
            with world.phase("completing the files"), write_errors(root, _GOES_ON):
                if work is not None:
                    write_checksums(target, work, units, [sums[n] for n in range(len(units))])
            names = {image.name: image.name for image in target.images}
            if format_.indexed:
                with publishing(root, world) as publication:
                    if work is not None:
                        _copy_beside(contents, publication.directory, dtype)
                        work.link_into(publication.directory, target.images)
                    publication.add_digests(digests.summed(world))
                names |= publication.names
            else:
                with world.phase("giving the files their names"), write_errors(root, _GOES_ON):
                    if work is not None:
                        beside = _beside_images(contents, work, dtype)
                        work.publish([*beside, *target.images])
            if work is not None:
                with write_errors(root, "all is there"):
                    work.remove()
        finally:
            if work is not None:
                work.close()
        kept_bytes = sum(
            part.nbytes
            for of in world.all_gather_object(list(kept), "what was kept")
            for n in of
            for part in units[n]
        )
    files = tuple(names[image.name] for image in target.images if image.rows)
    return Converted(located(out), files, target.tensors, target.nbytes, tuple(target.left_out), kept_bytes)


def _uploaded(
    source: str | os.PathLike[str],
    url: str,
    format_: TargetFormat,
    options: Options,
    strict: bool,
    weights_alone: bool,
    world: World,
) -> Converted:
    """Convert to a store: as its bytes are read they are uploaded, from the first file to the last."""
    if not format_.indexed:
        raise ConfigError(
            f"{shown_url(url)}: {format_.name} is written to a directory of this machine; convert to one, "
            "and copy it from there (hf and original take URLs)"
        )
    if world.size > 1:
        raise ConfigError(f"{shown_url(url)}: one process converts to a URL; leave out the others (--nproc)")
    contents = opened(source, weights_alone)
    with tempfile.TemporaryDirectory(prefix="zerostart-") as scratch:
        target = format_.target(contents, options, Path(scratch))
    _check_strict(source, format_, target, strict)
    assert target.layout is not None, "formats with an index have one"
    digests = Digests(target.entries)
    with publishing(url, world) as publication:
        _copy_beside(contents, publication.directory, options.dtype)
        with publication.place.alone(target.layout) as writer:
            give(target, contents.catalogs, writer, digests)
        publication.add_digests(digests.summed(world))
    files = tuple(publication.names.get(file.name, file.name) for file in target.layout.files)
    return Converted(url, files, target.tensors, target.nbytes, tuple(target.left_out))


def _check_strict(
    source: str | os.PathLike[str], format_: TargetFormat, target: Target, strict: bool
) -> None:
    if strict and target.left_out:
        raise ConfigError(
            f"{shown_url(os.fspath(source))} has what {format_.name} does not hold: "
            f"{', '.join(target.left_out)}; convert without strict to leave it out"
        )


_GOES_ON = "what was written stays: convert again, with the same arguments, to go on from there"


def _digest(contents: Contents, target: Target) -> str:
    """What tells one conversion from another: the files that are read, and what is written."""
    # Sums of parts are in the journal: those of another definition are no part of this conversion.
    found = hashlib.blake2b(DEFINITION.encode(), digest_size=16)
    for catalog in contents.catalogs:
        storage = catalog.storage
        states = [storage.identity(number) for number in range(len(storage.files))]
        found.update(repr((storage.files, storage.sizes, states)).encode())
    for stored in target.sources:
        found.update(repr((stored.name, stored.dtype, stored.shape, stored.catalog)).encode())
    for image in target.images:
        found.update(repr((image.name, image.size, image.rows)).encode())
    return found.hexdigest()


def _check_free(root: Path, images: list[Image]) -> None:
    """Raise ConfigError where somebody's files have the names that are needed."""
    if (root / PLACE / "plan").exists():
        return  # of a conversion that was killed, which may have given some of its files their names
    if taken := next((image.name for image in images if (root / image.name).exists()), None):
        raise ConfigError(f"{root / taken} is there already; convert to an empty directory, or to a new one")


def _beside(contents: Contents, dtype: torch.dtype | None) -> Iterator[tuple[str, Path | bytes]]:
    """Configuration, tokenizer and code, by name; in the configuration the dtype of the weights now."""
    root = Path(contents.root) if contents.root else None
    config = read_config(contents.root) if contents.root else None
    if root is None or config is None:
        return
    for path in sorted(root.iterdir()):
        wanted = path.name.endswith(_BESIDE) and not path.name.endswith(".index.json")
        if path.is_file() and wanted and path.name not in _OF_THE_RUN:
            if path.name == "config.json" and dtype is not None and "_class_name" not in config:
                yield path.name, _with_dtype(config, dtype)
            else:
                yield path.name, path


def _with_dtype(config: JsonObject, dtype: torch.dtype) -> bytes:
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    text = json.dumps({**kept, "dtype": str(dtype).removeprefix("torch.")}, indent=2, ensure_ascii=False)
    return (text + "\n").encode()


def _copy_beside(contents: Contents, out: Path, dtype: torch.dtype | None) -> None:
    for name, item in _beside(contents, dtype):
        if isinstance(item, bytes):
            (out / name).write_bytes(item)
        else:
            shutil.copyfile(item, out / name)


def _beside_images(contents: Contents, work: Work, dtype: torch.dtype | None) -> list[Image]:
    """The same as files of the conversion, unless something there has the name."""
    found = []
    for name, item in _beside(contents, dtype):
        if (work.root / name).exists():
            continue
        if isinstance(item, bytes):
            (work.files / name).write_bytes(item)
        else:
            shutil.copyfile(item, work.files / name)
        found.append(Image(name, (work.files / name).stat().st_size))
    return found
