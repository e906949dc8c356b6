"""Loops under `bb.advise`: they train as alone, are measured as by a meter, and keep no hooks."""

import copy
import gc
import io
import itertools
import math
import pickle
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim import optimizer as torch_optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from advised_loops import advised, batches, loss_of, network, plain_step, sgd
from bigbatch.advisor.lines_to_add import lines_to_add
from bigbatch.data.rng_state import random_state
from studies.simulated_device import NAME, simulated_device
from tensors import same


class Doubled:
    """An optimizer of a user's own that calls another one's step, and is none of torch's."""

    def __init__(self, inner):
        self.inner, self.zero_grad = inner, inner.zero_grad

    def step(self):
        self.inner.step()


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights, and steps by an inner optimizer."""

    def __init__(self, inner):
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner, self.steps = inner, 0

    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        if self.steps % 5 == 0:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    slow = self.state[p].setdefault("slow", p.clone())
                    p.copy_(slow.lerp_(p, 0.5))


def accumulated(model, optimizer, batch):
    optimizer.zero_grad()
    for part in zip(*(x.chunk(4) for x in batch), strict=True):
        (loss_of(model, part) / 4).backward()
    optimizer.step()


def by_closure(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)


def zeroed_in_place(model, optimizer, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def evaluated(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    model.eval()
    with torch.no_grad():
        loss_of(model, batch)
    model.train()


def clipped(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


OPTIMIZERS = {
    "SGD": sgd,
    "momentum": lambda model: sgd(model, momentum=0.9, nesterov=True),
    "Adam": lambda model: Adam(model.parameters(), 0.01),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.01, foreach=True),
    "Lookahead": lambda model: Lookahead(sgd(model)),
}
STEPS = [plain_step, accumulated, by_closure, zeroed_in_place, evaluated, clipped]
PARTS = {
    "dropout": lambda: [nn.Dropout(0.3)],
    "BatchNorm": lambda: [nn.BatchNorm1d(8)],
    "both": lambda: [nn.BatchNorm1d(8), nn.Dropout(0.1)],
    "LayerNorm": lambda: [nn.LayerNorm(8)],
}


def trained(context, make, step, parts):
    """(model, random state) after a training in a context."""
    model = network(*PARTS[parts]())
    optimizer = OPTIMIZERS[make](model)
    torch.manual_seed(3)
    with context(model, optimizer) as advice:
        for batch in batches():
            step(model, optimizer, batch)
    return model, random_state(), advice


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("parts", PARTS)
def test_weights_buffers_and_random_states_are_those_of_the_loop_alone(make, step, parts):
    """After the times of other sizes were measured, too."""
    if make == "Lookahead" and step is by_closure:
        pytest.skip("this Lookahead takes no closure")
    alone, expected, _ = trained(lambda *_: nullcontext(), make, step, parts)
    under, actual, advice = trained(bb.advise, make, step, parts)
    assert "" == advice.refusal
    assert same(alone, under)
    assert same(alone.buffers(), under.buffers())
    assert str(expected) == str(actual)
    assert len(advice.observations.measurements) >= 3


def assert_of_the_meter(model, meter, losses, advice, samples):
    """The meter reads every step of the same training; all backwards of a loss are repeated."""
    optimizer, read = sgd(model), []
    for parts in losses(model):
        optimizer.zero_grad()
        for loss in parts:
            loss.backward()
        read.append(meter.read(samples=samples))
        optimizer.step()
    assert len(advice.observations.measurements) >= 3
    for one in advice.observations.measurements:
        expected, actual = read[one.step], one.statistics
        assert expected.grad_sqnorm == pytest.approx(actual.grad_sqnorm, rel=1e-5)
        assert expected.grad_variance == pytest.approx(actual.grad_variance, rel=1e-5)
        assert (expected.samples, expected.micro_batches) == (actual.samples, actual.micro_batches)
        assert expected.layers.keys() == actual.layers.keys() == {"0", "2"}
        for name, layer in expected.layers.items():
            assert layer.grad_variance == pytest.approx(actual.layers[name].grad_variance, rel=1e-5)


def test_groups_of_a_backward_are_those_of_the_meter():
    model = network()
    advice = advised(model, sgd(model), plain_step)
    again = network()
    meter = bb.GradientMeter(again, groups=8, per_layer=True)
    losses = lambda model: ([loss_of(model, batch)] for batch in batches())  # noqa: E731
    assert_of_the_meter(again, meter, losses, advice, [16])
    assert ("groups", 8) == (advice.observations.way, advice.observations.found.parameters // 9)


def test_four_micro_batches_are_those_of_the_meter():
    model = network()
    advice = advised(model, (optimizer := sgd(model)), lambda b: accumulated(model, optimizer, b))
    again = network()

    def losses(model):
        for batch in batches():
            parts = zip(*(x.chunk(4) for x in batch), strict=True)
            yield [loss_of(model, part) / 4 for part in parts]

    assert_of_the_meter(again, bb.GradientMeter(again, per_layer=True), losses, advice, [4] * 4)
    assert "micro-batches" == advice.observations.way


@pytest.mark.parametrize(
    ("step", "parts", "way", "accumulation"),
    [
        (plain_step, "LayerNorm", "groups", 1),
        (plain_step, "BatchNorm", "cut micro-batches", 1),
        (accumulated, "BatchNorm", "micro-batches", 4),
        (by_closure, "LayerNorm", "groups", 1),
        (zeroed_in_place, "LayerNorm", "groups", 1),
    ],
)
def test_the_batch_is_known_whatever_the_way(step, parts, way, accumulation):
    _, _, advice = trained(bb.advise, "SGD", step, parts)
    found = advice.observations.found
    assert (way, accumulation) == (advice.observations.way, found.accumulation)
    assert (16, 16 // accumulation, 1) == (found.batch_size, found.micro_batch, found.ranks)
    assert ("SGD", "Sequential", "PyTorch") == (found.optimizer, found.model, found.engine)


@pytest.mark.parametrize("make", ["momentum", "Lookahead"])
def test_an_optimizer_that_steps_by_another_is_one(make):
    _, _, advice = trained(bb.advise, make, plain_step, "LayerNorm")
    assert ({"momentum": "SGD"}.get(make, make)) == advice.found.optimizer
    assert 30 == advice.observations.steps


def test_a_wrapper_that_is_no_optimizer_of_torch_is_seen_by_what_it_wraps():
    model = network()
    inner = sgd(model)
    outer = Doubled(inner)
    assert "" == advised(model, inner, lambda batch: plain_step(model, outer, batch)).refusal


def global_hooks():
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return [len(getattr(torch_optimizers, name)) for name in names]


def hooks_of(model):
    """How many hooks modules and parameters have."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_modules = sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)
    of_tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return of_modules + sum(
        len(getattr(p, kind) or ()) for p in model.parameters() for kind in of_tensors
    )


class LoopError(Exception):
    """Of a loop."""


def meters():
    return [x for x in gc.get_objects() if isinstance(x, bb.GradientMeter)]


@pytest.mark.parametrize("stops", [None, 0, 2, 3, 20])
@pytest.mark.parametrize("step", [plain_step, accumulated])
@pytest.mark.parametrize("steps", [None, 8])
def test_no_hook_stays_when_the_block_ends(stops, step, steps):
    model, before = network(), global_hooks()
    optimizer = sgd(model)
    gc.collect()
    of_others = meters()  # of earlier tests in this process

    def train(advice):
        with advice:
            for number, batch in enumerate(batches()):
                if number == stops:
                    loss_of(model, batch).backward()
                    raise LoopError
                step(model, optimizer, batch)

    block = bb.advise(model, optimizer, steps=steps)
    with nullcontext() if stops is None else pytest.raises(LoopError):
        train(block)
    assert (before, 0) == (global_hooks(), hooks_of(model))
    gc.collect()
    assert all(any(one is other for other in of_others) for one in meters())


def test_an_exception_of_the_loop_passes_and_the_advice_is_there():
    model = network()
    optimizer, error = sgd(model), LoopError("of the loop")
    found = []

    def train():
        with bb.advise(model, optimizer) as advice:
            found.append(advice)
            for batch in batches(21):
                plain_step(model, optimizer, batch)
            raise error

    with pytest.raises(LoopError) as caught:
        train()
    assert caught.value is error
    (advice,) = found
    assert ("", 21) == (advice.refusal, advice.observations.steps)
    assert advice.noise_scale > 0


@pytest.mark.parametrize("steps", [6, 10, 25])
def test_steps_are_a_limit(steps):
    model = network()
    advice = advised(model, sgd(model), plain_step, steps=steps)
    assert ("", steps) == (advice.refusal, advice.observations.steps)


def test_a_budget_is_a_limit():
    model = network()
    advice = advised(model, sgd(model), plain_step, batches(2000), budget="0.1s")
    assert "" == advice.refusal
    assert advice.observations.steps < 2000


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_too_few_steps_are_refused(steps):
    model = network()
    advice = advised(model, sgd(model), plain_step, batches(steps))
    assert ("at least 6" in advice.refusal) == (steps > 0)
    assert steps > 0 or "without a step" in advice.refusal
    assert math.isnan(advice.noise_scale)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("step", [plain_step, accumulated])
def test_tiny_batches_are_measured_as_far_as_they_can_be(size, step):
    size *= 4 if step is accumulated else 1
    model = network()
    optimizer = sgd(model)
    data = batches(60, size)
    advice = advised(model, optimizer, lambda batch: step(model, optimizer, batch), data)
    assert "" == advice.refusal
    assert size == advice.found.batch_size
    expected = "consecutive steps" if size == 1 else "groups"
    assert ("micro-batches" if step is accumulated else expected) == advice.observations.way


def test_frozen_parameters_do_not_count():
    model = network()
    model[0].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    advice = advised(model, optimizer, plain_step)
    assert ("", 18) == (advice.refusal, advice.found.parameters)
    assert ["2"] == [layer.name for layer in advice.trend.layers if layer.share]


def test_parameters_without_a_gradient_have_no_noise():
    model = network()
    model.unused = nn.Linear(3, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    advice = advised(model, sgd(model), plain_step)
    assert "" == advice.refusal
    assert {0.0} == {layer.share for layer in advice.trend.layers if layer.name == "unused"}


@pytest.mark.parametrize("at", [0, 1, 4, 15, 29])
def test_unfreezing_after_the_first_step_is_refused_and_trains_as_alone(at):
    def train(context):
        model = network()
        model[0].requires_grad_(False)
        optimizer = sgd(model)
        with context(model, optimizer) as advice:
            for number, batch in enumerate(batches()):
                if number == at:
                    model[0].requires_grad_(True)
                plain_step(model, optimizer, batch)
        return model, advice

    alone, _ = train(lambda *_: nullcontext())
    under, advice = train(bb.advise)
    assert same(alone, under)
    assert (at > 0) == ("began to train after the training had been found" in advice.refusal)
    assert at > 0 or {"0", "2"} == {layer.name for layer in advice.trend.layers if layer.share}


def test_freezing_is_measured():
    model = network()
    optimizer, number = sgd(model), iter(range(100))

    def step(batch):
        if next(number) == 15:
            model[0].requires_grad_(False)
        plain_step(model, optimizer, batch)

    advice = advised(model, optimizer, step)
    assert "" == advice.refusal
    last = advice.observations.measurements[-1]
    assert last.step > 15
    assert 0 == last.statistics.layers["0"].grad_variance < last.statistics.grad_variance


def test_several_models_of_one_optimizer_are_one_training():
    encoder, decoder = network(), nn.Linear(2, 2)
    optimizer = SGD([*encoder.parameters(), *decoder.parameters()], lr=0.05)
    both = nn.ModuleList([encoder, decoder])

    def step(batch):
        optimizer.zero_grad()
        nn.functional.mse_loss(decoder(encoder(batch[0])), batch[1]).backward()
        optimizer.step()

    advice = advised(both, optimizer, step)
    assert "" == advice.refusal
    assert {"0.0", "0.2", "1"} == {layer.name for layer in advice.trend.layers}
    assert advice.observations.time is None
    assert any("one module" in unseen for unseen in advice.observations.unseen)


class WithCriterion(nn.Module):
    """Its criterion is a submodule, as Lightning's modules often have it."""

    def __init__(self):
        super().__init__()
        self.body, self.loss_fn = network(), nn.MSELoss()

    def forward(self, x):
        return self.body(x)


def test_a_criterion_inside_the_model_does_not_hide_the_time():
    model = WithCriterion()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        model.loss_fn(model(batch[0]), batch[1]).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert "" == advice.refusal
    assert not any("one module" in unseen for unseen in advice.observations.unseen)
    assert advice.observations.time.backward.per_sample >= 0


def test_parts_of_one_batch_before_a_backward_add_up():
    model = network()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        output = torch.cat([model(part) for part in batch[0].chunk(3)])  # of 6, 6 and 4
        F.mse_loss(output, batch[1]).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert ("", 16, 16) == (advice.refusal, advice.found.batch_size, advice.found.micro_batch)
    assert "counted in all calls of the model" in str(advice)


def doubled(model, x, y):
    return F.mse_loss(model(torch.cat([x, x + 1])), torch.cat([y, y]))


def packed(model, x, y):
    """All samples of a batch in one row."""
    return F.mse_loss(model(x.view(1, -1))[0], y)


def moved(model, x, y):
    """Parts that are copied, as to a GPU, and no views of one batch."""
    return F.mse_loss(torch.cat([model(part.clone()) for part in x.chunk(2)]), y)


def time_first(model, x, y):
    return F.mse_loss(model(x[None].expand(5, -1, -1)).mean(0), y)


@pytest.mark.parametrize(
    ("loss", "counted"),
    [
        (doubled, "as its DataLoader counts them; dimension 0 of the model's first tensor has 38"),
        (packed, "as its DataLoader counts them; dimension 0 of the model's first tensor has 1"),
        (moved, "counted in all calls of the model, in dimension 0"),
        (time_first, "counted in dimension 1"),
    ],
)
def test_samples_are_those_of_the_loader(loss, counted):
    """Lines to add are settings of it."""
    model, data = network(), TensorDataset(torch.randn(19 * 20, 6), torch.randn(19 * 20, 2) + 1)
    if loss is packed:
        model = nn.Sequential(nn.Unflatten(1, (-1, 6)), *model)
    optimizer, loader = sgd(model), DataLoader(data, 19)

    def step(batch):
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()

    advice = advised(model, optimizer, step, loader)
    assert ("", 19, 19) == (advice.refusal, advice.found.batch_size, advice.found.micro_batch)
    assert f"1 x 1 x 19, {counted}" in str(advice)


def test_rows_that_no_whole_number_of_samples_has_give_no_lines():
    """Packed into 7 rows, of 20 samples."""
    model, data = network(), TensorDataset(torch.randn(20 * 20, 6))
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        (model(batch[0][:14].view(7, 2, 6)) - 1).square().mean().backward()
        optimizer.step()

    advice = advised(model, optimizer, step, DataLoader(data, 20))
    assert ("", 7, False) == (advice.refusal, advice.found.batch_size, advice.found.is_loaders)
    assert "no DataLoader has such batches, but of 20" in str(advice)
    assert {} == lines_to_add(advice)


def test_each_value_of_the_parameter_groups_is_found_once():
    model = network()
    pairs = [(0.9, 0.95), (0.8, 0.95)]
    groups = [{"params": [p], "betas": pairs[i % 2]} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups, 0.01)
    advice = advised(model, optimizer, plain_step)
    assert (((0.9, 0.95), (0.8, 0.95)), ()) == (advice.found.betas, advice.found.momentum)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 2, bias=False))
    advice = advised(model, torch.optim.Muon(model.parameters(), momentum=0.93), plain_step)
    assert ((), (0.93,)) == (advice.found.betas, advice.found.momentum)


def test_the_largest_micro_batch_is_that_of_the_activations():
    """A backward keeps 6 inputs and 8 outputs of the tanh, of 4 bytes."""
    model = network()
    time = advised(model, sgd(model), plain_step, batches(12, 64)).observations.time
    assert 14 * 4 / 2 <= time.sample_bytes <= 14 * 4 * 2
    assert time.largest > 64


def test_gradients_between_steps_that_are_zeroed_change_nothing():
    """An evaluation with gradients, of other samples, before the step's own backward."""

    def train(context):
        model = network()
        optimizer = sgd(model)
        with context(model, optimizer) as advice:
            for number, batch in enumerate(batches()):
                if number % 7 == 5:
                    loss_of(model, (batch[0][:5], batch[1][:5])).backward()
                plain_step(model, optimizer, batch)
        return model, advice

    alone, _ = train(lambda *_: nullcontext())
    under, advice = train(bb.advise)
    assert same(alone, under)
    assert "" == advice.refusal
    assert {16} == {one.statistics.samples for one in advice.observations.measurements}


def test_a_second_observation_sees_nothing_of_the_first():
    model = network()
    optimizer = sgd(model)
    first = advised(model, optimizer, plain_step)
    second = advised(model, optimizer, plain_step, batches(10))
    assert (30, 10) == (first.observations.steps, second.observations.steps)
    assert "" == first.refusal == second.refusal


def test_optimizers_of_other_models_are_ignored():
    model, other = network(), network(seed=5)
    optimizer, of_other = sgd(model), sgd(other)

    def step(batch):
        plain_step(model, optimizer, batch)
        plain_step(other, of_other, batch)

    advice = advised(model, optimizer, step)
    assert ("", 30) == (advice.refusal, advice.observations.steps)


def test_batches_of_other_sizes_in_turn_are_measured():
    sizes = itertools.cycle([16, 12])
    data = [(x[:n], y[:n]) for (x, y), n in zip(batches(40), sizes, strict=False)]
    model = network()
    advice = advised(model, sgd(model), plain_step, data)
    assert "" == advice.refusal
    assert {16, 12} >= {one.statistics.samples for one in advice.observations.measurements}


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, pickled, save_and_load], ids=["deepcopy", "pickle", "torch.save"]
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_model_may_be_copied_and_saved_at_any_moment(copied, accumulation):
    """Between forward and step too, where an inner module has an input with a graph."""
    model = network(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    optimizer, copies = sgd(model), []
    with bb.advise(model, optimizer) as advice:
        for number, (x, y) in enumerate(batches(40)):
            out = model[2:](model[:2](x))
            copies.append(copied(model))
            (F.mse_loss(out, y) / accumulation).backward()
            copies.append(copied(model))
            if number % accumulation == accumulation - 1:
                optimizer.step()
                optimizer.zero_grad()
    assert advice is not None
    for each in copies:
        each(x)  # with hooks that do nothing
    assert copies[-1](x).shape == (16, 2)


def test_a_forward_that_fails_and_is_repeated_changes_nothing():
    model = network()
    optimizer, failures = sgd(model), 0
    model[1].register_forward_hook(fail_every_third())
    with bb.advise(model, optimizer) as advice:
        for batch in batches(60):
            optimizer.zero_grad()
            try:
                loss = loss_of(model, batch)
            except MemoryError:
                failures += 1
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
    assert failures > 10
    assert "" == advice.refusal


def fail_every_third():
    count = itertools.count(1)

    def hook(*_):
        if next(count) % 3 == 0:
            raise MemoryError

    return hook


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_is_measured_unless_it_is_reentrant(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 2), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, self.first(x), use_reentrant=use_reentrant)

    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = sgd(model)
    with bb.advise(model, optimizer) as advice:
        for number, batch in enumerate(batches(120)):
            (loss_of(model, batch) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    if use_reentrant:  # a backward inside another
        assert "use_reentrant=False" in advice.refusal
    else:
        assert "" == advice.refusal
        assert "micro-batches" == advice.observations.way


def test_the_probe_of_other_sizes_leaves_what_a_module_counts():
    """The block continues after the observed steps."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = network(), 0
            self.draw = torch.Generator().manual_seed(3)

        def forward(self, x):
            self.calls += 1
            return self.body(x) + 0.01 * torch.rand(len(x), 2, generator=self.draw)

    def train(context):
        model = Counting()
        optimizer = sgd(model)
        with context(model, optimizer) as advice:
            for batch in batches(30):
                plain_step(model, optimizer, batch)
        for batch in batches(10, seed=5):
            plain_step(model, optimizer, batch)
        return model, advice

    alone, _ = train(lambda *_: nullcontext())
    model, advice = train(partial(bb.advise, steps=20))
    assert "" == advice.refusal
    assert 40 == model.calls == alone.calls
    assert same(alone, model)


def test_the_rate_of_a_scheduler_is_its_first_one():
    model = network()
    optimizer = sgd(model, lr=0.04)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 30)
    with bb.advise(model, optimizer) as advice:
        for batch in batches(30):
            plain_step(model, optimizer, batch)
            scheduler.step()
    assert (0.04,) == advice.found.lr["SGD"]


def test_the_time_before_a_forward_is_that_of_samples_if_a_loader_gets_them():
    model, data = network(), TensorDataset(torch.randn(40, 6), torch.randn(40, 2))
    loader = DataLoader(data, batch_size=20)
    optimizer = sgd(model)
    with bb.advise(model, optimizer) as advice:
        for _ in range(15):
            for batch in loader:
                plain_step(model, optimizer, batch)
    assert "" == advice.refusal
    assert advice.observations.time.data > 0


def test_the_present_batch_is_the_usual_one():
    """The last batch of an epoch is smaller, and here the last measured step too."""
    model = network()
    data = [*batches(9), *batches(1, size=3)]  # at first, every second step is measured
    advice = advised(model, sgd(model), plain_step, data)
    assert [3, 5, 7, 9] == [one.step for one in advice.observations.measurements]
    assert 3 == advice.observations.measurements[-1].statistics.samples
    assert 16 == advice.found.batch_size == advice.found.micro_batch


def test_a_step_that_fails_does_not_end_the_observation():
    """Every seventh call of the closure; the step is left out."""
    model = network()
    optimizer, calls = sgd(model), itertools.count(1)

    def step(batch):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if next(calls) % 7 == 0:
                raise MemoryError
            return loss

        with suppress(MemoryError):
            optimizer.step(closure)

    advice = advised(model, optimizer, step, batches(70))
    assert "" == advice.refusal
    assert 60 == advice.observations.steps


def advised_on_device(rank, ranks):
    """What is found of a training on the device, and its waits by `synchronize`."""
    device = simulated_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1)).to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device.reset()
    with bb.advise(model, optimizer, steps=20) as advice:
        for _ in range(30):
            model(torch.randn(16, 6).to(NAME)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return advice.refusal, advice.found.device, device.waits()["synchronize"]


def test_an_advisor_waits_for_a_device_of_any_kind_and_names_it(on_simulated_device):
    refusal, name, waits = on_simulated_device(advised_on_device)
    assert "" == refusal
    assert NAME == name
    assert waits > 10  # before and after each timed backward
