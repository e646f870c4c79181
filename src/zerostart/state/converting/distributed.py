"""Directories of ``torch.distributed.checkpoint``, as one process of torch's own would have saved them.

Source: ``metadata.py`` and ``filesystem.py`` of ``torch/distributed/checkpoint`` (torch 2.13).
"""

from __future__ import annotations

from pathlib import Path

import torch

from zerostart.checkpoint.formats.dcp import METADATA
from zerostart.checkpoint.write.images import Image, archived, joined
from zerostart.state.converting.contents import Contents
from zerostart.state.converting.targets import (
    Options,
    Target,
    TargetFormat,
    kept_torch_dtype,
    others_left_out,
)
from zerostart.upstream.torch.archives import Described, distributed_metadata

#: The names of the files that one process writes begin so; a new one after so many bytes.
_FILE, _FILE_BYTES = "__0_{}.distcp", 5_000_000_000


class Distributed(TargetFormat):
    """What ``torch.distributed.checkpoint.load`` opens.

    Without an optimizer weights are at the top, under the names of the source. With one they are under
    ``model``, in the precision in which they are stepped, and its states under ``optim``, as
    ``get_state_dict`` has both.
    """

    name = "dcp"

    def target(self, contents: Contents, options: Options, scratch: Path) -> Target:
        """Each tensor is one archive in a file, and ``.metadata`` says where."""
        target = Target(left_out=others_left_out(contents))
        if contents.schedule is not None:
            target.left_out.append("state of the schedule of learning rates")
        training = bool(contents.groups)
        # Key, dtype and shape, way through the state dict, and archive.
        found: list[tuple[str, torch.dtype | None, tuple[int, ...], tuple[str | int, ...], Image]] = []

        def add(
            route: tuple[str | int, ...],
            value: object,
            dtype: torch.dtype | None = None,
            shape: tuple[int, ...] = (),
        ) -> None:
            key = ".".join(map(str, route))
            found.append((key, dtype, shape, route, archived("", value, scratch)))

        for name in contents.weights:
            stored = contents.best(name) if training else contents.weights[name]
            dtype = kept_torch_dtype(stored, options.dtype)
            add(("model", name) if training else (name,), target.room(stored, dtype), dtype, stored.shape)
        for key, by_name in contents.states.items():
            for name, stored in by_name.items():
                dtype = kept_torch_dtype(stored, None)
                add(("optim", "state", name, key), target.room(stored, dtype), dtype, stored.shape)
        for key, numbers in contents.numbers.items():
            for name, number in numbers.items():
                value = torch.tensor(number, dtype=torch.float32, device="cpu")
                add(("optim", "state", name, key), value, torch.float32)
        for number, group in enumerate(contents.groups):
            for key, setting in {**group.settings, "params": list(group.parameters)}.items():
                held = setting.dtype if isinstance(setting, torch.Tensor) else None
                add(("optim", "param_groups", number, key), setting, held)
        described: dict[str, Described] = {}
        for number, parts in enumerate(_files([image for *_, image in found])):
            name = _FILE.format(number)
            image, places = joined(name, [found[at][-1] for at in parts])
            target.images.append(image)
            for at, (offset, length) in zip(parts, places, strict=True):
                key, kind, shape, route, _ = found[at]
                described[key] = (kind, shape, route, (name, offset, length))
        for name, other in contents.ties.items():  # which has no bytes of its own
            if name not in contents.weights and other in contents.weights:
                above = ("model",) if training else ()
                known = described[".".join((*above, other))]
                described[".".join((*above, name))] = (*known[:2], (*above, name), known[3])
        data = distributed_metadata(described)
        target.images.append(Image(METADATA, len(data), ((0, data),)))
        return target


def _files(images: list[Image]) -> list[list[int]]:
    """The numbers of the archives that go into each file."""
    files: list[list[int]] = []
    size = _FILE_BYTES
    for number, image in enumerate(images):
        if size >= _FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(number)
        size += image.size
    return files
