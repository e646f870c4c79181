"""Fail if the subject of a commit since `BASE` is not `area: imperative summary`.

A subject has at most 72 characters. The area is one folder of `src/zerostart` at any depth, one of its
modules, or one of `OTHER_AREAS`. Older commits stay as they are.
A shallow clone without `BASE` has newer commits only, so all of them are checked.
"""

import re
import subprocess
import sys
from pathlib import Path

BASE = "f1acc30592c4626f3499ae85d3646c8925650f65"
MAX_CHARACTERS = 72
OTHER_AREAS = frozenset({"docs", "tests", "bench", "ci"})
ROOT = Path(__file__).parents[1]
SUBJECT = re.compile(r"(?P<area>[a-z][a-z0-9_]*): (?P<first>\S+)(?: \S+)*")
#: First words that are no imperative.
NO_VERBS = frozenset(
    ("a", "an", "the", "no", "not", "of", "what", "whether", "who", "those", "two", "now", "all")
)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def find_fault(subject: str, areas: frozenset[str]) -> str | None:
    """Return the first rule that a subject breaks."""
    match = SUBJECT.fullmatch(subject)
    if match is None:
        return "is not `area: imperative summary`"
    if len(subject) > MAX_CHARACTERS:
        return f"has {len(subject)} characters, at most {MAX_CHARACTERS}"
    if match["area"] not in areas:
        return (
            f"has the unknown area {match['area']!r}: use a folder of src/zerostart, docs, tests, bench or ci"
        )
    if match["first"].lower() in NO_VERBS or subject.endswith("."):
        return "is no imperative summary"
    return None


def list_areas(commit: str) -> frozenset[str]:
    """List the areas of a commit: a later commit may rename a folder."""
    tree = f"{commit}:src/zerostart"
    paths = git("ls-tree", "-r", "-d", "--name-only", tree).stdout.split()
    paths += git("ls-tree", "--name-only", tree).stdout.split()
    return OTHER_AREAS | {Path(path).stem for path in paths}


def main() -> None:
    has_base = git("cat-file", "-e", f"{BASE}^{{commit}}").returncode == 0
    if not has_base and git("rev-parse", "--is-shallow-repository").stdout.strip() != "true":
        print(f"the subjects of commits are not checked: this history has no commit {BASE[:8]}")
        return
    log = git("log", "--no-merges", "--format=%H %s", f"{BASE}..HEAD" if has_base else "HEAD")
    commits = [line.partition(" ") for line in log.stdout.splitlines()]
    faults = [
        f"{commit[:8]} {subject!r} {fault}"
        for commit, _, subject in commits
        if (fault := find_fault(subject, list_areas(commit)))
    ]
    print(f"{len(commits)} subjects of commits, {len(faults)} with a fault")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
