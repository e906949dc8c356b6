"""The noise scale of a small GPT on tiny Shakespeare, as nanoGNS prints it.

nanoGNS prints one line for its character model after 250 steps of 64 windows. A network of the same
shape with the same settings is trained, and the meter reads it; docs/known-answers.md says what is
the same and what is not.

Source:
    github.com/CerebrasResearch/nanoGNS, exact/: README.md, train.py, model.py, gns-analysis.py;
    nanoGPT's config/train_shakespeare_char.py.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from real_data import FOLDER, needs

LENGTH, WIDTH, DEPTH, HEADS, DROPOUT = 256, 384, 6, 6, 0.2
BATCH = 64  # windows of a step of theirs
LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0
WARMUP_TOKENS = 4000 * 12 * 5 * 8 * 1024  # the default of train.py, which the config keeps
MICRO_BATCHES = 8
WINDOW = -1 / math.log(0.95)  # steps: a step's weight is .95 to the power of its age
# end, steps of theirs that one of ours stands for, windows: the noise scale is below 2 windows
# before step 120, so that smaller batches do as well there
PHASES = ((150, 5, 16), (200, 2, 32), (250, 1, 32))


class Block(nn.Module):
    """Causal attention and a GELU layer, each after a LayerNorm and with a residual; no biases."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + self.drop(self.mix(read.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))


class ShakespeareGPT(nn.Module):
    """10.7 M parameters; the head is the character embedding."""

    def __init__(self, characters):
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * DEPTH))
            elif weight.ndim > 1:
                nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)

    def forward(self, codes):
        x = self.characters(codes) + self.positions(torch.arange(codes.shape[1]))
        return functional.linear(self.norm(self.blocks(self.drop(x))), self.characters.weight)


def adamw_of(model):
    """AdamW with decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors}]
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def set_stride(optimizer, stride, number):
    """The decay of the moments for steps of this stride, and their bias correction so far."""
    for group in optimizer.param_groups:
        group["betas"] = tuple(beta**stride for beta in BETAS)
    for state in optimizer.state.values():
        state["step"].fill_(number / stride)


def train(text, phases, seed):
    """(number, loss, statistics) of each step; the meter leaves out the embedding, as nanoGNS."""
    places = {character: place for place, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([places[character] for character in text[: int(0.9 * len(text))]])
    torch.manual_seed(seed)
    model = ShakespeareGPT(len(places))
    optimizer, number = adamw_of(model), 0
    with GradientMeter(
        [p for p in model.parameters() if p is not model.characters.weight]
    ) as meter:
        for end, stride, batch in phases:
            set_stride(optimizer, stride, number)
            while number < end:
                rate = LR * (number + (stride - 1) / 2) * BATCH * LENGTH / WARMUP_TOKENS
                for group in optimizer.param_groups:
                    group["lr"] = stride * rate
                starts, total = torch.randint(len(codes) - LENGTH, (batch, 1)), 0.0
                for part in codes[starts + torch.arange(LENGTH + 1)].chunk(MICRO_BATCHES):
                    logits = model(part[:, :-1]).flatten(0, 1)
                    loss = functional.cross_entropy(logits, part[:, 1:].flatten()) / MICRO_BATCHES
                    loss.backward()
                    total += loss.item()
                yield number, total, meter.read([batch // MICRO_BATCHES] * MICRO_BATCHES)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                number += stride


@pytest.mark.release  # nine minutes of a core
@needs("tinyshakespeare")
def test_the_line_of_nanogns():
    text = (FOLDER / "tinyshakespeare" / "input.txt").read_text()
    average, losses = NoiseAverage(WINDOW, "steps"), {}
    for number, loss, statistics in train(text, PHASES, seed=0):
        losses[number] = loss
        if number >= PHASES[-2][0]:  # 93 % of the weight of an average from the start
            smooth = average.update(statistics)
    # other weights and windows; the noise scale doubles in 50 steps
    assert 21.9598 / 2 < smooth.noise_scale < 21.9598 * 2
    assert 0.9331 / 2 < smooth.grad_sqnorm < 0.9331 * 2
    assert 20.4898 / 1.5 < smooth.grad_variance < 20.4898 * 1.5
    assert pytest.approx(3.8537, abs=0.1) == losses[90]  # first losses of seeds differ by .1


@pytest.mark.thorough
def test_the_network_has_the_published_size_and_is_measured():
    assert 10_745_088 == sum(p.numel() for p in ShakespeareGPT(65).parameters())
    text = "the quick brown fox jumps over the lazy dog. " * 40
    steps = list(train(text, ((2, 1, 8),), seed=0))
    assert [0, 1] == [number for number, *_ in steps]
    assert all(statistics.grad_variance > 0 for *_, statistics in steps)
    # tied weights of deviation .02 prefer the character itself, by some tenths
    assert pytest.approx(math.log(len(set(text))), abs=0.3) == steps[0][1]
