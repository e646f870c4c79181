"""Files that documents and docstrings name are there."""

import re
from collections.abc import Iterator
from pathlib import Path

import zerostart

ROOT = Path(zerostart.__file__).parent
REPOSITORY = Path(__file__).parents[2]
#: Where a path that is written down may begin.
BASES = (REPOSITORY, REPOSITORY / "docs", REPOSITORY / "tests", ROOT.parent, ROOT)
#: Folders of libraries whose files are named too; which files they have differs between versions.
THEIRS = (
    *("transformers", "runtime", "module_inject", "utils"),
    *("model_parallelism", "sequence_parallelism", "ulysses_alst"),  # of DeepSpeed's tests
)
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?<![\w./<{*-])[A-Za-z_][\w-]*(?:/[\w.-]+)*\.(?:py|md|yaml)(?![\w/])")
_LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")


def texts() -> Iterator[tuple[Path, str]]:
    for folder, pattern in ((REPOSITORY, "*.md"), (REPOSITORY / "docs", "**/*.md"), (ROOT, "**/*.py")):
        for path in sorted(folder.glob(pattern)):
            yield path, path.read_text()


def is_there(name: str, beside: Path) -> bool:
    return any((base / name).exists() for base in (beside.parent, *BASES))


def test_files_that_are_named_are_there() -> None:
    """With their folder; a name alone may be one of anybody's."""
    found = []
    for path, text in texts():
        if path.name == "CHANGELOG.md":
            continue  # tells of the past
        for number, line in enumerate(text.splitlines(), 1):
            named = {name for quoted in _QUOTED.findall(line) for name in _PATH.findall(quoted)}
            if path.suffix == ".md":
                named |= {f"./{name}" for name in _LINK.findall(line)}
            found += [
                f"{path.relative_to(REPOSITORY)}:{number}: {name}"
                for name in sorted(named)
                if "/" in name and name.partition("/")[0] not in THEIRS and not is_there(name, path)
            ]
    assert found == []


def test_links_of_what_is_not_on_the_site_lead_somewhere() -> None:
    """Files and headings; the site checks its own links."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / ".github").glob("*.md")]
    pages += [page for folder in ("benchmarks", "examples") for page in (REPOSITORY / folder).rglob("*.md")]
    lost = []
    for page in pages:
        for link in re.findall(r"(?<!`)\]\(([^)\s]+)\)", page.read_text("utf-8")):
            path, _, anchor = link.partition("#")
            if "://" in path:
                continue
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                lost.append(f"{page.relative_to(REPOSITORY)}: {link}")
    assert lost == []


def headings(page: Path) -> set[str]:
    """Anchors of a page in Markdown, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    found = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", text, re.M))
    return {line.strip().replace(" ", "-") for line in found}
