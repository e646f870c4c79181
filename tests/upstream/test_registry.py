"""Fails when upstream moves: everything that is declared is checked against what is installed."""

import ast
import importlib
import inspect
import itertools
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

from tests.upstream import table
from zerostart import upstream
from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import shapes
from zerostart.upstream.deepspeed.zero3.partitions import import_deepspeed
from zerostart.upstream.registry import Lasts, PatchPoint, Touched, Use, demand, misfit, touched
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DIFFSYNTH, LIBRARIES, SGLANG, TORCH, TRL, VLLM, Library

ROOM = Path(upstream.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))
POINTS = [
    pytest.param(point, id=f"{file}-{number}-{'-'.join((*point.names, *point.attributes))[:40]}")
    for file, points in touched().items()
    for number, point in enumerate(points)
]
ROOT = Path(__file__).parents[2]
#: Not in the extra ``dev``; where they are, tests/diffusion and tests/serving look at them.
OPTIONAL = (DIFFSYNTH, VLLM, TRL, SGLANG)


@pytest.mark.parametrize("point", POINTS)
def test_the_installed_library_is_as_declared(point: Touched) -> None:
    if point.library in OPTIONAL:
        pytest.skip("see tests/diffusion and tests/serving")
    import_deepspeed()
    assert point.misfit() == ""
    assert point.why
    assert point.names or point.attributes or point.shapes or getattr(point, "writes", ())


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_the_installed_version_is_known(library: Library) -> None:
    version = library.installed()
    if library in OPTIONAL and version is None:
        pytest.skip(f"{library.name} is not here")
    assert version is not None
    assert library.knows(version)


def test_declarations_are_read_without_running_the_files() -> None:
    assert {point.library for points in touched().values() for point in points} == set(LIBRARIES)
    for file, points in touched().items():
        assert points == importlib.import_module(f"zerostart.upstream.{file}").TOUCHED


def test_every_file_that_imports_another_library_below_its_surface_declares_it() -> None:
    """The files without a declaration are those that touch nothing: they replace, set and import nothing."""
    for file in FILES:
        if ".".join(file.relative_to(ROOM).with_suffix("").parts) in touched():
            continue
        tree = ast.parse(file.read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        ours = {"deepspeed", "transformers", "accelerate", "diffusers", "diffsynth", "vllm", "trl"}
        assert not imported & ours, file.name


def test_no_class_of_torch_is_changed() -> None:
    for points in touched().values():
        for point in points:
            if isinstance(point, PatchPoint) and point.names:
                assert not (point.owner.startswith("torch.") and ":" in point.owner), point.place


def test_nothing_is_replaced_but_by_the_registry() -> None:
    """``setattr`` is for our own marks, and no attribute of what is imported is assigned."""
    for file in FILES:
        if file == ROOM / "patches.py":
            continue
        nodes = list(ast.walk(ast.parse(file.read_text())))
        imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
        imported = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                assert ast.unparse(node.args[1]) in ("_ATTRIBUTE", "_INSIDE"), f"{file.name}:{node.lineno}"
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute):
                    root = ast.unparse(target).split(".")[0]
                    assert root not in imported, f"{file.name}:{node.lineno}"


def test_the_package_asks_for_known_versions_and_forbids_majors_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for library in LIBRARIES:
        (asked,) = {line for line in required if line.split(">")[0].split("=")[0] == library.name}
        allowed = SpecifierSet(asked.removeprefix(library.name))
        assert ".".join(map(str, library.first)) in allowed
        assert asked.count(",") == asked.count("<") == 1
        assert f"{library.first[0] + 1}.0" not in allowed
        assert f"{library.first[0]}.999" in allowed


def pins(path: Path) -> dict[str, str]:
    lines = (line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name: version for name, version in lines if not name.startswith("#")}


def test_each_known_torch_has_its_constraints() -> None:
    """With versions that are known, and for the torch that is used here those that are used here."""
    minors = [f"{TORCH.first[0]}.{minor}" for minor in range(TORCH.first[1], TORCH.before[1])]
    files = {path.stem.removeprefix("torch-"): pins(path) for path in ROOT.glob("constraints/torch-*.txt")}
    assert sorted(files) == minors
    ours = pins(ROOT / "constraints.txt")
    for minor, pinned in files.items():
        assert pinned["torch"].startswith(f"{minor}.")
        for library in LIBRARIES:
            assert library in OPTIONAL or library.knows(pinned[library.name]), (minor, library)
    same = files[ours["torch"].rpartition(".")[0]]
    assert {name: same[name] for name in ours if name in same} == {n: v for n, v in ours.items() if n in same}


def test_the_documentation_is_up_to_date() -> None:
    assert table.PATH.read_text(encoding="utf-8") == table.text(), "run python -m tests.upstream.table"


def sample(first: int, second: int = 2) -> list[int]:
    """What shapes are tried on."""
    made: list[int] = [first + second, *range(3)]
    made.append(
        max(made, key=lambda x: -x)  # a comment
    )
    if first > 1:
        made.clear()
    return made


HERE = f"{__name__}:sample"


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        (Shape(HERE, leads=("first",), takes=("second",)), ""),
        (Shape(HERE, leads=("second",)), "it takes (first, second), not (second, ...)"),
        (Shape(HERE, takes=("third",)), "it takes no third"),
        (Shape(HERE, has=("made = [X + Y, *range(3)]", "made.append(...)", "return made")), ""),
        (Shape(HERE, has=("max(X, key=...)", "if first > 1: ...", "made.clear()")), ""),
        (Shape(HERE, has=("made.clear()", "made.append(...)")), "`made.append(...)` is missing in its place"),
        (Shape(HERE, has=("max(made)",)), "`max(made)` is missing"),
        (Shape(HERE, has=("X + X",)), "`X + X` is missing"),
        (Shape(HERE, once=("made.clear()",), lacks=("made.pop()",)), ""),
        (Shape(HERE, once=("range(4)",)), "`range(4)` is there 0 times, not once"),
        (Shape(HERE, lacks=("X.clear()",)), "`X.clear()` is there"),
        (Shape(f"{__name__}:samples"), "samples is missing"),
    ],
)
def test_shapes(shape: Shape, wrong: str) -> None:
    assert shape.misfit().endswith(wrong)
    assert bool(shape.misfit()) == bool(wrong)


@pytest.mark.parametrize("module", ["argparse", "dataclasses", "subprocess", "unittest.mock"])
def test_a_function_is_read_as_inspect_reads_it(module: str) -> None:
    found = [*vars(importlib.import_module(module)).values()]
    found += [value for kind in found if inspect.isclass(kind) for value in vars(kind).values()]
    functions = [f for f in found if inspect.isfunction(f) and f.__module__ == module]
    functions = [f for f in functions if f.__code__.co_filename.endswith(".py") and f.__name__ != "<lambda>"]
    assert len(functions) > 20
    for function in map(shapes._unwrapped, functions):
        expected = ast.parse(shapes._whole(inspect.getsource(function)))
        assert ast.dump(shapes._parsed(function)) == ast.dump(expected), function.__qualname__


class Sample:
    """What names and attributes are tried on."""

    named = 1

    def __init__(self) -> None:
        self.made = SimpleNamespace()


def test_what_an_owner_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(*names: str, attributes: tuple[str, ...] = ()) -> Use:
        return Use(
            library=TORCH, owner=f"{__name__}:Sample", names=names, attributes=attributes, why="a test"
        )

    assert use("named", attributes=("made",)).misfit() == ""
    assert use("made").misfit().endswith("Sample misses made")
    lacking = use("named", attributes=("made", "other"))
    assert lacking.misfit().endswith("Sample misses other")
    with pytest.raises(
        UnsupportedVersionError, match=r"misses other \(a test\)\. This is torch 2\..*pip install .*\. Try it"
    ):
        demand((lacking,), "Try it")
    monkeypatch.setattr(torch, "__version__", "2.20.0")
    assert misfit((use("named"),)) == ""
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert misfit((use("named"),)).startswith(
        "torch 2.10.1 is installed. This is torch 2.10.1; zerostart knows"
    )
    # Of a build of somebody's own: the shapes decide alone.
    monkeypatch.setattr(torch, "__version__", "main-a1b2")
    assert misfit((use("named"),)) == ""


def test_every_duration_is_one_that_occurs() -> None:
    used = {p.lasts for points in touched().values() for p in points if isinstance(p, PatchPoint)}
    assert used == set(Lasts)
