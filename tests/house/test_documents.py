"""Check that the files named in documents and docstrings exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import zerostart

ROOT = Path(zerostart.__file__).parent
REPOSITORY = Path(__file__).parents[2]
#: Folders that a written path may be relative to.
BASES = (REPOSITORY, REPOSITORY / "docs", REPOSITORY / "tests", ROOT.parent, ROOT)
#: Folders of other libraries; their files differ between versions.
FOREIGN_FOLDERS = (
    *("transformers", "runtime", "module_inject", "utils"),
    *("model_parallelism", "sequence_parallelism", "ulysses_alst"),  # DeepSpeed's tests
)
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?<![\w./<{*-])[A-Za-z_][\w-]*(?:/[\w.-]+)*\.(?:py|md|yaml)(?![\w/])")
_LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")


def texts() -> Iterator[tuple[Path, str]]:
    for folder, pattern in ((REPOSITORY, "*.md"), (REPOSITORY / "docs", "**/*.md"), (ROOT, "**/*.py")):
        for path in sorted(folder.glob(pattern)):
            yield path, path.read_text()


def exists(name: str, page: Path) -> bool:
    return any((base / name).exists() for base in (page.parent, *BASES))


def test_named_files_exist() -> None:
    """Check only names with a folder: others may mean any project's file."""
    missing = []
    for path, text in texts():
        if path.name == "CHANGELOG.md":
            continue  # names deleted files
        for number, line in enumerate(text.splitlines(), 1):
            names = {name for quoted in _QUOTED.findall(line) for name in _PATH.findall(quoted)}
            if path.suffix == ".md":
                names |= {f"./{name}" for name in _LINK.findall(line)}
            missing += [
                f"{path.relative_to(REPOSITORY)}:{number}: {name}"
                for name in sorted(names)
                if "/" in name and name.partition("/")[0] not in FOREIGN_FOLDERS and not exists(name, path)
            ]
    assert missing == []


def test_links_outside_the_site_have_targets() -> None:
    """Check files and headings; the site checks its own links."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / ".github").glob("*.md")]
    pages += [page for folder in ("benchmarks", "examples") for page in (REPOSITORY / folder).rglob("*.md")]
    broken = []
    for page in pages:
        for link in re.findall(r"(?<!`)\]\(([^)\s]+)\)", page.read_text("utf-8")):
            path, _, anchor = link.partition("#")
            if "://" in path:
                continue
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append(f"{page.relative_to(REPOSITORY)}: {link}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a Markdown page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    words = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", text, re.M))
    return {line.strip().replace(" ", "-") for line in words}
