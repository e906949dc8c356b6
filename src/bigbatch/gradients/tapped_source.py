"""Gradients of an engine, which reduces in or after a backward: taps see each rank's own."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from bigbatch.errors import GradientError
from bigbatch.gradients.first_hook import current_backward, follows
from bigbatch.gradients.grad_guard import EngineGuard, require_dense
from bigbatch.gradients.gradient_hooks import hands_errors_over, weak_method
from bigbatch.gradients.leaf_tap import GradientTap
from bigbatch.gradients.protocols import MicroBatchGradients
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.source import TWICE, GradientSource

MADE_LATE = (
    "under fully_shard (FSDP2) a forward without backward leaves whole parameters in "
    "model.parameters(), which are not what is trained; make the optimizer before any forward, or "
    "after module.reshard() of every module that fully_shard was called on"
)

_SMALL = 1 << 14  # elements; for fewer, a call costs more than the read
_GATHERED = 1 << 17  # elements of small gradients that are reported together


class TappedSource(GradientSource):
    """Watches gradients by hooks, since the engine writes to `.grad` itself.

    Args:
        parameters: the parameters to watch.
        tap: hooks the gradients.
        guard: reads `.grad` on this rank, and notices who else writes to it.
        reducer: communicates, and knows which shard of the mean gradient each rank has.
        explicit: counts only what happens inside `micro_batch`.
    """

    guard: EngineGuard

    def __init__(
        self,
        parameters: Iterable[Tensor],
        tap: GradientTap,
        guard: EngineGuard,
        reducer: RankReducer,
        *,
        explicit: bool = False,
    ) -> None:
        self._tap = tap
        self.watches_leaves = tap.on_leaves
        self._reached: set[Tensor] = set()  # parameters that the current micro-batch reached
        self._gathered: dict[Tensor, Tensor] = {}  # small gradients that are not reported yet
        self._elements = 0  # of these
        self._reads_at_once = False  # whether a subscriber wants each as it comes
        self._totals: dict[Tensor, Tensor] | None = None  # of several backwards
        self._end_callback: weakref.ref[Callable[[], None]] | None = None  # alive in a backward
        self._backward = -1  # torch's number of that one
        self._report_one = weak_method(self._on_gradient)
        super().__init__(parameters, guard, reducer, explicit=explicit)

    # hooks

    def _require_supported(self, parameter: Tensor) -> None:
        super()._require_supported(parameter)
        self._tap.require_supported(parameter)

    def _attach_hooks(self) -> None:
        """Hooks every parameter that requires a gradient.

        Without subscribers one leaf hook stays on, which shows a backward outside `micro_batch`.
        """
        if self._closed:
            return
        if self._subscribers:
            self._tap.attach(self.parameters, self._report_one)
        elif self.explicit and self._tap.on_leaves:
            trained = (p for p in reversed(self.parameters) if p.requires_grad)
            self._tap.attach(itertools.islice(trained, 1), self._report_one)

    def _remove_hooks(self) -> None:
        self._tap.close()

    def _unhook(self, parameter: Tensor) -> None:
        self._tap.detach(parameter)

    def _watched(self, leaf: Tensor) -> Tensor | None:
        parameter = self._tap.parameter_of(leaf)
        return parameter if self._tap.is_hooked(parameter) else None

    def sums_of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """S of each parameter; None where no micro-batch reached it, or S is not kept."""
        return list(map(self.guard.sum_of, parameters))

    # a micro-batch

    def _restart(self) -> None:
        self._end_callback = None
        self._totals = None
        self._gathered.clear()
        super()._restart()

    def _open(self) -> None:
        changed = self.guard.open_micro_batch() or self._in_micro_batch
        may_be_zeroed = self.micro_batches and changed and not self.explicit
        if may_be_zeroed and self.guard.is_clean_within_step():
            self._restart()  # the user called zero_grad(), and starts a new step
        if self.micro_batches and self.explicit:
            self._require_undisturbed()
        self._begin_step()
        self._reached.clear()
        self._gathered.clear()
        self._elements = 0
        self._reads_at_once = any(subscriber.reads_at_once for subscriber in self._subscribers)
        self._totals = {} if self._several else None
        self._in_micro_batch, self.foreign_backward = True, False
        self._begin_micro_batch()

    def _require_undisturbed(self) -> None:
        """Checks gradients that an engine writes to, without waiting for the device."""
        if self.foreign_backward or self.guard.all_set_to_none():
            raise GradientError(
                "a backward of your own changed .grad between two micro-batches, or the gradients "
                "were zeroed there; run it outside the step, and zero them at its end"
            )

    def _fail(self) -> None:
        self.restart()

    def _close(self) -> None:
        stamps = self.guard.stamps()
        if not any(stamps) and not self.guard.grad_may_wait:
            self.require_no_step_in_backward()
        for parameter, total in (self._totals or {}).items():
            self._emit(parameter, total)
        self._totals = None
        self._report_gathered()
        self._in_micro_batch = False
        self.guard.accept(stamps)
        if self._subscribers:
            self._require_seen(self.guard.written_parameters(stamps))
        self._end_micro_batch()

    def _reached_parameters(self) -> Iterable[Tensor]:
        return self._reached

    def _require_seen(self, written_parameters: list[Tensor]) -> None:
        """An engine may write to the gradient of a parameter that this rank did not reach."""
        if not all(map(self._tap.is_hooked, written_parameters)):
            self.restart()
            raise GradientError(
                "a parameter received a gradient that was not seen: it was unfrozen, or its "
                "hooks were removed, after the step began; do that between steps"
            )

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reports a gradient, at once or with others that are small."""
        if parameter in self._reached:
            raise GradientError(TWICE)
        self._reached.add(parameter)
        is_large = gradient.numel() > _SMALL or not gradient.is_cpu
        if is_large or self._reads_at_once:
            total = self.guard.sum_of(parameter)
            sums, is_first = None if total is None else [total], self.guard.keeps_sums
            is_first = is_first and total is None
            self._report(MicroBatchGradients([parameter], [gradient], sums, is_first))
            return
        self._gathered[parameter] = gradient  # not detached: torch would write into its memory
        self._elements += gradient.numel()
        if self._elements > _GATHERED:
            self._report_gathered()

    def _report_gathered(self) -> None:
        if self._gathered:
            batch = MicroBatchGradients([*self._gathered], [*self._gathered.values()])
            self._gathered, self._elements = {}, 0
            self._report(batch)

    # a backward

    @hands_errors_over
    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """A hook reports the gradient of one parameter."""
        if self._in_micro_batch and not self._subscribers:
            return
        backward_begins = (
            self._end_callback is None or self._end_callback() is None or follows(self._backward)
        )
        if backward_begins and self._implicit:
            self._restart()  # the previous backward failed
        if backward_begins and not self._in_micro_batch:
            if not self.explicit:
                self._weight, self._several = 1.0, False
                self._open()
                self._implicit = True
            self._call_when_backward_ends()
        if not self._in_micro_batch:
            return
        require_dense([gradient])
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._totals is not None:
            total = self._totals.get(parameter)
            self._totals[parameter] = gradient.clone() if total is None else total.add_(gradient)
            return
        self._emit(parameter, self.guard.added_by(parameter, gradient))
        self.guard.after_report(parameter, gradient)

    def _call_when_backward_ends(self) -> None:
        """Queues a callback that the autograd engine keeps alive until the backward ends or fails.

        It queues another, which runs after those that DDP and FSDP2 queued to finish `.grad`.
        """
        ended = self._backward_ended if self._implicit else self._foreign_backward_ended
        self._backward = current_backward()
        last = functools.partial(ended)  # an object of this backward alone
        self._end_callback = weakref.ref(last, weak_method(self._backward_gone))
        queue = Variable._execution_engine.queue_callback
        queue(functools.partial(queue, last))

    @_disable_dynamo
    @hands_errors_over
    def _backward_ended(self) -> None:
        if self.guard.stamps_before == self.guard.stamps() and not self.guard.grad_may_wait:
            self._refuse_autograd_grad()
        self._close()

    def _require_over(self) -> None:
        if current_backward() < 0:
            self._end_callback = None

    def _backward_gone(self, backward: object) -> None:
        """A backward has ended, or failed in the micro-batch that it opened."""
        if self._implicit and backward is self._end_callback:
            self._forget_groups()

    @_disable_dynamo
    @hands_errors_over
    def _foreign_backward_ended(self) -> None:
        self.foreign_backward |= self.guard.changed_by_foreign_backward()

    def _refuse_autograd_grad(self) -> None:
        self.restart()
        if are_freed(self.parameters):
            raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
        self.require_no_step_in_backward()
        raise GradientError(
            "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
            "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch; "
            "zero the gradients and repeat the step"
        )


def are_freed(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine freed the memory of a parameter that it had gathered for a forward."""
    return any(p.numel() and not p.untyped_storage().size() for p in parameters)
