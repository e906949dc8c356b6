"""Extension of griffe for our signatures: the values that a setting allows, and its default.

`Count | None` reads as `int >= 1 | None`, and `**options: Unpack[LoopOptions]` as the options. All
is read from the source, so that the reference follows it.
"""

import ast
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from typing import Any, get_args

from griffe import (
    Attribute,
    Class,
    Expr,
    ExprBinOp,
    ExprCall,
    ExprName,
    ExprSubscript,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
    get_expression,
)

from bigbatch.setting_types import In

UNBOUNDED = 1e9  # a larger bound only refuses what must be a mistake
LOOPS = (  # which read `options.get(name, default)`
    "bigbatch.training.adaptive_batch.AdaptiveBatch",
    "bigbatch.training.update.Update",
)

Value = str | Expr | None


class ReadableSignatures(Extension):
    """Rewrites the annotations and defaults of a package when all its modules are loaded."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Writes out the types of attributes and functions, and the options of functions."""
        loops = [pkg.modules_collection[name] for name in LOOPS]
        for member in _members(pkg):
            if isinstance(member, Attribute):
                member.annotation = written_out(member.annotation)
                if "class-attribute" in member.labels:  # a dataclass makes it an argument
                    member.value = written_out(member.value)
            elif isinstance(member, Function):
                _expand_options(member, loops)
                member.returns = written_out(member.returns)
                for parameter in member.parameters:
                    parameter.annotation = written_out(parameter.annotation)
                    parameter.default = written_out(parameter.default)


def written_out(value: Value) -> Value:
    """An annotation or a default in which no name of ours stands for another expression."""
    if isinstance(value, ExprName):
        return _definition(value)
    if _is_annotated(value):
        return written_out(value.slice.elements[0])
    if not isinstance(value, Expr):
        return value
    parts = {one.name: _parts_written_out(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, ExprBinOp):
        parts = {name: f"({one})" if _is_chain(one) else one for name, one in parts.items()}
    return replace(value, **parts)


def _parts_written_out(parts: Any) -> Any:
    return [written_out(one) for one in parts] if isinstance(parts, list) else written_out(parts)


def _is_chain(part: Any) -> bool:
    """Whether a part of a union is a comparison with two sides, without parentheses."""
    return isinstance(part, str) and part.count("<") == 2 and part[0] != "("


def _definition(name: ExprName) -> Value:
    """What a type or constant of ours stands for; the name itself of any other object."""
    path = name.canonical_path
    if not isinstance(name.parent, Object) or not path.startswith("bigbatch."):
        return name  # a part of a dotted name, or of another library
    definition = name.parent.modules_collection[path]
    value = definition.value if definition.is_attribute else None
    if value is None or isinstance(value, ExprName | ExprCall):
        return name
    if not _is_annotated(value):
        return written_out(value)
    kind, constraint, *_ = get_args(getattr(import_module(definition.module.path), definition.name))
    is_interval = isinstance(constraint, In)
    return _numbers(kind.__name__, constraint) if is_interval else written_out(value)


def _is_annotated(value: Value) -> bool:
    return isinstance(value, ExprSubscript) and value.canonical_path == "typing.Annotated"


def _numbers(kind: str, interval: In) -> str:
    """`int >= 1` for "[1, inf)": Python, since signatures are formatted as such."""
    low, high = (
        one if abs(one) < UNBOUNDED else math.copysign(math.inf, one)
        for one in (interval.low, interval.high)
    )
    from_low, to_high = ("<=" if one in interval else "<" for one in (low, high))
    if high == math.inf:
        return kind if low == -math.inf else f"{kind} {from_low.replace('<', '>')} {low:g}"
    if from_low == to_high:
        return f"{kind} in " + (
            f"[{low:g}, {high:g}]" if low in interval else f"({low:g}, {high:g})"
        )
    return f"{low:g} {from_low} {kind} {to_high} {high:g}"


def _expand_options(function: Function, loops: list[Class]) -> None:
    """Puts the keys of a `TypedDict` in the place of `**options: Unpack[...]`."""
    for options in list(function.parameters):
        annotation = options.annotation
        if isinstance(annotation, ExprSubscript) and annotation.canonical_path == "typing.Unpack":
            del function.parameters[options.name]
            keys = function.modules_collection[annotation.slice.canonical_path]
            defaults = _defaults(function, keys, loops)
            for name, key in keys.attributes.items():
                option = Parameter(name, annotation=key.annotation, default=defaults[name])
                option.kind = ParameterKind.keyword_only
                function.parameters.add(option)


def _defaults(function: Function, keys: Class, loops: list[Class]) -> dict[str, Value]:
    """The defaults of a function's options, of three places; the last one that has it counts.

    `options.get(name, default)` in the loop, an argument of a base class, and `Keys(name=default)`
    in the function or its class.
    """
    defaults: dict[str, Value] = {}
    for loop in loops:
        for call in _calls(loop, "options.get"):
            name, *default = call.args
            defaults[name.value] = _expression(*default, loop) if default else "None"
    is_method = isinstance(function.parent, Class)
    for base in reversed(function.parent.mro() if is_method else []):
        if isinstance(init := base.members.get("__init__"), Function):
            defaults |= {one.name: one.default for one in init.parameters if one.default}
    owner = function.parent if is_method else function
    for call in _calls(owner, keys.name):
        defaults |= {one.arg: _expression(one.value, owner) for one in call.keywords}
    return defaults


def _calls(where: Object, name: str) -> Iterator[ast.Call]:
    for one in ast.walk(ast.parse(where.source)):
        if isinstance(one, ast.Call) and ast.unparse(one.func) == name:
            yield one


def _expression(node: ast.expr, scope: Object) -> Value:
    return get_expression(node, parent=scope, parse_strings=False)


def _members(of: Object) -> Iterator[Object]:
    for member in of.members.values():
        if not member.is_alias:
            yield member
            yield from _members(member)
