"""Base optimizers of others: what they keep in groups and state, VarianceReduced leaves theirs."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

from bigbatch.errors import SettingError
from bigbatch.optim import VarianceReduced
from tensors import same

pytestmark = pytest.mark.filterwarnings("ignore:k = [2-7] micro-batches:UserWarning")


class Counting(SGD):
    """Counts steps in the state, under no parameter, as MADGRAD and SPAM do."""

    @torch.no_grad()
    def step(self, closure=None):
        steps = self.state.setdefault("steps", torch.tensor([0]))
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + steps.item())
        steps += 1
        return super().step(closure)


class Damped(SGD):
    """Has a setting that is called as one of VarianceReduced's, as Mars and AdaBound have."""

    def __init__(self, parameters, lr, **own):
        super().__init__(parameters, lr)
        self.defaults.update(own)
        for group in self.param_groups:
            group.update(own)


def optimizer_of(model):
    return VarianceReduced(Counting(model.parameters(), lr=0.1, momentum=0.9), beta3=0.9)


def train(model, optimizer, steps):
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.randn(2, 3, generator=draw)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("before", [0, 1, 2])  # steps; a count of 0 is not left out
def test_what_a_base_keeps_under_no_parameter_is_saved_and_loaded(before):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    optimizer.base.state["steps"] = torch.tensor([0])
    train(model, optimizer, before)
    other = copy.deepcopy(model)
    resumed = optimizer_of(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [before] == resumed.state_dict()["state"]["steps"].tolist()
    train(model, optimizer, 2)
    train(other, resumed, 2)
    assert same(model, other)


@pytest.mark.parametrize(("name", "value"), [("gamma", 0.025), ("beta3", None), ("r_max", 2.0)])
def test_a_base_with_a_setting_of_the_same_name_is_refused(name, value):
    base = Damped(nn.Linear(3, 2).parameters(), 0.1, **{name: value})
    with pytest.raises(SettingError, match=f"Damped has {name} of its own in its parameter groups"):
        VarianceReduced(base, gamma=0.5)
