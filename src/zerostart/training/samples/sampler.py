"""Draw samples between two steps, each rank its share, without changing the training."""

from __future__ import annotations

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
from zerostart.training.samples.pipeline import Prompt, SamplePipeline

if TYPE_CHECKING:
    from zerostart.training.config.configuration import ModelConfig, SamplesConfig
    from zerostart.training.loop.failures import Failures
    from zerostart.training.loop.session import Session
    from zerostart.training.loop.task import Task

#: Folder of samples in the output directory, with a folder for each step.
FOLDER = "samples"
#: Names of sample files: the number and words of the prompt.
_SAMPLE_NAME = re.compile(r"\d+(-.*)?\.(png|mp4)")


def open_sample_pipeline(settings: SamplesConfig | None, model: ModelConfig) -> SamplePipeline | None:
    """Return the pipeline, without weights, that draws the samples of a run, if any.

    Raises ConfigError if the samples cannot be drawn or written.
    """
    if settings is None:
        return None
    drawing = SamplePipeline(model.source, model.component or "transformer", settings)
    try:
        import PIL.Image  # noqa: F401

        if drawing.videos:
            import av  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"samples are written with Pillow and PyAV, but one cannot be imported ({error}); "
            "install them: pip install zerostart[media]"
        ) from error
    return drawing


def open_sampler(
    drawing: SamplePipeline | None, task: Task, dtype: torch.dtype, last_step: int, directory: Path
) -> Sampler | None:
    """Return the sampler of the run in ``directory``; None if there is no ``drawing``.

    Raises ConfigError for a text that was not encoded with the data of ``task``.
    """
    if drawing is None:
        return None
    texts = dict.fromkeys([*drawing.texts, *drawing.negatives])
    return Sampler(drawing, {text: task.embedded(text) for text in texts}, dtype, last_step, directory)


def divide_prompts(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Divide the numbers of ``prompts`` into batches of up to ``size`` and equal shapes."""
    # Tensors of one batch are stacked. The order of first sight makes batches the same on every rank.
    alike: dict[tuple[tuple[str, torch.Size], ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        alike.setdefault(tuple((name, row.shape) for name, row in prompt.items()), []).append(number)
    return [numbers[i : i + size] for numbers in alike.values() for i in range(0, len(numbers), size)]


class Sampler:
    """Draws the samples of a run with its model in training, and writes them."""

    def __init__(
        self,
        drawing: SamplePipeline,
        embedded: dict[str, Prompt],
        dtype: torch.dtype,
        last_step: int,
        directory: Path,
    ) -> None:
        """``embedded`` maps each prompt and negative prompt to its encoded tensors."""
        self._settings = drawing.settings
        self._last_step = last_step
        self._folder = directory / FOLDER
        self._drawing = drawing
        # All prompts once, then all again: a sample keeps its number, and so its seed, when `count` rises.
        self._texts = self._settings.prompts * self._settings.count
        keys, negatives = drawing.texts * self._settings.count, drawing.negatives * self._settings.count
        self._pictures = [text.pictures if isinstance(text, PicturedText) else () for text in keys]
        self._prompts = [embedded[text] for text in keys]
        self._negatives = [embedded[text] for text in negatives]
        self._dtype = dtype

    def due(self, step: int) -> bool:
        """Return True if samples are drawn after ``step`` steps."""
        every = self._settings.every
        return step in (0, self._last_step) or bool(every and step % every == 0)

    def take(self, session: Session, failures: Failures, step: int) -> Path:
        """Draw, write and log the samples of ``step``, and return their folder; collective.

        Raises the error of any rank on all.
        """
        folder = self._folder / f"step-{step:08d}"
        with failures.deferred():
            if session.accelerator.is_main_process:
                delete_samples(folder)
        failures.raise_together()
        with session.averaged(self._settings.with_ema):
            # Not deferred: a forward of shards is collective.
            frames = self._draw(session)
        with failures.deferred():
            self._write(frames, folder)
        failures.raise_together()  # all have written theirs
        with failures.deferred():
            if session.accelerator.is_main_process:
                _log(session.accelerator.trackers, folder, step)
        return folder

    def _draw(self, session: Session) -> dict[int, torch.Tensor]:
        """Draw this rank's share, and return it by number; collective.

        Samples are [F, 3, H, W] from 0 to 1. The batches are the same for any number of ranks. All ranks draw
        equally often, for a sharded forward is collective: if the batches do not divide evenly, the first is
        drawn again and dropped. Modes and random states are restored.
        """
        # A pipeline takes the pictures of one prompt at a time.
        size = 1 if any(self._pictures) else self._settings.batch_size
        batches = divide_prompts(self._prompts, size)
        place, count = session.engine.mesh.batch(session.accelerator.process_index)
        frames: dict[int, torch.Tensor] = {}
        with _inference_mode(session):
            own = session.accelerator.unwrap_model(session.model)
            # The engine gathers shards at each call; the bare model has only this rank's part.
            model = InTraining(session.model, own, session.device, self._dtype)
            pipe = self._drawing.opened(model, self._dtype)
            # Each group of ranks that shares sequences takes every ``count``-th batch.
            for start in range(0, len(batches), count):
                mine = start + place < len(batches)
                numbers = batches[start + place if mine else 0]
                # Seeds by the sample's own number, so that batches and ranks do not change its noise.
                seeds = [self._settings.seed + number for number in numbers]
                prompts = [self._prompts[number] for number in numbers]
                negatives = [self._negatives[number] for number in numbers if self._negatives]
                pictures = self._pictures[numbers[0]]
                samples = self._drawing.draw(pipe, prompts, negatives, seeds, pictures)
                if mine:
                    frames.update(zip(numbers, samples, strict=True))
        del pipe
        gc.collect()  # frees the autoencoder
        return frames

    def _write(self, samples: dict[int, torch.Tensor], folder: Path) -> None:
        width = len(str(len(self._texts) - 1))
        for number, frames in samples.items():
            words = re.sub(r"\W+", "-", self._texts[number])[:40].strip("-")
            write_sample(folder / f"{number:0{width}d}-{words}".rstrip("-"), frames, self._settings.fps)


def _log(trackers: Sequence[Any], folder: Path, step: int) -> None:
    """Hand the written pictures of all ranks to the trackers that take images."""
    from PIL import Image

    takers = [tracker for tracker in trackers if hasattr(tracker, "log_images")]
    files = [file for file in _sample_files(folder) if file.suffix == ".png"]
    if not (takers and files):
        return
    pictures = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    for tracker in takers:
        # TensorBoard needs the order of axes; the others take a list of pictures.
        if tracker.name == "tensorboard":
            tracker.log_images({"samples": pictures}, step=step, dataformats="NHWC")
        else:
            tracker.log_images({"samples": list(pictures)}, step=step)


@contextmanager
def _inference_mode(session: Session) -> Iterator[None]:
    devices = [] if session.device.type == "cpu" else [session.device]
    with torch.random.fork_rng(devices, device_type=session.device.type), torch.no_grad():
        session.model.eval()
        try:
            yield
        finally:
            session.model.train()


class InTraining(nn.Module):
    """The model in training for a pipeline: calls use its engine, attributes the model."""

    def __init__(self, wrapped: nn.Module, own: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """``device`` and ``dtype`` are those of the computation, wherever the shards are."""
        super().__init__()
        # Not as children: the pipeline must find nothing to move or to cast.
        self.__dict__.update(_wrapped=wrapped, _own=own, device=device, dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the engine."""
        return self.__dict__["_wrapped"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Reached for attributes that this object lacks: configuration, dtype of layers, and the like.
        return getattr(self.__dict__["_own"], name)


def write_sample(path: Path, frames: torch.Tensor, fps: int) -> Path:
    """Write ``frames`` to ``path`` with the suffix .png or .mp4, and return that path.

    ``frames`` are [F, 3, H, W] from 0 to 1. Raises WriteError.
    """
    from PIL import Image

    # The autoencoder may overshoot, and a byte would wrap around. Writers take [F, H, W, 3].
    rows = (frames.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
    target = path.with_suffix(".png" if len(rows) == 1 else ".mp4")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if len(rows) == 1:
            Image.fromarray(rows[0].numpy()).save(target)
        else:
            _write_video(target, rows, fps)
    except OSError as error:  # PyAV's errors of files are of this class, too
        target.unlink(missing_ok=True)
        raise WriteError(f"{target}: the sample cannot be written: {error}") from error
    return target


def _write_video(path: Path, rows: torch.Tensor, fps: int) -> None:
    import av

    _, height, width, _ = rows.shape
    # Every build of FFmpeg has mpeg4.
    options: Mapping[str, dict[str, str]] = {"libx264": {"crf": "18"}, "mpeg4": {"b": "8M"}}
    codec = next(name for name in options if name in av.codecs_available or name == "mpeg4")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options[codec])
        # Every player knows yuv420p, which needs even sides.
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        for row in rows:
            frame = av.VideoFrame.from_ndarray(row.numpy(), format="rgb24")
            container.mux(stream.encode(frame.reformat(stream.width, stream.height, "yuv420p")))
        container.mux(stream.encode())  # the frames that the encoder has held back


def delete_samples(folder: Path) -> None:
    """Delete the files of ``write_sample`` in ``folder``, and an empty folder; raises WriteError."""
    try:
        for file in _sample_files(folder):
            file.unlink()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise WriteError(
            f"{folder}: the earlier samples in it cannot be removed: {error.strerror}"
        ) from error


def _sample_files(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if _SAMPLE_NAME.fullmatch(file.name) and not file.is_dir())
