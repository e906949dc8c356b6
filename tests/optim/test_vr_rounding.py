"""Where a gradient is nothing but rounding, r compares rounding errors; nothing else does."""

import pytest
import torch
from torch import nn

from bigbatch.optim import VRAdam

SEED, WIDTH = 0, 8


class Attention(nn.Module):
    """The bias of its keys adds the same number to every score, so the softmax does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0]).square().mean()


def without_keys(gradient):
    queries, keys, values = gradient.chunk(3)
    return torch.cat([queries, torch.zeros_like(keys), values])


def trained(*, flipped, keys):
    """Weights after 20 steps; `flipped` gives a micro-batch the same samples in another order."""
    torch.manual_seed(SEED)
    model = Attention().double()
    if not keys:
        model.attention.in_proj_bias.register_hook(without_keys)
    optimizer = VRAdam(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(SEED)
    for _ in range(20):
        for _ in range(8):
            x = torch.randn(4, 6, WIDTH, generator=draw, dtype=torch.float64)
            (model(x.flip(0) if flipped else x) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("keys", [True, False], ids=["biases of keys", "none"])
def test_a_gradient_of_rounding_alone_owns_a_part_of_its_layers_mean(keys):
    one, other = (trained(flipped=flipped, keys=keys) for flipped in (False, True))
    apart = max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
    assert apart > 1e-6 if keys else apart < 1e-12
