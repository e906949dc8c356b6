"""Micro-batches that are backwards; taps see a rank's own gradients, before an engine's sums."""

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.grad_guard import require_dense
from bigbatch.gradients.gradient_hooks import (
    current_backward,
    follows,
    hands_errors_over,
    is_nested,
    watching_hook,
    weak_method,
    weakly,
)
from bigbatch.gradients.protocols import MicroBatchGradients
from bigbatch.gradients.source import TWICE, GradientSource

MADE_LATE = (
    "under fully_shard (FSDP2) a forward without backward leaves whole parameters in "
    "model.parameters(), which are not what is trained; make the optimizer before any forward, or "
    "after module.reshard() of every module that fully_shard was called on"
)
_NESTED = (
    "a backward inside another one reached the parameters first (reentrant checkpointing of the "
    "whole model, which use_reentrant=False avoids?), so the end of the micro-batch is unknown; "
    "mark the micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch"
)

_SMALL = 1 << 14  # elements; for fewer, a call costs more than the read
_GATHERED = 128  # small gradients that are reported together


class TappedSource(GradientSource):
    """Watches gradients by hooks, as where an engine writes to `.grad` itself.

    An engine is supported by its hooks, a guard and a reducer; `gradients/ddp.py` is an example.
    """

    keeps_sums = False
    """Whether it has S, the sum of what the complete micro-batches added."""
    gathers = False
    """Whether gradients that hooks see are added up, and reported at the end of a micro-batch."""

    # hooks

    def _attach_hooks(self) -> None:
        """Hooks every parameter that requires a gradient.

        Without subscribers one leaf hook stays on, which shows a backward outside `micro_batch`.
        """
        if self._closed:
            return
        trained = [p for p in self.parameters if p.requires_grad]
        if not self._subscribers:
            trained = trained[-1:] if self.explicit and self.on_leaves else []
        for parameter in trained:
            if parameter not in self._handles:
                self._handles[parameter] = self._register(parameter, parameter)

    def _register(self, leaf: Tensor, parameter: Tensor) -> RemovableHandle:
        """Hooks the leaf of which an engine computes the parameter's gradient."""
        hook = watching_hook(weakly(weak_method(self._on_gradient), parameter))
        return leaf.register_hook(hook)  # type: ignore[no-untyped-call,no-any-return]

    # a micro-batch

    def _open(self) -> None:
        changed = self.guard.open_micro_batch() or self._in_micro_batch
        may_be_zeroed = self.micro_batches and changed and not self.explicit
        if may_be_zeroed and self.guard.is_clean_within_step():
            self._restart()  # the user called zero_grad(), and starts a new step
        if self.micro_batches:
            self._require_undisturbed(changed=changed)
        self._begin_step()
        self._announced = False
        self._reached.clear()
        self._gathered.clear()
        self._in_micro_batch, self.foreign_backward = True, False

    def _require_undisturbed(self, *, changed: bool) -> None:
        """Checks gradients that an engine writes to, without waiting for the device."""
        if self.explicit and (self.foreign_backward or self.guard.all_set_to_none()):
            raise GradientError(
                "a backward of your own changed .grad between two micro-batches, or the gradients "
                "were zeroed there; run it outside the step, and zero them at its end"
            )

    def _close(self) -> None:
        stamps = self.guard.stamps()
        if not any(stamps) and not self.guard.grad_may_wait:
            self.require_no_step_in_backward()
        if self._subscribers:
            self._require_seen(self.guard.written_parameters(stamps))
        self._report_gathered()
        self.guard.accept(stamps)
        self._end_micro_batch()

    def _require_seen(self, written_parameters: list[Tensor]) -> None:
        """An engine may write to the gradient of a parameter that this rank did not reach."""
        if not all(map(self._handles.__contains__, written_parameters)):
            self.restart()
            raise GradientError(
                "a parameter received a gradient that was not seen: it was unfrozen, or its "
                "hooks were removed, after the step began; do that between steps"
            )

    def _emit(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reports a gradient, at once or with others that are small."""
        if id(parameter) in self._reached or parameter in self._gathered:
            raise GradientError(TWICE)
        is_large = gradient.numel() > _SMALL or not gradient.is_cpu
        if is_large or self._reads_at_once:
            total = self._sum_of(parameter)
            sums = None if total is None else [total]
            is_first = self.keeps_sums and total is None
            self._report(MicroBatchGradients([parameter], [gradient], sums, is_first))
            return
        self._gathered[parameter] = gradient
        if len(self._gathered) == _GATHERED:
            self._report_gathered()

    def _report_gathered(self) -> None:
        if self._gathered:
            batch = MicroBatchGradients([*self._gathered], [*self._gathered.values()])
            self._gathered = {}
            self._report(batch)

    # a backward

    @hands_errors_over
    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """A hook reports the gradient of one parameter."""
        if self._in_micro_batch and not self._subscribers:
            return
        self._begin_backward()
        if not self._in_micro_batch or self._hides or self.failed:
            return
        require_dense([gradient])
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._several or self.gathers:
            total = self._gathered.get(parameter)
            self._gathered[parameter] = gradient if total is None else total + gradient
        else:
            self._emit(parameter, gradient)

    def _begin_backward(self) -> None:
        """Opens a micro-batch at the first gradient of a backward, and has its end called."""
        is_open = self._backward is not None and self._backward() is not None
        if is_open and not follows(self._backward_number):
            return
        if self._implicit:
            self._end_failed()
        self._backward_number = current_backward()
        self._watch_backward()
        if not (self._in_micro_batch or self.explicit):
            self._open_implicitly()

    def _watch_backward(self) -> None:
        """Queues what the autograd engine keeps alive until the backward ends or fails.

        It is queued by another callback, to run after those that DDP and FSDP2 queue to finish
        `.grad`. No frame of an error may keep it.
        """
        queue = Variable._execution_engine.queue_callback
        if self._in_micro_batch:
            last: Any = functools.partial(bool)  # does nothing
            self._backward = weakref.ref(last)
        else:
            last = functools.partial(self._backward_ended)
            self._backward = weakref.ref(last, weak_method(self._backward_gone))
            last = functools.partial(queue, last)
        queue(last)

    @hands_errors_over
    def _open_implicitly(self) -> None:
        self._weight, self._several = 1.0, False
        backward = self._backward
        try:
            if is_nested():
                raise GradientError(_NESTED)
            self._open()
        except GradientError:
            self._in_micro_batch = True  # what the backward leaves belongs to no step
            raise
        finally:
            self._implicit, self._backward = True, backward

    @_disable_dynamo
    @hands_errors_over
    def _backward_ended(self) -> None:
        if not self._implicit:
            self.foreign_backward |= self.guard.changed_by_foreign_backward()
        elif self._has_accumulated():
            self._close()
        else:
            if are_freed(self.parameters):
                raise GradientError(f"the parameters were freed in the backward: {MADE_LATE}")
            self.require_no_step_in_backward()
            self._end_autograd_grad()

    def _has_accumulated(self) -> bool:
        """Whether the backward has written to `.grad`, as autograd.grad does not."""
        return self.guard.grad_may_wait or self.guard.stamps_before != self.guard.stamps()

    def _backward_gone(self, backward: object) -> None:
        """A backward has ended, or failed in the micro-batch that it opened.

        On a device a thread of autograd's drops a failed one later, while code of the user runs.
        Then it is abandoned at the next backward, and its groups are forgotten here.
        """
        if self._implicit and backward is self._backward:
            # whether the user's code waits for this; the frame above is that of `weak_method`
            waits = sys._getframe(1).f_back is not None
            (self._abandon if waits else super()._abandon)()

    def _end_autograd_grad(self) -> None:
        """Refuses what its hooks, if not its gradients, have shown to the subscribers."""
        raise GradientError(
            "torch.autograd.grad over the parameters was seen as a micro-batch; mark the "
            "micro-batches with `with meter.micro_batch():`, or train through AdaptiveBatch; "
            "zero the gradients and repeat the step"
        )


def are_freed(parameters: Iterable[Tensor]) -> bool:
    """Whether an engine freed the memory of a parameter that it had gathered for a forward."""
    return any(p.numel() and not p.untyped_storage().size() for p in parameters)
