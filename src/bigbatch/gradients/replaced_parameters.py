"""Checks that the watched parameters are still the model's own."""

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bigbatch.errors import GradientError
from bigbatch.gradients.auto import is_sharded

NO_GRADIENT = (
    "no parameter that is trained or measured got a gradient, so the step would train nothing: "
    "were parameters replaced after the optimizer or the meter was made, or is the loss that of "
    "another model? Build the optimizer, and AdaptiveBatch or the GradientMeter, from the model "
    "whose loss it is"
)

_NAMED = 3  # parameters named in an error
_Slots = tuple[list[dict[str, Any]], list[str], list[Any]]  # a module's dict, a key, its value


class ReplacementCheck:
    """Remembers every slot of a model that holds a parameter or a module, and its value.

    FSDP2 puts unsharded parameters in the place of its shards for a step; that is no change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots: _Slots = [], [], []
        self._slots, self._names = self._found()

    def require_held(self, watched: Iterable[Tensor]) -> None:
        """Raises GradientError if a watched parameter was replaced, and not tied or removed."""
        dicts, keys, values = self._slots
        if all(map(operator.is_, map(dict.get, dicts, keys), values)):
            return
        watched, before, (slots, names) = list(watched), self._names, self._found()
        lost_names = [before[p] for p in watched if p in before and p not in names]
        if lost_names and not names.keys() <= {*watched, *before}:
            named = ", ".join(lost_names[:_NAMED]) + (", ..." if len(lost_names) > _NAMED else "")
            raise GradientError(
                f"{len(lost_names)} of the parameters that are trained or measured "
                f"({named}) are not the model's any more, which holds others: a layer was "
                "replaced, or load_state_dict(assign=True) called; build the optimizer, and "
                "AdaptiveBatch or the GradientMeter, after that, or leave assign=True out"
            )
        self._slots, self._names = slots, names

    def _found(self) -> tuple[_Slots, dict[Tensor, str]]:
        """The model's slots now, and its parameters' names; a shard stands for the gathered one."""
        before = {(id(slots), key): value for slots, key, value in zip(*self._slots, strict=True)}
        dicts, keys, values = found = list[dict[str, Any]](), list[str](), list[Any]()
        names: dict[Tensor, str] = {}
        for prefix, module in self._model.named_modules():
            for slots in (module._parameters, module._modules):
                for key, value in slots.items() if isinstance(slots, dict) else ():
                    shard = before.get((id(slots), key))
                    gathered = is_sharded(shard) and _is_gathered(value, shard)
                    dicts.append(slots)
                    keys.append(key)
                    values.append(shard if gathered else value)
                    if isinstance(values[-1], Tensor):
                        names[values[-1]] = f"{prefix}.{key}" if prefix else key
        return found, names


def _is_gathered(value: Any, shard: Any) -> bool:
    """Whether a value is what a forward gathers of a shard: a slice, under tensor parallelism."""
    if not is_sharded(value):
        return value is not None
    return bool(value.device_mesh != shard.device_mesh)
