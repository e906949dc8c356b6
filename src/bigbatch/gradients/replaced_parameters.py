"""Checks that the watched parameters are still the model's own."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.auto import is_sharded

NO_GRADIENT = (
    "no parameter that is trained or measured got a gradient, so the step would train nothing: "
    "were parameters replaced after the optimizer or the meter was made, or is the loss that of "
    "another model? Build the optimizer, and AdaptiveBatch or the GradientMeter, from the model "
    "whose loss it is"
)

_NAMED = 3  # parameters named in an error


class ReplacementCheck:
    """Remembers every slot of a model that holds a parameter or a module, and its value.

    `require_held` compares identities alone, and walks through the model only where one has
    changed. FSDP2 puts unsharded parameters in the place of its shards for a forward and a
    backward; that is no change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[tuple[int, str], Any] = {}  # (id of the dict, name) -> value
        self._record()

    def require_held(self, watched: Iterable[Tensor]) -> None:
        """Raises GradientError if a watched parameter was replaced by an unwatched one.

        A parameter that was tied to another one since, or removed with its layer, is not replaced.
        """
        if all(map(operator.is_, map(dict.get, self._dicts, self._slot_names), self._found)):
            return
        watched = list(watched)
        parameters = self._parameters()
        lost_names = [self._names[p] for p in watched if p in self._names and p not in parameters]
        known_parameters = set(watched) | set(self._names)
        if lost_names and any(p not in known_parameters for p in parameters):
            raise GradientError(_replaced_message(lost_names))
        self._record()

    def _record(self) -> None:
        """Remembers the model as it is now."""
        self._names = self._parameters()
        found = list(self._iterate_slots())
        self._dicts = [slots for slots, _, _ in found]
        self._slot_names = [name for _, name, _ in found]
        self._found = [value for _, _, value in found]
        self._values = {(id(slots), name): value for slots, name, value in found}

    def _parameters(self) -> dict[Tensor, str]:
        """Every parameter, with its first name."""
        return {
            value: f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules()
            for _, name, value in self._contents(module._parameters)
            if value is not None
        }

    def _iterate_slots(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module in self._model.modules():
            yield from self._contents(module._parameters)
            yield from self._contents(module._modules)

    def _contents(self, slots: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The slots of a module; a shard stands for the parameter that FSDP2 gathered from it."""
        for name, value in slots.items() if isinstance(slots, dict) else ():
            previous = self._values.get((id(slots), name))
            gathered = value is not previous and is_sharded(previous) and not is_sharded(value)
            yield slots, name, previous if gathered and value is not None else value


def has_gradient(source: GradientSource) -> bool:
    """Whether this rank has a part of any gradient; one that is zero counts."""
    return bool(source.local_grads())


def _replaced_message(names: list[str]) -> str:
    dots = ", ..." if len(names) > _NAMED else ""
    return (
        f"{len(names)} of the parameters that are trained or measured ({', '.join(names[:_NAMED])}"
        f"{dots}) are not the model's any more, which holds others: a layer was replaced, or "
        "load_state_dict(assign=True) called; build the optimizer, and AdaptiveBatch or the "
        "GradientMeter, after that, or leave assign=True out"
    )
