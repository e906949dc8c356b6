"""Which steps are measured: one in n, so that measuring takes at most a share of the time."""

import math
from statistics import median
from typing import Any

from bigbatch.errors import SettingError

DEFAULT_BUDGET = 0.05

Situation = tuple[int, int, int]
"""(micro-batches of a measured step, of one that is not, floor(log2 batch size))."""

_PAIRS = 6  # timed pairs of steps; the first, which may compile and fill caches, does not count
_DECISIONS = 8  # measured decisions over which the batch moves or rests
_MOVED = 1.5  # factor between the first and the last of them from which the batch moves
_MAX_REST = 4  # most that the interval is multiplied by at rest
_MAX_INTERVAL = 2**20


class MeasuringInterval:
    """Chooses the steps that are measured, of which every n-th is one.

        c = median of (seconds of a measured step / seconds of the step before it) - 1
        n0 = the smallest power of two that is at least c / budget
        n = n0 while the batch moves; at rest doubled by each measured decision, up to 4 n0

    So measuring takes at most the share `budget` of the time. c is timed once for each situation,
    over 5 pairs of a step that is not measured and one that is, between which no policy that needs
    statistics may change the batch (`times_next`). Until c is known, n is that of the situation
    before, and at least 2; the first situation has n = 2. The batch moves if the last decision
    differs by more than a factor of 1.5 from the one 8 measured decisions ago, or if there were
    fewer.

    A measured step that cannot decide (the end of an epoch, a gradient that is not finite) is
    followed by another one, which the next interval makes up for.
    """

    def __init__(self, budget: float | None, every: int | None = None) -> None:
        self.settings = {"budget": repr(budget), "every": repr(every)}  # as text
        self._fixed = 1 if every is None and budget is None else every
        self._budget = budget if budget and not self._fixed else 0.0  # above 0 if n is timed
        self._costs: dict[Situation, float] = {}  # c
        self._ratios: dict[Situation, list[float]] = {}  # of the pairs, until c is known
        self._unpaired: tuple[Situation, float] | None = None  # seconds of the step before a pair
        self._last: tuple[Situation, bool] | None = None  # the step whose time comes next
        self._situation: Situation | None = None  # the one that `every` is for
        self._base = 2  # n0, or that of the last situation that was timed
        self._rest = 1  # the factor of n0
        self._batch_sizes: list[int] = []  # of the last measured decisions
        self.wait = 0  # steps before the next measured one
        self._debt = 0  # steps that the next interval is longer

    @property
    def measures(self) -> bool:
        """Whether any step is measured."""
        return self._fixed is not None or self._budget > 0

    @property
    def due(self) -> bool:
        """Whether the next step is measured."""
        return self.measures and self.wait == 0

    @property
    def times_next(self) -> bool:
        """Whether the present step and the next one are a timed pair, of one batch size."""
        timed = self._budget and self._situation not in self._costs
        return bool(timed) and self.wait == 1

    @property
    def every(self) -> int | None:
        """n; None if no step is measured."""
        if not self.measures:
            return None
        return self._fixed or self._base * (self._rest if self._base > 1 else 1)

    @property
    def reason(self) -> str:
        """Why n is what it is, in words for a log."""
        if not self._budget:
            return f"every={self._fixed}" if self._fixed else "budget=0"
        if self._situation not in self._costs:
            return f"one step in {self.every} is, while steps are timed"
        cost = f"measuring adds {self._costs[self._situation]:.0%} to a step"
        rests = ", the batch rests" if self._rest > 1 else ""
        return f"one step in {self.every} is: {cost}{rests}, budget={self._budget:g}"

    def require_statistics(self, reader: str) -> None:
        """Raises SettingError if no step is measured, for a setting that reads statistics."""
        if not self.measures:
            raise SettingError(
                f"{reader} needs measured steps, and budget=0 measures none; pass a budget above "
                f"0, {DEFAULT_BUDGET:g} say, or every="
            )

    def add_seconds(self, seconds: float) -> None:
        """Adds the time of the last step, the same on all ranks; 0 if it is unknown."""
        if self._last is None or not seconds or not self._budget:
            return
        (situation, measured), self._last = self._last, None
        before, self._unpaired = self._unpaired, None if measured else (situation, seconds)
        if not measured or before is None or before[0] != situation or situation in self._costs:
            return
        ratios = self._ratios.setdefault(situation, [])
        ratios.append(seconds / before[1])
        if len(ratios) == _PAIRS:
            self._costs[situation] = max(0.0, median(ratios[1:]) - 1)
            del self._ratios[situation]

    def end_step(
        self, situation: Situation, following: Situation, batch_size: int, *, decides: bool
    ) -> None:
        """Ends a step, and chooses the kind of the next one."""
        self._last = (situation, self.due) if decides else None
        if not self.due:
            self.wait = max(0, self.wait - 1)
            return
        if decides:
            self._note_decision(batch_size)
        self._choose(following)
        interval = self.every or 1
        if decides or self._debt:
            self.wait, self._debt = interval - 1 + self._debt, 0
        else:
            self.wait, self._debt = 0, interval - 1

    def _note_decision(self, batch_size: int) -> None:
        """Doubles the interval at rest; the batch moves where it has changed, or is new."""
        self._batch_sizes = [*self._batch_sizes, batch_size][-_DECISIONS - 1 :]
        low, high = sorted((self._batch_sizes[0], batch_size))
        moves = len(self._batch_sizes) <= _DECISIONS or high > _MOVED * low
        self._rest = 1 if moves else min(2 * self._rest, _MAX_REST)

    def _choose(self, situation: Situation) -> None:
        """Sets n0 for a situation; one that is not timed yet needs steps of both kinds."""
        if not self._budget:
            return
        self._situation = situation
        if situation in self._costs:
            self._base = _power_of_two(self._costs[situation] / self._budget)
        else:
            self._base, self._rest = max(2, self._base), 1

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict`: numbers, in lists and tuples."""
        return {
            "settings": self.settings,
            "costs": [[*situation, cost] for situation, cost in self._costs.items()],
            "ratios": [[*situation, *ratios] for situation, ratios in self._ratios.items()],
            "unpaired": self._unpaired,
            "last": self._last,
            "situation": self._situation,
            "interval": [self._base, self._rest, self.wait, self._debt],
            "batch_sizes": [*self._batch_sizes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; under other settings the next step is measured."""
        self._costs = {(a, b, c): cost for a, b, c, cost in state["costs"]}
        self._ratios = {(a, b, c): ratios for a, b, c, *ratios in state["ratios"]}
        self._unpaired, self._last = state["unpaired"], state["last"]
        self._situation = state["situation"]
        self._base, self._rest, self.wait, self._debt = state["interval"]
        self._batch_sizes = [*state["batch_sizes"]]
        if state["settings"] != self.settings:
            self.wait = self._debt = 0


def _power_of_two(number: float) -> int:
    """The smallest power of two that is at least `number`, from 1 to 2^20."""
    mantissa, exponent = math.frexp(min(max(number, 1.0), _MAX_INTERVAL))
    return 1 << (exponent - (mantissa == 0.5))
