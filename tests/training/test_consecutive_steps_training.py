"""Loops of one backward a step, which compare two consecutive steps: min_micro_batches=1."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.errors import SettingError
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.log.history import history_of
from bigbatch.log.html_report import write_report
from bigbatch.optim import VRSGD
from bigbatch.training.loss_weights import weighted_loss
from loop_steps import trained
from tensors import through_a_file

torch.set_num_threads(1)  # small tensors: a second thread only waits
MICRO = 128


def samples(n):
    own = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 4, 4, generator=own, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (n,), generator=own))


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 3)),
    ).to(dtype)


def adaptive(
    n=4096,
    *,
    model=None,
    policy=None,
    loader=None,
    meter=None,
    optimizer=torch.optim.SGD,
    **settings,
):
    """A CNN with BatchNorm on n samples, 32 a step at first."""
    model = network() if model is None else model
    return bb.AdaptiveBatch(
        model,
        optimizer(model.parameters(), lr=0.05),
        DataLoader(samples(n), MICRO) if loader is None else loader,
        policy=bb.Fixed(32) if policy is None else policy,
        meter=None if meter is None else bb.GradientMeter(model, **meter),
        **({"batch_size": 32, "min_micro_batches": 1} | settings),
    )


def measured(records):
    return [record.step for record in records if record.statistics is not None]


def by_hand(sizes, scale=None):
    """Gradients and losses of a plain loop over batches of these sizes; the rate is constant."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = samples(4096).tensors
    gradients, losses, start = [], [], 0
    for size in sizes:
        optimizer.zero_grad()
        loss = cross_entropy(model(x[start : start + size]), y[start : start + size])
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses.append(loss.item())
        optimizer.step()
        start += size
    return gradients, losses


def of_pair(one, two, first, second):
    noise = float((one - two).square().sum()) / (1 / first + 1 / second)
    return pytest.approx((float(one @ two), noise), rel=1e-8, abs=1e-12)


def test_a_network_with_batch_norm_is_measured_and_never_cut():
    train = adaptive(policy=bb.SimiGrad(0.9, max_batch=MICRO), lr_scaling=None)
    records = trained(train)
    sizes = [record.batch_size for record in records]
    assert {1} == {record.micro_batches for record in records}
    assert MICRO == max(sizes)
    gradients, losses = by_hand(sizes)
    assert losses == [record.loss for record in records]
    compared = measured(records)
    assert [2, 4, 6, 8] == compared[:4]
    for step in compared:
        found = records[step - 1].statistics
        expected = of_pair(*gradients[step - 2 : step], *sizes[step - 2 : step])
        assert expected == (found.grad_sqnorm, found.grad_variance)
        assert "consecutive steps" == found.compared
        assert (sizes[step - 1], 2) == (found.samples, found.micro_batches)


@pytest.mark.parametrize(
    "policy",
    [
        bb.SimiGrad(0.9, max_batch=MICRO),
        bb.NoiseScale(max_batch=MICRO),
        bb.Goodput(max_batch=MICRO),
    ],
)
def test_policies_follow_these_statistics(policy):
    records = trained(adaptive(policy=policy))
    assert len({record.batch_size for record in records}) > 5
    assert {1} == {record.micro_batches for record in records}


def test_pairs_get_rarer_as_steps_do():
    records = trained(adaptive(32 * 600))
    n = {1: 64, 2: 128, 4: 256, 8: 512, 16: 600}  # for the steps before so many
    kept = [t for t in range(600) if t % max(2, next(k for k, end in n.items() if t < end)) == 0]
    assert [t + 2 for t in kept] == measured(records)


def test_every_is_the_interval_of_the_first_steps_of_pairs():
    assert [2, 7, 12] == measured(trained(adaptive(every=5), 14))
    assert [] == measured(trained(adaptive(every=0), 14))
    assert [2, 4, 6] == measured(trained(adaptive(every=1), 6))


def test_the_log_says_that_a_step_waits_for_the_next_one():
    policy = bb.Controller(bb.SimiGrad(0.3), 32, smoothing=None)
    settings = {"policy": policy, "batch_size": None}
    records = trained(adaptive(**settings, every=3), 3)
    expected = "not measured yet; the next step is compared with this one"
    assert expected == records[0].decision.reason
    assert records[1].decision.reason.startswith("similarity")
    assert "not measured; one step in 3 is" == records[2].decision.reason


def test_steps_that_are_compared_have_no_hooks_but_the_one_of_any_step():
    train = adaptive(every=1)
    trained(train, 3)
    assert 1 == sum(len(p._backward_hooks or ()) for p in train.model.parameters())


def test_a_batch_of_several_micro_batches_is_measured_by_these():
    records = trained(adaptive(batch_size=2 * MICRO, policy=bb.Fixed(2 * MICRO)), 3)
    assert [1, 2, 3] == measured(records)
    assert {"micro-batches"} == {record.statistics.compared for record in records}
    policy = bb.Controller(bb.SimiGrad(0.99, max_batch=4 * MICRO), 100, smoothing=None)
    records = trained(adaptive(policy=policy, batch_size=None), 14)
    kinds = [
        (record.micro_batches, record.statistics.compared)
        for record in records
        if record.statistics is not None
    ]
    assert {(1, "consecutive steps"), (2, "micro-batches")} == set(kinds)


def test_a_skipped_step_is_no_part_of_a_pair():
    records = trained(adaptive(every=8), 18, spoiled=[0, 3, 8])
    assert [3, 11, 18] == measured(records)
    records = trained(adaptive(every=8), 12, spoiled=[1])  # the second one of a pair
    assert [4, 10] == measured(records)


def test_two_passes_share_no_pair():
    train = adaptive(32 * 3, every=1)
    records = trained(train, passes=3)
    assert [2, 5, 8] == measured(records)


def test_a_last_batch_of_few_samples_is_compared_with_none():
    records = trained(adaptive(32 * 3 + 10), passes=2)
    assert [32, 32, 32, 10] * 2 == [record.batch_size for record in records]
    assert [2, 6] == measured(records)


def test_a_loader_of_one_batch_is_never_measured_and_says_so():
    train = adaptive(32, policy=bb.SimiGrad(0.9, max_batch=MICRO))
    with pytest.warns(UserWarning, match="no step was measured in the first pass"):
        records = trained(train, passes=3)
    assert [] == measured(records)


def test_a_loss_with_weights_is_measured_in_samples():
    def run(weight):
        train, records = adaptive(32 * 4, every=1), []
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(train.model(x), y), weight=weight(len(records), x))
            records.append(step.update())
        return records

    plain = run(lambda _, x: len(x))
    other = run(lambda number, x: [3.0, 3.0, 5.0, 4.0][number] * len(x))
    for one, two in zip(plain, other, strict=True):
        if one.statistics is not None:
            near = pytest.approx(one.statistics.grad_sqnorm, rel=1e-9)
            assert near == two.statistics.grad_sqnorm
            assert 32 == two.statistics.samples
    assert pytest.approx(plain[1].statistics.grad_variance) == other[1].statistics.grad_variance


def test_a_grad_scaler_changes_nothing_also_where_its_scale_changes():
    plain = trained(adaptive(every=1), 8)
    scaled = trained(adaptive(every=1, scaler=GradScaler("cpu", 1024.0, growth_interval=3)), 8)
    for one, two in zip(plain, scaled, strict=True):
        if one.statistics is not None:
            assert pytest.approx(one.noise_scale, rel=1e-9) == two.noise_scale
            assert pytest.approx(one.similarity, rel=1e-9) == two.similarity


def test_a_meter_with_options_gives_what_two_gradients_have():
    meter = {"per_layer": True, "confidence": 0.9, "half_batch_cosine": True}
    records = trained(adaptive(every=1, meter=meter), 4)
    for record in (records[1], records[3]):
        found = record.statistics
        assert ["0", "1", "4"] == list(found.layers)
        layers = math.fsum(layer.grad_variance for layer in found.layers.values())
        assert pytest.approx(layers) == found.grad_variance
        assert (-1.0, 1.0) == found.similarity_interval
        assert found.half_batch_cosine is None


def test_parameters_that_begin_to_train_start_another_pair():
    model = network()
    train = adaptive(model=model, every=1)
    train.optimizer.param_groups[0]["params"] = list(model[4].parameters())
    records = []
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        records.append(step.update())
        if len(records) == 3:
            train.optimizer.add_param_group({"params": list(model[0].parameters())})
        if len(records) == 6:
            break
    assert [2, 5] == measured(records)


def test_a_group_with_learning_rate_0_counts_as_any_other():
    model = network()
    train = adaptive(model=model, every=1)
    frozen, rest = list(model[0].parameters()), [*model[1].parameters(), *model[4].parameters()]
    train.optimizer = None
    optimizer = torch.optim.SGD([{"params": frozen, "lr": 0.0}, {"params": rest}], lr=0.05)
    loader = DataLoader(samples(4096), MICRO)
    settings = {"policy": bb.Fixed(32), "min_micro_batches": 1, "every": 1}
    before = [p.clone() for p in frozen]
    records = trained(bb.AdaptiveBatch(model, optimizer, loader, **settings), 4)
    assert [2, 4] == measured(records)
    assert all(map(torch.equal, before, frozen))


# states


@pytest.mark.parametrize("cut", [1, 2, 3, 8, 65, 66])
@pytest.mark.parametrize("every", [None, 4])
def test_a_killed_run_continues_bit_for_bit(cut, every):
    def start():
        policy = bb.SimiGrad(0.9, max_batch=MICRO)
        return adaptive(32 * 100, policy=policy, every=every, model=network(torch.float64))

    def rest(train, steps):
        records = []
        while len(records) < steps:
            records += trained(train, steps - len(records))
        return [replace(record, elapsed_seconds=0.0) for record in records]

    whole = start()
    expected = rest(whole, 75)
    killed = start()
    head = rest(killed, cut)
    parts = killed.model, killed.optimizer, killed
    model, optimizer, state = through_a_file([part.state_dict() for part in parts])
    resumed = start()
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.load_state_dict(state)
    assert expected == head + rest(resumed, 75 - cut)
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_state_of_a_loop_that_cuts_its_steps_is_continued_by_pairs():
    cutting = adaptive(min_micro_batches=None)
    trained(cutting, 5)
    train = adaptive()
    with pytest.warns(UserWarning, match="min_micro_batches was 4, is 1"):
        train.load_state_dict(cutting.state_dict())
    assert [7, 9] == measured(trained(train, 4))


def test_a_branch_test_leaves_the_pair_as_it_is():
    def run(between):
        train = adaptive(32 * 100, every=1)
        records = trained(train, 3)
        if between:
            model = train.model
            train.branch_test(lambda batch: cross_entropy(model(batch[0]), batch[1]), [32, 64])
        records += trained(train, 3)
        return [(record.loss, record.statistics) for record in records]

    assert run(between=False) == run(between=True)


# what is written


def test_the_log_says_what_was_compared(tmp_path):
    trained(adaptive(every=1, log=tmp_path / "pairs"), 4)
    trained(adaptive(every=1, min_micro_batches=None, log=tmp_path / "cut"), 4)
    for name, expected in (("pairs", "consecutive steps"), ("cut", "micro-batches")):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        known = [row["compared"] for row in rows if row["similarity"] is not None]
        assert known
        assert {expected} == set(known)
        assert all("compared" not in row for row in rows if row["similarity"] is None)


def test_the_report_says_which_runs_compare_two_steps(tmp_path):
    trained(adaptive(every=1, log=tmp_path / "pairs"), 6)
    trained(adaptive(every=1, min_micro_batches=None, log=tmp_path / "cut"), 6)
    page = tmp_path / "report.html"
    write_report([history_of(tmp_path / name) for name in ("pairs", "cut")], page, "runs")
    text = page.read_text()
    assert "pairs: 3 measured values compare two consecutive steps" in text
    assert 1 == text.count("compare two consecutive steps")


def test_another_loop_may_give_the_micro_batches():
    model = network()
    train = bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        ExternalBatches(32),
        policy=bb.Fixed(32),
        min_micro_batches=1,
        every=1,
    )
    loop, (x, y) = ExternalLoop(train), samples(4096).tensors
    for number in range(6):
        rows = slice(32 * number, 32 * number + 32)
        loop.announce(32, ends_epoch=number == 5, remaining=5 - number)
        loss = cross_entropy(model(x[rows]), y[rows])
        with loop.step.weighted_backward(loss) as factor:
            weighted_loss(loss, factor).backward()
        with loop.step.optimizer_step():
            train.optimizer.step()
        expected = None if number % 2 == 0 else "consecutive steps"
        assert expected == getattr(train.record.statistics, "compared", None)
    loop.end_pass()
    gradients, _ = by_hand([32] * 6)
    found = train.record.statistics
    assert of_pair(*gradients[4:], 32, 32) == (found.grad_sqnorm, found.grad_variance)


# refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": VRSGD},
            "a variance-reduced optimizer compares gradients within a step; pass at least 2",
        ),
        ({"groups": 2}, "groups= compares gradients within a step; pass at least 2"),
    ],
)
def test_what_compares_gradients_within_a_step_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        adaptive(**settings)
