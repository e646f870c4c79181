"""What a function of another library looks like, as far as zerostart builds on it.

A :class:`Shape` is a few lines of Python that the function's source must have, compared as syntax trees and
not as text: spaces, line breaks, quotes, comments, annotations and the order of keyword arguments do not
matter. In such a line

- a capital letter (``X``) stands for any expression, the same one wherever it stands in that line;
- ``...`` stands for anything: an expression, the rest of a call's arguments, or the body of a statement.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
import inspect
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

#: A function of another library, or what stands in its place: with the signature of that one.
Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """What is expected of the function ``of`` (``module:function`` or ``module:Class.method``)."""

    of: str
    #: The first parameters, in this order (``self`` and ``cls`` aside).
    leads: tuple[str, ...] = ()
    #: Parameters that are there, anywhere.
    takes: tuple[str, ...] = ()
    #: Lines that are there, each after the one before it.
    has: tuple[str, ...] = ()
    #: Lines that are there just once.
    once: tuple[str, ...] = ()
    #: Lines that are not there.
    lacks: tuple[str, ...] = ()

    def misfit(self) -> str:
        """What is otherwise, in words; empty if nothing is."""
        try:
            function = _unwrapped(resolve(self.of))
        except (ImportError, AttributeError):
            return f"{_plain(self.of)} is missing"
        wrong = self._arguments(function)
        if not wrong and (self.has or self.once or self.lacks):
            wrong = _judged(self, function)
        return f"{_plain(self.of)} is not as it was: {wrong}" if wrong else ""

    def _arguments(self, function: Function) -> str:
        given = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        if tuple(given[: len(self.leads)]) != self.leads:
            return f"it takes ({', '.join(given)}), not ({', '.join(self.leads)}, ...)"
        absent = [name for name in self.takes if name not in given]
        return f"it takes no {', '.join(absent)}" if absent else ""


def resolve(path: str) -> Any:
    """The object ``module`` or ``module:name.name``; raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split(".") if names else (), importlib.import_module(module))


def _unwrapped(function: Any) -> Any:
    """What is inside a function's wrappers, of which some leave no ``__wrapped__`` but have ``func``."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is not None and code.co_freevars == ("func",):
        return _unwrapped(function.__closure__[0].cell_contents)
    return function


def assigns(kind: type, name: str) -> bool:
    """Whether a method of a class, or of one that it derives from, sets an attribute ``name``."""
    return any(name in code.co_names and name in _assigned(code) for code in _codes(kind))


@functools.lru_cache(maxsize=256)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The attributes that are set."""
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


@functools.lru_cache(maxsize=32)
def _codes(kind: type) -> tuple[types.CodeType, ...]:
    methods = (_unwrapped(value) for base in kind.__mro__ for value in vars(base).values() if callable(value))
    return tuple(method.__code__ for method in methods if hasattr(method, "__code__"))


def _plain(path: str) -> str:
    return path.replace(":", ".")


@functools.lru_cache(maxsize=1024)
def _judged(shape: Shape, function: Function) -> str:
    """What is otherwise in the function's body, which is read once a process."""
    try:
        nodes = _nodes(function)
    except (OSError, TypeError, SyntaxError):
        return "its source cannot be read"
    # Each line of ``has`` has to come after the one before it; statements are in the order of the source.
    last = (0, 0)
    for line in shape.has:
        place = next((place for place in _places(line, nodes) if place >= last), None)
        if place is None:
            return f"`{line}` is missing" + (" in its place" if last > (0, 0) else "")
        last = place
    for line in shape.once:
        count = sum(1 for _ in _places(line, nodes))
        if count != 1:
            return f"`{line}` is there {count} times, not once"
    surplus = [line for line in shape.lacks if next(_places(line, nodes), None)]
    return f"`{surplus[0]}` is there" if surplus else ""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Inside, sources are read and parsed; what that leaves in memory, megabytes, goes at the end."""
    before = set(linecache.cache)
    try:
        yield
    finally:
        _nodes.cache_clear()
        for name in linecache.cache.keys() - before:
            linecache.cache.pop(name, None)


#: Line and column.
_Place = tuple[int, int]


@functools.lru_cache(maxsize=16)
def _nodes(function: Function) -> Mapping[type, Sequence[tuple[_Place, ast.AST]]]:
    """Statements and expressions of the function's source by their kind, from its beginning to its end."""
    found: dict[type, list[tuple[_Place, ast.AST]]] = {}
    for node in ast.walk(_parsed(function)):
        if isinstance(node, ast.stmt | ast.expr):
            plain = _unannotated(node)
            found.setdefault(type(plain), []).append(((node.lineno, node.col_offset), plain))
    return {kind: sorted(nodes, key=lambda pair: pair[0]) for kind, nodes in found.items()}


def _parsed(function: Function) -> ast.AST:
    """The syntax tree of the function, whose last line is told by its code and the indentation.

    ``inspect.getsource`` finds it by tokens, which takes longer than all else here; what cannot be parsed so,
    such as a string that begins further left at the end, is left to it.
    """
    code = getattr(function, "__code__", None)
    lines = [] if code is None else linecache.getlines(code.co_filename)
    if code is not None and lines:
        first, end = code.co_firstlineno - 1, _last_line(code)
        margin = _margin(lines[first])
        while end < len(lines) and (not lines[end].strip() or _margin(lines[end]) > margin):
            end += 1
        with contextlib.suppress(SyntaxError):
            return ast.parse(_whole("".join(lines[first:end])))
    return ast.parse(_whole(inspect.getsource(function)))


def _last_line(code: types.CodeType) -> int:
    """The last line on which an instruction of the code begins, or of the functions in it."""
    inner = [_last_line(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return max([line for *_, line in code.co_lines() if line is not None] + inner)


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _places(line: str, nodes: Mapping[type, Sequence[tuple[_Place, ast.AST]]]) -> Iterator[_Place]:
    """Where ``line`` is."""
    pattern = _pattern(line)
    return (place for place, node in nodes.get(type(pattern), ()) if _same(pattern, node, {}))


def _whole(source: str) -> str:
    """Source that parses, though it may be indented; dedenting fails at strings that begin further left."""
    return f"if True:\n{source}" if source[0].isspace() else source


@functools.cache
def _pattern(line: str) -> ast.AST:
    (statement,) = ast.parse(line).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _same(pattern: Any, node: Any, letters: dict[str, ast.expr]) -> bool:
    if _is_any(pattern):
        return True
    # A capital letter is bound where it is met first, and has to be the same expression wherever it recurs.
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1 and pattern.id.isupper():
        return isinstance(node, ast.expr) and _alike(letters.setdefault(pattern.id, node), node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        # ``...`` at the end of a body or of arguments stands for the rest.
        rest = bool(pattern) and _is_any(pattern[-1])
        fits = len(node) >= len(pattern) - 1 if rest else len(node) == len(pattern)
        return fits and all(_same(p, n, letters) for p, n in zip(pattern, node, strict=False))
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    if isinstance(pattern, ast.Call):
        return _same_call(pattern, node, letters)
    return all(_same(p, getattr(node, field, None), letters) for field, p in _fields(pattern))


def _same_call(pattern: ast.Call, node: ast.Call, letters: dict[str, ast.expr]) -> bool:
    rest = any(map(_is_any, pattern.args))
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    wanted = {keyword.arg: keyword.value for keyword in pattern.keywords}
    if not (wanted.keys() <= given.keys() if rest else wanted.keys() == given.keys()):
        return False
    return (
        _same(pattern.func, node.func, letters)
        and _same(pattern.args, node.args, letters)
        and all(_same(value, given[name], letters) for name, value in wanted.items())
    )


def _fields(pattern: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields that count; an ``else`` only where the pattern has one."""
    for name, value in ast.iter_fields(pattern):
        if name not in ("ctx", "kind", "type_comment") and not (name == "orelse" and value == []):
            yield name, value


def _is_any(pattern: object) -> bool:
    if isinstance(pattern, ast.Expr):
        pattern = pattern.value
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def _alike(first: ast.expr, node: ast.expr) -> bool:
    return first is node or ast.unparse(first) == ast.unparse(node)


def _unannotated(node: ast.stmt | ast.expr) -> ast.stmt | ast.expr:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)
    return node
