"""Trainings whose batches are rows of packed sequences."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import SettingError

WORDS, LENGTHS = 20, [3, 8, 2, 7, 5, 4, 6, 2]


class Words(nn.Module):
    """Predicts a word from the one before it."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS)).double()

    def forward(self, words):
        return self.layers(words)


def rows():
    """One row of all sequences, whose first labels are ignored."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (1, sum(LENGTHS)), generator=draw)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    labels = (words * 3 + 1) % WORDS
    labels[0, bounds[:-1]] = -100
    return [{"input_ids": words, "labels": labels, "cu_seqlens": bounds}]


def loss_of(model, batch):
    """The mean over the labels of the only row, as docs/loops.md writes it."""
    return cross_entropy(model(batch["input_ids"])[0], batch["labels"][0])


@pytest.mark.parametrize(("micro_batch", "every"), [(1, 1), (1, 0), (2, 1), (3, 1), (3, 0)])
@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_step_is_a_mean_over_labels_however_few_sequences_a_backward_has(
    micro_batch, every, unit
):
    model = Words()
    expected = loss_of(model, rows()[0])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    tokens = sum(LENGTHS) // len(LENGTHS) if unit == "tokens" else 1
    train = bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        bb.Batches(rows(), packed=True, unit=unit),
        policy=bb.Fixed(2 * sum(LENGTHS)),
        micro_batch=micro_batch * tokens,
        every=every,
    )
    for step in train:
        for batch in step:
            step.backward(loss_of(model, batch))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert step.update().loss == pytest.approx(expected.item())


def test_groups_of_one_row_are_refused():
    model = Words()
    with pytest.raises(SettingError, match="packed samples are one row"):
        bb.AdaptiveBatch(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            bb.Batches(rows(), packed=True),
            policy=bb.Fixed(8),
            micro_batch=4,
            groups=2,
        )
