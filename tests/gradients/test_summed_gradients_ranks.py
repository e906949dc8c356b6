"""Gradients that fully_shard adds up over ranks and does not divide, as torchtitan sets it."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from bigbatch import GradientMeter
from bigbatch.errors import GradientError

TOKENS = [[3, 8, 5], [1, 2, 7]]  # of each rank's backwards


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def micro_batch(rank, number, tokens):
    draw = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(tokens, 5, generator=draw, dtype=torch.float64)


def loss_sum(model, x):
    return model(x).square().sum()


def sharded(factor):
    model = network()
    fully_shard(model[0])
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that scales
            if factor is not None:
                module.set_gradient_divide_factor(factor)
    return model


def measured(rank, ranks, factor):
    """Each loss is a sum over tokens, divided by those of the step on all ranks."""
    model, of_step = sharded(factor), sum(map(sum, TOKENS))
    with GradientMeter(model) as meter:
        for number, n in enumerate(TOKENS[rank]):
            (loss_sum(model, micro_batch(rank, number, n)) / of_step).backward()
        try:
            return meter.read(samples=TOKENS[rank])
        except GradientError as error:
            return str(error)


def expected():
    """Signal and noise from the definition, of whole gradients in one process."""
    model, gradients, sizes = network(), [], []
    for rank, of_rank in enumerate(TOKENS):
        for number, n in enumerate(of_rank):
            loss = loss_sum(model, micro_batch(rank, number, n)) / n
            found = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(torch.cat([gradient.flatten() for gradient in found]))
            sizes.append(n)
    n, g = torch.tensor(sizes, dtype=torch.float64), torch.stack(gradients)
    mean = n @ g / n.sum()
    noise = float((n * (g - mean).square().sum(1)).sum() / (len(sizes) - 1))
    return float(mean.square().sum()) - noise / sum(sizes), noise


@pytest.mark.cpu
def test_summed_gradients_are_those_of_the_step_whatever_each_rank_has(ranks):
    signal, noise = expected()
    for statistics in ranks(2)(measured, 1.0):
        assert pytest.approx(signal, rel=1e-11) == statistics.grad_sqnorm
        assert pytest.approx(noise, rel=1e-11) == statistics.grad_variance
        assert sum(map(sum, TOKENS)) == statistics.samples


@pytest.mark.cpu
def test_unequal_tokens_are_refused_where_ranks_are_averaged(ranks):
    for message in ranks(2)(measured, None):
        assert "the ranks have [16.0, 10.0] samples" in message
