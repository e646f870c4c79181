"""What the documents say of accelerators says on what it has run: no machine of the tests has one."""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
#: Pages made from declarations and lists of others, which promise nothing of a device.
GENERATED = {"docs/upstream.md", "docs/conformance.md", "docs/serving-models.md"}
DEVICES = re.compile(
    r"\b(CUDA|NCCL|HCCL|XCCL|GPUs?|NPUs?|XPUs?|MPS|PCIe|page-locked|pinned|accelerators?"
    r"|device memory|streams?)\b"
    r"|加速器|显存|锁页|流上"
)
#: Where there is none, or it is a word of something else.
ABSENT = re.compile(
    r"([Nn]o|[Nn]one|[Ww]ithout( an)?|there is no|wants? an|ask for|asks? for( \w+)*? of an) accelerators?\b"
    r"|rank 0's stream|whole stream|its stream|the CUDA build|torch with CUDA|带 CUDA 的 torch"
    r"|没有加速器|不需要加速器|无需加速器"
)
#: What says it: by itself, or by the table of docs/configuring.md.
SAID = re.compile(
    r"\| run on \||[Rr]un on the (CPU|pretend)|pretend (accelerator|one)|not( \w+)? (run|tested|measured)"
    r"|on one (NVIDIA )?H200|has run on several real|no run on|#accelerators"
    r"|模拟加速器|尚未在真实"
)


def claims(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and tables that speak of a device, by their lines; a table goes with what is before it."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    before = ""
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        plain = ABSENT.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph))
        whole = f"{before}\n{paragraph}" if paragraph.lstrip().startswith(("|", "-")) else paragraph
        if DEVICES.search(plain) and not paragraph.startswith("#") and not SAID.search(whole):
            yield line, " ".join(paragraph.split())
        line += paragraph.count("\n")
        before = paragraph if paragraph.strip() else before


def pages() -> Iterator[Path]:
    yield REPOSITORY / "README.md"
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        if str(page.relative_to(REPOSITORY)) not in GENERATED:
            yield page


def test_what_is_said_of_accelerators_says_where_it_ran() -> None:
    found = [
        f"{page.relative_to(REPOSITORY)}:{line}: {text[:200]}"
        for page in pages()
        for line, text in claims(page.read_text("utf-8"))
    ]
    assert found == []


def test_a_claim_is_found() -> None:
    text = "Copies go on streams.\n\nIt needs no accelerator.\n\n| a | b |\n|---|---|\n| NCCL | yes |\n"
    assert [line for line, _ in claims(text)] == [1, 5]
    assert not [
        *claims(text.replace("streams", "streams of the pretend accelerator").replace("yes", "not run"))
    ]
