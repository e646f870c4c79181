"""The section ``media`` of a configuration: data sets of pictures and videos, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from zerostart.training.config.sections import ConfigSection, Count, Positive

Kind = Literal["image", "images", "video"]
SizeSource = Literal["item", "own"]


class ColumnConfig(ConfigSection):
    """A column of the table whose cells name files."""

    column: str | None = None
    """Name in the table; null: that in the items."""
    kind: Kind | None = None
    """Content of a cell: image, images (a list), video; null: as `KNOWN_COLUMNS` says."""
    size: SizeSource | None = None
    """Target size: item (that of the item's video or image), own; null: as `KNOWN_COLUMNS` says."""


@dataclass(frozen=True)
class Column:
    """A column of files: ``column`` in the table, ``name`` in the items.

    ``own_size``: each of its pictures has its own size, independent of the item's.
    """

    name: str
    column: str
    kind: Kind
    own_size: bool


#: Names of media in an item, with their kinds and sizes.
KNOWN_COLUMNS: dict[str, tuple[Kind, SizeSource]] = {
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


#: Columns of texts and of files in tables of other tools.
TEXT_COLUMNS = ("caption", "text")
FILE_COLUMN = "file_name"


class DatasetConfig(ConfigSection):
    """One of several data sets; its keys override those of the section ``media``."""

    path_keys: ClassVar[frozenset[str]] = frozenset({"source", "base"})

    source: str
    """A table (.csv, .json, .jsonl), a directory of pictures and texts or with a metadata table, or hf:NAME.

    A directory that Hugging Face ``datasets`` saved is read too.
    """
    base: str | None = None
    """Directory that file names are relative to; null: that of the table."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt: str | None = "prompt"
    """Column of texts (without ``prompt`` in the table also ``caption`` or ``text``); null: no texts."""
    caption_prefix: str = ""
    """Prefix of each text, such as a trigger word with its comma."""
    columns: dict[str, str | ColumnConfig] = Field(default_factory=dict)
    """Columns of files by their names in the items; empty: those of `KNOWN_COLUMNS`, or file_name."""
    items: Count = 0
    """Number of rows to use; 0: all."""
    height: Positive | None = None
    """Height in pixels; null: by max_pixels and buckets."""
    width: Positive | None = None
    """Width in pixels."""
    max_pixels: Positive = 1024 * 1024
    """Maximum number of pixels of a size that is chosen for each picture."""
    multiple_of: Positive = 16
    """All sizes are multiples of this number of pixels."""
    buckets: Literal["own", "standard"] | Annotated[list[tuple[Positive, Positive]], Field(min_length=1)] = (
        "own"
    )
    """own (at most max_pixels), standard (max_pixels, 1:2 to 2:1), or a list of sizes [height, width]."""
    num_frames: Positive = 81
    """Maximum number of frames; a shorter video gives the largest number that time_division_factor allows."""
    time_division_factor: Positive = 4
    """Number of frames modulo this is time_division_remainder."""
    time_division_remainder: Count = 1
    """See time_division_factor."""
    frame_rate: Annotated[float, Field(gt=0.0)] | None = None
    """Frames a second, picked by their times; null: consecutive frames."""
    frames: Literal["first", "even"] = "first"
    """first: the first frames; even: evenly spaced frames from the first to the last."""
    background: tuple[Count, Count, Count] = (255, 255, 255)
    """Red, green and blue (0 to 255) under transparent parts."""
    repeats: Positive = 1
    """Passes over the rows in an epoch."""

    @model_validator(mode="after")
    def _check_sizes(self) -> DatasetConfig:
        if (self.height is None) != (self.width is None):
            raise ValueError("height and width belong together: give both, or only max_pixels")
        if self.height is not None and self.buckets != "own":
            raise ValueError("buckets has no meaning together with height and width; leave one out")
        sizes = [] if isinstance(self.buckets, str) else self.buckets
        for size in [(self.height, self.width)] if self.height and self.width else sizes:
            if any(side % self.multiple_of for side in size if side):
                raise ValueError(
                    f"a size of {size[0]} x {size[1]} does not consist of multiples of multiple_of "
                    f"{self.multiple_of}, which the model's patches need"
                )
        if max(self.background) > 255:
            raise ValueError(f"background {list(self.background)} has a number above 255")
        return self

    @model_validator(mode="after")
    def _check_frames(self) -> DatasetConfig:
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
    def _check_columns(self) -> DatasetConfig:
        for name, value in self.columns.items():
            if name in ("prompt", ""):
                raise ValueError(f"columns: {name!r} does not name files; prompt names the column of texts")
            if name not in KNOWN_COLUMNS and (isinstance(value, str) or value.kind is None):
                known_names = ", ".join(KNOWN_COLUMNS)
                raise ValueError(
                    f"columns.{name} is none of {known_names}; say what it holds: "
                    f"{name}: {{column: ..., kind: image}} (or images, or video)"
                )
        return self


class MediaConfig(DatasetConfig):
    """Pictures and videos to train on.

    A picture is scaled until it covers its target, and cropped around its centre. The target is ``height``
    by ``width``, or the one of ``buckets`` whose shape is nearest.
    """

    source: str = Field("", description=DatasetConfig.model_fields["source"].description)
    datasets: list[DatasetConfig] = Field(default_factory=list)
    """Several data sets instead of ``source``; a key that a data set leaves out has this section's value."""
    workers: Count = 0
    """Decoding processes of each rank; 0: the rank decodes itself."""

    @model_validator(mode="before")
    @classmethod
    def _apply_to_datasets(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("datasets"), list):
            return values
        common = {key: value for key, value in values.items() if key in DatasetConfig.model_fields}
        common.pop("source", None)
        sections = [{**common, **one} if isinstance(one, dict) else one for one in values["datasets"]]
        return {**values, "datasets": sections}

    @model_validator(mode="after")
    def _check_source(self) -> MediaConfig:
        if bool(self.source) == bool(self.datasets):
            problem = "both are given" if self.source else "neither is given"
            raise ValueError(f"source or datasets say where the data are, and {problem}: give one of them")
        return self

    @property
    def sets(self) -> tuple[DatasetConfig, ...]:
        """The data sets; the section itself if it has a source."""
        return tuple(self.datasets) or (self,)

    def comparable(self, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the values without the paths of the data sets."""
        return {**super().comparable(without), "datasets": [one.comparable() for one in self.datasets]}
