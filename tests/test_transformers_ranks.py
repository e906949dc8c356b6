"""The Trainer with a batch size that follows a policy, in two processes."""

import pytest
import torch

import bigbatch as bb
from bigbatch.connect.transformers import AdaptiveTrainer
from bigbatch.errors import SettingError
from bigbatch.optim import VRAdam
from launched import launched
from test_transformers import Gradients
from tiny import arguments, gpt, logged, texts

GROWING = bb.Schedule("8, 16 from 48 samples, 24 from 80 samples")


def one_update(rank, ranks, folder, micro_batch):
    with launched(rank, ranks):
        trainer = AdaptiveTrainer(
            model=gpt(exact=True),
            args=arguments(folder, max_steps=1, max_grad_norm=0.0),
            train_dataset=texts(24),
            policy=bb.Fixed(24),
            micro_batch=micro_batch,
            callbacks=[kept := Gradients()],
        )
        trainer.train()
        return kept.found, logged(trainer, "loss", "grad_norm")


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_every_label_weighs_the_same_on_two_processes(ranks, tmp_path, micro_batch):
    model = gpt(exact=True)
    loss = model(**torch.utils.data.default_collate(texts(24))).loss
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(expected).item()
    for found, figures in ranks(2)(one_update, str(tmp_path), micro_batch):
        for mine, yours in zip(expected, found, strict=True):
            torch.testing.assert_close(mine, yours, rtol=0, atol=1e-10)
        assert [pytest.approx((loss.item(), norm), rel=1e-5)] == figures  # logged in float32


def whole(rank, ranks, folder, settings):
    with launched(rank, ranks):
        reduced = settings.pop("reduced", False)
        model = gpt(exact=True)
        optimizer = VRAdam(model.parameters(), lr=1e-2) if reduced else None
        trainer = AdaptiveTrainer(
            model=model,
            args=arguments(folder, train_sampling_strategy="sequential", **settings),
            train_dataset=texts(67),
            policy=GROWING,
            optimizers=(optimizer, None),
        )
        trainer.train()
        lines = logged(trainer, "loss", "grad_norm", "batch_size", "samples", "learning_rate")
        return lines, [p.detach().clone() for p in model.parameters()]


def played(settings):
    """One process that plays both ranks, by hand."""
    model = gpt(exact=True)
    if settings.get("reduced"):
        optimizer = VRAdam(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = bb.Batches(torch.utils.data.DataLoader(texts(67), 8), virtual_ranks=2)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=GROWING, micro_batch=4)
    steps = train.base_steps(2)
    train.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / steps)
    lines = []
    for _ in train.epochs(2):
        for step in train:
            for batch in step:
                tokens = int(batch["labels"][:, 1:].ne(-100).sum())
                step.backward(model(**batch).loss, weight=tokens)
            norm = step.clip_grad_norm_(1.0).item()
            record = step.update()
            lines.append((record.loss, norm, record.batch_size, record.samples, record.lr[0]))
    return lines, list(model.parameters())


@pytest.mark.parametrize("settings", [{}, {"reduced": True}], ids=["adamw", "vr-adam"])
def test_two_processes_train_as_one_that_plays_both(ranks, tmp_path, settings):
    expected, weights = played(settings)
    first, second = ranks(2)(whole, str(tmp_path), settings)
    # M2 is sent in bfloat16, and Adam divides by what is near nothing: half a step of 1e-2
    close, moved = (2e-3, 5e-3) if "reduced" in settings else (1e-5, 1e-7)
    assert first[0] != []
    for lines, others in (first, second):
        for mine, yours in zip(expected, lines or expected, strict=True):
            assert mine == pytest.approx(yours, rel=close)
        for mine, yours in zip(weights, others, strict=True):
            torch.testing.assert_close(mine, yours, rtol=close, atol=moved)
    assert all(map(torch.equal, first[1], second[1]))
    assert 134 == expected[-1][3]
    assert len({line[2] for line in expected}) > 2


def test_bfloat16_trains_on_two_processes(ranks, tmp_path):
    lines, _ = ranks(2)(whole_float32, str(tmp_path))[0]
    assert lines[0] > lines[-1]


def whole_float32(rank, ranks, folder):
    with launched(rank, ranks):
        trainer = AdaptiveTrainer(
            model=gpt(), args=arguments(folder, bf16=True), train_dataset=texts(), policy=GROWING
        )
        trainer.train()
        return logged(trainer, "loss"), trainer.adaptive.samples


def test_ranks_that_weigh_the_same_whatever_their_labels_are_refused(ranks, tmp_path):
    for message in ranks(2)(refusal, str(tmp_path)):
        assert "average_tokens_across_devices=False" in message
        assert "leave it True" in message


def refusal(rank, ranks, folder):
    with launched(rank, ranks):
        try:
            AdaptiveTrainer(
                model=gpt(),
                args=arguments(folder, average_tokens_across_devices=False),
                train_dataset=texts(),
                policy=GROWING,
            )
        except SettingError as error:
            return str(error)
