"""GradientMeter(groups=k): what it reads of groups of one backward, against k backwards."""

import copy
import gc
import io
import math
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from bigbatch import GradientMeter
from bigbatch.errors import GradientError, SettingError
from group_gradients import (
    Function,
    Recorder,
    error,
    expected_noise,
    loop,
    mean_loss,
    measured,
    of_samples,
    sizes_of,
)
from oracles import noise as oracle
from single_process_training import same

torch.set_num_threads(1)
K = 4
CLOSE = 1e-9  # of float64 sums in another order


def network(dtype=torch.float64, width=12):
    torch.manual_seed(0)
    layers = [nn.Linear(5, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 9)]
    return nn.Sequential(*layers).to(dtype)


def samples(n, dtype=torch.float64, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=draw, dtype=torch.float64).to(dtype)


def oracle_of(parts):
    """The oracle's answer for (gradients of groups, their weights) of several backwards."""
    rows = [torch.cat([r.flatten(1) for r in gradients], 1) for gradients, _ in parts]
    weights = [n for _, sizes in parts for n in sizes]
    means = torch.cat(rows) * (sum(weights) / torch.tensor(weights).double())[:, None]
    return oracle.weighted(means, weights)


EXACT = {"per_layer": True}, {"half_batch_cosine": True}, {"confidence": 0.9}


# one backward


@pytest.mark.parametrize("options", EXACT, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("n", [2, 7, 8])
def test_options_that_need_the_groups_themselves_make_the_noise_exact(n, options):
    expected = expected_noise(network(), [samples(n)], K)
    assert same(expected, measured(network(), [samples(n)], K, **options))


def test_a_layer_has_the_noise_of_its_own_groups():
    model, x = network(), samples(10)
    rows = dict(zip(dict(model.named_parameters()), loop(model, [x], K), strict=True))
    layers = measured(model, [x], K, per_layer=True).layers
    for name in ("0", "2", "3"):
        own = [rows[f"{name}.{kind}"] for kind in ("weight", "bias")]
        assert same(oracle_of([(own, sizes_of(10, K))]), layers[name])


def test_the_cosine_is_that_of_the_even_and_the_odd_groups():
    model, x = network(), samples(10)
    rows = torch.cat([r.flatten(1) for r in loop(model, [x], K)], 1)
    expected = torch.cosine_similarity(rows[::2].sum(0), rows[1::2].sum(0), dim=0).item()
    actual = measured(model, [x], K, half_batch_cosine=True).half_batch_cosine
    assert pytest.approx(expected, rel=CLOSE) == actual


def test_the_interval_is_that_of_as_many_micro_batches():
    x, sizes = samples(22), sizes_of(22, 8)
    model = network()
    with GradientMeter(model, confidence=0.9) as meter:
        for part in x.split(sizes):
            (mean_loss(model, part) * len(part) / len(x)).backward()
        expected = meter.read(sizes).interval
    actual = measured(network(), [x], 8, confidence=0.9).interval
    # random projections are float32
    ends = [(interval.low, interval.high) for interval in (expected, actual)]
    assert pytest.approx(ends[0], rel=1e-5) == ends[1]


def test_the_signal_is_exact_where_the_noise_is_projected():
    x = samples(10)
    exact, projected = measured(network(), [x], K, per_layer=True), measured(network(), [x], K)
    lengths = [s.grad_sqnorm + s.grad_variance / s.samples for s in (exact, projected)]
    assert pytest.approx(lengths[0], rel=CLOSE) == lengths[1]
    assert exact.grad_variance != projected.grad_variance


def test_one_sample_has_no_noise():
    with pytest.raises(GradientError, match="1 micro-batch seen"):
        measured(network(), [samples(1)], K)


def test_the_training_of_a_measured_model_is_the_same_to_the_bit():
    models = [network(torch.float32) for _ in range(2)]
    with GradientMeter(models[1], groups=K) as meter:
        for step in range(3):
            for model in models:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.zero_grad()
                mean_loss(model, samples(7, torch.float32, seed=step)).backward()
                optimizer.step()
            grads = [[p.grad for p in model.parameters()] for model in models]
            assert all(map(torch.equal, *grads))
            meter.source.restart()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


# several backwards


@pytest.mark.parametrize("sizes", [[8, 8], [7, 3, 10], [1, 9], [2, 1, 1]])
def test_the_groups_of_all_backwards_of_a_step_are_compared(sizes):
    model, parts = network(), []
    batches = [samples(n, seed=n + i) for i, n in enumerate(sizes)]
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        for x in batches:
            share = len(x) / sum(sizes)
            parts.append(([r * share for r in loop(model, [x], K)], sizes_of(len(x), K)))
            (mean_loss(model, x) * share).backward()
        statistics = meter.read(samples=sizes)
    assert sum(len(groups) for _, groups in parts) == statistics.micro_batches
    assert same(oracle_of(parts), statistics)


def test_a_backward_that_was_not_prepared_is_one_group():
    model, x = network(), samples(8)
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        loss = mean_loss(model, x) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        statistics = meter.read(samples=[8, 8])
    halves = [row / 2 for row in loop(model, [x], K)]
    whole = [row.sum(0, keepdim=True) for row in halves]
    assert same(oracle_of([(halves, [2] * 4), (whole, [8])]), statistics)


def test_an_evaluation_between_forward_and_backward_changes_nothing():
    model, x = network(), samples(8)
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        loss = mean_loss(model, x)
        with torch.no_grad():
            model(samples(3))
        loss.backward()
        assert same(expected_noise(model, [x], K), meter.read(samples=[8]))


def test_a_step_that_was_zeroed_unread_does_not_count():
    model, x = network(), samples(8)
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        for _ in range(3):
            model.zero_grad()
            mean_loss(model, x).backward()
        assert same(expected_noise(model, [x], K), meter.read(samples=[8]))


def test_an_evaluation_before_the_forward_changes_nothing():
    model, x = network(), samples(8)
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        model(samples(3))
        mean_loss(model, x).backward()
        assert same(expected_noise(model, [x], K), meter.read(samples=[8]))


def test_steps_that_are_not_due_are_not_prepared():
    model, read = network(), []
    with GradientMeter(model, groups=K, every=2) as meter:
        for _ in range(3):
            model.zero_grad()
            mean_loss(model, samples(8)).backward()
            read.append(meter.read(samples=[8]))
    assert [True, False, True] == [statistics is not None for statistics in read]


# weights of samples


def token_loss(model, x, counts):
    """Mean over tokens, of which a sample has some; its loss stands for all of them."""
    losses = cross_entropy(model(x), torch.arange(len(x)) % 9, reduction="none")
    return (losses * counts).sum() / counts.sum()


def token_rows(model, x, counts):
    rows, start = [], 0
    labels = torch.arange(len(x)) % 9
    for n in sizes_of(len(x), K):
        part = slice(start, start + n)
        losses = cross_entropy(model(x[part]), labels[part], reduction="none")
        share = (losses * counts[part]).sum() / counts.sum()
        rows.append(torch.autograd.grad(share, list(model.parameters())))
        start += n
    return [torch.stack(row) for row in zip(*rows, strict=True)]


def test_samples_may_weigh_their_tokens():
    model, x = network(), samples(7)
    counts = torch.tensor([3.0, 1, 4, 1, 5, 9, 2], dtype=torch.float64)
    weights = [part.sum().item() for part in counts.split(sizes_of(7, K))]
    expected = oracle_of([(token_rows(model, x, counts), weights)])
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        token_loss(model, x, counts).backward()
        assert same(expected, meter.read(samples=[counts]))


def test_a_group_without_tokens_does_not_count():
    model, x = network(), samples(8)
    counts = torch.tensor([3.0, 1, 0, 0, 5, 9, 2, 6], dtype=torch.float64)
    rows, weights = token_rows(model, x, counts), [4, 0, 14, 8]
    kept = [row[torch.tensor(weights) > 0] for row in rows]
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        token_loss(model, x, counts).backward()
        statistics = meter.read(samples=[counts])
    assert 3 == statistics.micro_batches
    assert same(oracle_of([(kept, [4, 14, 8])]), statistics)


# precision


@pytest.mark.parametrize("options", [{}, {"per_layer": True}], ids=["projected", "exact"])
def test_float32_is_measured_to_its_rounding(options):
    x = samples(16)
    expected = measured(network(), [x], K, **options)
    actual = measured(network(torch.float32), [x.float()], K, **options)
    # rounding of 1e-7 an element, in differences of squared norms
    assert pytest.approx(expected.grad_variance, rel=1e-4) == actual.grad_variance


def in_bfloat16(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mean_loss(model, x).float()


@pytest.mark.parametrize("options", [{}, {"per_layer": True}], ids=["projected", "exact"])
def test_bfloat16_autocast_is_measured_to_its_rounding(options):
    model, x = network(torch.float32, width=32), samples(32, torch.float32)
    expected = measured(network(width=32), [x.double()], K, **options)
    actual = measured(model, [x], K, loss=in_bfloat16, **options)
    # 2^-9 an element, in differences of squared norms
    assert pytest.approx(expected.grad_variance, rel=0.02) == actual.grad_variance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_a_half_type_is_measured_to_its_rounding(dtype):
    x = samples(32)
    expected = measured(network(), [x], K, per_layer=True)
    actual = measured(network(dtype), [x.to(dtype)], K, per_layer=True)
    assert pytest.approx(expected.grad_variance, rel=0.1) == actual.grad_variance


def test_the_scale_of_a_grad_scaler_is_taken_out():
    x, scaler = samples(16, torch.float32), GradScaler("cpu", init_scale=1024.0)
    expected = measured(network(torch.float32), [x], K)
    model = network(torch.float32)
    with GradientMeter(model, groups=K, scaler=scaler) as meter:
        scaler.scale(mean_loss(model, x)).backward()
        actual = meter.read(samples=[16])
    assert pytest.approx(expected.grad_variance, rel=1e-5) == actual.grad_variance
    assert pytest.approx(expected.grad_sqnorm, rel=1e-4) == actual.grad_sqnorm


def test_float16_gradients_that_overflow_are_no_error_of_the_groups():
    model, scaler = network(torch.float16), GradScaler("cpu", init_scale=2.0**20)
    with GradientMeter(model, groups=K, scaler=scaler) as meter:
        scaler.scale(mean_loss(model, samples(16, torch.float16)).float()).backward()
        statistics = meter.read(samples=[16])
    assert not math.isfinite(statistics.grad_sqnorm)


# checkpointing


def block(self, x):
    hidden = torch.tanh(self.conv(x.unsqueeze(1)).flatten(1))
    weight = self.low_rank_a @ self.low_rank_b.exp()
    return self.head(self.norm(hidden) @ weight)


def checkpointed(levels):
    def forward(self, x):
        def run(x, depth):
            if not depth:
                return block(self, x)
            return checkpoint(run, x, depth - 1, use_reentrant=False)

        return run(x, levels)

    torch.manual_seed(0)
    parts = {
        "conv": nn.Conv1d(1, 9, 3),
        "norm": nn.LayerNorm(27),
        "head": nn.Linear(12, 9),
        "low_rank_a": torch.randn(27, 2),
        "low_rank_b": torch.randn(2, 12),
    }
    return Function(forward, **parts).double()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_non_reentrant_checkpointing_changes_nothing(levels):
    assert error(checkpointed(levels), [samples(8)], K) < CLOSE


@pytest.mark.parametrize("levels", [1, 2])
def test_checkpointed_random_projections_are_the_same(levels):
    plain, nested = (measured(checkpointed(n), [samples(8)], K) for n in (0, levels))
    assert pytest.approx(plain.grad_variance, rel=CLOSE) == nested.grad_variance


# what stays


def test_a_closed_meter_leaves_no_hook():
    model = network()
    measured(model, [samples(8)], K)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("end", ["read", "failed", "closed", "next forward"])
def test_no_activation_outlives_its_step(end, levels):
    """Nor a backward that fails, a forward without one until the next, or the meter.

    Watches the input and what a layer gives to a product; a checkpoint keeps the first alone.
    """
    model, watched = checkpointed(levels), []

    def alive():
        gc.collect()
        return sum(reference() is not None for reference in watched)

    def fail(_):
        raise RuntimeError("in the backward")

    with GradientMeter(model, groups=K) as meter:
        handles = [
            model.register_forward_pre_hook(lambda _, args: watched.append(weakref.ref(args[0]))),
            model.norm.register_forward_hook(lambda *a: watched.append(weakref.ref(a[-1]))),
        ]
        loss = mean_loss(model, samples(8))
        for handle in handles:
            handle.remove()
        assert alive() == (1 if levels else 2)
        if end == "read":
            loss.backward()
            meter.read(samples=[8])
        elif end == "failed":
            model.head.weight.register_hook(fail)  # the rest of the graph has not run
            with pytest.raises(RuntimeError, match="in the backward"):
                loss.backward()
            torch.ones((), requires_grad=True).backward()  # until then torch keeps what is left
        elif end == "closed":
            meter.close()
        else:
            model(samples(8))
        del loss
        assert not alive()


def test_the_sums_of_a_step_hold_no_graph():
    model = network()
    recorder = Recorder()
    with GradientMeter(model, groups=K) as meter:
        meter.source.subscribe(recorder)
        mean_loss(model, samples(8)).backward()
        meter.read(samples=[8])
    (groups,) = recorder.backwards
    assert not any(gradient.requires_grad for gradient in groups.values())


def test_a_copied_model_does_not_report_to_the_meter_of_the_first():
    model = network()
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        copied, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loss = mean_loss(model, samples(8))
        for other in (copied, torch.load(file, weights_only=False)):
            mean_loss(other, samples(6)).backward()
        loss.backward()
        assert same(expected_noise(model, [samples(8)], K), meter.read(samples=[8]))


@pytest.mark.parametrize("stated", [48, torch.tensor(48), torch.full((7,), 6), 7])
def test_samples_that_are_not_those_of_the_backward_are_refused(stated):
    """Tokens for samples would mix their units; the weight of each sample does not."""
    model = network()
    with GradientMeter(model, groups=K) as meter:
        mean_loss(model, samples(8)).backward()
        with pytest.raises(GradientError, match="model got 8 samples in dimension 0"):
            meter.read(samples=[stated])


def test_another_backward_through_the_graph_is_not_part_of_the_step():
    """As for the importance of activations: some uses run in it, in any of the steps."""
    model = network()
    expected = expected_noise(model, [samples(8)], K)
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        for _ in range(4):
            model.zero_grad()
            hidden = model[1](model[0](samples(8)))
            meter.source.prepare_groups([output := model[3](model[2](hidden))], 8)
            torch.autograd.grad(output.max(1).values.sum(), hidden, retain_graph=True)
            of_samples(output).mean().backward()
            assert same(expected, meter.read(samples=[8]))


def test_two_meters_measure_one_model():
    model = network()
    expected = expected_noise(model, [samples(8)], K)
    with (
        GradientMeter(model, groups=K, per_layer=True) as one,
        GradientMeter(model, groups=2, per_layer=True) as other,
    ):
        for _ in range(4):
            model.zero_grad()
            mean_loss(model, samples(8)).backward()
            assert same(expected, one.read(samples=[8]))
            assert 2 == other.read(samples=[8]).micro_batches


def test_parameters_that_are_measured_later_have_groups():
    """The graph is the same with and without them."""
    model, x = network(), samples(8)
    head = list(model[3].parameters())
    expected = expected_noise(model, [x], K)
    with GradientMeter(model, groups=K, per_layer=True) as meter:
        for selected, every_layer in ((head, False), (model.parameters(), True), (head, False)):
            meter.select(selected)
            for _ in range(2):  # the fourth is checked again in any case
                model.zero_grad()
                mean_loss(model, x).backward()
                statistics = meter.read(samples=[8])
                assert every_layer == same(expected, statistics)
                assert every_layer == bool(statistics.layers["0"].grad_variance)


@pytest.mark.parametrize("part", ["layer", "parameter"])
def test_the_sums_of_a_small_part_are_compared_too(part):
    """A second call outside the forward, of a layer whose gradient is a millionth."""
    model = Function(
        lambda s, x: (s.net(x), s.aux(x)), net=network(torch.float32), aux=nn.Linear(5, 1)
    )

    def loss(model, x):
        output, small = model(x)
        consistency = (small - model.aux(x + 5)).square().mean()
        return of_samples(output).mean() + 1e-6 * consistency

    with GradientMeter(model, groups=K, per_layer=part == "layer") as meter:
        if part == "parameter":
            meter.source.subscribe(Recorder())
        loss(model, samples(8, torch.float32)).backward()
        with pytest.raises(GradientError, match="do not add up"):
            meter.read(samples=[8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_only_rounding_is_no_error(dtype):
    """That of the keys' bias, as large as all of its error."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(16, 16) for name in ("query", "key", "value", "head")}

    def forward(m, x):
        return m.head((m.query(x) @ m.key(x).mT).softmax(-1) @ m.value(x))

    model = Function(forward, **layers).to(dtype)
    with GradientMeter(model, groups=K) as meter:
        meter.source.subscribe(Recorder())
        for _ in range(17):  # three of them are compared
            model.zero_grad()
            x = torch.randn(8, 6, 16).to(dtype)
            model(x).float().square().flatten(1).sum(1).mean().backward()
            assert meter.read(samples=[8]).micro_batches == K


def test_signs_depend_on_the_number_of_the_step_alone():
    def noise(first):
        model = network()
        with GradientMeter(model, groups=K) as meter:
            for step in range(3):
                meter.at_step(step)
                model.zero_grad()
                if step < first:
                    continue
                mean_loss(model, samples(8, seed=step)).backward()
                noise = meter.read(samples=[8]).grad_variance
        return noise

    assert noise(first=0) == noise(first=2)


# refused settings


def test_mean_losses_cannot_be_cut_into_groups():
    with pytest.raises(SettingError, match='loss="weighted"'):
        GradientMeter(network(), groups=K, loss="mean")


def test_parameters_alone_have_no_forward_to_prepare():
    with pytest.raises(SettingError, match="needs the model"):
        GradientMeter(list(network().parameters()), groups=K)


@dataclass
class Logits:
    """No tensor, and no container that torch looks into."""

    logits: torch.Tensor


FORMS = {  # of a network: what it gets and returns
    r"inputs .*\(Logits\) have no tensor of samples": (Logits, lambda m, x: m.net(x.logits)),
    r"outputs .*\(Logits\) have no tensor with a gradient": (
        lambda x: x,
        lambda m, x: Logits(m.net(x)),
    ),
}


@pytest.mark.parametrize("message", FORMS)
def test_a_forward_without_samples_says_where_they_were_looked_for(message):
    packed, forward = FORMS[message]
    model = Function(forward, net=network())

    def run(model, x):
        output = model(packed(x))
        return of_samples(getattr(output, "logits", output)).mean()

    with GradientMeter(model, groups=K) as meter:
        run(model, samples(8)).backward()
        with pytest.raises(GradientError, match=message):
            meter.read(samples=[8])
        model.zero_grad()
        for part in samples(8).split(4):  # micro-batches need no samples to be found
            (run(model, part) / 2).backward()
        assert 2 == meter.read(samples=[4, 4]).micro_batches


def test_one_group_is_refused():
    with pytest.raises(SettingError, match="groups=1"):
        GradientMeter(network(), groups=1)


def test_a_backward_of_one_sample_counts_once():
    """Five micro-batches, and 8 samples in 4 groups with 1 sample in a backward of its own."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randint(3, (9,))

    def measured(cuts, **options):
        model.zero_grad()
        with GradientMeter(model, confidence=0.9, half_batch_cosine=True, **options) as meter:
            for part in cuts:
                (cross_entropy(model(x[part]), y[part]) * len(x[part]) / 9).backward()
            return meter.read([len(x[part]) for part in cuts])

    loop = measured([slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8), slice(8, 9)])
    groups = measured([slice(0, 8), slice(8, 9)], groups=4)
    assert pytest.approx(loop.similarity_interval, abs=1e-7) == groups.similarity_interval
    assert pytest.approx(loop.half_batch_cosine, abs=1e-12) == groups.half_batch_cosine
