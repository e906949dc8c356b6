"""The public API runs as documented."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import bigbatch as bb
from bigbatch.optim import VarianceReduced, VRAdam


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(640, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


@pytest.fixture
def loader(data):
    return torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)


def test_the_meter_alone(model, data):
    micro_batches = [data[:13], data[13:21], data[21:26]]
    sizes = [len(y) for _, y in micro_batches]
    with bb.GradientMeter(model) as meter:
        for x, y in micro_batches:
            (cross_entropy(model(x), y) * len(y) / sum(sizes)).backward()
        noise = meter.read(samples=sizes)
    assert (3, 26) == (noise.micro_batches, noise.samples)
    assert noise.grad_variance > 0
    assert (
        pytest.approx(noise.grad_sqnorm / (noise.grad_sqnorm + 2 * noise.grad_variance / 26))
        == noise.similarity
    )
    assert (
        noise.noise_scale == noise.grad_variance / noise.grad_sqnorm
        if noise.grad_sqnorm > 0
        else torch.inf
    )


def test_the_adaptive_loop_with_every_setting(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        loader,
        policy=bb.SimiGrad(target=0.3, min_batch=64, max_batch=8192),
        batch_size=128,
        base_batch=None,
        micro_batch=256,
        min_micro_batches=None,
        lr_scaling="sqrt",
        scheduler=None,
        scaler=None,
        meter=None,
    )
    train.scheduler = OneCycleLR(optimizer, 0.4, total_steps=train.base_steps(4))
    for epoch in train.epochs(4):
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            step.clip_grad_norm_(1.0)
            record = step.update()
            assert 64 <= record.batch_size <= 640
            assert epoch == record.epoch
    assert 4 * 640 == record.samples
    assert record.loss < 0.9  # log 3 = 1.1 at the start
    restored = bb.AdaptiveBatch(
        model, optimizer, loader, policy=bb.SimiGrad(target=0.3), batch_size=128
    )
    restored.scheduler = OneCycleLR(optimizer, 0.4, total_steps=restored.base_steps(4))
    restored.load_state_dict(train.state_dict())
    assert (4, []) == (restored.epoch, list(restored.epochs(4)))


class HoldUntil:
    needs = bb.Needs(statistics=False)

    def decide(self, noise: bb.GradientStatistics | None, now: bb.TrainingState) -> bb.Decision:
        batch_size = now.target_batch_size if now.samples < 1_000 else 256
        return bb.Decision(batch_size=batch_size, reason="warm-up", lr_factor=1.0)


def test_a_custom_policy(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=HoldUntil(), batch_size=64)
    batches = []
    for _ in train.epochs(3):
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            batches.append(step.update().batch_size)
    assert [64] * 16 == batches[:16]  # 1,024 samples: the 17th step is the first of 256
    assert 256 == batches[16]


def test_policies_and_plans_alone():
    policy = bb.SimiGrad(target=0.2, min_batch=1, max_batch=None)
    assert 140 == policy.next_batch(similarity=0.1, batch_size=128)
    noise = bb.GradientStatistics(
        grad_sqnorm=1.0, grad_variance=576.0, samples=128, micro_batches=8
    )
    by_single_steps = bb.Controller(policy, batch_size=128, smoothing=None)
    assert 140 == by_single_steps.next(noise).batch_size
    by_averages = bb.Controller(policy, batch_size=128, smoothing="auto")
    assert [128, 128, 128, 140] == [by_averages.next(noise).batch_size for _ in range(4)]
    assert 576 == pytest.approx(bb.NoiseAverage(50_000).update(noise).noise_scale)
    plan = bb.BatchPlan.fit(
        batch_size=6000,
        ranks=4,
        max_micro=512,
        min_micro_batches=1,
        min_accumulation=1,
        min_batch=1,
        max_batch=None,
        micro=None,
    )
    assert (3, 500, 4, 6000) == (plan.accumulation, plan.micro, plan.ranks, plan.batch_size)


@pytest.mark.parametrize(
    "build",
    [
        lambda p: VRAdam(p, lr=1e-2, gamma=0.1, r_max=1.0),
        lambda p: VarianceReduced(torch.optim.AdamW(p, lr=1e-2, fused=True), gamma=0.1, beta3=None),
    ],
)
def test_optimizers_train_in_a_plain_loop(model, data, build):
    optimizer = build(model.parameters())
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        parts = [
            cross_entropy(model(data[i : i + 80][0]), data[i : i + 80][1]) / 8
            for i in range(0, 640, 80)
        ]
        for loss in parts:
            loss.backward()
        optimizer.step()
        losses.append(float(sum(parts).detach()))
    assert losses[-1] < 0.7 * losses[0]
