"""An AdaptiveBatch that another loop drives: it asks for micro-batches, or announces its own."""

from collections.abc import Iterator

from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.errors import LoopError
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step import Step


class ExternalLoop:
    """The step that another loop is in.

        for batch in driven:                        # its loader; or driven.announce(samples)
            with driven.step.weighted_backward(loss): ...     # its backward
            if driven.step.complete:
                with driven.step.optimizer_step(): ...    # its optimizer step

    Args:
        train: what measures, decides and acts.
    """

    def __init__(self, train: AdaptiveBatch) -> None:
        self.train = train
        self._step: Step | None = None
        self._steps: Iterator[Step] | None = None
        self._micro_batches: Iterator[Batch] | None = None

    @property
    def step(self) -> Step:
        """The present step.

        Raises:
            LoopError: none has begun.
        """
        if self._step is None:
            raise LoopError(
                "no micro-batch was given out for this backward; iterate the loader that came with "
                "the engine, once around every backward"
            )
        return self._step

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the loader; after a `break`, the rest of it."""
        for step in self.train:
            self._step = step
            yield from step

    def forget(self) -> None:
        """The present step is none any more: a state was loaded."""
        self._step = self._steps = self._micro_batches = None

    def announce(
        self, samples: int, *, ends_epoch: bool = False, remaining: int | None = None
    ) -> None:
        """The other loop's next micro-batch, before its forward.

        Args:
            samples: of it, on this rank.
            ends_epoch: whether it is the last of an epoch, and so of its step.
            remaining: how many come after it in the epoch, where that is known.
        Raises:
            LoopError: the step before was not finished.
        """
        assert isinstance(self.train.batches, ExternalBatches)
        if self._step is not None and self._step.complete and not self._step.ended:
            raise LoopError(
                "another micro-batch came before the optimizer had stepped for those before it"
            )
        self.train.batches.announce(samples, ends_epoch=ends_epoch, remaining=remaining)
        if self._step is None or self._step.ended:
            self._step = self._next_step()
            self._micro_batches = iter(self._step)
        assert self._micro_batches is not None
        next(self._micro_batches)

    def end_pass(self) -> None:
        """Counts a pass whose last step has ended, before the next one begins."""
        assert isinstance(self.train.batches, ExternalBatches)
        if self._steps is not None and self.step.ended and self.train.batches.ends_epoch:
            next(self._steps, None)
            self._steps = None

    def _next_step(self) -> Step:
        step = None if self._steps is None else next(self._steps, None)
        if step is None:  # the first of an epoch
            self._steps = iter(self.train)
            step = next(self._steps)
        return step
