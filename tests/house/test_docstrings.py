"""Public docstrings say what is raised, by syntax trees.

Of a function that is exported, and of the public methods of a class that is, the docstring names each error
that it or the private functions of its module raise. What lies deeper is told by the docstrings there; but a
public name of a package says at least that something is raised, however deep.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import zerostart
from tests.house.test_structure import TREES, name_of
from zerostart import errors

ROOT = Path(zerostart.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Raised for those who write zerostart, and not for those who call it.
NO_ERRORS = {"NotImplementedError", "AssertionError", "StopIteration", "KeyboardInterrupt"}


@dataclass
class Module:
    """Functions and methods by name, and which of them are public."""

    functions: dict[str, Function] = field(default_factory=dict)
    public: list[str] = field(default_factory=list)
    #: Errors that its functions give, for others to raise.
    given: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(source: str) -> "Module":
        tree, made = ast.parse(source), Module()
        exported = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        for name, node in _named(tree.body):
            made.functions[name] = node
            if _gives_error(node):
                made.given[node.name] = ast.unparse(node.returns or node)
            outer, _, leaf = name.rpartition(".")
            if (outer or leaf) in (exported or [[]])[0] and not leaf.startswith("_"):
                made.public.append(name)
        return made

    def raised(self, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Names of the errors that a function raises, itself or by private functions of the module."""
        found: set[str] = set()
        for node in _uncaught(self.functions[name].body):
            if isinstance(node, ast.Raise) and node.exc is not None:
                kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                word = ast.unparse(kind).rpartition(".")[2]
                found.add(self.given.get(word) or GIVEN.get(word, word))
            elif isinstance(node, ast.Call) and (called := self._private(node, name)) not in (None, *seen):
                found |= self.raised(str(called), seen | {name})
        return {kind for kind in found if _is_error(kind)}

    def _private(self, call: ast.Call, caller: str) -> str | None:
        target = ast.unparse(call.func)
        outer = caller.rpartition(".")[0]
        name = f"{outer}.{target[5:]}" if target.startswith(("self.", "cls.")) else target
        leaf = name.rpartition(".")[2]
        return name if leaf.startswith("_") and name in self.functions else None

    def silent(self) -> list[str]:
        """Public functions whose docstrings do not name all that they raise, and what is not named."""
        found = []
        for name in self.public:
            said = ast.get_docstring(self.functions[name]) or ""
            left = {kind for kind in self.raised(name) if not _names(said, kind)}
            if left:
                found.append(f"{name}: {', '.join(sorted(left))}")
        return found


def _named(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            if not any(ast.unparse(d).endswith(".setter") for d in node.decorator_list):  # told by the getter
                yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _named(node.body, f"{prefix}{node.name}.")


def _gives_error(node: Function) -> bool:
    return node.returns is not None and ast.unparse(node.returns).endswith("Error")


def _uncaught(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes of a function outside of inner functions and of blocks whose errors are all caught."""
    left: list[ast.AST] = list(body)
    while left:
        node = left.pop()
        yield node
        if isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)):
            continue
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Try) and node.handlers:
            inner = [n for n in inner if n not in node.body]
        left += inner


def _is_error(kind: str) -> bool:
    known = getattr(errors, kind, getattr(builtins, kind, None))
    return kind not in NO_ERRORS and isinstance(known, type) and issubclass(known, BaseException)


def _names(said: str, kind: str) -> bool:
    """Whether a docstring names an error, one that it is of, or whoever says it: what another raises."""
    above = [base.__name__ for base in getattr(errors, kind, getattr(builtins, kind, None)).__mro__[:-2]]
    known = [name for name in above if name not in ("Exception", "BaseException")]
    return "aise" in said and any(word in said for word in (*known, "aises what", "aises as"))


#: Errors that functions give, by the function's name: ``raise refusal(...)``.
GIVEN = {
    node.name: ast.unparse(node.returns)
    for path in sorted(ROOT.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and _gives_error(node)
}
#: Without the commands: what they raise becomes an exit code, and their docstrings are their help.
MODULES = {
    str(path.relative_to(ROOT)): Module.of(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
    if path.parent.name != "cli"
}


@pytest.mark.parametrize("module", MODULES)
def test_public_docstrings_name_what_is_raised(module: str) -> None:
    assert MODULES[module].silent() == []


def test_what_is_not_told_is_found() -> None:
    source = """
__all__ = ["load", "Kind", "told", "caught"]
def _check(x):
    raise ConfigError("x")
def load(x):
    '''Load.'''
    _check(x)
class Kind:
    def read(self):
        '''Read; raises ReadError.'''
        self._open()
    def _open(self):
        raise ReadError if self else ValueError("y")
    def close(self):
        '''Close.'''
        raise errors.WriteError("z")
def told(x):
    '''Load. Raises ZerostartError.'''
    _check(x)
def caught(x):
    '''Load.'''
    try:
        _check(x)
    except ConfigError:
        pass
"""
    assert Module.of(source).silent() == ["load: ConfigError", "Kind.close: WriteError"]


Key = tuple[str, str]
PACKAGES = {name_of(path) for path in ROOT.rglob("__init__.py")}
#: What a conformance class has are tests, and what they raise fails them.
TESTS = "zerostart.testing"


def _definitions() -> dict[Key, ast.AST]:
    found: dict[Key, ast.AST] = {}

    def walk(module: str, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, Function | ast.ClassDef):
                found.setdefault((module, prefix + node.name), node)
            if isinstance(node, ast.ClassDef):
                walk(module, node.body, f"{prefix}{node.name}.")

    for module, tree in TREES.items():
        walk(module, tree.body, "")
    return found


DEFINED = _definitions()
IMPORTED = {
    module: {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in TREES
        for alias in node.names
    }
    for module, tree in TREES.items()
}


def _meant(module: str, name: str) -> Key | None:
    """Where what ``module`` calls ``name`` is defined; None if it cannot be seen."""
    while (module, name) not in DEFINED:
        head, _, rest = name.partition(".")
        if head not in IMPORTED.get(module, {}):
            return None
        origin, original = IMPORTED[module][head]
        inner = f"{origin}.{original}"
        module, name = (inner, rest) if inner in TREES else (origin, f"{original}.{rest}".rstrip("."))
    return module, name


def _raised_deep() -> dict[Key, set[str]]:
    """The errors of ours that each function may raise, itself or by others that it calls by their names."""
    found: dict[Key, set[str]] = {}
    calls: dict[Key, set[Key]] = {}
    for (module, name), node in DEFINED.items():
        if not isinstance(node, Function):
            continue
        raised, called = found.setdefault((module, name), set()), calls.setdefault((module, name), set())
        for inner in _uncaught(node.body):
            if isinstance(inner, ast.Raise) and inner.exc is not None:
                kind = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
                word = ast.unparse(kind).rpartition(".")[2]
                raised |= {GIVEN.get(word, word)} & set(vars(errors))
            elif isinstance(inner, ast.Call):
                target = ast.unparse(inner.func)
                if target.startswith(("self.", "cls.")):
                    target = f"{name.rpartition('.')[0]}.{target.partition('.')[2]}"
                key = _meant(module, target)
                if key is not None and isinstance(DEFINED[key], ast.ClassDef):
                    key = (key[0], f"{key[1]}.__init__")
                if key is not None:
                    called.add(key)
    grew = True
    while grew:
        before = sum(map(len, found.values()))
        for key, others in calls.items():
            found[key] |= set().union(*(found.get(other, set()) for other in others))
        grew = sum(map(len, found.values())) > before
    return found


def _public() -> Iterator[Key]:
    """Functions that packages export, and public methods of the classes that they do."""
    for package in sorted(PACKAGES - {TESTS}):
        for node in TREES[package].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                for exported in ast.literal_eval(node.value):
                    if (key := _meant(package, exported)) is None:
                        continue
                    inside = [
                        other for other in DEFINED if other[0] == key[0] and _is_method(other[1], key[1])
                    ]
                    yield from inside if isinstance(DEFINED[key], ast.ClassDef) else [key]


def _is_method(name: str, owner: str) -> bool:
    outer, _, leaf = name.rpartition(".")
    return outer == owner and not leaf.startswith("_")


def test_public_names_say_that_they_raise() -> None:
    raised = _raised_deep()
    public = sorted({key for key in _public() if raised.get(key)})
    silent = [key for key in public if "aise" not in (ast.get_docstring(DEFINED[key]) or "")]
    told = 1 - len(silent) / len(public)
    assert len(public) > 60
    assert told >= 0.95, f"{told:.0%}; silent: {silent}"
    assert not [key for key in silent if key[0] == "zerostart"]
