"""Every way in which torch uses a parameter, against a float64 loop of backwards on slices."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from group_gradients import Function, error, expected_noise, scatter_of_sketches

torch.set_num_threads(1)
CLOSE = 1e-9  # of float64 sums in another order
D = 12


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64) * 0.5


def rows(*shape):
    """A maker of one input of so many samples."""
    return lambda n: (normal(n, *shape),)


def tokens(*shape, vocabulary=11):
    return lambda n: (torch.randint(vocabulary, (n, *shape)),)


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(D, 10)), nn.Parameter(normal(10))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, D), self.weight)
        return flat.view(*x.shape[:-1], 10)


class Attention(nn.Module):
    """Takes and gives samples in dimension 0, whatever its attention takes."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, **options)

    def forward(self, x, memory=None):
        k = v = x if memory is None else memory
        k, v = k[..., : self.attention.kdim], v[..., : self.attention.vdim]
        if not self.attention.batch_first:
            x, k, v = (t.transpose(0, 1) for t in (x, k, v))
        output = self.attention(x, k, v, need_weights=False)[0]
        return output if self.attention.batch_first else output.transpose(0, 1)


class Tied(nn.Module):
    """Tokens and positions, one layer, and a head that has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(13, 10), nn.Embedding(5, 10)
        self.layer, self.norm = nn.Linear(10, 10), nn.LayerNorm(10)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(torch.tanh(self.layer(x))))


def encoder(**options):
    return nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, **options)


def layers(bias=True):
    return nn.Sequential(nn.Linear(D, 10, bias=bias), nn.Tanh(), nn.Linear(10, D, bias=bias))


def repeated(times):
    def forward(self, x):
        for _ in range(times):
            x = torch.tanh(self.layer(x))
        return x

    return lambda: Function(forward, layer=nn.Linear(D, D))


def slices(self, x):
    q, k, v = self.weight.chunk(3)
    a, b, c = self.bias.split(D)
    return torch.tanh(F.linear(x, q, a)) * F.linear(x, k, b) + F.linear(x, v, c)


def class_token(self, x):
    return self.layer(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions)


def frozen():
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 9))
    model[2].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


def unused():
    return Function(lambda self, x: self.used(x), used=nn.Linear(D, D), unused=nn.Linear(3, 3))


def low_rank(forward, *, frozen=True):
    def make():
        weight = nn.Parameter(normal(D, D), requires_grad=not frozen)
        return Function(forward, w=weight, a=normal(D, 3), b=normal(3, D))

    return make


CALLS = {
    # modules
    "Linear": (layers, rows(D)),
    "Linear-3": (layers, rows(3, D)),
    "Linear-4": (layers, rows(2, 3, D)),
    "Linear-no-bias": (lambda: layers(bias=False), rows(D)),
    "Linear-3-no-bias": (lambda: layers(bias=False), rows(3, D)),
    "Linear-one-output": (lambda: nn.Linear(D, 1), rows(D)),
    "Bilinear": (lambda: Function(lambda s, x: s.m(x, x.flip(1)), m=nn.Bilinear(D, D, 9)), rows(D)),
    "Conv1d": (lambda: nn.Conv1d(9, 10, 3, stride=2, padding=1), rows(9, 7)),
    "Conv1d-circular": (
        lambda: nn.Conv1d(9, 10, 3, padding=1, padding_mode="circular"),
        rows(9, 7),
    ),
    "Conv2d": (lambda: nn.Conv2d(9, 11, 3, stride=2, padding=1, dilation=2), rows(9, 6, 6)),
    "Conv2d-no-bias": (lambda: nn.Conv2d(3, 10, 3, bias=False), rows(3, 5, 5)),
    "Conv2d-groups": (lambda: nn.Conv2d(12, 10, 3, groups=2, padding="same"), rows(12, 5, 5)),
    "Conv2d-depthwise": (lambda: nn.Conv2d(12, 12, 3, groups=12), rows(12, 5, 5)),
    "Conv2d-1x1": (lambda: nn.Conv2d(9, 10, 1), rows(9, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(9, 10, 2), rows(9, 3, 3, 4)),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(9, 10, 3, stride=2, output_padding=1),
        rows(9, 5),
    ),
    "ConvTranspose2d-groups": (
        lambda: nn.ConvTranspose2d(12, 10, 3, stride=2, groups=2, bias=False),
        rows(12, 4, 4),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(9, 10, 2), rows(9, 2, 3, 3)),
    "Embedding": (lambda: nn.Embedding(11, 10), tokens()),
    "Embedding-padding": (lambda: nn.Embedding(11, 10, padding_idx=2), tokens(5)),
    "Embedding-3": (lambda: nn.Embedding(11, 10), tokens(2, 3)),
    "Embedding-choices": (  # of rows of tokens, as for questions with several answers
        lambda: Function(
            lambda s, t: s.m(t.flatten(0, 1)).view(*t.shape, -1), m=nn.Embedding(11, 10)
        ),
        tokens(2, 3),
    ),
    "Embedding-flattened": (
        lambda: Function(lambda s, t: s.m(t.flatten()).view(*t.shape, -1), m=nn.Embedding(11, 10)),
        tokens(5),
    ),
    "Embedding-tied": (Tied, tokens(5, vocabulary=13)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(11, 10), tokens(5)),
    "LayerNorm": (lambda: nn.LayerNorm(D), rows(D)),
    "LayerNorm-3": (lambda: nn.LayerNorm(D), rows(4, D)),
    "LayerNorm-two-dimensions": (lambda: nn.LayerNorm((4, D)), rows(2, 4, D)),
    "LayerNorm-no-bias": (lambda: nn.LayerNorm(D, bias=False), rows(4, D)),
    "RMSNorm": (lambda: nn.RMSNorm(D), rows(4, D)),
    "RMSNorm-two-dimensions": (lambda: nn.RMSNorm((4, D)), rows(4, D)),
    "GroupNorm": (lambda: nn.GroupNorm(4, 12), rows(12, 5, 5)),
    "GroupNorm-vectors": (lambda: nn.GroupNorm(4, 12), rows(12)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(12, affine=True), rows(12, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(12, affine=True), rows(12, 5, 5)),
    "BatchNorm-eval": (lambda: nn.BatchNorm2d(12).eval(), rows(12, 5, 5)),
    "PReLU": (lambda: nn.PReLU(12), rows(12, 5)),
    "LSTM": (
        lambda: Function(lambda s, x: s.m(x)[0], m=nn.LSTM(D, 9, batch_first=True)),
        rows(3, D),
    ),
    "GRUCell": (lambda: nn.GRUCell(D, 9), rows(D)),
    "MultiheadAttention": (lambda: Attention(batch_first=True), rows(5, D)),
    "MultiheadAttention-time-first": (Attention, rows(5, D)),
    "MultiheadAttention-no-bias": (lambda: Attention(batch_first=True, bias=False), rows(5, D)),
    "MultiheadAttention-bias-kv": (lambda: Attention(add_bias_kv=True), rows(5, D)),
    "MultiheadAttention-other-keys": (
        lambda: Attention(batch_first=True, kdim=10, vdim=9),
        lambda n: (normal(n, 5, D), normal(n, 4, D)),
    ),
    "TransformerEncoderLayer": (lambda: encoder(batch_first=True), rows(5, D)),
    "TransformerEncoderLayer-norm-first": (
        lambda: encoder(batch_first=True, norm_first=True, activation="gelu"),
        rows(5, D),
    ),
    "TransformerEncoderLayer-time-first": (
        lambda: Function(lambda s, x: s.m(x.transpose(0, 1)).transpose(0, 1), m=encoder()),
        rows(5, D),
    ),
    # functions
    "F.linear": (
        lambda: Function(lambda s, x: F.linear(x, s.w, s.b), w=normal(10, D), b=normal(10)),
        rows(5, D),
    ),
    "F.conv2d": (
        lambda: Function(lambda s, x: F.conv2d(x, s.w, s.b), w=normal(10, 9, 3, 3), b=normal(10)),
        rows(9, 4, 4),
    ),
    "matmul": (lambda: Function(lambda s, x: x @ s.w, w=normal(D, 10)), rows(5, D)),
    "matmul-transposed": (lambda: Function(lambda s, x: x @ s.w.t(), w=normal(10, D)), rows(5, D)),
    "matmul-left": (lambda: Function(lambda s, x: (s.w @ x.t()).t(), w=normal(10, D)), rows(D)),
    "matmul-left-3": (lambda: Function(lambda s, x: s.w @ x, w=normal(10, D)), rows(D, 5)),
    "matmul-vector": (lambda: Function(lambda s, x: x @ s.w, w=normal(D)), rows(5, D)),
    "addmm": (Conv1D, rows(5, D)),
    "addmm-alpha": (
        lambda: Function(
            lambda s, x: torch.addmm(s.b, x, s.w, alpha=0.5, beta=2), w=normal(D, 10), b=normal(10)
        ),
        rows(D),
    ),
    "bmm-expanded": (
        lambda: Function(lambda s, x: torch.bmm(x, s.w.expand(len(x), -1, -1)), w=normal(1, D, 10)),
        rows(5, D),
    ),
    "baddbmm": (
        lambda: Function(
            lambda s, x: torch.baddbmm(s.b, x, s.w.expand(len(x), -1, -1)),
            w=normal(1, D, 10),
            b=normal(1, 1, 10),
        ),
        rows(5, D),
    ),
    "einsum": (
        lambda: Function(lambda s, x: torch.einsum("btd,de->bte", x, s.w), w=normal(D, 10)),
        rows(5, D),
    ),
    "einsum-of-samples": (
        lambda: Function(lambda s, x: torch.einsum("bd,de->be", x, s.w), w=normal(D, 10)),
        rows(D),
    ),
    "einsum-heads": (
        lambda: Function(lambda s, x: torch.einsum("btd,dhe->bthe", x, s.w), w=normal(D, 2, 9)),
        rows(5, D),
    ),
    "einsum-experts": (
        lambda: Function(lambda s, x: torch.einsum("bhd,hde->bhe", x, s.w), w=normal(3, D, 10)),
        rows(3, D),
    ),
    "index": (lambda: Function(lambda s, t: s.w[t], w=normal(11, 10)), tokens(5)),
    "one-hot": (
        lambda: Function(lambda s, t: F.one_hot(t, 11).double() @ s.w, w=normal(11, 10)),
        tokens(5),
    ),
    "attention-of-a-query": (
        lambda: Function(
            lambda s, x: F.scaled_dot_product_attention(s.q.expand(len(x), -1, -1), x, x),
            q=normal(3, D),
        ),
        rows(5, D),
    ),
    # element by element
    "scale-and-shift": (
        lambda: Function(lambda s, x: x * s.g + s.b, g=normal(D), b=normal(D)),
        rows(5, D),
    ),
    "subtraction": (
        lambda: Function(
            lambda s, x: s.b - x * s.g - s.c, g=normal(1), b=normal(D), c=normal(5, 1)
        ),
        rows(5, D),
    ),
    "one-number": (
        lambda: Function(lambda s, x: x * s.g + s.b, g=normal(), b=normal()),
        rows(5, D),
    ),
    "division": (lambda: Function(lambda s, x: x / s.g, g=normal(D) + 3), rows(5, D)),
    "power": (lambda: Function(lambda s, x: x.abs().pow(s.g), g=normal(D)), rows(5, D)),
    "addcmul": (
        lambda: Function(lambda s, x: torch.addcmul(s.b, x, s.g), g=normal(D), b=normal(D)),
        rows(5, D),
    ),
    "where": (lambda: Function(lambda s, x: torch.where(x > 0, x, s.g), g=normal(D)), rows(5, D)),
    "LayerScale": (
        lambda: Function(lambda s, x: x + s.g * torch.tanh(s.m(x)), g=normal(D), m=nn.Linear(D, D)),
        rows(5, D),
    ),
    "positions": (lambda: Function(lambda s, x: x + s.p, p=normal(1, 5, D)), rows(5, D)),
    "positions-sliced": (lambda: Function(lambda s, x: x + s.p[:5], p=normal(7, D)), rows(5, D)),
    "class-token": (
        lambda: Function(
            class_token, token=normal(1, 1, D), positions=normal(1, 6, D), layer=nn.Linear(D, D)
        ),
        rows(5, D),
    ),
    "class-token-repeated": (
        lambda: Function(
            lambda s, x: s.m(torch.cat([s.c.repeat(len(x), 1, 1), x], 1)),
            c=normal(1, 1, D),
            m=nn.Linear(D, D),
        ),
        rows(5, D),
    ),
    "temperature": (lambda: Function(lambda s, x: torch.exp(s.t) * x, t=normal()), rows(D)),
    # functions of parameters
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(D, 10)), rows(D)),
    "weight_norm-Conv1d": (lambda: parametrizations.weight_norm(nn.Conv1d(9, 10, 3)), rows(9, 5)),
    "spectral_norm-eval": (
        lambda: parametrizations.spectral_norm(nn.Linear(D, 10)).eval(),
        rows(D),
    ),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(D, 10)), rows(D)),
    "pruned": (
        lambda: Function(lambda s, x: F.linear(x, s.w * (torch.arange(D) % 2)), w=normal(10, D)),
        rows(D),
    ),
    "LoRA": (low_rank(lambda s, x: F.linear(x, s.w) + x @ s.b.t() @ s.a.t()), rows(5, D)),
    "LoRA-merged": (low_rank(lambda s, x: F.linear(x, s.w + s.a @ s.b)), rows(D)),
    "LoRA-of-a-trained-weight": (
        low_rank(lambda s, x: F.linear(x, s.w + s.a @ s.b), frozen=False),
        rows(5, D),
    ),
    "scaled-weight": (
        lambda: Function(lambda s, x: F.linear(x, s.w * s.g), w=normal(10, D), g=normal(1, D)),
        rows(D),
    ),
    "cosine": (
        lambda: Function(lambda s, x: F.linear(F.normalize(x), F.normalize(s.w)), w=normal(10, D)),
        rows(D),
    ),
    "slices": (lambda: Function(slices, weight=normal(3 * D, D), bias=normal(3 * D)), rows(5, D)),
    "layer-of-a-parameter": (
        lambda: Function(lambda s, x: x @ s.m(s.p).mean(0), p=normal(8, 5), m=nn.Linear(5, D)),
        rows(5, D),
    ),
    # several uses
    "twice": (repeated(2), rows(D)),
    "three-times": (repeated(3), rows(5, D)),
    "frozen": (frozen, rows(D)),
    "unused": (unused, rows(D)),
}

# what k divides, and does not; fewer samples than k; as many as D, as outputs, as tokens
SIZES = {"divided": (8, 4), "ragged": (7, 3), "few": (3, 8), "wide": (12, 4), "square": (5, 5)}


def case(call, size):
    make, make_inputs = CALLS[call]
    samples, k = SIZES[size]
    torch.manual_seed(0)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model, make_inputs(samples), k


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", CALLS)
def test_groups_of_one_backward_have_the_gradients_of_a_backward_each(call, size):
    assert error(*case(call, size)) < CLOSE


@pytest.mark.parametrize("call", CALLS)
def test_random_projections_have_the_noise_of_the_groups_on_average(call):
    model, inputs, k = case(call, "ragged")
    expected = expected_noise(model, inputs, k).grad_variance
    mean, deviation = scatter_of_sketches(model, inputs, k, draws=32)
    # of signs that are drawn again in every step; a wrong use is off by far more
    assert pytest.approx(expected, rel=1e-9, abs=4 * deviation / math.sqrt(32)) == mean
