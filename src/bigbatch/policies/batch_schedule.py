"""A batch size that was written down beforehand, in words."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import NUMBER, Amount, amount_pattern
from bigbatch.policies.policy import Decision, TrainingState
from bigbatch.setting_types import Count, Positive, check_setting, checked
from bigbatch.statistics.noise_scale import GradientStatistics

_LARGEST = 2.0**53  # here the whole numbers of a float end; no batch comes near


@checked
@dataclass(frozen=True)
class Schedule:
    """Follows a schedule that was written down: doublings, ramps, growth in place of decay.

        64, 128 from 2M samples, 256 from 8M samples
        64 to 512 over 4M samples in steps of 64
        64, x2 every 20 epochs up to 1024
        128, x5 at 60 epochs, x5 at 120 epochs, x5 at 160 epochs up to 3200, then decay

    Each clause changes what those before it say. K, M, B, T are thousands, millions and so on.
    "then decay" makes of the growth that the cap keeps from the batch an `lr_factor`, capped over
    uncapped batch. That stands for a decay where the learning rate does not follow the batch by
    itself, so it needs `lr_scaling=None`. The batch is a pure function of `now`: a resumed run
    needs no state. A change comes with the first decision after its moment.

    Args:
        text: the schedule; docs/policies.md has the grammar.
        tokens_per_sample: mean length of a sample, where the schedule counts tokens.
    Raises:
        SettingError: the text says something else; with the clause, and what is allowed.
    Source:
        Doublings: AdaBatch (Devarakonda et al. 2017, arXiv 1712.02029). Growth in place of decay:
        Smith et al. 2018 (arXiv 1711.00489).
    Example:
        >>> schedule = Schedule("64, x2 every 20 epochs up to 1024")
        >>> step = GradientStatistics(1.0, 576.0, samples=64, micro_batches=4)
        >>> schedule.decide(step, TrainingState(64, 64, 64, epoch=45))
        Decision(batch_size=256, reason='schedule: x2 every 20 epochs up to 1024', lr_factor=1.0)
    """

    text: str
    tokens_per_sample: Positive | None = None

    def __post_init__(self) -> None:
        per = self.tokens_per_sample
        counts_tokens = any(clause.amount.unit == "token" for clause in self._parsed.clauses)
        if per is not None and not counts_tokens:
            raise SettingError(
                f"tokens_per_sample={per:g} has no use: {self.text!r} counts no tokens"
            )

    @property
    def batch_size(self) -> int:
        """Where it starts."""
        return self._parsed.start

    def decide(self, statistics: GradientStatistics, now: TrainingState) -> Decision:
        """What the schedule says after so much training, whatever was measured."""
        parsed = self._parsed
        wanted, last = float(parsed.start), f"{parsed.start}"
        for clause in parsed.clauses:
            times = clause.times(now)
            if clause.at_once or times >= 1:
                wanted, last = min(clause.batch(wanted, times), _LARGEST), clause.text
        bound = math.inf if now.max_batch is None else now.max_batch
        capped = min(wanted, parsed.cap)
        factor = min(capped, bound) / wanted if parsed.decays else 1.0
        return Decision(round(capped), f"schedule: {last}", factor)

    @property
    def decays(self) -> bool:
        """Whether growth that is kept from the batch lowers the learning rate instead."""
        return self._parsed.decays

    @cached_property
    def _parsed(self) -> "_Parsed":
        return _parse(self.text, self.tokens_per_sample)


@dataclass(frozen=True)
class _Clause:
    """What the batch becomes from some moment on.

    Args:
        text: as it is written.
        amount: of training, to the moment or between two of them.
        batch: the size, from that of the clauses before and how often the amount was done.
        size: that it names, 0 for none.
        at_once: whether it begins with the training.
        repeats: whether it has no moment of its own.
    """

    text: str
    amount: Amount
    batch: Callable[[float, Fraction], float]
    size: int = 0
    at_once: bool = False
    repeats: bool = False

    def times(self, now: TrainingState) -> Fraction:
        """How many times its amount fits into the training so far; exact."""
        return self.amount.times(now.samples, now.steps, now.epoch)


@dataclass(frozen=True)
class _Parsed:
    """A schedule taken apart."""

    start: int
    clauses: list[_Clause]
    cap: float = math.inf
    decays: bool = False


# The grammar, as docs/policies.md has it in words.

_SIZE = r"\d{1,15}"
_AMOUNT = amount_pattern("step", "sample", "epoch", "token")
_FIRST = {
    "SIZE": re.compile(rf"(?P<size>{_SIZE})"),
    "SIZE to SIZE over AMOUNT [in steps of SIZE]": re.compile(
        rf"(?P<start>{_SIZE}) to (?P<size>{_SIZE}) over {_AMOUNT}(?: in steps of (?P<by>{_SIZE}))?"
    ),
}
_LATER = {
    "SIZE from AMOUNT": re.compile(rf"(?P<size>{_SIZE}) from {_AMOUNT}"),
    "xFACTOR at|every AMOUNT [up to SIZE]": re.compile(
        rf"x ?(?P<factor>{NUMBER}) (?P<when>at|every) {_AMOUNT}(?: up to (?P<cap>{_SIZE}))?"
    ),
}
_DECAY = "then decay"


def _parse(text: str, tokens_per_sample: float | None) -> _Parsed:
    """Takes the text apart, clause by clause."""
    if not isinstance(text, str):
        raise SettingError(f"schedule={text!r} must be a text")
    words = [" ".join(clause.split()) for clause in text.split(",")]
    decays = len(words) > 1 and words[-1].lower() == _DECAY
    parsed = _Parsed(0, [])
    for clause in words[: len(words) - decays]:
        try:
            parsed = _with_clause(parsed, clause, tokens_per_sample)
        except SettingError as error:
            raise SettingError(f"schedule {text!r}, clause {clause!r}: {error}") from None
    if decays and parsed.cap == math.inf:
        raise SettingError(
            f"schedule {text!r}, clause {_DECAY!r}: allowed after 'up to SIZE' only, which keeps "
            "growth from the batch"
        )
    return replace(parsed, decays=decays)


def _with_clause(parsed: _Parsed, text: str, tokens_per_sample: float | None) -> _Parsed:
    """The schedule with one clause more."""
    if parsed.cap < math.inf:
        raise SettingError(f"nothing but {_DECAY!r} may follow 'up to SIZE'")
    found = _match(text, _LATER if parsed.start else _FIRST)
    start = parsed.start or _size(found.get("start", found.get("size", "")))
    if "unit" not in found:
        return _Parsed(start, [])
    clause = _clause(text, found, _amount(found, tokens_per_sample))
    if "when" not in found or found["when"] == "at":
        _require_later(clause, parsed.clauses)
    cap = float(_size(found["cap"])) if "cap" in found else math.inf
    clauses = [*parsed.clauses, clause]
    largest = max(start, *(one.size for one in clauses))
    if cap < largest:
        raise SettingError(f"the cap is below the {largest} samples before it; raise it")
    return _Parsed(start, clauses, cap)


def _match(text: str, forms: dict[str, re.Pattern[str]]) -> dict[str, str]:
    """The parts of the form that the clause has."""
    for form in forms.values():
        if found := form.fullmatch(text.lower()):
            return {name: part for name, part in found.groupdict().items() if part is not None}
    raise SettingError(
        f"allowed here: {', or '.join(forms)}; a SIZE is 256 (samples), a FACTOR 2 or 1.5, an "
        "AMOUNT 20 epochs, 500 steps, 2M samples or 8B tokens"
    )


def _clause(text: str, found: dict[str, str], amount: Amount) -> _Clause:
    if "factor" in found:
        factor, every = float(found["factor"]), found["when"] == "every"
        if factor <= 1:
            raise SettingError(f"the factor {factor:g} must be above 1")
        return _Clause(text, amount, partial(_times, factor, every), repeats=every)
    size = _size(found["size"])
    if "start" not in found:
        return _Clause(text, amount, partial(_constant, size), size)
    start, by = _size(found["start"]), _size(found.get("by", "1"))
    if abs(size - start) % by:
        raise SettingError(f"{abs(size - start)} samples are no whole number of steps of {by}")
    return _Clause(text, amount, partial(_ramp, start, size, by), size, at_once=True)


def _constant(size: int, before: float, times: Fraction) -> float:
    """256 from 8M samples."""
    return size


def _times(factor: float, every: bool, before: float, times: Fraction) -> float:
    """x2 every 20 epochs, or x5 at 60 epochs."""
    power = min(math.floor(times) if every else 1, math.log(_LARGEST, factor))
    return before * float(factor**power)


def _ramp(start: int, size: int, by: int, before: float, times: Fraction) -> float:
    """64 to 512 over 4M samples in steps of 64: each step takes as long."""
    way = size - start
    steps = math.floor(min(times, Fraction(1)) * (abs(way) // by))
    return start + math.copysign(steps * by, way)


def _size(text: str) -> int:
    return int(check_setting("size", int(text), Count))


def _amount(found: dict[str, str], tokens_per_sample: float | None) -> Amount:
    amount = Amount.of_match(found)
    if amount.count.denominator > 1:
        raise SettingError(f"{amount} must be a whole number")
    if amount.unit != "token":
        return amount
    if tokens_per_sample is None:
        raise SettingError("tokens need tokens_per_sample=, the mean length of a sample")
    return replace(amount, count=amount.count / Fraction(tokens_per_sample))


def _require_later(clause: _Clause, before: list[_Clause]) -> None:
    """Moments of one unit come in the order of time; "every" has no moment."""
    counted = {"token": "sample"}  # tokens are samples by now
    unit = counted.get(clause.amount.unit, clause.amount.unit)
    for one in before:
        same_unit = unit == counted.get(one.amount.unit, one.amount.unit)
        if same_unit and not one.repeats and one.amount.count > clause.amount.count:
            raise SettingError(f"it comes before {one.text!r}; write clauses in order of time")
