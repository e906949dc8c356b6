"""Random states of an accelerator of any kind, as the simulated one."""

import pytest
import torch

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
