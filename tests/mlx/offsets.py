"""Where model files of mlx-lm and mlx-vlm take `cache.offset` for one integer, or keep state on a module.

In a batch `cache.offset` is an array, one number a row: a model that slices, counts or decides by it is wrong
or fails; and what a module keeps of its last call belongs to another request in the next. Found by reading
syntax trees, so that it can be run on any version: `python -m tests.mlx.offsets`. What is done about each use
is in `tests/mlx/uses.py`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("mlx_lm", "mlx_vlm")
OFFSET_WORDS = ("offset", "start_pos", "cache_offset", "kv_offset")
"""Arguments of these names are offsets; a file without any of them has none."""
INTEGER_CALLS = frozenset({"arange", "range", "int", "max", "min", "item", "len", "create_causal_mask"})
"""Calls that take or make integers."""
BUILDERS = frozenset(
    {
        "__init__",
        "sanitize",
        "shard",
        "pipeline",
        "from_config",
        "from_pretrained",
        "set_dtype",
        "to_lora",
        "fuse",
    }
)
"""Methods that run before or apart from a forward."""


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """One use. `family`: the model's folder or file; `kind`: slice, arange, comparison, state, …; `what`: its
    source."""

    package: str
    family: str
    kind: str
    line: int
    what: str


def search(package: str) -> list[Use]:
    """Every use in the model files of an installed package. Empty where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return []
    models = Path(spec.origin).parent / "models"
    uses: set[Use] = set()
    for path in sorted(models.rglob("*.py")):
        relative = path.relative_to(models)
        family = relative.parts[0].removesuffix(".py")
        if family in ("cache", "base"):
            continue
        uses.update(uses_in(path.read_text(encoding="utf-8"), package, family))
    return sorted(uses)


def uses_in(source: str, package: str, family: str) -> Iterator[Use]:
    """The uses in one file."""
    counts = any(word in source for word in OFFSET_WORDS)
    keeps = re.search(r"^\s+self\.\w+(: [^=]+)? .?= ", source, re.MULTILINE) is not None
    if not counts and not keeps:
        return
    for node in ast.walk(ast.parse(source)):
        if counts and isinstance(node, ast.FunctionDef):
            for kind, found in _integer_uses(node):
                yield Use(package, family, kind, found.lineno, _short(found))
        if keeps and isinstance(node, ast.ClassDef) and _is_module(node):
            for found in _kept_state(node):
                yield Use(package, family, "state", found.lineno, _short(found))


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else text[:77] + "..."


# Integer use of offsets


def _integer_uses(function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST]]:
    nodes = list(ast.walk(function))
    names = _offset_names(function, nodes)
    if not any(_is_offset(node, names) for node in nodes):
        return

    def tainted(node: ast.AST | None) -> bool:
        return node is not None and any(_is_offset(part, names) for part in ast.walk(node))

    for node in nodes:
        match node:
            case ast.Slice() if tainted(node.lower) or tainted(node.upper):
                yield "slice", node
            case ast.Call(func=called, args=arguments):
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                owner = called.value if isinstance(called, ast.Attribute) else None
                if name in INTEGER_CALLS and (
                    any(map(tainted, arguments)) or (name == "item" and tainted(owner))
                ):
                    yield "arange" if name in ("arange", "range") else f"{name}()", node
            case ast.Compare(left=left, comparators=others, ops=operators):
                if all(
                    isinstance(operator, ast.Is | ast.IsNot | ast.In | ast.NotIn) for operator in operators
                ):
                    continue
                if any(_is_offset(part, names) or _sums_offset(part, names) for part in (left, *others)):
                    yield "comparison", node
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if _is_offset(test, names):
                yield "comparison", test


def _offset_names(function: ast.FunctionDef, nodes: Sequence[ast.AST]) -> frozenset[str]:
    """Names that hold an offset or a sum with one, in the function."""
    names = {
        argument.arg
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if argument.arg in OFFSET_WORDS
    }
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    for _ in range(3):  # names made of names
        for node in assignments:
            if _sums_offset(node.value, frozenset(names)):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _is_offset(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if not isinstance(node, ast.Attribute) or node.attr not in ("offset", "start_position", "_offset"):
        return False
    base = ast.unparse(node.value)
    return base == "c" or "cache" in base.lower()


def _sums_offset(node: ast.AST, names: frozenset[str]) -> bool:
    """An offset, or arithmetic and choices over one."""
    match node:
        case ast.BinOp(left=left, right=right):
            return _sums_offset(left, names) or _sums_offset(right, names)
        case ast.IfExp(body=body, orelse=other):
            return _sums_offset(body, names) or _sums_offset(other, names)
    return _is_offset(node, names)


# State kept on modules


def _is_module(node: ast.ClassDef) -> bool:
    return any("Module" in ast.unparse(base) or "Mixin" in ast.unparse(base) for base in node.bases)


def _kept_state(node: ast.ClassDef) -> Iterator[ast.AST]:
    """Assignments to attributes of self in methods that a forward may run."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name in BUILDERS:
            continue
        if any("setter" in ast.unparse(decorator) for decorator in method.decorator_list):
            continue
        for part in ast.walk(method):
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            if not isinstance(part, ast.Assign | ast.AugAssign | ast.AnnAssign):
                continue
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="*", default=list(PACKAGES))
    for package in parser.parse_args().package:
        for use in search(package):
            print(f"{use.package}\t{use.family}:{use.line}\t{use.kind}\t{use.what}")


if __name__ == "__main__":
    main()
