"""The noise scale of a small GPT on tiny Shakespeare, as nanoGNS measures it.

nanoGNS prints one line for its character model after 250 steps of 64 windows. This module trains a
network of the same shape with the same settings, and `GradientMeter` measures it. The weights and
the order of the windows are others, since nothing that fixes them is published.

Source:
    github.com/CerebrasResearch/nanoGNS, exact/: README.md, train.py, model.py, gns-analysis.py;
    nanoGPT's config/train_shakespeare_char.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch.statistics.averages import NoiseAverage
from bigbatch.statistics.meter import GradientMeter
from bigbatch.statistics.noise_scale import GradientStatistics
from bigbatch_recipes.datasets.files import text_of
from studies.known_answer import KnownAnswer

_LENGTH = 256  # characters of a window
_WIDTH, _DEPTH, _HEADS, _DROPOUT = 384, 6, 6, 0.2
_BATCH = 64  # windows of a step of theirs
_LR, _BETAS, _DECAY, _CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0
_WARMUP_TOKENS = 4000 * 12 * 5 * 8 * 1024  # the default of train.py, which the config keeps
_TRAIN_SHARE = 0.9
_MICRO_BATCHES = 8
_WINDOW = -1 / math.log(0.95)  # steps: a step's weight is .95 to the power of its age
_LOSS_STEP = 90  # the last step whose loss the README prints


@dataclass(frozen=True)
class Phase:
    """Steps of one length.

    Args:
        end: the step of theirs at which the phase ends.
        stride: steps of theirs that one of ours stands for: its learning rate is as many times
            theirs, and the decay of Adam's moments is to that power.
        batch_size: windows of a step of ours.
    """

    end: int
    stride: int
    batch_size: int


FULL = (Phase(250, 1, _BATCH),)
SHORT = (Phase(150, 5, 16), Phase(200, 2, 32), Phase(250, 1, 32))
"""The noise scale is below 2 windows before step 120, so that smaller batches do as well there."""


class _Block(nn.Module):
    """Causal attention and a GELU layer, each after a LayerNorm and with a residual; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH, bias=False)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.mix = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(_WIDTH, bias=False)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)
        self.drop = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """The states (samples, characters, width) of the next block."""
        samples, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(samples, length, 3, _HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        p = _DROPOUT if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.mix(attended.transpose(1, 2).reshape(samples, length, _WIDTH)))
        hidden = functional.gelu(self.up(self.norm_2(x)))
        output: Tensor = x + self.drop(self.down(hidden))
        return output


class ShakespeareGPT(nn.Module):
    """A GPT of 10.7 M parameters whose head is its character embedding.

    Args:
        characters: number of characters.
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.drop = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(_WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * _DEPTH))
            elif weight.ndim > 1:
                nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of what follows each character, (samples, length, characters)."""
        positions = torch.arange(codes.shape[1]).expand_as(codes)
        x = self.drop(self.characters(codes) + self.positions(positions))
        return functional.linear(self.norm(self.blocks(x)), self.characters.weight)


@dataclass(frozen=True)
class GPTStep:
    """One step of the training: the number of theirs, its loss and its statistics."""

    number: int
    loss: float
    statistics: GradientStatistics


def train(text: str, phases: tuple[Phase, ...], seed: int) -> Iterator[GPTStep]:
    """Trains the network on random windows of the first nine tenths of the text.

    The meter reads every parameter except the character embedding, which nanoGNS leaves out because
    the head shares it.
    """
    codes = _codes_of(text)
    codes = codes[: int(_TRAIN_SHARE * len(codes))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ShakespeareGPT(1 + int(codes.max()))
        measured = [p for p in model.parameters() if p is not model.characters.weight]
        optimizer = _optimizer(model)
        number = 0
        with GradientMeter(measured) as meter:
            for phase in phases:
                _set_stride(optimizer, phase.stride, number)
                while number < phase.end:
                    rate = _LR * (number + (phase.stride - 1) / 2) * _BATCH * _LENGTH
                    for group in optimizer.param_groups:
                        group["lr"] = phase.stride * rate / _WARMUP_TOKENS
                    loss = _backward(model, codes, phase.batch_size)
                    sizes = [phase.batch_size // _MICRO_BATCHES] * _MICRO_BATCHES
                    statistics = meter.read(sizes)
                    assert statistics is not None
                    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                    yield GPTStep(number, loss, statistics)
                    number += phase.stride


def run(folder: Path | None, phases: tuple[Phase, ...], seed: int) -> Iterator[KnownAnswer]:
    """The README's line, and the loss that it prints at step 90."""
    file = None if folder is None else folder / "tinyshakespeare" / "input.txt"
    if file is None or not file.is_file():
        missing = "no --data" if file is None else f"there is no {file}"
        for what, expected, tolerance, reason, is_factor in _EXPECTED:
            yield KnownAnswer(
                *(what, _SOURCE, expected, math.nan, tolerance, reason),
                is_factor=is_factor,
                skipped=missing,
            )
        return
    average, loss = NoiseAverage(_WINDOW, "steps"), math.nan
    last_phase = phases[-2].end if len(phases) > 1 else 0
    for step in train(text_of(file), phases, seed):
        if step.number <= _LOSS_STEP:
            loss = step.loss
        if step.number >= last_phase:  # 93 % of the weight of an average from the start
            smooth = average.update(step.statistics)
    values = (smooth.noise_scale, smooth.grad_sqnorm, smooth.grad_variance, loss)
    for (what, expected, tolerance, reason, is_factor), value in zip(
        _EXPECTED, values, strict=True
    ):
        yield KnownAnswer(what, _SOURCE, expected, value, tolerance, reason, is_factor=is_factor)


_SOURCE = "nanoGNS, exact/README.md"
_SEED = "other weights and windows; it doubles in 50 steps"
_EXPECTED = (
    ("noise scale of the GPT at step 240, batch 64", 21.9598, 2.0, _SEED, True),
    (
        "its squared mean gradient",
        0.9331,
        2.0,
        "other weights and windows; it halves in 50 steps",
        True,
    ),
    ("its tr Sigma", 20.4898, 1.5, "other weights and windows", True),
    ("its loss at step 90", 3.8537, 0.1, "first losses of seeds differ by .1", False),
)


def _codes_of(text: str) -> Tensor:
    """The place of each character among those of the text, (characters,)."""
    places = {character: place for place, character in enumerate(sorted(set(text)))}
    return torch.tensor([places[character] for character in text])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": _DECAY},
        {"params": vectors},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


def _set_stride(optimizer: torch.optim.Optimizer, stride: int, number: int) -> None:
    """The decay of the moments for steps of this stride, and their bias correction so far."""
    for group in optimizer.param_groups:
        group["betas"] = tuple(beta**stride for beta in _BETAS)
    for state in optimizer.state.values():
        state["step"].fill_(number / stride)


def _backward(model: nn.Module, codes: Tensor, batch_size: int) -> float:
    """Adds the gradient of the mean loss of random windows, by micro-batches."""
    starts = torch.randint(len(codes) - _LENGTH, (batch_size,))
    windows = codes[starts[:, None] + torch.arange(_LENGTH + 1)]
    total = 0.0
    for part in windows.chunk(_MICRO_BATCHES):
        logits = model(part[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        loss = loss / _MICRO_BATCHES
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total
