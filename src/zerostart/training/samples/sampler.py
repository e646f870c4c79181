"""Drawing samples between two steps: every rank its share, and nothing of the training is changed by it."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zerostart.errors import ConfigError, WriteError
from zerostart.training.data.media import PicturedText
from zerostart.training.samples.pipeline import Drawing, Prompt

if TYPE_CHECKING:
    from zerostart.training.config.configuration import ModelConfig, SamplesConfig
    from zerostart.training.loop.failures import Failures
    from zerostart.training.loop.session import Session
    from zerostart.training.loop.task import Task

#: In the output directory: what is drawn, a folder for each step.
FOLDER = "samples"


def open_drawing(settings: SamplesConfig | None, model: ModelConfig, averaged: bool) -> Drawing | None:
    """How the samples of a run are drawn; None where none are asked for. No weight is read.

    ``averaged``: the run has averaged weights. Raises :class:`ConfigError` for what cannot be drawn.
    """
    if settings is None:
        return None
    if settings.with_ema and not averaged:
        raise ConfigError(
            "samples.with_ema: the run has no averaged weights; add the section ema, or leave it out"
        )
    drawing = Drawing(model.source, model.component or "transformer", settings)
    check_writers(drawing.videos)
    return drawing


def open_sampler(
    drawing: Drawing | None, task: Task, dtype: torch.dtype, last_step: int, directory: Path
) -> Sampler | None:
    """What draws the samples of the run in ``directory``, once their texts have been encoded with its data.

    None where there is no ``drawing``. Raises :class:`ConfigError` for a text that has not.
    """
    if drawing is None:
        return None
    # A text in both is one entry of the cache; `dict.fromkeys` keeps the order, for errors.
    texts = [*drawing.texts, *drawing.negatives]
    embedded = {text: task.embedded(text) for text in dict.fromkeys(texts)}
    return Sampler(drawing, embedded, dtype, last_step, directory)


def batches_of(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """The numbers of ``prompts`` in batches of up to ``size``, in each of which all have the same shapes."""
    alike: dict[tuple[tuple[str, torch.Size], ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        # Tensors of one batch are stacked: texts of other lengths go into another. The order of first sight
        # makes batches the same on every rank.
        alike.setdefault(tuple((name, row.shape) for name, row in prompt.items()), []).append(number)
    return [numbers[i : i + size] for numbers in alike.values() for i in range(0, len(numbers), size)]


class Sampler:
    """Draws the samples of a run with its model in training, and writes them down."""

    def __init__(
        self,
        drawing: Drawing,
        embedded: dict[str, Prompt],
        dtype: torch.dtype,
        last_step: int,
        directory: Path,
    ) -> None:
        """``embedded`` has what the encoders made of each prompt, and of what is guided away from."""
        self._settings = drawing.settings
        self._last = last_step
        self._folder = directory / FOLDER
        self._drawing = drawing
        # All prompts once, then all again: a sample keeps its number, and so its seed, when `count` is
        # raised.
        self._texts = self._settings.prompts * self._settings.count
        keys, away = drawing.texts * self._settings.count, drawing.negatives * self._settings.count
        self._pictures = [text.pictures if isinstance(text, PicturedText) else () for text in keys]
        self._prompts = [embedded[text] for text in keys]
        self._negatives = [embedded[text] for text in away]
        self._dtype = dtype

    def due(self, step: int) -> bool:
        """Whether something is drawn after ``step`` steps."""
        every = self._settings.every
        return step in (0, self._last) or bool(every and step % every == 0)

    def take(self, session: Session, failures: Failures, step: int) -> Path:
        """Draw with the model as it is, write down and log what it drew; gives the folder; collective.

        Raises what a rank fails with, on all.
        """
        folder = self._folder / f"step-{step:08d}"
        with failures.deferred():
            if session.accelerator.is_main_process:
                clear_drawn(folder)
        failures.raise_together()
        with session.averaged(self._settings.with_ema):
            # Nothing is deferred here: a forward of shards is collective, and a rank that left it could not
            # be met.
            drawn = self._drawn(session)
        with failures.deferred():
            self._write(drawn, folder)
        failures.raise_together()  # all have written theirs
        with failures.deferred():
            if session.accelerator.is_main_process:
                _log(session.accelerator.trackers, folder, step)
        return folder

    def _drawn(self, session: Session) -> dict[int, torch.Tensor]:
        """This rank's share, [F, 3, H, W] from 0 to 1, by number; collective.

        The batches are the same for any number of ranks. All ranks draw equally often, for a sharded forward
        is a collective: where the batches do not divide evenly, the first is drawn again for nothing. Modes
        and random states stay as they were.
        """
        # A pipeline takes the pictures of one prompt at a time.
        size = 1 if any(self._pictures) else self._settings.batch_size
        batches = batches_of(self._prompts, size)
        place, count = session.engine.mesh.batch(session.accelerator.process_index)
        drawn: dict[int, torch.Tensor] = {}
        with _undisturbed(session):
            own = session.accelerator.unwrap_model(session.model)
            # By way of the engine, which gathers shards at each call; the bare model has only this rank's
            # part.
            model = InTraining(session.model, own, session.device, self._dtype)
            pipe = self._drawing.opened(model, self._dtype)
            # Each group of ranks that shares sequences takes every ``count``-th batch.
            for start in range(0, len(batches), count):
                mine = start + place < len(batches)
                numbers = batches[start + place if mine else 0]
                # By the sample's own number: neither its batch nor the number of ranks changes its noise.
                seeds = [self._settings.seed + number for number in numbers]
                prompts = [self._prompts[number] for number in numbers]
                negatives = [self._negatives[number] for number in numbers if self._negatives]
                pictures = self._pictures[numbers[0]]
                made = self._drawing.draw(pipe, prompts, negatives, seeds, pictures)
                if mine:
                    drawn.update(zip(numbers, made, strict=True))
        del pipe
        gc.collect()  # the autoencoder: what comes next may need the room
        return drawn

    def _write(self, drawn: dict[int, torch.Tensor], folder: Path) -> None:
        """Write this rank's share. Raises WriteError."""
        width = len(str(len(self._texts) - 1))
        for number, frames in drawn.items():
            words = re.sub(r"\W+", "-", self._texts[number])[:40].strip("-")
            write_drawn(folder / f"{number:0{width}d}-{words}".rstrip("-"), frames, self._settings.fps)


def _log(trackers: Sequence[Any], folder: Path, step: int) -> None:
    """Hand the pictures that all ranks have written to the trackers that take some. Raises WriteError."""
    from PIL import Image

    takers = [tracker for tracker in trackers if hasattr(tracker, "log_images")]
    files = [file for file in _drawn_files(folder) if file.suffix == ".png"]
    if not (takers and files):
        return
    try:
        pictures = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    except OSError as error:
        raise WriteError(f"{folder}: a written sample cannot be read: {error}") from error
    for tracker in takers:
        # TensorBoard has to be told which axis is which; the others take a list of pictures.
        if tracker.name == "tensorboard":
            tracker.log_images({"samples": pictures}, step=step, dataformats="NHWC")
        else:
            tracker.log_images({"samples": list(pictures)}, step=step)


@contextmanager
def _undisturbed(session: Session) -> Iterator[None]:
    # The state of the CPU is saved in any case; it is the only one where that computes.
    devices = [] if session.device.type == "cpu" else [session.device]
    with torch.random.fork_rng(devices, device_type=session.device.type), torch.no_grad():
        # Dropout would draw numbers, and the sample be another at each call.
        session.model.eval()
        try:
            yield
        finally:
            session.model.train()


class InTraining(nn.Module):
    """The model in training as a pipeline sees it: called by way of its engine, all else the model's own."""

    def __init__(self, wrapped: nn.Module, own: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """``device`` is where it computes, wherever its shards lie, and ``dtype`` in what."""
        super().__init__()
        # Not as children: the pipeline must find nothing to move or to cast.
        self.__dict__.update(_wrapped=wrapped, _own=own, device=device, dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the engine gives."""
        return self.__dict__["_wrapped"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Reached only for what this object has not: configuration, dtype of layers, and the like.
        return getattr(self.__dict__["_own"], name)


#: What encodes videos, the best first, with its options: a build of FFmpeg need not have each.
_ENCODERS: Mapping[str, dict[str, str]] = {
    "libx264": {"crf": "18"},
    "libopenh264": {"b": "8M"},
    "mpeg4": {"b": "8M"},
}
#: What samples are called: their number, and the words that they were drawn for.
_DRAWN = re.compile(r"\d+(-.*)?\.(png|mp4)")


def check_writers(videos: bool) -> None:
    """Raise :class:`ConfigError` where what writes pictures, or ``videos``, is not installed."""
    try:
        import PIL.Image  # noqa: F401

        if videos:
            _encoder()
    except ImportError as error:
        raise ConfigError(
            f"samples are written with Pillow and PyAV, but one cannot be imported ({error}); "
            "install them: pip install zerostart[media]"
        ) from error


def _encoder() -> str:
    """The first of ``_ENCODERS`` that this PyAV has. Raises :class:`ConfigError`."""
    from av.codec import codecs_available
    from av.codec.codec import Codec, UnknownCodecError

    for name in _ENCODERS:
        if name in codecs_available:
            with contextlib.suppress(UnknownCodecError):  # it reads what it does not write
                Codec(name, "w")
                return name
    raise ConfigError(
        "samples of several frames are written with PyAV, but the installed one has no "
        f"encoder of {', '.join(_ENCODERS)}; install one that has (pip install "
        "zerostart[media]), or leave samples out"
    )


def write_drawn(path: Path, frames: torch.Tensor, fps: int) -> Path:
    """Write ``frames``, [F, 3, H, W] from 0 to 1, to ``path`` with a suffix of its own; gives that path.

    Raises :class:`WriteError`.
    """
    # The autoencoder may overshoot, and a byte would wrap around. [F, H, W, 3] is what writers take.
    rows = (frames.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
    found = path.with_suffix(".png" if len(rows) == 1 else ".mp4")
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        if len(rows) == 1:
            _picture(found, rows[0])
        else:
            _video(found, rows, fps)
    except OSError as error:  # PyAV's errors of files are of this class, too
        found.unlink(missing_ok=True)  # a part of it is no sample, and takes the room of the next
        raise WriteError(f"{found}: the sample cannot be written: {error}") from error
    return found


def _picture(path: Path, rows: torch.Tensor) -> None:
    from PIL import Image

    Image.fromarray(rows.numpy()).save(path)


def _video(path: Path, rows: torch.Tensor, fps: int) -> None:
    import av

    _, height, width, _ = rows.shape
    with av.open(str(path), "w") as container:
        # Every player knows yuv420p, whose colours are shared by 2 x 2 pixels.
        name = _encoder()
        stream = container.add_stream(name, rate=fps, options=_ENCODERS[name])
        # An odd side gets one more pixel.
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        for row in rows:
            frame = av.VideoFrame.from_ndarray(row.numpy(), format="rgb24")
            for packet in stream.encode(frame.reformat(stream.width, stream.height, "yuv420p")):
                container.mux(packet)
        # The encoder holds frames back for those that refer to later ones: without a frame it gives the rest.
        for packet in stream.encode():
            container.mux(packet)


def clear_drawn(folder: Path) -> None:
    """Remove what ``write_drawn`` has put into ``folder``, and it where nothing else is there.

    Raises :class:`WriteError`.
    """
    try:
        for file in _drawn_files(folder):
            file.unlink()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise WriteError(
            f"{folder}: the earlier samples in it cannot be removed: {error.strerror}"
        ) from error


def _drawn_files(folder: Path) -> list[Path]:
    """What ``write_drawn`` has put into ``folder``, in the order of the samples' numbers. Raises OSError."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in found if _DRAWN.fullmatch(file.name) and not file.is_dir())
