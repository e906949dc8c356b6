"""Third-party optimizers: short versions of schedule-free and Lookahead; timm's LARS and LAMB."""

import importlib
import sys
from collections import OrderedDict, defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch


class ScheduleFree(torch.optim.Optimizer):
    """Trains y, which is between z, the iterate of SGD, and x, the average for evaluation."""

    def __init__(self, parameters, lr=0.05, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "training": False, "steps": 0})

    def train(self):
        self._set_training(True)

    def eval(self):
        self._set_training(False)

    @torch.no_grad()
    def _set_training(self, training):
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - beta if training else 1 - 1 / beta)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["training"]:
            raise RuntimeError("step() in eval mode; call train() first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] += 1
            share, beta, lr = 1 / group["steps"], group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share).add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                    z.sub_(p.grad, alpha=lr)
        return loss


class Lookahead(torch.optim.Optimizer):
    """Averages the slow weights and those of an inner optimizer in every other step.

    As in timm, `Optimizer.__init__` is not called, and the state dict has a form of its own.
    """

    def __init__(self, optimizer, hooks=OrderedDict):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks(), hooks()
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, defaultdict(dict)
        self.steps = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for p, state in self.state.items():
                p.lerp_(state["slow"], 0.5)
                state["slow"].copy_(p)
        return loss

    def state_dict(self):
        slow = [state["slow"] for state in self.state.values()]
        return {"slow": slow, "steps": self.steps, "inside": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["inside"])
        self.steps = state_dict["steps"]
        for state, slow in zip(self.state.values(), state_dict["slow"], strict=True):
            state["slow"].copy_(slow)


def timm_optimizer(name):
    """LARS or LAMB of timm, imported without the rest of timm, which needs torchvision."""
    package = ModuleType("_timm_optim")
    package.__path__ = [str(Path(find_spec("timm").origin).parent / "optim")]
    sys.modules.setdefault(package.__name__, package)
    module = importlib.import_module(f"{package.__name__}.{name.lower()}")
    return getattr(module, name.capitalize())
