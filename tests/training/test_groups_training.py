"""AdaptiveBatch(groups=k): the training of a loop of k backwards, in one."""

import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import VRSGD, VRAdam
from loop_steps import loss_of
from loop_steps import trained as trained_in_passes
from single_process_training import same
from tensors import difference
from tensors import same as same_tensors

torch.set_num_threads(1)
K, BATCH, STEPS = 8, 22, 4
CLOSE = 1e-10  # of float64 sums in another order


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3)]
    return nn.Sequential(*layers).to(dtype)


def data(n=110, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=draw, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(3, (n,), generator=draw))


def built(model, optimizer=None, *, exact=False, **settings):
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    settings = {"policy": bb.Fixed(BATCH), "micro_batch": BATCH, "every": 1, **settings}
    if settings["every"] is None:
        del settings["every"]
    if exact:
        settings["meter"] = bb.GradientMeter(model, per_layer=True)
    return bb.AdaptiveBatch(model, optimizer, DataLoader(data(dtype=dtype), BATCH), **settings)


def trained(train, steps=STEPS, **options):
    return trained_in_passes(train, steps, passes=100, **options)


# the same training


@pytest.mark.parametrize("micro_batch", [22, 11])
def test_groups_are_the_micro_batches_of_a_loop(micro_batch):
    groups, backwards = network(), network()
    with_groups = trained(built(groups, groups=K, micro_batch=micro_batch, exact=True))
    count = math.ceil(BATCH / micro_batch)
    loop = built(backwards, micro_batch=1, min_micro_batches=BATCH, exact=True)
    with_backwards = trained(loop)
    assert difference(backwards, groups) < CLOSE
    for record, other in zip(with_groups, with_backwards, strict=True):
        assert count == record.micro_batches
        assert K * count == record.statistics.micro_batches
        assert record.loss == pytest.approx(other.loss)


def test_the_noise_is_that_of_as_many_backwards():
    models = [network(), network()]
    groups = trained(built(models[0], groups=11, exact=True))
    backwards = trained(built(models[1], micro_batch=2, min_micro_batches=11, exact=True))
    for record, other in zip(groups, backwards, strict=True):
        statistics, expected = record.statistics, other.statistics
        assert expected.micro_batches == statistics.micro_batches
        oracle = (expected.grad_sqnorm, expected.grad_variance)
        oracle = (*oracle, expected.similarity, expected.noise_scale)
        assert same(oracle, statistics)


def test_weights_and_gradients_are_the_same_to_the_bit_as_without_groups():
    models = [network(torch.float32), network(torch.float32)]
    trained(built(models[0], groups=K))
    trained(built(models[1], every=0))
    assert same_tensors(*models)


@pytest.mark.parametrize("options", [{"every": 1}, {"every": 0}], ids=str)
def test_sums_of_groups_are_compared_in_every_step_that_an_optimizer_reads(options):
    """A gradient that a hook of the user changes is not the sum of its groups."""
    model = network()
    model[0].weight.register_hook(lambda gradient: 1.5 * gradient)
    train = built(model, VRSGD(model.parameters(), lr=0.1), groups=K, **options)
    with pytest.raises(GradientError, match=r"do not add up .*groups=None"):
        trained(train, 1)


def test_a_step_needs_no_more_backwards_than_its_memory_does():
    assert [1] * STEPS == [r.micro_batches for r in trained(built(network(), groups=K))]


def test_a_batch_has_at_least_a_sample_for_each_group_that_is_compared():
    train = built(network(), groups=2, policy=bb.SimiGrad(target=-0.99, min_batch=2, max_batch=64))
    assert min(r.batch_size for r in trained(train, 12)) >= 4


def test_a_loop_takes_the_groups_of_its_meter():
    model = network()
    meter = bb.GradientMeter(model, groups=K, per_layer=True)
    expected = trained(built(network(), groups=K, exact=True))
    actual = trained(built(model, meter=meter))
    assert [r.statistics for r in expected] == [r.statistics for r in actual]


def test_two_numbers_of_groups_are_refused():
    model = network()
    with pytest.raises(SettingError, match="groups=8, and groups=4 of the meter"):
        built(model, groups=8, meter=bb.GradientMeter(model, groups=4))


# weights of samples


def counts_of(batch):
    return 1 + torch.arange(len(batch[1]), dtype=torch.float64) % 5


def token_loss(model, batch):
    x, y = batch
    losses, counts = cross_entropy(model(x), y, reduction="none"), counts_of(batch)
    return (losses * counts).sum() / counts.sum()


def token_steps(train, weight_of, steps=2):
    records = []
    for step in train:
        for batch in step:
            step.backward(token_loss(train.model, batch), weight=weight_of(batch))
        records.append(step.update())
        if len(records) == steps:
            return records
    raise AssertionError


def test_samples_with_tokens_are_weighed_by_them():
    models = [network(), network()]
    settings = {"exact": True, "policy": bb.Fixed(20)}
    groups = token_steps(built(models[0], groups=4, micro_batch=20, **settings), counts_of)
    loop = built(models[1], micro_batch=5, min_micro_batches=4, **settings)
    backwards = token_steps(loop, lambda batch: counts_of(batch).sum().item())
    assert difference(*models) < CLOSE
    for record, other in zip(groups, backwards, strict=True):
        expected = other.statistics
        oracle = (expected.grad_sqnorm, expected.grad_variance)
        assert same((*oracle, expected.similarity, expected.noise_scale), record.statistics)


def test_one_weight_for_all_samples_is_refused():
    with pytest.raises(SettingError, match=r"weight of each sample.*tensor of 22 numbers"):
        token_steps(built(network(), groups=4), lambda batch: 30.0)


def test_a_micro_batch_without_tokens_is_left_out():
    def weight_of(batch):
        weights = counts_of(batch)
        return weights * (numbers.pop(0) > 0)

    model, numbers = network(), [1, 0, 1, 1]
    records = token_steps(built(model, groups=4, micro_batch=11, exact=True), weight_of)
    assert [4, 8] == [record.statistics.micro_batches for record in records]


def test_a_sample_with_a_negative_weight_is_refused():
    with pytest.raises(SettingError, match="weight="):
        token_steps(built(network(), groups=4), lambda batch: counts_of(batch) - 2)


# losses


def test_a_loss_that_compares_samples_is_refused():
    def contrastive(model, batch):
        outputs = model(batch[0])
        return cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs)))

    with pytest.raises(GradientError, match="a group's samples influence others"):
        trained(built(network(), groups=4), loss_of=contrastive)


def test_a_penalty_on_a_mean_over_samples_is_refused():
    def penalized(model, batch):
        hidden = model[1](model[0](batch[0]))
        return loss_of(model, batch) + (hidden - hidden.mean(0)).square().mean()

    with pytest.raises(GradientError, match="a group's samples influence others"):
        trained(built(network(), groups=4), loss_of=penalized)


def test_a_sum_over_samples_is_found():
    def total(model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="sum")

    with pytest.warns(UserWarning, match="mean"):
        trained(built(network(), groups=4), steps=1, loss_of=total)


def test_two_forwards_may_share_a_loss_and_a_backward():
    """The graph is that of the loss, so that every use is in it."""

    def twice(model, batch):
        x, y = batch
        return (cross_entropy(model(x), y) + cross_entropy(model(x.flip(1)), y)) / 2

    groups, backwards = network(), network()
    records = trained(built(groups, groups=11, exact=True), loss_of=twice)
    loop = built(backwards, micro_batch=2, min_micro_batches=11, exact=True)
    for record, other in zip(records, trained(loop, loss_of=twice), strict=True):
        expected = other.statistics.grad_variance
        assert pytest.approx(expected, rel=1e-9) == record.statistics.grad_variance


def test_weight_decay_in_the_loss_is_refused():
    def decayed(model, batch):
        return loss_of(model, batch) + 0.1 * model[0].weight.square().sum()

    with pytest.raises(GradientError, match="groups=None"):
        trained(built(network(), groups=4), loss_of=decayed)


# precision


def test_a_grad_scaler_skips_a_step_that_overflows_and_goes_on():
    def in_float16(model, batch):
        with torch.autocast(batch[0].device.type, dtype=torch.float16):
            return loss_of(model, batch)

    model = network(torch.float32)
    scaler = GradScaler("cpu", init_scale=2.0**22)
    train = built(model, SGD(model.parameters(), lr=0.01), groups=4, scaler=scaler)
    records = trained(train, 16, loss_of=in_float16)
    assert records[0].skipped
    assert not records[-1].skipped
    assert records[-1].statistics.grad_variance > 0


# resumption


def saved(train, model, optimizer) -> bytes:
    file = io.BytesIO()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "train": train}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return file.getvalue()


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: VRAdam(p, lr=0.01)])
def test_a_resumed_training_has_the_same_signs_and_decisions(make):
    def start():
        model = network(torch.float32)
        optimizer = make(model.parameters())
        policy = bb.SimiGrad(target=0.3, min_batch=8, max_batch=44)
        return built(model, optimizer, groups=K, policy=policy, batch_size=16), model, optimizer

    def key(record):
        return record.batch_size, record.loss, record.statistics, record.decision

    train, model, optimizer = start()
    before = trained(train, 3)
    file = saved(train, model, optimizer)
    expected = trained(train, 6)
    resumed, copied, other = start()
    state = torch.load(io.BytesIO(file), weights_only=True)
    for part, name in ((copied, "model"), (other, "optimizer"), (resumed, "train")):
        part.load_state_dict(state[name])
    actual = trained(resumed, 6)
    assert [key(record) for record in expected] == [key(record) for record in actual]
    assert same_tensors(model, copied)
    assert before[-1].step + 1 == actual[0].step


def test_another_number_of_groups_is_reported_at_resumption():
    model = network()
    train = built(model, groups=4)
    trained(train, 1)
    state = train.state_dict()
    other = built(network(), groups=8)
    with pytest.warns(UserWarning, match="groups"):
        other.load_state_dict(state)


def test_a_group_without_weight_does_not_count_as_a_micro_batch():
    """One group of eight has no token: VR and the meter compare seven, as micro-batches do."""
    x = torch.randn(16, 4, 5, dtype=torch.float64)
    y = torch.randint(3, (16, 4))
    y[2:4] = y[5, 1:] = -100

    def trained(groups):
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
        train = bb.AdaptiveBatch(
            model,
            VRSGD(model.parameters(), lr=0.5),
            [(x, y)],
            policy=bb.Fixed(16),
            micro_batch=16,
            min_micro_batches=8,
            groups=groups,
            every=1,
            lr_scaling=None,
        )
        for step in train:
            for a, b in step:
                tokens = (b != -100).sum(1)
                loss = cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum")
                step.backward(loss / tokens.sum().clamp_min(1), weight=tokens)
            with pytest.warns(UserWarning, match="k = 7 micro-batches"):
                record = step.update()
        return record, model

    (loop, expected), (groups, actual) = trained(None), trained(8)
    assert 7 == loop.statistics.micro_batches == groups.statistics.micro_batches
    assert pytest.approx(loop.similarity, abs=1e-12) == groups.similarity
    assert difference(expected, actual) < 1e-14
