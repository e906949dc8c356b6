"""Trainings whose sizes count tokens, in one process and on ranks."""

import random
import warnings
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.log.curve_series import panels_of
from bigbatch.log.history import history_of, table_of
from bigbatch.log.html_report import write_report
from bigbatch.log.replay import replay

WORDS = 20


class Bigrams(nn.Module):
    """Predicts a word from the one before it, in each sequence of a row."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS))
        self.double()

    def forward(self, batch):
        return cross_entropy(
            self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )


def rows(count=24, per_row=5, seed=0):
    """Packed batches of sequences of 1 to 12 words."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        lengths = [draw.randrange(1, 13) for _ in range(per_row)]
        words = torch.tensor([[draw.randrange(WORDS) for _ in range(sum(lengths))]])
        bounds = torch.tensor([0, *accumulate(lengths)])
        labels = (words * 3 + 1) % WORDS
        made.append({"input_ids": words, "labels": labels, "cu_seqlens": bounds})
    return made


def training(model, loader, **settings):
    settings = {"policy": bb.Fixed(120), "micro_batch": 60, "every": 1} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = bb.Batches(loader, packed=True, unit="tokens")
    return bb.AdaptiveBatch(model, optimizer, batches, **settings)


def trained(rank, ranks, engine, passes=1, **settings):
    """Micro-batches, record and gradient of each step, before it."""
    model = Bigrams()
    wrapped = DistributedDataParallel(model) if engine == "ddp" else model
    train = training(wrapped, rows(seed=rank), **settings)
    done = []
    for _ in train.epochs(passes):
        for step in train:
            batches = []
            for batch in step:
                batches.append(batch)
                step.backward(wrapped(batch))
            gradient = [p.grad.clone() for p in model.parameters()]
            weights = [p.detach().clone() for p in model.parameters()]
            done.append((batches, step.update(), gradient, weights))
    return done


def gradients_of(weights, batches):
    """The gradient of each micro-batch's mean loss, and its tokens."""
    model = Bigrams()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    parameters = [*model.parameters()]
    flat = [
        torch.cat([g.flatten() for g in torch.autograd.grad(model(batch), parameters)])
        for batch in batches
    ]
    return torch.stack(flat), torch.tensor([batch["input_ids"].shape[1] for batch in batches])


def check_step(batches, record, gradient, weights):
    """The mean gradient of all tokens, and the statistics of weighted micro-batches."""
    h, n = gradients_of(weights, batches)
    total, k = n.sum(), len(n)
    mean = (n[:, None] * h).sum(0) / total
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradient]), mean)
    assert record.batch_size == total
    assert record.micro_batches == k
    variance = (n * (h - mean).square().sum(1)).sum() / (k - 1)
    assert record.statistics.grad_variance == pytest.approx(variance.item(), rel=1e-9)
    signal = mean.square().sum() - variance / total
    assert record.statistics.grad_sqnorm == pytest.approx(signal.item(), rel=1e-9, abs=1e-12)


def test_a_step_has_the_mean_gradient_and_noise_of_its_tokens():
    done = trained(0, 1, "plain")
    for batches, record, gradient, weights in done[:-1]:
        check_step(batches, record, gradient, weights)
        assert abs(record.batch_size - 120) <= 6
    tokens = sum(row["input_ids"].shape[1] for row in rows())
    assert done[-1][1].samples == tokens == sum(one[1].batch_size for one in done)


@pytest.mark.cpu
def test_ranks_take_tokens_of_their_own_and_end_together(ranks):
    answers = ranks(2)(trained, "ddp")
    first, second = answers
    assert len(first) == len(second) > 10
    for ours, theirs in zip(first, second, strict=True):
        assert ours[1].batch_size == theirs[1].batch_size
        assert len(ours[0]) == len(theirs[0])
        check_step(ours[0] + theirs[0], *ours[1:])
    sizes = [one[1].batch_size for one in first[:-2]]
    assert all(abs(size - 120) <= 12 for size in sizes)


def of_padded_batches(rank, ranks):
    """Backwards and tokens of each step on this rank; those of all ranks; the loss, and its own."""
    model, done = Bigrams(), []
    words = [row["input_ids"] for row in rows(48, 1, seed=rank)]
    loader = [{"input_ids": one, "labels": (one * 3 + 1) % WORDS} for one in words]
    batches = bb.Batches(loader, unit="tokens")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in bb.AdaptiveBatch(
        wrapped, optimizer, batches, policy=bb.Fixed(60), micro_batch=20, every=1
    ):
        backwards, tokens, loss_sum = 0, 0, 0.0
        for batch in step:
            loss = wrapped(batch)
            step.backward(loss)
            backwards, tokens = backwards + 1, tokens + batch["input_ids"].numel()
            loss_sum += loss.item() * batch["input_ids"].numel()
        record = step.update()
        done.append((backwards, tokens, record.batch_size, record.loss, loss_sum))
    return done


@pytest.mark.cpu
def test_ranks_whose_batches_differ_in_shape_add_micro_batches_of_their_own(ranks):
    first, second = ranks(2)(of_padded_batches)
    assert len(first) == len(second) > 2
    assert any(ours[0] != theirs[0] for ours, theirs in zip(first, second, strict=True))
    for ours, theirs in zip(first, second, strict=True):
        assert ours[2] == theirs[2] == ours[1] + theirs[1]
        assert ours[3] == pytest.approx((ours[4] + theirs[4]) / ours[2])
    assert all(abs(one[1] - 30) <= 6 for one in first[:-1])


def resumed(rank, ranks, stop):
    """The sizes of a run, and of one that is saved after `stop` steps and resumed."""
    whole = [record.batch_size for _, record, *_ in trained(rank, ranks, "ddp", 2)]
    train = training(DistributedDataParallel(Bigrams()), rows(seed=rank))
    sizes = []

    def go(train, steps):
        for _ in train.epochs(2):
            for step in train:
                for batch in step:
                    step.backward(train.model(batch))
                sizes.append(step.update().batch_size)
                if len(sizes) == steps:
                    return

    go(train, stop)
    again = training(DistributedDataParallel(Bigrams()), rows(seed=rank))
    again.load_state_dict(train.state_dict())
    go(again, 10**9)
    return whole, sizes


@pytest.mark.cpu
def test_ranks_resume_in_the_middle_of_a_pass(ranks):
    for whole, sizes in ranks(2)(resumed, 5):
        assert whole == sizes
        assert len(whole) > 20


def test_the_batch_adapts_in_tokens():
    policy = bb.SimiGrad(target=0.98, min_batch=80, max_batch=600)
    done = trained(0, 1, "plain", 6, policy=policy, batch_size=100)
    targets = [record.decision.batch_size for _, record, *_ in done]
    assert max(targets) > 2 * min(targets)
    records = [record for _, record, *_ in done]
    pairs = zip(targets, records[1:], records[2:], strict=False)
    inside = [(size, one) for size, one, after in pairs if one.epoch == after.epoch]
    assert len(inside) > 10
    for size, one in inside:  # a full micro-batch is below its 60 tokens by part of a sequence
        assert -12 * one.micro_batches < one.batch_size - size <= 6


def test_a_schedule_counts_tokens_where_the_training_does():
    done = trained(0, 1, "plain", policy=bb.Schedule("60, 120 from 200 tokens"), micro_batch=60)
    first = next(n for n, one in enumerate(done) if one[1].samples >= 200)
    assert all(abs(one[1].batch_size - 60) <= 6 for one in done[: first + 1])
    assert all(abs(one[1].batch_size - 120) <= 6 for one in done[first + 1 : -2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": bb.Schedule("60, 120 from 200 samples")}, "counts samples and the training"),
        (
            {"policy": bb.Schedule("60, 120 from 200 tokens", tokens_per_sample=6)},
            "write tokens, or leave tokens_per_sample= of a Schedule out",
        ),
        ({"policy": bb.Schedule("60, x2 at 9 tokens", tokens_per_sample=3)}, "counts samples"),
        (
            {"policy": bb.Controller(bb.SimiGrad(), 120, smoothing="4K samples")},
            "counts samples and the training tokens",
        ),
        (
            {"policy": bb.Controller(bb.SimiGrad(), 120, warmup="4K samples")},
            "counts samples and the training tokens",
        ),
        ({"policy": bb.SimiGrad(), "micro_batch": None}, "pass micro_batch= and batch_size=, in"),
        ({"groups": 4}, "groups=4 divides the samples"),
    ],
)
def test_what_counts_samples_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        training(Bigrams(), rows(), **settings)


def test_what_counts_tokens_is_refused_in_a_training_of_samples():
    model = Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for policy in (
        bb.Schedule("4, 8 from 1B tokens"),
        bb.Controller(bb.SimiGrad(), 8, smoothing="4M tokens"),
    ):
        with pytest.raises(SettingError, match="counts tokens and the training samples"):
            bb.AdaptiveBatch(
                model, optimizer, [torch.zeros(4, 3)] * 4, policy=policy, micro_batch=4
            )


def test_a_branch_test_in_tokens_is_refused():
    train = training(Bigrams(), rows())
    with pytest.raises(SettingError, match="a branch test counts samples"):
        train.branch_test(train.model)


def test_a_log_says_what_it_counts(tmp_path):
    train = training(Bigrams(), rows(), log=tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in train:
            for batch in step:
                step.backward(train.model(batch))
            step.update()
    train.run_log.close()
    history = history_of(tmp_path / "run")
    assert history.settings["unit"] == "tokens"
    assert {panel.x_label for panel in panels_of([history], "samples")} == {"tokens"}
    titles = [panel.title for panel in panels_of([history], "step")]
    assert {"batch size, tokens", "noise scale, tokens"} <= {*titles}
    assert "tokens" in table_of([history]).columns
    report = tmp_path / "report.html"
    write_report([history], report, "tokens")
    assert "weighted by tokens" in report.read_text()
    with pytest.raises(SettingError, match="counts samples and the training tokens"):
        replay(history, {"schedule": bb.Schedule("60, 120 from 200 samples")})
    replay(history, {"schedule": bb.Schedule("60, 120 from 200 tokens")})
