"""One number that is known without this library, and what the library makes of it."""

import math
from dataclasses import dataclass, field

from studies.timing import Row


@dataclass(frozen=True)
class KnownAnswer:
    """A row of `bigbatch bench known-answers`.

    Args:
        what: the quantity, without vertical bars, which would end a cell of a table.
        source: where the expected number comes from: a paper, a README, or arithmetic.
        expected: the known number, a literal or a formula that shares no code with the library.
        measured: what the library computes; nan if the row is skipped.
        tolerance: largest difference, or largest factor where `is_factor`.
        reason: why so much.
        is_factor: whether the tolerance is a factor either way.
        skipped: why nothing was measured; "" if something was.
    Example:
        >>> KnownAnswer("half", "arithmetic", 0.5, 0.52, 0.05, "of a trial").passes
        True
        >>> KnownAnswer("half", "arithmetic", 0.5, 1.1, 2, "of a seed", is_factor=True).passes
        False
    """

    what: str
    source: str
    expected: float
    measured: float
    tolerance: float
    reason: str
    is_factor: bool = field(default=False, kw_only=True)
    skipped: str = field(default="", kw_only=True)

    @property
    def passes(self) -> bool:
        """Whether the measured number is within the tolerance; a skipped row is not a failure."""
        if self.skipped:
            return True
        if self.is_factor:
            ratio = self.measured / self.expected
            return 1 / self.tolerance <= ratio <= self.tolerance
        return abs(self.measured - self.expected) <= self.tolerance

    def row(self) -> Row:
        """The row of the table."""
        sign = "x " if self.is_factor else "+- "
        return {
            "what": self.what,
            "source": self.source,
            "expected": _text(self.expected),
            "measured": _text(self.measured),
            "tolerance": f"{sign}{self.tolerance:.2g}" if self.tolerance else "0",
            "reason": self.reason,
            "result": f"skipped: {self.skipped}" if self.skipped else _RESULTS[self.passes],
        }


def _text(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.5g}"


_RESULTS = {True: "pass", False: "FAIL"}
EXACT = 1e-9  # relative rounding of a few float64 operations
