"""What a setting may be: a type, an interval, and `checked`, which holds every call to both.

The annotation of an argument is its check, for the Python API, a config file and a command line
alike: `Annotated[float, In("(0, 1)")] | None` is a number between 0 and 1, or None.
"""

import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
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
    """An interval, as mathematics writes it: "[0, 1)" holds 0 and not 1; "inf" is never held.

    Args:
        text: the interval.
        why: what the number is, where a message is clearer with it.
    Example:
        >>> 0 in In("[0, 1)"), 1 in In("[0, 1)"), str(In("[1, inf)"))
        (True, False, 'of at least 1')
    """

    def __init__(self, text: str, why: str = "") -> None:
        found = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", text)
        assert found is not None, text
        self.low, self.high = float(found[2]), float(found[3])
        self._holds_low, self._holds_high = found[1] == "[", found[4] == "]"
        self._text, self._why = text, f", {why}" if why else ""

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self._holds_low else value > self.low
        return above and (value <= self.high if self._holds_high else value < self.high)

    def __str__(self) -> str:
        if self.high < math.inf:
            text = f"in {self._text}"
        elif self.low == -math.inf:
            text = "that is finite"
        else:
            text = f"{'of at least' if self._holds_low else 'above'} {self.low:g}"
        return text + self._why


CHECKED_ELSEWHERE = (
    "checked elsewhere"  # Annotated[..., CHECKED_ELSEWHERE]: by code that knows a remedy
)
MAX_FACTOR = 1e9  # by which anything may grow at once

Count = Annotated[int, In("[1, inf)")]
Whole = Annotated[int, In("[0, inf)")]
Number = Annotated[float, In("(-inf, inf)")]
NotNegative = Annotated[float, In("[0, inf)")]
Positive = Annotated[float, In("(0, inf)")]
Share = Annotated[float, In("[0, 1)")]
Coverage = Annotated[float, In("(0, 1)", "the coverage of an interval, 0.9 say")]
Cosine = Annotated[float, In("(-1, 1)", "a cosine")]
Growth = Annotated[float, In(f"(1, {MAX_FACTOR:g}]", "a factor")]


def checked(called: Called) -> Called:
    """Holds every call of a function, or every construction of a class, to its annotations.

    Numbers of NumPy become Python's. What only a type checker can tell is let through: protocols,
    and what a function takes and returns.

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
    places = [name for name, one in _parameters(function).items() if one.kind in _BY_PLACE]
    readers = cache(lambda: _readers(function))  # later: annotations may name what comes below

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        reads, known = readers()
        if known and (unknown := sorted(named.keys() - reads.keys())):
            names = ", ".join(known)
            raise SettingError(f"{', '.join(unknown)} is unknown here; there are {names}")
        first = [reads[name](value) for name, value in zip(places, args, strict=False)]
        rest = {name: reads[name](x) if name in reads else x for name, x in named.items()}
        return function(*first, *args[len(places) :], **rest)

    return call  # type: ignore[return-value]


class Kind:
    """What a value may be, as the annotation of an argument says it.

    Args:
        annotation: a type, a union, a `Literal`, a tuple, list or dict of such, or `Annotated`.
    Example:
        >>> kind = Kind(Count | None)
        >>> 8 in kind, 0 in kind, str(kind)
        (True, False, 'a whole number of at least 1, or None')
    """

    def __init__(self, annotation: Any) -> None:
        self._annotation, self._read = annotation, _reader(annotation)

    def __contains__(self, value: Any) -> bool:
        try:
            self._read(value)
        except _OTHER:
            return False
        return True

    def __str__(self) -> str:
        return _words(self._annotation)

    def of(self, name: str, value: Any) -> Any:
        """The value of a setting, as Python's own number where it was another's.

        Raises:
            SettingError: it is none of this kind.
        """
        try:
            return self._read(value)
        except _OTHER:
            remedy = _remedy(value, self._annotation)
            raise SettingError(f"{name}={_shown(value)} must be {self}{remedy}") from None


def check_setting(name: str, value: Any, annotation: Any) -> Any:
    """The value of a setting that is held to an annotation once; see `Kind.of`."""
    return Kind(annotation).of(name, value)


def parse_setting(name: str, text: str, kind: Any) -> Any:
    """The value of a setting that is written as text.

    Raises:
        SettingError: it cannot be read as `kind`.
    """
    value: Any = text
    for one in map(_base, _alternatives(kind)):
        with suppress(KeyError, ValueError):
            value = _OF_TEXT[one](text)
            break
    return check_setting(name, value, kind)


@cache
def argument_kinds(made: type) -> dict[str, Any]:
    """What each argument of a constructor may be, those of the classes below it too."""
    makers = [vars(each)["__init__"] for each in reversed(made.__mro__) if "__init__" in vars(each)]
    return {name: kind for maker in makers for name, kind in _kinds(maker)[0].items()}


_Reader = Callable[[Any], Any]  # gives a value in a type, or raises one of these
_OTHER = (TypeError, ValueError, OverflowError)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_OF_TEXT: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: _TRUTH[text.lower()],
    int: int,
    float: float,
    NoneType: lambda text: {"none": None}[text.lower()],
}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _kinds(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Kinds of a function's arguments, and the names of those that a TypedDict has."""
    hints = get_type_hints(function, include_extras=True)
    kinds, options = {}, {}
    for name, one in _parameters(function).items():
        kind = hints.get(name, Any)
        if get_origin(kind) is Unpack:
            options = get_type_hints(get_args(kind)[0], include_extras=True)
        elif one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            kinds[name] = kind
    return kinds | options, list(options)


def _readers(function: Callable[..., Any]) -> tuple[dict[str, _Reader], list[str]]:
    kinds, options = _kinds(function)
    return {name: partial(Kind(kind).of, name) for name, kind in kinds.items()}, options


def _alternatives(kind: Any) -> list[Any]:
    if get_origin(kind) not in (Union, UnionType):
        return [kind]
    return [one for each in get_args(kind) for one in _alternatives(each)]


def _base(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _shown(value: Any) -> str:
    """A value, or the type of one that has no short form."""
    plain = isinstance(value, int | float | str | NoneType | tuple | list | dict)
    text = reprlib.repr(value) if plain else ""
    return text if text and "\n" not in text else f"<{type(value).__name__}>"


def _remedy(value: Any, kind: Any) -> str:
    """What to pass instead of a wrapper of what is wanted, or of a tensor."""
    wanted = [_base(one) for one in _alternatives(kind)]
    if hasattr(value, "item") and (int in wanted or float in wanted):
        return "; pass its .item()"
    classes = tuple(one for one in wanted if isinstance(one, type) and one is not NoneType)
    for name, inside in vars(value).items() if hasattr(value, "__dict__") else ():
        if isinstance(inside, classes) and not name.startswith("_"):
            return f"; pass its .{name}"
    return ""


@cache
def _reader(kind: Any) -> _Reader:
    """What holds values to a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return partial(_first, [_reader(one) for one in inner])
    if CHECKED_ELSEWHERE in inner:
        return partial(_instance, Any)
    if origin is Annotated:
        return partial(_inside, _reader(inner[0]), inner[1:])
    if origin is tuple:
        return partial(_each, [_reader(one) for one in inner])
    if origin is list:
        return partial(_all, _reader(inner[0]))
    if origin is dict:
        return partial(_named, _reader(inner[1]))
    if origin is Literal:
        return partial(_one_of, inner)
    if kind in (int, float):
        return partial(_number, kind)
    return partial(_instance, origin or kind)


def _first(readers: list[_Reader], value: Any) -> Any:
    for read in readers:
        try:
            return read(value)
        except _OTHER:
            continue
    raise ValueError


def _inside(read: _Reader, intervals: tuple[In, ...], value: Any) -> Any:
    value = read(value)
    if not all(value in interval for interval in intervals):
        raise ValueError
    return value


def _each(readers: list[_Reader], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list) or len(value) != len(readers):
        raise TypeError
    return tuple(read(one) for read, one in zip(readers, value, strict=True))


def _all(read: _Reader, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return [read(one) for one in value]


def _named(read: _Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return {name: read(one) for name, one in value.items()}


def _one_of(choices: tuple[Any, ...], value: Any) -> Any:
    if not any(type(value) is type(one) and value == one for one in choices):
        raise ValueError
    return value


def _number(kind: type[int | float], value: Any) -> int | float:
    """A number of Python's; NumPy's register as whole or real ones, and tensors do not."""
    if type(value) in (int, kind):
        float(value)  # what is too long for one is no size and no rate
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        raise TypeError
    return kind(value)  # type: ignore[call-overload]


def _instance(kind: Any, value: Any) -> Any:
    if kind is None or kind is NoneType:
        fits = value is None
    elif kind is Callable:
        fits = callable(value)
    elif kind is Iterable:
        iterates = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
        fits = iterates and not isinstance(value, str | bytes)
    elif kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        fits = True
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise TypeError
    return value


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


def _words(kind: Any) -> str:
    words = list(dict.fromkeys(map(_words_of_one, _alternatives(kind))))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"


def _words_of_one(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([_words(inner[0]), *map(str, inner[1:])])
    if origin is Literal:
        return "one of " + ", ".join(f'"{one}"' for one in inner)
    if origin is tuple:
        return f"({', '.join(map(_words, inner))})"
    if origin is list:
        return f"a list, each {_words(inner[0])}"
    if origin is dict:
        return f"names, each with {_words(inner[1])}"
    kind = origin or kind
    name = getattr(kind, "__name__", str(kind))
    return _WORDS.get(kind) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
