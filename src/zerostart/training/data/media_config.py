"""The section ``media`` of a training configuration: which pictures and videos, and in what size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from zerostart.training.config.sections import Count, Positive, Section

Kind = Literal["image", "images", "video"]
Fitted = Literal["item", "own"]


class ColumnConfig(Section):
    """A column of the table whose cells name files."""

    column: str | None = None
    """Its name in the table; null: that in the items."""
    kind: Kind | None = None
    """What a cell names: image, images (a list of any number), video; null: as `KNOWN_COLUMNS` says."""
    size: Fitted | None = None
    """The size it is cropped to: item (of the item's video or image), own; null: as `KNOWN_COLUMNS` says."""


@dataclass(frozen=True)
class Column:
    """A column of files: ``column`` in the table, ``name`` in the items.

    ``own_size``: each of its pictures has a size for itself.
    """

    name: str
    column: str
    kind: Kind
    own_size: bool


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


#: Columns of texts and of files that other tools' tables have, where the table has none of ours.
TEXT_COLUMNS = ("caption", "text")
FILE_COLUMN = "file_name"


class DatasetConfig(Section):
    """One of several data sets, with what it has otherwise than the section ``media`` says for all."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"source", "base"})

    source: str
    """A table (.csv, .json, .jsonl), or a directory of pictures and texts.

    Also a directory with a ``metadata`` table in it, one that Hugging Face ``datasets`` saved, or ``hf:NAME``
    for a dataset that it loads.
    """
    base: str | None = None
    """What names of files are relative to; null: the table's directory."""
    split: str = "train"
    """The part of a dataset of Hugging Face that is taken."""
    prompt: str | None = "prompt"
    """The column of texts; null: there are none.

    Where a table has no column ``prompt``, ``caption`` or ``text`` is it.
    """
    caption_prefix: str = ""
    """Put before each text, as it is: a word that stands for what is learnt, with its comma."""
    columns: dict[str, str | ColumnConfig] = Field(default_factory=dict)
    """Which columns name files, by their names in the items; without it those of `KNOWN_COLUMNS` do.

    A table that has none of these may have ``file_name``, of pictures or of videos.
    """
    items: Count = 0
    """How many rows are taken; 0: all."""
    height: Positive | None = None
    """Pixels; null: by max_pixels and buckets."""
    width: Positive | None = None
    """Pixels."""
    max_pixels: Positive = 1024 * 1024
    """Most pixels of a size that is chosen for each picture."""
    multiple_of: Positive = 16
    """All sizes are multiples of this number of pixels."""
    buckets: Literal["own", "standard"] | list[tuple[Positive, Positive]] = "own"
    """own, standard, or a list of sizes [height, width].

    ``standard`` are sizes of about ``max_pixels`` from 1:2 to 2:1; ``own`` is each picture's own size, scaled
    down to ``max_pixels`` where it has more.
    """
    num_frames: Positive = 81
    """Most frames of a video. A shorter one gives the largest number that time_division_factor allows."""
    time_division_factor: Positive = 4
    """The number of frames, divided by this, leaves time_division_remainder."""
    time_division_remainder: Count = 1
    """See time_division_factor."""
    frame_rate: Annotated[float, Field(gt=0.0)] | None = None
    """Frames a second, picked by their times; null: frames are taken as they follow."""
    frames: Literal["first", "even"] = "first"
    """The first frames of a video, or some in even distances from its first to its last."""
    background: tuple[Count, Count, Count] = (255, 255, 255)
    """Red, green and blue (0 to 255) of transparent parts."""
    repeats: Positive = 1
    """How often an epoch goes over the rows."""

    @model_validator(mode="after")
    def _sizes(self) -> DatasetConfig:
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
                    f"a size of {size[0]} x {size[1]} does not consist of multiples of multiple_of "
                    f"{self.multiple_of}, which the model's patches need"
                )
        if max(self.background) > 255:
            raise ValueError(f"background {list(self.background)} is not made of numbers from 0 to 255")
        return self

    @model_validator(mode="after")
    def _times(self) -> DatasetConfig:
        factor, remainder = self.time_division_factor, self.time_division_remainder
        if remainder >= factor:
            raise ValueError(f"time_division_remainder {remainder} is not less than the factor {factor}")
        if self.num_frames % factor != remainder:
            below = self.num_frames - (self.num_frames - remainder) % factor
            near = " or ".join(str(count) for count in (below, below + factor) if count > 0)
            raise ValueError(
                f"num_frames {self.num_frames} does not leave {remainder} when divided by {factor} "
                f"(time_division_remainder and time_division_factor); {near} does"
            )
        if self.frames == "even" and self.frame_rate is not None:
            raise ValueError(
                "frames even spreads frames over a video without a frame_rate; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _named(self) -> DatasetConfig:
        for name, value in self.columns.items():
            if name in ("prompt", ""):
                raise ValueError(f"columns: {name!r} does not name files; prompt names the column of texts")
            if name not in KNOWN_COLUMNS and (isinstance(value, str) or value.kind is None):
                known = ", ".join(KNOWN_COLUMNS)
                raise ValueError(
                    f"columns.{name} is none of {known}; say what it holds: "
                    f"{name}: {{column: ..., kind: image}} (or images, or video)"
                )
        return self


class MediaConfig(DatasetConfig):
    """Pictures and videos to train on.

    A picture is scaled until it covers its target, and cropped around its centre. The target is ``height``
    by ``width``; without them what is nearest to its own shape among ``buckets``.
    """

    source: str = ""
    """A table (.csv, .json, .jsonl), or a directory of pictures and texts.

    Also a directory with a ``metadata`` table in it, one that Hugging Face ``datasets`` saved, or ``hf:NAME``
    for a dataset that it loads.
    """
    datasets: list[DatasetConfig] = Field(default_factory=list)
    """Several data sets, in the place of ``source``: a list of sections with keys of this one.

    What one leaves out it has from this section. An epoch goes over each as often as its ``repeats`` say, and
    all are shuffled together.
    """
    workers: Count = 0
    """Processes that decode, beside each rank; 0: the rank itself does."""

    @model_validator(mode="before")
    @classmethod
    def _of_all(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("datasets"), list):
            return values
        common = {key: value for key, value in values.items() if key in DatasetConfig.model_fields}
        common.pop("source", None)
        made = [{**common, **one} if isinstance(one, dict) else one for one in values["datasets"]]
        return {**values, "datasets": made}

    @model_validator(mode="after")
    def _one_of_both(self) -> MediaConfig:
        if bool(self.source) == bool(self.datasets):
            told = "both are given" if self.source else "neither is given"
            raise ValueError(f"source or datasets say where the data are, and {told}: give one of them")
        return self

    @property
    def sets(self) -> tuple[DatasetConfig, ...]:
        """The data sets; the section itself where it is one."""
        return tuple(self.datasets) or (self,)

    def comparable(self, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Paths of the data sets are left out, too."""
        return {**super().comparable(without), "datasets": [one.comparable() for one in self.datasets]}
