"""What a run says once of a batch that a bound keeps, and no longer the policy."""

from collections.abc import Sequence
from dataclasses import replace

from bigbatch.policies.policy import Decision

_STEPS = 50  # measured decisions in a row at the lower bound, after which it says so
_MARK = "; note: "


class BoundNotes:
    """Counts decisions at the lower bound, and remembers what was said."""

    def __init__(self) -> None:
        self._at_lower = 0  # measured decisions in a row that only min_batch keeps as large
        self._said = [False, False]  # of the lower bound, of the data set

    def at_lower(self, batch_size: int, noise_scale: float, smallest: int | None) -> str:
        """The note after one more measured decision there; "" before it is time, and later."""
        self._at_lower += 1
        if self._at_lower < _STEPS or self._said[0]:
            return ""
        self._said[0] = True
        allowed = (
            "no measured step is smaller" if batch_size == smallest else "min_batch= lets it shrink"
        )
        return (
            f"the noise scale is {noise_scale:.3g}, below the batch of {batch_size}: a smaller "
            f"batch would need fewer samples; {allowed}"
        )

    def above_lower(self) -> None:
        """A measured decision that no lower bound keeps."""
        self._at_lower = 0

    def at_data_set(self, batch_size: int) -> str:
        """The note of a batch that has grown to all samples of an epoch; "" later."""
        if self._said[1]:
            return ""
        self._said[1] = True
        return (
            f"the batch has grown to all {batch_size} samples of an epoch, so an epoch is one "
            "step; max_batch= bounds it"
        )

    def state_dict(self) -> list[int]:
        """The state that `load_state_dict` takes."""
        return [self._at_lower, *map(int, self._said)]

    def load_state_dict(self, state: Sequence[int]) -> None:
        """Continues from a saved state."""
        self._at_lower, self._said = state[0], [bool(said) for said in state[1:]]


def noted(decision: Decision, note: str) -> Decision:
    """The decision with a note, if there is one, at the end of its reason."""
    return replace(decision, reason=f"{decision.reason}{_MARK}{note}") if note else decision


def note_of(reason: str) -> str:
    """The note at the end of a decision's reason, or ""."""
    return reason.partition(_MARK)[2]
