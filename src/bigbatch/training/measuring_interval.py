"""Which steps are measured: every one at first, then ever fewer, down to one in 16."""

from bigbatch.errors import SettingError

_LARGEST, _STEPS = 16, 32


class MeasuringInterval:
    """Counts steps and measures every n-th: step t, from 0 on, is measured if n divides t.

        n = min(16, the largest power of two that is at most max(1, t / 32))

    So n is 1 before step 64, 2 before 128, 4 before 256, 8 before 512, and 16 from there on. Of T
    steps are measured: all up to 64; 96 of 128, 128 of 256, 160 of 512; then 128 + T / 16, which is
    19 % of 1,000 and 7.5 % of 10,000. It depends on nothing but counts, so the same seed gives the
    same run on any machine.

    A measured step that cannot decide (the end of an epoch, a gradient that is not finite) is
    followed by another one, in addition.

    Where two consecutive steps are compared, the first of them does not decide either, so the one
    after it is measured too: for n of 1 and 2 these are all steps, in pairs.

    Args:
        every: n for the whole run; 0 measures no step.
        pairs: whether two consecutive steps are compared. A step that is measured in addition is
            then followed by others until one decides.
    """

    def __init__(self, every: int | None = None, *, pairs: bool = False) -> None:
        self._fixed, self._pairs = every, pairs
        self.start(0, again=False)

    def start(self, step: int, *, again: bool) -> None:
        """Continues a run after so many steps, of which the last one is measured again or not."""
        self._step = step
        self.again = again  # whether the last step should have decided, and could not
        self.every = self._fixed or None
        """The present n; None if no step is measured."""
        if self._fixed is None:
            self.every = min(_LARGEST, 1 << (max(1, step // _STEPS).bit_length() - 1))
        self._is_nth = self.every is not None and step % self.every == 0
        self.due = self._is_nth or again
        """Whether the next step is measured."""

    def require_statistics(self, reader: str) -> None:
        """Raises SettingError if no step is measured, for a setting that reads statistics."""
        if self._fixed == 0:
            raise SettingError(
                f"{reader} needs measured steps, and every=0 measures none; leave every= out"
            )

    def end_step(self, *, decides: bool) -> None:
        """Ends a step, which decides unless it was measured in vain."""
        was_measured = self.due if self._pairs else self._is_nth
        self.start(self._step + 1, again=was_measured and not decides)
