"""Accelerators of any kind, as the simulated one: random states, memory that ends, waiting."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.data.accelerator import Accelerator
from bigbatch.data.rng_state import random_state, restore_random_state, seed_torch
from studies.simulated_device import NAME, simulated_device

pytestmark = pytest.mark.early


def drawn_again(rank, ranks):
    """Numbers of the device, those after its state is restored, and after a seed."""
    simulated_device()
    state = random_state()
    numbers = [torch.rand(3, device=NAME).tolist() for _ in range(3)]
    restore_random_state(state)
    again = [torch.rand(3, device=NAME).tolist() for _ in range(3)]
    seed_torch(1)
    Accelerator().empty_cache()  # of which this kind has none
    return [len(state[NAME]), "cuda" in state], numbers, again


def test_random_states_are_those_of_the_accelerator_that_is_there(on_simulated_device):
    kinds, numbers, again = on_simulated_device(drawn_again)
    assert [1, False] == kinds
    assert numbers == again


def test_without_an_accelerator_a_state_has_none():
    if torch.accelerator.is_available():
        pytest.skip("the process has an accelerator")
    assert {"python", "numpy", "torch"} == set(random_state())
    assert not Accelerator().in_use


def largest(rank, ranks):
    """The largest micro-batch where 24 samples fit and the device has no memory for more."""
    simulated_device()
    model = nn.Linear(4, 1).to(NAME)

    def loss_of(x):
        torch.empty(1 << (46 if len(x) > 24 else 4), device=NAME)
        return model(x.to(NAME)).square().mean()

    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(torch.randn(64, 4), batch_size=16)
    return bb.largest_micro_batch(model, optimizer, loader, loss_of, margin=0)


def test_memory_that_ends_on_a_device_bounds_the_micro_batch(on_simulated_device):
    assert 24 == on_simulated_device(largest)


def advised(rank, ranks):
    """What is found of a training on the device, and its waits by `synchronize`."""
    device = simulated_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1)).to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device.reset()
    with bb.advise(model, optimizer, steps=20) as advice:
        for _ in range(30):
            model(torch.randn(16, 6).to(NAME)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return advice.refusal, advice.found.device, device.waits()["synchronize"]


def test_an_advisor_waits_for_a_device_of_any_kind_and_names_it(on_simulated_device):
    refusal, name, waits = on_simulated_device(advised)
    assert "" == refusal
    assert NAME == name
    assert waits > 10  # before and after each timed backward
