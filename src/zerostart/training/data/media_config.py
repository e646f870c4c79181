"""The section ``media`` of a training configuration: which pictures and videos, and in what size."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from zerostart.training.config.sections import Count, Positive, Section

Kind = Literal["image", "images", "video"]
Fitted = Literal["item", "own"]


class ColumnConfig(Section):
    """A column of the table whose cells name files.

    ``column`` is its name there; None: that in the items. ``kind`` ``images`` is a list of any number,
    ``image`` exactly one. ``size`` ``item`` crops to the size of the item's ``video`` or ``image``, ``own``
    to a size that is chosen for each picture by itself. A kind or size of None is that of `KNOWN_COLUMNS`.
    """

    column: str | None = None
    kind: Kind | None = None
    size: Fitted | None = None


#: What the tasks know: in an item by these names, with their kinds and sizes.
KNOWN_COLUMNS: dict[str, tuple[Kind, Fitted]] = {
    "video": ("video", "item"),
    "image": ("image", "item"),
    "first_frame": ("image", "item"),
    "last_frame": ("image", "item"),
    "control_image": ("image", "item"),
    "control_video": ("video", "item"),
    "control_mask": ("video", "item"),
    "reference_image": ("images", "own"),
    "edit_image": ("images", "own"),
}


class MediaConfig(Section):
    """Pictures and videos to train on.

    ``source`` is a table (``.csv``, ``.json``, ``.jsonl``), a directory with a ``metadata`` table in it or
    with files and texts side by side, a directory that Hugging Face ``datasets`` saved, or ``hf:NAME`` for
    a dataset that it loads, of which ``split`` is taken. Names of files are relative to ``base``, by
    default the table's own directory. ``prompt`` is the column of texts; None: there are none. ``columns``
    says which columns name files, by their names in the items; without it those of `KNOWN_COLUMNS` do.
    ``items`` limits how many rows are taken (0: all).

    A picture is scaled until it covers its target, and cropped around its centre. The target is ``height``
    by ``width``; without them what is nearest to its own shape among ``buckets``, sizes [height, width].
    ``standard`` are sizes of about ``max_pixels`` from 1:2 to 2:1; ``own`` is each picture's own size,
    scaled down to ``max_pixels`` where it has more. All sizes are multiples of ``multiple_of``.

    A video gives ``num_frames`` frames, or where it is shorter the largest number that leaves
    ``time_division_remainder`` when divided by ``time_division_factor``: its ``first`` ones, or some in
    ``even`` distances from its first to its last. ``frame_rate`` (a second) has them picked by their times;
    None takes them as they follow.

    Transparent parts become ``background`` (red, green, blue of 0 to 255). An epoch goes over the rows
    ``repeats`` times. ``workers`` processes decode beside each rank (0: the rank itself does). A file that a
    cache has seen is what it was where its length and time are; with ``check`` ``contents`` it is read
    nevertheless.
    """

    places: ClassVar[frozenset[str]] = frozenset({"source", "base"})

    source: str
    base: str | None = None
    split: str = "train"
    prompt: str | None = "prompt"
    columns: dict[str, str | ColumnConfig] = Field(default_factory=dict)
    items: Count = 0
    height: Positive | None = None
    width: Positive | None = None
    max_pixels: Positive = 1024 * 1024
    multiple_of: Positive = 16
    buckets: Literal["own", "standard"] | list[tuple[Positive, Positive]] = "own"
    num_frames: Positive = 81
    time_division_factor: Positive = 4
    time_division_remainder: Count = 1
    frame_rate: Annotated[float, Field(gt=0.0)] | None = None
    frames: Literal["first", "even"] = "first"
    background: tuple[Count, Count, Count] = (255, 255, 255)
    repeats: Positive = 1
    workers: Count = 0
    check: Literal["times", "contents"] = "times"

    @model_validator(mode="after")
    def _sizes(self) -> MediaConfig:
        if (self.height is None) != (self.width is None):
            raise ValueError("height and width go together: give both, or none and max_pixels")
        if self.height is not None and self.buckets != "own":
            raise ValueError("buckets has no meaning beside height and width; leave one out")
        if self.buckets == []:
            raise ValueError("buckets is empty; list sizes [height, width], or write own or standard")
        sizes = [] if isinstance(self.buckets, str) else self.buckets
        for size in [(self.height, self.width)] if self.height and self.width else sizes:
            if any(side % self.multiple_of for side in size if side):
                raise ValueError(
                    f"a size of {size[0]} x {size[1]} is not made of multiples of multiple_of "
                    f"{self.multiple_of}, which the model's patches ask for"
                )
        if max(self.background) > 255:
            raise ValueError(f"background {list(self.background)} is not made of numbers from 0 to 255")
        return self

    @model_validator(mode="after")
    def _times(self) -> MediaConfig:
        factor, remainder = self.time_division_factor, self.time_division_remainder
        if remainder >= factor:
            raise ValueError(f"time_division_remainder {remainder} is not below the factor {factor}")
        if self.num_frames % factor != remainder:
            below = self.num_frames - (self.num_frames - remainder) % factor
            near = " or ".join(str(count) for count in (below, below + factor) if count > 0)
            raise ValueError(
                f"num_frames {self.num_frames} does not leave {remainder} when divided by {factor} "
                f"(time_division_remainder and time_division_factor); {near} does"
            )
        if self.frames == "even" and self.frame_rate is not None:
            raise ValueError("frames even spreads frames over a video, at no frame_rate; leave one out")
        return self

    @model_validator(mode="after")
    def _named(self) -> MediaConfig:
        for name, value in self.columns.items():
            if name in ("prompt", ""):
                raise ValueError(f"columns: {name!r} names no files; prompt names the column of texts")
            if name not in KNOWN_COLUMNS and (isinstance(value, str) or value.kind is None):
                known = ", ".join(KNOWN_COLUMNS)
                raise ValueError(
                    f"columns.{name} is none of {known}; say what it holds: "
                    f"{name}: {{column: ..., kind: image}} (or images, or video)"
                )
        return self
