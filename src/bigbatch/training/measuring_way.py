"""How a measured step gets its micro-batches: cut, or as groups of samples in one backward."""

from statistics import median
from typing import Any, Literal

from bigbatch.errors import SettingError
from bigbatch.gradients.groups.grouping import Groups

GroupsSetting = Groups | Literal["auto"] | None

_AUTO_GROUPS = 8
_TIMED = 6  # measured steps of each way; the first, which may compile and fill caches, counts not


class MeasuringWay:
    """Chooses whether measured steps are cut into micro-batches or measured by groups.

    With "auto" both ways are timed in turn, over 5 measured steps each, once for every floor(log2
    batch size); the one with the smaller median of seconds per sample is taken. Where a step has
    enough micro-batches without being cut, these are measured. So they are if the groups of the
    model cannot be seen.

    Args:
        groups: k, for groups in every step; None for none; "auto".
    """

    def __init__(self, groups: GroupsSetting) -> None:
        self.is_auto = groups == "auto"
        self.groups: int | None = _AUTO_GROUPS if groups == "auto" else groups
        self.refusal = ""  # why the groups of the model cannot be seen
        self._seconds: dict[int, dict[bool, list[float]]] = {}  # per sample, by size and way
        self._chosen: dict[int, bool] = {}  # whether groups are taken, by size
        self._last: tuple[int, bool, int] | None = None  # the step whose time comes next

    @property
    def min_groups(self) -> int:
        """Groups of a backward in any measured step; 1 if it may be cut instead."""
        return 1 if self.is_auto or self.groups is None else self.groups

    def takes_groups(self, batch_size: int, *, must_cut: bool) -> bool:
        """Whether the next measured step is measured by groups.

        Args:
            batch_size: its samples.
            must_cut: whether it has too few micro-batches unless it is cut.
        """
        if not self.is_auto:
            return self.groups is not None
        if self.refusal or not must_cut:
            return False
        size = _size_of(batch_size)
        if size in self._chosen:
            return self._chosen[size]
        seconds = self._seconds.get(size, {})
        return len(seconds.get(True, ())) <= len(seconds.get(False, ()))

    def end_step(self, batch_size: int, *, by_groups: bool, counts: bool) -> None:
        """Ends a step, whose seconds come with the next one.

        Args:
            batch_size: its samples.
            by_groups: whether it was measured by groups.
            counts: whether it was measured, as planned, and one that had to be cut otherwise.
        """
        self._last = (_size_of(batch_size), by_groups, batch_size) if counts else None

    def add_seconds(self, seconds: float) -> None:
        """Adds the time of the last step, the same on all ranks; 0 if it is unknown."""
        last, self._last = self._last, None
        if last is None or not seconds or not self.is_auto or last[0] in self._chosen:
            return
        size, by_groups, samples = last
        ways = self._seconds.setdefault(size, {True: [], False: []})
        ways[by_groups].append(seconds / samples)
        if min(map(len, ways.values())) >= _TIMED:
            cut, groups = (median(ways[way][1:]) for way in (False, True))
            self._chosen[size] = groups < cut
            del self._seconds[size]

    def refuse(self, reason: str) -> None:
        """Groups are not taken any more."""
        self.refusal = reason

    def require_same_groups(self, groups: int | None) -> None:
        """Raises SettingError if the meter has groups of its own, and another number."""
        if groups not in (None, self.groups):
            stated = '"auto"' if self.is_auto else self.groups
            raise SettingError(f"groups={stated}, and groups={groups} of the meter: pass one")

    def require_no_reader(self, optimizer: str) -> None:
        """Raises SettingError with "auto", for an optimizer that reads every step."""
        if self.is_auto:
            raise SettingError(
                f'groups="auto" chooses how measured steps are measured, and {optimizer} reads the '
                "micro-batches of every step; pass groups=8, or leave groups out to cut each step"
            )

    def describe(self, batch_size: int) -> str:
        """The way at a batch size and its reason, in words for a log; empty without "auto"."""
        size = _size_of(batch_size)
        if not self.is_auto:
            return ""
        if self.refusal:
            return f"micro-batches are measured: {self.refusal}"
        if size not in self._chosen:
            return "measuring by micro-batches and by groups is timed"
        way = "groups" if self._chosen[size] else "micro-batches"
        return f"{way} are measured, which was the faster way at this batch size"

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict`."""
        return {
            "chosen": [[size, chosen] for size, chosen in self._chosen.items()],
            "seconds": [[size, *map(list, ways.values())] for size, ways in self._seconds.items()],
            "last": self._last,
            "refusal": self.refusal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state."""
        self._chosen = dict(state["chosen"])
        seconds = state["seconds"]
        self._seconds = {size: {True: [*a], False: [*b]} for size, a, b in seconds}
        self._last, self.refusal = state["last"], state["refusal"]


def _size_of(batch_size: int) -> int:
    """floor(log2 batch size)."""
    return batch_size.bit_length() - 1
