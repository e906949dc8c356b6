"""Losses under a GradScaler: true units, before and after unscaling, by hand and in a loop."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy

import single_process_training
from bigbatch import AdaptiveBatch, Fixed, GradientMeter
from bigbatch.errors import GradientError
from oracles import noise as oracle
from single_process_training import RAGGED

torch.set_num_threads(1)  # small tensors: a second thread only waits
ALL = {
    "confidence": 0.9,
    "per_layer": True,
    "half_batch_cosine": True,
}  # everything that can be asked for
REL = 1e-4  # GradScaler wants float32 parameters: sums of 50 squares


network = functools.partial(single_process_training.network, torch.float32)
data = functools.partial(single_process_training.data, dtype=torch.float32)
same = functools.partial(single_process_training.same, rel=REL)


def scaler_of(scale=1024.0):
    return GradScaler("cpu", init_scale=scale)


def accumulate(model, scaler, loss="weighted", sizes=RAGGED):
    for x, y in data(sizes):
        share = len(y) / sum(sizes) if loss == "weighted" else 1.0
        scaler.scale(cross_entropy(model(x), y) * share).backward()


def expected_of(model, loss="weighted", sizes=RAGGED):
    model = copy.deepcopy(model).double()
    rows = []
    for x, y in data(sizes):
        parts = torch.autograd.grad(cross_entropy(model(x.double()), y), list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return getattr(oracle, loss)(torch.stack(rows), sizes)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.3])
def test_signal_and_noise_are_without_the_scale(scale, loss):
    model, scaler = network(), scaler_of(scale)
    with GradientMeter(model, loss=loss, scaler=scaler) as meter:
        accumulate(model, scaler, loss)
        assert same(expected_of(model, loss), meter.read(RAGGED))


def test_without_the_scaler_they_are_with_the_square_of_its_scale():
    model, scaler = network(), scaler_of()
    with GradientMeter(model) as meter:
        accumulate(model, scaler)
        actual = meter.read(RAGGED)
    expected = expected_of(model)
    assert pytest.approx(
        (expected.grad_sqnorm * 2**20, expected.grad_variance * 2**20), rel=REL
    ) == (actual.grad_sqnorm, actual.grad_variance)
    assert pytest.approx(expected.similarity, rel=REL) == actual.similarity


def test_everything_else_is_as_without_a_scaler():
    seen = []
    for scaler in (scaler_of(), GradScaler("cpu", enabled=False)):
        model = network()
        with GradientMeter(model, scaler=scaler, **ALL) as meter:
            accumulate(model, scaler)
            seen.append(meter.read(RAGGED))
    scaled, plain = seen
    assert pytest.approx(plain.similarity_interval, rel=1e-4) == scaled.similarity_interval
    assert pytest.approx(plain.noise_scale_interval, rel=1e-3) == scaled.noise_scale_interval
    assert pytest.approx(plain.half_batch_cosine, rel=REL) == scaled.half_batch_cosine
    for name, layer in plain.layers.items():
        other = scaled.layers[name]
        assert pytest.approx((layer.grad_sqnorm, layer.grad_variance), rel=REL) == (
            other.grad_sqnorm,
            other.grad_variance,
        )


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_unscaling_clipping_and_stepping_after_read_is_torchs_own_recipe(options):
    model, scaler = network(), scaler_of()
    optimizer = sgd(model)
    with GradientMeter(model, scaler=scaler, **options) as meter:
        for _ in range(4):
            expected = expected_of(model)
            accumulate(model, scaler)
            assert same(expected, meter.read(RAGGED))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_that_unscales_inside_its_step_is_measured_before(kind):
    model, scaler = network(), scaler_of()
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    with GradientMeter(model, scaler=scaler) as meter:
        for _ in range(4):
            expected = expected_of(model)
            accumulate(model, scaler)
            assert same(expected, meter.read(RAGGED))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def test_a_scale_that_changes_between_steps_is_followed():
    model, scaler = network(), GradScaler("cpu", init_scale=64.0, growth_interval=1)
    optimizer = sgd(model)
    scales = []
    with GradientMeter(model, scaler=scaler) as meter:
        for _ in range(4):
            expected = expected_of(model)
            scales.append(scaler.get_scale())
            accumulate(model, scaler)
            assert same(expected, meter.read(RAGGED))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [64.0, 128.0, 256.0, 512.0] == scales


def unscaled(model, scaler):
    scaler.unscale_(sgd(model))


def unscaled_and_clipped(model, scaler):
    scaler.unscale_(sgd(model))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def clipped(model, scaler):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


@pytest.mark.parametrize("change", [unscaled, unscaled_and_clipped, clipped])
@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("passed", [True, False])
def test_reading_after_unscaling_or_clipping_is_refused(change, loss, passed):
    model, scaler = network(), scaler_of()
    meter = GradientMeter(model, loss=loss, scaler=scaler if passed else None)
    accumulate(model, scaler, loss)
    change(model, scaler)
    with pytest.raises(GradientError):
        meter.read(RAGGED)
    model.zero_grad()
    scaler = scaler_of(1.0)
    accumulate(model, scaler, loss)
    meter.scaler = None
    assert same(expected_of(model, loss), meter.read(RAGGED))


@pytest.mark.parametrize("missed", [0, 1, 2, 3])
def test_unscaling_is_found_whichever_parameters_the_backwards_reach(missed):
    model, scaler = network(), scaler_of()
    parameters = list(model.parameters())
    meter = GradientMeter(model, scaler=scaler)
    for x, y in data():
        value = scaler.scale(cross_entropy(model(x), y) * len(y) / 19)
        value.backward(inputs=[p for p in parameters if p is not parameters[missed]])
    unscaled(model, scaler)
    with pytest.raises(GradientError):
        meter.read(RAGGED)


def test_unscaling_is_found_where_only_parameters_are_trained_that_came_later():
    model, head, scaler = network(), nn.Linear(4, 3), scaler_of()
    meter = GradientMeter(model, scaler=scaler)
    meter.select([*meter.source.parameters, *head.parameters()])
    for x, y in data():
        scaler.scale(cross_entropy(head(x), y) * len(y) / 19).backward()
    unscaled(head, scaler)
    with pytest.raises(GradientError):
        meter.read(RAGGED)


def test_unscaling_is_found_where_only_parameters_are_trained_that_were_frozen_at_first():
    model, scaler = network(), scaler_of()
    model[0].requires_grad_(False)
    meter = GradientMeter(model, scaler=scaler)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    meter.select(model.parameters())  # looks for parameters that have no hook yet
    accumulate(model, scaler)
    unscaled(model, scaler)
    with pytest.raises(GradientError):
        meter.read(RAGGED)


def test_an_overflow_is_no_warning_and_no_number_and_the_next_step_is_right():
    model, scaler = network(), scaler_of()
    optimizer = sgd(model)
    meter = GradientMeter(model, scaler=scaler, **ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in data():
            scaler.scale(cross_entropy(model(x), y) * 1e38).backward()
        step = meter.read(RAGGED)
    assert not step.noise_scale < float("inf")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert 512.0 == scaler.get_scale()
    accumulate(model, scaler)
    assert same(expected_of(model), meter.read(RAGGED))


# in a loop


def adaptive(scaler, *, every=1, of_meter=None):
    model = network()
    meter = GradientMeter(model, scaler=of_meter, **ALL)
    return AdaptiveBatch(
        model,
        sgd(model),
        data([5] * 24),
        policy=Fixed(20),
        micro_batch=5,
        scaler=scaler,
        meter=meter,
        lr_scaling=None,
        every=every,
    )


def noises(train, *, clip):
    seen = []
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        if clip == "own":
            step.clip_grad_norm_(0.05)
        elif clip == "torchs":
            if train.scaler is not None:
                train.scaler.unscale_(train.optimizer)
            nn.utils.clip_grad_norm_(train.model.parameters(), 0.05)
        seen.append(step.update().statistics)
    return seen


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("clip", [None, "own", "torchs"])
def test_a_loop_with_a_scaler_measures_and_trains_as_one_without(clip, every):
    plain, scaled = adaptive(None, every=every), adaptive(scaler_of(), every=every)
    for one, other in zip(noises(plain, clip=clip), noises(scaled, clip=clip), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert same(
                (one.grad_sqnorm, one.grad_variance, one.similarity, one.noise_scale), other
            )
            assert pytest.approx(one.half_batch_cosine, rel=REL) == other.half_batch_cosine
    for p, q in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_loop_gives_its_scaler_to_a_meter_of_ones_own():
    own = scaler_of(7.0)  # the meter's, that scales nothing here
    with_scaler, without = adaptive(scaler_of(), of_meter=own), adaptive(None, of_meter=own)
    for one, other in zip(noises(with_scaler, clip=None), noises(without, clip=None), strict=True):
        assert same((one.grad_sqnorm, one.grad_variance, one.similarity, one.noise_scale), other)


def test_the_first_step_of_a_loop_with_a_scaler_has_the_oracles_numbers():
    train = adaptive(scaler_of())
    expected = expected_of(train.model, sizes=[5] * 4)
    assert same(expected, noises(train, clip=None)[0])
