"""A loader without end, whose batches a function draws."""

from collections.abc import Callable, Iterator

from bigbatch.data.collate import Batch
from bigbatch.errors import BatchError


class DrawnBatches:
    """Batches that a function draws at random, without end, such as nanoGPT's `get_batch`.

    A draw has no position: a run resumes with the random states that its next batches were drawn
    from, and draws nothing again that steps have taken.
    """

    def __init__(self, draw: Callable[[], Batch]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Batch]:
        while True:
            try:
                batch = self._draw()
            except StopIteration:
                raise BatchError(
                    "the function that draws the batches ended with StopIteration, and a function "
                    "has no end: pass what it iterates over, such as the DataLoader, as the loader"
                ) from None
            if isinstance(batch, Iterator):
                raise BatchError(
                    f"the function that draws the batches gave a {type(batch).__name__}, and each "
                    "call has to give one batch; pass an object whose __iter__ gives the batches"
                )
            yield batch

    def state_dict(self) -> dict[str, object]:
        """Empty, as the random states are kept with each batch."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing to do."""
