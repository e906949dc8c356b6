"""Saves everything that a trial of some steps changes, and restores it."""

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.data.rng_state import random_state, restore_random_state
from bigbatch.errors import SettingError
from bigbatch.gradients import MADE_LATE, are_freed, parameters_of
from bigbatch.optim.optimizer_settings import parts_of
from bigbatch.training.training_parts import trained_parameters


class ForwardSnapshot(AbstractContextManager[object]):
    """What forwards of a model may change: buffers, training modes, random states."""

    def __init__(self, model: nn.Module) -> None:
        self._random = random_state()
        self._modules = [(m, m.training, dict(m._buffers)) for m in model.modules()]
        self._values = _copies([*model.buffers()])

    @torch.no_grad()
    def restore(self) -> None:
        """Restores everything; may be called repeatedly."""
        for module, training, buffers in self._modules:
            module.training = training
            module._buffers.update(buffers)
        for tensor, value in self._values:
            tensor.copy_(value)
        restore_random_state(self._random)

    def __exit__(self, *_: object) -> None:
        self.restore()


class TrainingSnapshot(ForwardSnapshot):
    """Everything that a trial changes; tensors are copied to the CPU."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model)
        self._model, self._optimizer = model, optimizer
        self._fsdp_roots = _fsdp_roots(model)
        if any(not hasattr(root, "reset_iter_state") for root in self._fsdp_roots):
            raise SettingError(
                f"under fully_shard torch {torch.__version__} cannot continue after an error; "
                "install torch 2.13"
            )
        self._state = tree_map(lambda leaf: leaf, optimizer.state_dict())  # copies the containers
        self._attributes = [(each, dict(each)) for each in _attributes(optimizer, depth=2)]
        groups = [(part, part.param_groups) for part in parts_of(optimizer)]
        self._groups = [(part, own, [(g, dict(g)) for g in own]) for part, own in groups]
        parameters = dict.fromkeys([*parameters_of(model), *trained_parameters(optimizer)])
        if are_freed(parameters):
            raise SettingError(f"the optimizer holds other parameters than the model: {MADE_LATE}")
        self._parameters = [
            (p, p.requires_grad, None if p.grad is None else p.grad.cpu()) for p in parameters
        ]
        attributes = [vars(part) for part, _ in groups]
        self._values += _copies(tree_leaves([[*parameters], self._state, attributes]))

    def restore(self) -> None:
        """Restores everything; may be called repeatedly."""
        self._model.zero_grad()  # of gathered parameters too, which a reset forgets
        for root in self._fsdp_roots:
            with suppress(AttributeError):  # no forward has begun, so there is nothing to reset
                root.reset_iter_state()
        for attributes, saved in self._attributes:
            attributes.clear()
            attributes.update(saved)
        for parameter, requires_grad, grad in self._parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None if grad is None else grad.to(parameter.device)
        super().restore()
        self._optimizer.load_state_dict(self._state)
        for part, own, groups in self._groups:
            for loaded, (group, saved) in zip(part.param_groups, groups, strict=True):
                loaded.update(saved)  # loading has copied a learning rate that is a tensor
                group.clear()
                group.update(loaded)
            if "param_groups" in vars(part):  # a wrapper may forward those of another
                own[:] = [group for group, _ in groups]
                part.param_groups = own


def _attributes(thing: Any, depth: int) -> list[dict[str, Any]]:
    """The attributes of an object, and of the objects in them."""
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is not dict:
        return []
    values = attributes.values() if depth else ()
    parts = [p for value in values for p in (value if isinstance(value, list) else [value])]
    return [attributes, *(nested for part in parts for nested in _attributes(part, depth - 1))]


def _fsdp_roots(module: nn.Module) -> list[Any]:
    """The outermost modules of fully_shard, known by a method that only they have."""
    if hasattr(module, "set_requires_gradient_sync"):
        return [module]
    return [root for child in module.children() for root in _fsdp_roots(child)]


def _copies(leaves: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """The tensors among the leaves, or this rank's shards of them, and copies on the CPU."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values()
    shards = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [(shard.detach(), shard.detach().to("cpu", copy=True)) for shard in shards]
