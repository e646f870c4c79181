"""Check every declared use against the installed libraries."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.upstream import table
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.deepspeed.zero3_partitions import import_deepspeed
from zerostart.upstream.guard import Use, declared_uses, demand, find_misfits
from zerostart.upstream.versions import DIFFSYNTH, LIBRARIES, SGLANG, TORCH, TRL, VLLM

ROOT = Path(__file__).parents[2]
#: Not in the extra ``dev``; tests/diffusion and tests/serving check them if they are installed.
OPTIONAL = (DIFFSYNTH, VLLM, TRL, SGLANG)


def test_the_installed_libraries_have_the_declared_names() -> None:
    import_deepspeed()
    uses = [use for use in declared_uses() if use.library not in OPTIONAL]
    assert len(uses) > 50
    assert [text for use in uses if (text := use.find_misfit())] == []
    assert all(use.why and use.names for use in uses)


def pins(path: Path) -> dict[str, str]:
    lines = (line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name: version for name, version in lines if not name.startswith("#")}


def test_each_known_torch_has_its_constraints() -> None:
    """Check that pinned versions are known, and those of the torch in use."""
    minors = [f"{TORCH.first[0]}.{minor}" for minor in range(TORCH.first[1], TORCH.before[1])]
    files = {path.stem.removeprefix("torch-"): pins(path) for path in ROOT.glob("constraints/torch-*.txt")}
    assert sorted(files) == minors
    ours = pins(ROOT / "constraints.txt")
    for minor, pinned in files.items():
        assert pinned["torch"].startswith(f"{minor}.")
        for library in LIBRARIES:
            assert library in OPTIONAL or library.knows(pinned[library.name]), (minor, library)
    used = files[ours["torch"].rpartition(".")[0]]
    assert {name: used[name] for name in ours if name in used} == {n: v for n, v in ours.items() if n in used}


def test_the_documentation_is_up_to_date() -> None:
    assert table.PATH.read_text(encoding="utf-8") == table.text(), "run python -m tests.upstream.table"


class Sample:
    """A class to check names, parameters and source on."""

    attribute = 1

    def __init__(self) -> None:
        self.nested = SimpleNamespace()

    def call(self, first: int, second: int = 2, *, third: int = 3) -> int:
        return  first + second  # fmt: skip


@pytest.mark.parametrize(
    ("names", "source", "message"),
    [
        ("attribute, call(first), .nested", (), ""),
        ("call(first, second, *, third)", (), ""),
        ("nested", (), "Sample misses nested"),
        (".other", (), "Sample misses other"),
        ("call(second)", (), "it takes (first, second, third), not (second, ...)"),
        ("call(*, fourth)", (), "it takes no fourth"),
        ("attribute", ("call: return first + second",), ""),
        ("attribute", ("call: return second",), "`return second` is missing"),
        ("torch.nn:Linear.forward(input), torch.nn:Linear(in_features)", (), ""),
        ("torch.nn:Linear.forward(output)", (), "it takes (input), not (output, ...)"),
    ],
)
def test_misfits(names: str, source: tuple[str, ...], message: str) -> None:
    misfit_text = Use(f"{__name__}:Sample", names, "a test", source).find_misfit()
    assert misfit_text.endswith(message)
    assert bool(misfit_text) == bool(message)


def test_a_misfit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting, misfitting = Use("torch:nn", "Linear", "a test"), Use("torch:nn", "Cubic", "a test")
    with pytest.raises(
        UnsupportedVersionError, match=r"misses Cubic \(a test\)\. This is torch 2\..*pip install .*\. Try it"
    ):
        demand((misfitting,), "Try it")
    monkeypatch.setattr(torch, "__version__", "2.20.0")
    assert find_misfits((fitting,)) == ""
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert find_misfits((fitting,)).startswith(
        "torch 2.10.1 is installed. This is torch 2.10.1; install a known"
    )
    # A build without a number is judged by its names.
    monkeypatch.setattr(torch, "__version__", "main-a1b2")
    assert find_misfits((fitting,)) == ""
