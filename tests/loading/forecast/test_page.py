"""The page of a forecast, read back by a parser: its figures are those of the JSON, and text stays text."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.filesize import decimal
from safetensors.torch import save_file
from typer.testing import CliRunner

import zerostart
from tests.tiny import TinyCheckpoints
from zerostart.cli.plan import _write
from zerostart.errors import WriteError
from zerostart.loading.forecast.page import page_of

HOSTILE = "a</script><img src=x onerror=alert(1)>\"' &amp;.safetensors"


class Parsed(HTMLParser):
    """Tables by id or class, rows of cells (text, exact number); scripts by id; all elements and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[list[Any]]]] = {}
        self.scripts: dict[str, str] = {}
        self.text: list[str] = []
        self._rows: list[list[list[Any]]] = []
        self._script: str | None = None
        self._cell: list[Any] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag == "table":
            self._rows = self.tables.setdefault(found.get("id") or found.get("class") or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = ["", None]
            self._rows[-1].append(self._cell)
        elif tag == "data" and self._cell is not None:
            self._cell[1] = float(found["value"] or "nan")
        elif tag == "script":
            self._script = found.get("id") or "code"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = None
        elif tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif self._cell is not None:
            self._cell[0] += data
        else:
            self.text.append(data)

    def figures(self, table: str) -> list[list[Any]]:
        """Rows without the headings: exact numbers, and texts where there are none."""
        return [[text if value is None else value for text, value in row] for row in self.tables[table][1:]]


def test_figures_are_those_of_the_json(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    import typer

    from zerostart.cli.plan import command as plan

    application = typer.Typer()
    application.command()(plan)
    source, file = checkpoints("qwen3_moe", torch.bfloat16, sharded=True), tmp_path / "plan.html"
    given = ["--world-size", "4", "--zero-stage", "2", "--device-memory", "1MB", "--host-memory", "1GB"]
    done = CliRunner().invoke(application, [str(source), *given, "--html", str(file), "--json"])
    assert done.exit_code == 0, done.output
    told, page = json.loads(done.output), Parsed(file.read_text(encoding="utf-8"))
    assert [row[:3] for row in page.figures("ranks")] == [
        [rank["rank"], rank["read_bytes"], rank["read_ops"]] for rank in told["ranks"]
    ]
    assert [row[5:] for row in page.figures("ranks")] == [
        [rank["device_bytes"], rank["peak_host_bytes"], rank["peak_device_bytes"]] for rank in told["ranks"]
    ]
    assert [row[1:] for row in page.figures("files")] == [
        [f["nbytes"], f["read_bytes"], f["read_ops"], f["ranks"]] for f in told["files"]
    ]
    assert len(told["files"]) > 1
    assert told["alternatives"]
    assert page.figures("alternatives") == [
        [other["change"], *(fit["needed"] for fit in other["fits"]), "✓" if other["fit"] else "✗"]
        for other in told["alternatives"]
    ]
    rows = page.figures("components")
    phases = ("load", "initialize", "step")
    for kind in told["memory"]:
        for where in ("device", "host"):
            names = {name for phase in phases for name in kind[phase][where]}
            for name in names:
                assert [name, *(kind[phase][where].get(name, 0) for phase in phases)] in rows
    reads = json.loads(page.scripts["reads"])
    assert np.reshape(reads["bytes"], (4, -1)).sum(1).tolist() == [r["read_bytes"] for r in told["ranks"]]
    assert np.reshape(reads["bytes"], (4, -1)).sum(0).tolist() == [f["read_bytes"] for f in told["files"]]
    assert np.reshape(reads["reads"], (4, -1)).sum(1).tolist() == [r["read_ops"] for r in told["ranks"]]
    picture = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", file.read_text(), re.DOTALL)[0])
    cells = [re.findall(r"M(\d+) (\d+)h(\d+)", one.get("d", "")) for one in picture]
    assert sum(int(many) for runs in cells for *_, many in runs) == np.count_nonzero(reads["bytes"])
    lengths = [f["nbytes"] for f in told["files"]]
    assert all(end <= length for end, length in zip(reads["end"], lengths * 4, strict=True))


def test_json_is_all_that_the_command_prints(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Also where it tries settings of which DeepSpeed warns, on the standard output; and what they change."""
    page = tmp_path / "page.html"
    words = [
        checkpoints("qwen3_moe"),
        "--world-size",
        "8",
        "--engine",
        "deepspeed",
        "--device-memory",
        "100KB",
    ]
    command = [sys.executable, "-m", "zerostart", "plan", *map(str, words), "--json", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout)
    alternatives = {one["change"]: one["fits"][0]["needed"] for one in told["alternatives"]}
    assert "AutoTP" not in done.stderr, "of a setting that nobody has asked for"
    needed = told["fits"][0]["needed"]
    assert alternatives["expert_parallel=2"] < needed, "less is gathered"
    assert "ranks that share experts or tensors hold as much as before" in page.read_text()


def test_what_is_exchanged(checkpoints: TinyCheckpoints) -> None:
    made = zerostart.plan(
        checkpoints("qwen3"), 3, engine="fsdp2", engine_config={"replicate": 3}, exchange=True
    )
    page = Parsed(page_of(made, "source"))
    assert [row[1] for row in page.figures("exchanged")] == list(made.exchanged_bytes)
    sent = np.reshape(json.loads(page.scripts["messages"])["bytes"], (3, 3))
    assert sent.sum(0).tolist() == list(made.exchanged_bytes)
    assert sum(made.exchanged_bytes) > 0
    assert sum(file.read_bytes for file in made.files) == sum(rank.read_bytes for rank in made.ranks)


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    """Of files and of tensors; and the page has neither a script but its own nor anything to fetch."""
    path = tmp_path / HOSTILE.replace("/", "")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2), HOSTILE: torch.ones(1)}, path)
    made = zerostart.plan(path, 2, model=lambda: torch.nn.Linear(2, 2))
    text = page_of(made, str(path))
    page = Parsed(text)
    assert not any(tag == "img" or key.startswith("on") for tag, found in page.elements for key in found)
    assert HOSTILE in "".join(page.text)
    assert page.figures("files")[0][0] == path.name
    assert not re.search(r"(?:https?:)?//[\w.]+|@import|url\(", text.replace(str(path), ""))
    assert not any(key in ("src", "href") for _, found in page.elements for key in found)
    policy = next(str(found["content"]) for _, found in page.elements if "http-equiv" in found)
    digest = base64.b64encode(hashlib.sha256(page.scripts["code"].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(("ranks", "files"), [(512, 1000), (2048, 163)])
def test_the_size_of_a_page_is_bounded(checkpoints: TinyCheckpoints, ranks: int, files: int) -> None:
    """A job of every size is some MB, and sums stay exact however much of a map is summed up."""
    made = zerostart.plan(checkpoints("qwen3"), 2)
    number = np.arange(files, dtype=np.int64)
    wide = np.stack([number, number, number + 5 * 10**9, number + 10**9, number], axis=1)
    every = tuple(replace(made.ranks[0], rank=rank, extents=wide) for rank in range(ranks))
    stored = tuple((f"/a/folder/model-{n:05}-of-{files:05}.safetensors", 5 * 10**9) for n in range(files))
    text = page_of(replace(made, world_size=ranks, ranks=every, stored=stored), "source")
    assert len(text.encode()) < 4_000_000
    page = Parsed(text)
    assert sum(json.loads(page.scripts["reads"])["bytes"]) == ranks * int(wide[:, 3].sum())
    assert page.tables["files"][1][2] == [decimal(ranks * 10**9), ranks * 10**9]


def test_a_link_stays_one_and_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """``--html /dev/stdout`` is no wish for another file of that name."""
    (tmp_path / "seen").touch()
    (tmp_path / "link").symlink_to("seen")
    _write(tmp_path / "link", "a page")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "seen").read_text() == "a page"
    with pytest.raises(WriteError, match="the page cannot be written: Not a directory"):
        _write(tmp_path / "seen" / "page.html", "a page")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "seen"]
