"""Types and intervals of settings, and `checked`, which checks the arguments of every call.

The annotation of an argument is its check, for the Python API, a config file and a command line
alike: `Annotated[float, In("(0, 1)")] | None` is a number between 0 and 1, or None.
"""

import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from bigbatch.errors import SettingError

Called = TypeVar("Called", bound=Callable[..., Any])


class In:
    """An interval, as mathematics writes it: "[0, 1)" holds 0 and not 1; "inf" is never inside.

    Args:
        text: the interval.
        description: what the number is, if that makes a message clearer.
    Example:
        >>> 0 in In("[0, 1)"), 1 in In("[0, 1)"), str(In("[1, inf)"))
        (True, False, 'of at least 1')
    """

    def __init__(self, text: str, description: str = "") -> None:
        match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", text)
        assert match is not None, text
        self.low, self.high = float(match[2]), float(match[3])
        self._includes_low, self._includes_high = match[1] == "[", match[4] == "]"
        self._text, self._description = text, f", {description}" if description else ""

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self._includes_low else value > self.low
        return above and (value <= self.high if self._includes_high else value < self.high)

    def __str__(self) -> str:
        if self.high < math.inf:
            text = f"in {self._text}"
        elif self.low == -math.inf:
            text = "that is finite"
        else:
            text = f"{'of at least' if self._includes_low else 'above'} {self.low:g}"
        return text + self._description

    __repr__ = __str__  # in `help()`


CHECKED_ELSEWHERE = "checked elsewhere"  # Annotated[type, this]: by code that knows a remedy
MAX_FACTOR = 1e9  # largest factor of one change

Count = Annotated[int, In("[1, inf)")]
Whole = Annotated[int, In("[0, inf)")]
Number = Annotated[float, In("(-inf, inf)")]
NotNegative = Annotated[float, In("[0, inf)")]
Positive = Annotated[float, In("(0, inf)")]
Coefficient = Annotated[float, In("[0, 3.4e38]", "the range of float32")]
PositiveCoefficient = Annotated[float, In("(0, 3.4e38]", "the range of float32")]
Share = Annotated[float, In("[0, 1)")]
Coverage = Annotated[float, In("(0, 1)", "the coverage of an interval, 0.9 say")]
Cosine = Annotated[float, In("(-1, 1)", "a cosine")]
Growth = Annotated[float, In(f"(1, {MAX_FACTOR:g}]", "a factor")]
Groups = Annotated[int, In("[2, inf)", "one leaves nothing to compare")]
Gamma = Annotated[float, In("(0, 1]", "the least factor of a step")]
RMax = Annotated[float, In("[1, inf)", "1.0 or 1 / gamma are usual")]
Remainder = Literal["share", "step", "drop"]
Unit = Literal["samples", "tokens"]


def checked(called: Called) -> Called:
    """Checks every call of a function, or every construction of a class, by its annotations.

    Numbers of NumPy become Python's. Protocols, and the arguments and results of functions, are
    not checked: only a type checker can.

    Raises:
        SettingError: by the call, for an argument of another type or out of its interval.
    Example:
        >>> @checked
        ... def halve(share: Share) -> float:
        ...     return share / 2
        >>> halve(1.5)
        Traceback (most recent call last):
        bigbatch.errors.SettingError: share=1.5 must be a number in [0, 1)
    """
    if not isinstance(called, type):
        return _checked(called)
    called.__init__ = _checked(called.__init__)  # type: ignore[misc]
    return called


def _checked(function: Called) -> Called:
    signature = inspect.signature(function).parameters
    positional = [name for name, one in signature.items() if one.kind in _POSITIONAL]
    all_kinds = cache(lambda: _kinds(function))  # later: they may name what comes below

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kinds = all_kinds()
        unknown = ", ".join(sorted(kwargs.keys() - kinds.keys()))
        if unknown and (options := ", ".join(name for name in kinds if name not in signature)):
            raise SettingError(f"{unknown} is unknown here; there are {options}")
        values = [kinds[name].check(name, x) for name, x in zip(positional, args, strict=False)]
        named_values = {
            name: kinds[name].check(name, x) if name in kinds else x for name, x in kwargs.items()
        }
        return function(*values, *args[len(positional) :], **named_values)

    return call  # type: ignore[return-value]


class Kind:
    """The values that an annotation allows.

    Args:
        annotation: a type, a union, a `Literal`, a tuple, list or dict of such, or `Annotated`.
    Example:
        >>> kind = Kind(Count | None)
        >>> 8 in kind, 0 in kind, str(kind)
        (True, False, 'a whole number of at least 1, or None')
    """

    def __init__(self, annotation: Any) -> None:
        self._annotation, self._arguments = annotation, get_args(annotation)
        self._type = get_origin(annotation) or annotation
        inner = self._arguments[:1] if self._type is Annotated else self._arguments
        self._inner = [Kind(one) for one in inner] if self._type in _NESTED else []

    def __contains__(self, value: Any) -> bool:
        try:
            self._read(value)
        except _NOT_ALLOWED:
            return False
        return True

    def __str__(self) -> str:
        kind, inner = self._type, list(map(str, self._inner))
        if kind in _UNIONS:
            *others, last = dict.fromkeys(inner)
            return f"{', '.join(others)}, or {last}" if others else last
        if kind is Annotated:
            return " ".join([*inner, *map(str, self._arguments[1:])])
        if kind is Literal:
            return "one of " + ", ".join(f'"{one}"' for one in self._arguments)
        if kind is tuple:
            return f"({', '.join(inner)})"
        if kind is list:
            return f"a list, each {inner[0]}"
        if kind is dict:
            return f"names, each with {inner[1]}"
        name = getattr(kind, "__name__", str(kind))
        return _WORDS.get(kind) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"

    def check(self, name: str, value: Any) -> Any:
        """The value of a setting, as Python's own number if it was another's.

        Raises:
            SettingError: the annotation does not allow it.
        """
        try:
            return self._read(value)
        except _NOT_ALLOWED:
            remedy = self._remedy(value)
            raise SettingError(f"{name}={_shown(value)} must be {self}{remedy}") from None

    def parse(self, name: str, text: str) -> Any:
        """The value of a setting that is written as text.

        Raises:
            SettingError: the annotation does not allow it.
        """
        value: Any = text
        for kind in self._types():
            with suppress(KeyError, ValueError):
                value = _OF_TEXT[kind](text)
                break
        return self.check(name, value)

    def _types(self) -> list[Any]:
        """The types of the alternatives, without what `Annotated` adds."""
        if self._type is Annotated or self._type in _UNIONS:
            return [one for kind in self._inner for one in kind._types()]
        return [self._annotation]

    def _read(self, value: Any) -> Any:
        """The value in this type; raises one of `_NOT_ALLOWED` if it is of another type."""
        kind, inner = self._type, self._inner
        if kind in (int, float):
            return _number(kind, value)
        if kind in _UNIONS:
            for one in inner:
                with suppress(*_NOT_ALLOWED):
                    return one._read(value)
        elif kind is Annotated:
            constraints = self._arguments[1:]
            if CHECKED_ELSEWHERE in constraints:
                return value
            value = inner[0]._read(value)
            if all(value in constraint for constraint in constraints):
                return value
        elif kind is tuple:
            if isinstance(value, tuple | list):
                return tuple(one._read(each) for one, each in zip(inner, value, strict=True))
        elif kind is list:
            if isinstance(value, list):
                return [inner[0]._read(one) for one in value]
        elif kind is dict:
            if isinstance(value, dict) and all(isinstance(name, str) for name in value):
                return {name: inner[1]._read(one) for name, one in value.items()}
        elif kind is Literal:
            if any(type(value) is type(one) and value == one for one in self._arguments):
                return value
        elif _is_instance(value, kind):
            return value
        raise ValueError

    def _remedy(self, value: Any) -> str:
        """How to pass the number of a tensor."""
        is_number = {int, float} & {*self._types()}
        return "; pass its .item()" if is_number and hasattr(value, "item") else ""


def check_setting(name: str, value: Any, annotation: Any) -> Any:
    """The value of a setting; see `Kind.check`."""
    return Kind(annotation).check(name, value)


def parse_setting(name: str, text: str, annotation: Any) -> Any:
    """The value of a setting that is written as text; see `Kind.parse`."""
    return Kind(annotation).parse(name, text)


@cache
def argument_kinds(cls: type) -> dict[str, Kind]:
    """Kinds of a constructor's arguments, those of its base classes too."""
    inits = [vars(base)["__init__"] for base in reversed(cls.__mro__) if "__init__" in vars(base)]
    return {name: kind for init in inits for name, kind in _kinds(init).items()}


_NOT_ALLOWED = (TypeError, ValueError, OverflowError)  # raised by `Kind._read`
_UNIONS = (Union, UnionType)
_NESTED = (Annotated, *_UNIONS, tuple, list, dict)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_OF_TEXT: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: _TRUTH[text.lower()],
    int: int,
    float: float,
    NoneType: lambda text: {"none": None}[text.lower()],
}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
    Callable: "a function",
    Iterable: "an iterable",
    Any: "a value",
}


def _kinds(function: Callable[..., Any]) -> dict[str, Kind]:
    """Kinds of a function's arguments, and of those that its TypedDict has."""
    hints = get_type_hints(function, include_extras=True)
    kinds: dict[str, Any] = {}
    for name, one in inspect.signature(function).parameters.items():
        annotation = hints.get(name, Any)
        if get_origin(annotation) is Unpack:
            kinds |= get_type_hints(get_args(annotation)[0], include_extras=True)
        elif one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            kinds[name] = annotation
    return {name: Kind(annotation) for name, annotation in kinds.items()}


def _shown(value: Any) -> str:
    """A value, or the type of one that has no short form."""
    plain = isinstance(value, int | float | str | NoneType | tuple | list | dict)
    text = reprlib.repr(value) if plain else ""
    return text if text and "\n" not in text else f"<{type(value).__name__}>"


def _number(kind: type[int | float], value: Any) -> int | float:
    """A number of Python's; NumPy's are registered as Integral or Real, and tensors are not."""
    if type(value) in (int, kind):
        float(value)  # an int too long for a float is no size and no rate
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        raise TypeError
    return kind(value)  # type: ignore[call-overload]


def _is_instance(value: Any, kind: Any) -> bool:
    if kind is Callable:
        return callable(value)
    if kind is Iterable:
        iterates = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
        return iterates and not isinstance(value, str | bytes)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)
