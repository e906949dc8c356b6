"""Warnings of what makes r doubtful, each once."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.optim.apply_gsnr import AppliedGsnr

_RANGE_EVERY = 16  # steps; on a GPU it waits
_FEW = 8  # below it the ratio's variance is infinite or nearly so


class GsnrWarnings:
    """Warns of micro-batches that all agree, that are few, or whose M2 is out of range."""

    def __init__(self) -> None:
        self._steps = 0
        self._warned_of_range = False

    @property
    def checks_agreement(self) -> bool:
        """Whether this step looks for gradients that all agree, which waits for the device."""
        return not self._steps

    @property
    def checks_range(self) -> bool:
        """Whether it looks for layers whose M2 is out of range, which waits too."""
        return self._steps % _RANGE_EVERY == 0 and not self._warned_of_range

    def warn(self, done: AppliedGsnr, named: Callable[[], list[tuple[str, Tensor]]]) -> None:
        """Warns of what is new.

        Args:
            done: in this step.
            named: returns the parameters with their names.
        """
        if not self._steps and done.agree and not done.out_of_range:
            self._warn(
                "every micro-batch has the same gradient, so r says nothing; is it the same "
                "data, or a gradient that was averaged already?"
            )
        if not self._steps and done.k < _FEW:
            self._warn(
                f"k = {done.k} micro-batches give a poor signal-to-noise ratio: pure noise has a "
                f"mean ratio of 1 / (k - 3); use k >= {_FEW}"
            )
        if done.out_of_range and not self._warned_of_range:
            self._warned_of_range = True
            self._warn(_out_of_range(done.out_of_range, named()))
        self._steps += 1

    def _warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=8)  # of who called step()


def _out_of_range(layers: Sequence[Tensor], named: list[tuple[str, Tensor]]) -> str:
    name = next(name for name, p in named if p is layers[0])
    dtype = sum_dtype(layers[0].dtype)
    least, most = math.sqrt(torch.finfo(dtype).tiny), math.sqrt(torch.finfo(dtype).max)
    return (
        f"r is not right for {len(set(layers))} layers, {name!r} the first: their micro-batch "
        f"gradients differ by less than {least:.0e} or more than {most:.0e}, and the squares of "
        f"that leave {dtype}'s range; multiply the loss by a constant, as a GradScaler does: r "
        "does not change with it"
    )
