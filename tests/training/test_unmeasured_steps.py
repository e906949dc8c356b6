"""Steps that measure nothing: read one step late where the optimizer skips on the device."""

import json
import math
import pickle
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import bigbatch as bb
from bigbatch.log.step_record import StepRecord

STEPS, SIZE = 12, 8
OPTIMIZERS = {
    "SGD": lambda p, fused: SGD(p, lr=0.1, fused=fused),
    "momentum": lambda p, fused: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused),
    "AdamW": lambda p, fused: AdamW(p, lr=0.01, fused=fused),
}


def data():
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(STEPS, SIZE, 4, generator=draw), torch.arange(STEPS * SIZE) % 3
    return list(zip(x, y.view(STEPS, SIZE), strict=True))


def training(name="momentum", *, fused=True, scheduler=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = OPTIMIZERS[name](model.parameters(), fused)
    schedule = None if scheduler is None else LambdaLR(optimizer, scheduler)
    settings = {"policy": bb.Fixed(SIZE), "micro_batch": SIZE, "every": 0, **options}
    return bb.AdaptiveBatch(model, optimizer, data(), scheduler=schedule, **settings)


def trained(train, *, looks=False, spoiled=(), ignored=-100):
    """The records of a pass, and the weights after each step."""
    records, weights = [], []
    for number, step in enumerate(train):
        for x, y in step:
            loss = cross_entropy(train.model(x), y, ignore_index=ignored)
            step.backward(loss * math.inf if number in spoiled else loss)
        records.append(step.update())
        if looks:
            assert train.steps + train.skipped == records[-1].step == number + 1
            assert records[-1].skipped == (number in spoiled)
        weights.append([p.detach().clone() for p in train.model.parameters()])
    return records, weights


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_record_is_the_same_whenever_it_is_looked_at(name):
    options = {"scheduler": lambda tick: 0.9**tick}
    at_once = training(name, **options)
    late = training(name, **options)
    spoiled = (0, 3, 4, STEPS - 1)
    expected, weights = trained(at_once, looks=True, spoiled=spoiled)
    records, later = trained(late, spoiled=spoiled)
    clocks = {"elapsed_seconds": 0.0}
    assert [asdict(r) | clocks for r in expected] == [asdict(r) | clocks for r in records]
    assert all(map(equal, weights, later))
    assert (at_once.steps, at_once.skipped) == (late.steps, late.skipped) == (STEPS - 4, 4)
    shared = [t.state_dict()["shared"] for t in (at_once, late)]
    assert repr(shared[0]) == repr(shared[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [0, 2])
def test_a_step_that_is_not_finite_changes_no_weight_and_no_buffer(name, first):
    fused, plain = training(name), training(name, fused=False)
    spoiled = (first, first + 1)
    _, actual = trained(fused, spoiled=spoiled)
    _, expected = trained(plain, spoiled=spoiled)
    for one, other in zip(actual, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # fused rounds otherwise
    assert all(p.isfinite().all() for p in fused.model.parameters())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_backward_a_step_is_a_plain_loop_to_the_last_bit_whatever_the_labels(name, fused):
    train = training(name, fused=fused, lr_scaling=None)
    _, actual = trained(train, ignored=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = OPTIMIZERS[name](model.parameters(), fused)
    for (x, y), weights in zip(data(), actual, strict=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y, ignore_index=2).backward()
        optimizer.step()
        assert equal(model.parameters(), weights)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_whose_labels_are_all_ignored_is_skipped(fused):
    train = training(fused=fused)
    before = []
    for number, step in enumerate(train):
        for x, y in step:
            y = torch.full_like(y, -100) if number == 5 else y
            step.backward(cross_entropy(train.model(x), y))
        before.append([p.detach().clone() for p in train.model.parameters()])
        record = step.update()
        if number == 5:  # weight decay would move the weights
            assert equal(before[-1], train.model.parameters())
            assert record.skipped
            assert math.isnan(record.loss)
    assert (train.steps, train.skipped) == (STEPS - 1, 1)


def test_the_row_of_the_last_step_is_written_where_the_loop_is_left(tmp_path):
    train = training("AdamW", log=tmp_path / "run")
    for number, step in enumerate(train):
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        step.update()
        if number == 3:
            break
    train.run_log.flush()
    (file,) = (tmp_path / "run").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [1, 2, 3, 4] == [row["step"] for row in rows if "step" in row]


def test_a_record_that_was_not_read_is_a_record_like_any_other():
    def one(read):
        train = training("AdamW")
        step = next(iter(train))
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        record = replace(step.update(), elapsed_seconds=0.0) if read else step.update()
        vars(record)["elapsed_seconds"] = 0.0
        return record

    read = one(True)
    assert read == one(False)
    assert one(False) == read
    assert one(False) == one(False)
    assert repr(one(False)) == repr(read)
    assert hash(one(False)) == hash(read)
    decision = replace(read.decision, reason="another")
    values = {"loss": 1.0, "skipped": True, "decision": decision}
    assert replace(one(False), **values) == replace(read, **values)


def test_the_reason_of_a_step_is_the_same_when_it_is_read_late():
    """Step 128 is the last one of those of which every second is measured."""

    def reasons(*, fused):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        policy = bb.Controller(bb.SimiGrad(0.2), SIZE, max_batch=SIZE, smoothing=None)
        optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
        train = bb.AdaptiveBatch(model, optimizer, 11 * data(), policy=policy, micro_batch=SIZE)
        records, _ = trained(train)
        unmeasured = [r for r in records if r.statistics is None]
        return [(r.step, r.every, r.decision.reason) for r in unmeasured]

    expected = reasons(fused=False)
    assert (128, 4, "not measured; one step in 2 is") in expected
    assert expected == reasons(fused=True)


def test_a_record_that_was_not_read_is_copied_as_a_record():
    records, _ = trained(training("AdamW"))
    train = training("AdamW")
    step = next(iter(train))
    for x, y in step:
        step.backward(cross_entropy(train.model(x), y))
    copied = pickle.loads(pickle.dumps(step.update()))
    assert type(copied) is StepRecord
    assert copied.loss == records[0].loss
    with pytest.raises(AttributeError):
        _ = copied.no_field
