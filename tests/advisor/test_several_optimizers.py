"""Trainings with several optimizers: how the program names them, and a composite's own parts."""

import pytest
import torch
from torch.optim import SGD, AdamW, Muon, Optimizer

import bigbatch as bb
from advised_loops import advised, batches, loss_of, network, plain_step
from bigbatch.advisor.observations import Limits
from bigbatch.advisor.training_observer import TrainingObserver


def both(model):
    return Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02), AdamW(
        [p for p in model.parameters() if p.ndim < 2], lr=3e-4
    )


def in_a_list(model):
    optimizers = [*both(model)]
    for batch in batches():
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def in_a_dict(model):
    by_name = dict(zip("ab", both(model), strict=True))
    for batch in batches():
        loss_of(model, batch).backward()
        for optimizer in by_name.values():
            optimizer.step()
            optimizer.zero_grad()


def by_names(model):
    muon, adamw = both(model)
    for batch in batches():
        loss_of(model, batch).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()


def in_a_function(model):
    def step():
        for each in (both_of_them[0], both_of_them[1]):
            each.step()
            each.zero_grad()

    both_of_them = both(model)
    for batch in batches():
        loss_of(model, batch).backward()
        step()


class Trainer:
    def __init__(self, model):
        self.model = model
        self.hidden, self.rest = both(model)

    def __call__(self):
        for batch in batches():
            loss_of(self.model, batch).backward()
            for step in (self.hidden.step, self.rest.step, self.model.zero_grad):
                step()


def in_an_object(model):
    Trainer(model)()


def nowhere(model):
    steps = [each.step for each in both(model)]
    for batch in batches():
        loss_of(model, batch).backward()
        for step in (*steps, model.zero_grad):
            step()


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (in_a_list, "*optimizers"),
        (in_a_dict, "*by_name.values()"),
        (by_names, "muon, adamw"),
        (in_a_function, "*both_of_them"),
        (in_an_object, "self.hidden, self.rest"),
        (nowhere, "..."),
    ],
)
def test_the_programs_own_names_are_found(train, names):
    model = network()
    observer = TrainingObserver(Limits(steps=None, seconds=None, groups=8))
    with observer:
        train(model)
    found = observer.observations.found
    assert "" == observer.observations.refusal
    assert (names, "Muon and AdamW") == (found.composite, found.optimizer)
    assert {"Muon": (0.02,), "AdamW": (3e-4,)} == found.lr


class Container(Optimizer):
    """As torchtitan's OptimizersContainer: its own groups are copies that no step reads."""

    def __init__(self, *optimizers):
        self.optimizers = [*optimizers]
        everything = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        super().__init__(everything, {"lr": 99.0})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("kind", [bb.Composite, Container])
def test_one_of_several_is_advised_by_the_rates_of_each(kind):
    torch.manual_seed(0)
    model = network()
    optimizer = kind(SGD(model[0].parameters(), lr=0.05), AdamW(model[2].parameters(), lr=1e-3))
    observations = advised(model, optimizer, plain_step).observations
    assert "" == observations.refusal
    assert ("SGD and AdamW", "") == (observations.found.optimizer, observations.found.composite)
    assert {"SGD": (0.05,), "AdamW": (1e-3,)} == observations.found.lr
