"""An AdaptiveBatch in another library's loop, which reads or announces its micro-batches."""

from collections.abc import Iterator

from bigbatch.data.collate import Batch
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.errors import LoopError
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.step import Step


class ExternalLoop:
    """Tracks the step of an AdaptiveBatch whose loop is another library's.

        for batch in loop:                        # its loader; or loop.announce(samples)
            with loop.step.weighted_backward(loss): ...     # its backward
            if loop.step.complete:
                with loop.step.optimizer_step(): ...    # its optimizer step

    Args:
        train: the AdaptiveBatch that measures, decides and plans.
    """

    def __init__(self, train: AdaptiveBatch) -> None:
        self.train = train
        self._step: Step | None = None
        self._steps: Iterator[Step] | None = None
        self._micro_batches: Iterator[Batch] | None = None

    @property
    def step(self) -> Step:
        """The current step.

        Raises:
            LoopError: no step has begun.
        """
        if self._step is None:
            raise LoopError(
                "no micro-batch was read for this backward; iterate the loader that initialize "
                "returned, and run one backward for each of its micro-batches"
            )
        return self._step

    @property
    def waiting(self) -> bool:
        """Whether a micro-batch was given out whose backward is still to come."""
        return self._step is not None and self._step.waiting

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the loader; after a `break`, the rest of it."""
        for step in self.train:
            self._step = step
            yield from step

    def forget(self) -> None:
        """Drops the current step, after a state was loaded."""
        self._step = self._steps = self._micro_batches = None

    def announce(
        self, samples: int, *, ends_epoch: bool = False, remaining: int | None = None
    ) -> None:
        """Announces the next micro-batch, before its forward.

        Raises:
            LoopError: the optimizer has not stepped for the previous step.
        """
        assert isinstance(self.train.batches, ExternalBatches)
        if self._step is not None and self._step.complete and not self._step.ended:
            raise LoopError(
                "another micro-batch came before the optimizer had stepped for the previous ones"
            )
        self.train.batches.announce(samples, ends_epoch=ends_epoch, remaining=remaining)
        if self._step is None or self._step.ended:
            step = None if self._steps is None else next(self._steps, None)
            if step is None:  # the first step of an epoch
                self._steps = iter(self.train)
                step = next(self._steps)
            self._step, self._micro_batches = step, iter(step)
        assert self._micro_batches is not None
        next(self._micro_batches)

    def end_pass(self) -> None:
        """Counts a pass as done after its last step, before the next pass begins."""
        assert isinstance(self.train.batches, ExternalBatches)
        if self._steps is not None and self.step.ended and self.train.batches.ends_epoch:
            next(self._steps, None)
            self._steps = None
