"""Models, losses and loops in which the groups of a backward are not what k backwards compute."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bigbatch import GradientMeter
from bigbatch.errors import BigbatchError
from group_gradients import Function, Scaled, error, mean_loss, measured, of_samples

torch.set_num_threads(1)
K = 4
CLOSE = 1e-9  # of float64 sums in another order


def normal(*shape):
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64) * 0.5


def model(function, **parts):
    torch.manual_seed(0)
    ready = torch.Tensor, nn.Module
    parts = {name: p if isinstance(p, ready) else p() for name, p in parts.items()}
    return Function(function, **parts).double()


def first():
    return nn.Linear(5, 10)


def second():
    return nn.Linear(10, 9)


def network(middle=None):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 10), *([middle] if middle else []), nn.Tanh(), nn.Linear(10, 9)]
    return nn.Sequential(*layers).double()


def refused(reason):
    return pytest.raises(BigbatchError, match=rf"(?s){reason}.*groups=None")


# samples that influence others

BATCH_NORMS = {
    "affine": lambda: network(nn.BatchNorm1d(10)),
    "without-affine": lambda: network(nn.BatchNorm1d(10, affine=False)),
    "without-averages": lambda: network(nn.BatchNorm1d(10, track_running_stats=False)).eval(),
    "of-the-data": lambda: nn.Sequential(nn.BatchNorm1d(5, affine=False), network()).double(),
    "function": lambda: model(
        lambda s, x: s.m(F.batch_norm(s.l(x), None, None, training=True)), l=first, m=second
    ),
}


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_batch_norm_is_refused_by_name(kind):
    with refused("BatchNorm normalizes over the samples of all groups"):
        measured(BATCH_NORMS[kind](), [normal(8, 5)], K)


COUPLED = {
    "normalized-by-hand": lambda s, x: s.m(torch.tanh(s.l(x) - s.l(x).mean(0))),
    "normalized-by-hand-once": lambda s, x: (lambda h: s.m(torch.tanh(h - h.mean(0))))(s.l(x)),
    "attention-over-samples": lambda s, x: s.m(torch.softmax(s.l(x) @ s.l(x).t(), -1) @ s.l(x)),
    "shuffled-back": lambda s, x: s.m(torch.tanh(s.l(x)).flip(0)),
    "next-sample": lambda s, x: s.m(torch.tanh(s.l(x)) + s.l(x).roll(1, 0)),
    "sum-of-samples": lambda s, x: s.m(torch.tanh(s.l(x))) * s.m(s.l(x)).sum(0),
    "sorted": lambda s, x: s.m(s.l(x).sort(0).values),
    "neighbours": lambda s, x: s.m(torch.tanh(s.l(x)).view(4, 2, -1).flip(1).flatten(0, 1)),
    "pairs": lambda s, x: (lambda h: sum(s.m(torch.cat([h[:4], h[:4], h[4:], h[4:]])).chunk(2)))(
        torch.tanh(s.l(x))
    ),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_samples_that_influence_others_or_lie_apart_are_refused(kind):
    with refused("a group's samples influence others in "):
        measured(model(COUPLED[kind], l=first, m=second), [normal(8, 5)], K)


def test_attention_along_the_wrong_dimension_is_refused():
    attention = nn.MultiheadAttention(10, 2)  # takes time first
    with refused("a group's samples influence others"):
        measured(
            model(lambda s, x: s.a(x, x, x, need_weights=False)[0], a=attention),
            [normal(8, 6, 10)],
            K,
        )


def test_a_recurrence_over_samples_is_refused():
    with refused("a group's samples influence others"):
        measured(model(lambda s, x: s.m(x)[0], m=nn.LSTM(5, 9)), [normal(8, 3, 5)], K)


# where the samples are


SAME_SIZES = {
    "time-first": lambda s, x: s.m(torch.tanh(s.l(x.transpose(0, 1)))).transpose(0, 1),
    "positions": lambda s, x: s.m(torch.tanh(s.l(x) + s.p)),
    "positions-looked-up": lambda s, x: s.m(torch.tanh(s.l(x) + s.e(torch.arange(x.shape[1])))),
    "positions-expanded": lambda s, x: s.m(
        torch.tanh(s.l(x) + s.e(torch.arange(x.shape[1]).expand(len(x), -1)))
    ),
    "mixed-time": lambda s, x: s.m(torch.tanh(s.t @ s.l(x))),
    "flattened": lambda s, x: s.m(s.l(x.flatten(0, 1)).tanh()).view(*x.shape[:2], -1),
    "samples-inside": lambda s, x: s.m(
        s.l(x.transpose(0, 1).flatten(0, 1)).tanh().view(x.shape[1], len(x), -1)
    ).transpose(0, 1),
}


@pytest.mark.parametrize("samples", [8, 6, 10])  # as many as time steps, as widths
@pytest.mark.parametrize("kind", SAME_SIZES)
def test_samples_are_found_where_other_dimensions_have_their_size(kind, samples):
    time = 8
    net = model(
        SAME_SIZES[kind],
        l=first,
        m=second,
        p=normal(time, 10),
        e=nn.Embedding(time, 10),
        t=normal(time, time),
    )
    assert error(net, [normal(samples, time, 5)], K) < CLOSE


ROWS_OF_SAMPLES = {
    "one-layer": lambda s, x: s.m(x),
    "layers": lambda s, x: s.m(torch.tanh(s.l(x))),
    "norm": lambda s, x: s.n(s.m(torch.tanh(s.l(x)))),
    "norm-of-rows": lambda s, x: s.n(s.m(torch.tanh(s.l(x)).flatten(0, 1))).unflatten(
        0, x.shape[:2]
    ),
}
SIZES = [
    (order, time, samples)
    for order in ("sample-major", "sample-minor", "time-first")
    for time in (3, 9, 18)
    for samples in (9, 3, 8)  # as many as columns, a divisor of them, neither
    if order == "sample-major" or time != samples  # nothing would show which is which
]


@pytest.mark.parametrize(("order", "time", "samples"), SIZES)
@pytest.mark.parametrize("kind", ROWS_OF_SAMPLES)
def test_a_loss_of_rows_whose_columns_are_as_many_as_the_samples(kind, order, time, samples):
    """The loss is the only root, and works on each element."""

    def function(s, x):
        out = ROWS_OF_SAMPLES[kind](s, x if order == "sample-major" else x.transpose(0, 1))
        rows = out if order == "time-first" else out.flatten(0, 1)
        return (rows.sin() * torch.linspace(0.5, 1.5, 9, dtype=rows.dtype)).mean()

    width = 5 if kind == "one-layer" else 10
    net = model(function, l=first, m=nn.Linear(width, 9), n=nn.LayerNorm(9))
    assert error(net, [normal(samples, time, 5)], K, lambda net, x: net(x)) < CLOSE


@pytest.mark.parametrize("time", [3, 9])
@pytest.mark.parametrize("samples", [9, 3, 8])
def test_rows_whose_samples_nothing_shows_are_refused_at_every_size(time, samples):
    """Also where a layer is as wide as the batch."""

    def function(s, x):
        rows = s.n(s.m(torch.tanh(s.l(x.flatten(0, 1)) * s.g)))
        return of_samples(rows + s.p).mean()

    net = model(function, l=first, m=second, n=nn.LayerNorm(9), g=normal(10), p=normal(9))
    with refused("no value from the loss down to .* has a dimension of the batch's size"):
        measured(net, [normal(samples, time, 5)], K, lambda net, x: net(x))


@pytest.mark.parametrize("time", [3, 18])
def test_a_loss_of_a_number_for_each_time_and_sample(time):
    net = model(
        lambda s, x: s.m(torch.tanh(s.l(x.transpose(0, 1)))).squeeze(-1).sin().mean(),
        l=first,
        m=nn.Linear(10, 1),
    )
    assert error(net, [normal(9, time, 5)], K, lambda net, x: net(x)) < CLOSE


TWICE = {
    "after-the-others": lambda s, x: sum(s.m(s.l(torch.cat([x, x.flip(1)])).tanh()).chunk(2)),
    "in-turn": lambda s, x: s.m(s.l(torch.stack([x, x.flip(1)], 1).flatten(0, 1)).tanh()).unflatten(
        0, (-1, 2)
    ),
}


@pytest.mark.parametrize("kind", TWICE)
def test_samples_that_stand_twice_in_a_batch_are_found(kind):
    assert error(model(TWICE[kind], l=first, m=second), [normal(8, 5)], K) < CLOSE


@pytest.mark.parametrize("width", [8, 4, 16])  # B, k, a multiple of B
def test_samples_are_found_where_layers_are_as_wide(width):
    def forward(self, x):
        hidden = torch.tanh(self.l(x) * self.s)
        merged = self.m.weight * self.g + self.a @ self.b
        return hidden @ merged + F.linear(hidden, self.w[:width])

    net = model(
        forward,
        l=nn.Linear(width, width),
        m=nn.Linear(width, width, bias=False),
        s=normal(width),
        g=normal(width, width),
        a=normal(width, width),
        b=normal(width, width),
        w=normal(2 * width, width),
    )
    assert error(net, [normal(8, width)], K) < CLOSE


def test_tied_weights_of_one_size_throughout():
    net = model(
        lambda s, t: F.linear(torch.tanh(s.l(s.e(t))), s.e.weight),
        e=nn.Embedding(8, 8),
        l=nn.Linear(8, 8),
    )
    assert error(net, [normal(8, 8).mul(100).long() % 8], K) < CLOSE


@pytest.mark.parametrize("samples", [6, 8])
def test_a_constant_of_the_model_is_no_sample(samples):
    """A layer on a buffer whose rows are a multiple of the samples, or as many."""

    class Grid(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("grid", torch.randn(24, 3))
            self.bias, self.layer = nn.Linear(3, 10), nn.Linear(5, 10)
            self.double()

        def forward(self, x):
            return torch.tanh(self.layer(x)) @ torch.tanh(self.bias(self.grid)).t()

    assert error(Grid(), [normal(samples, 5)], K) < CLOSE
    net = Grid()
    net.grid = net.grid[:samples]
    assert error(net, [normal(samples, 5)], K) < CLOSE


def test_one_sample_at_a_time():
    net = network()
    with GradientMeter(net, groups=K, per_layer=True) as meter:
        for number in range(3):
            (mean_loss(net, normal(1, 5) + number) / 3).backward()
        assert 3 == meter.read(samples=[1, 1, 1]).micro_batches


# losses


def test_label_smoothing_and_class_weights_are_part_of_a_samples_loss():
    labels = torch.arange(8) % 9

    def loss(net, x, y):
        return F.cross_entropy(net(x), y, label_smoothing=0.2)

    assert error(network(), [normal(8, 5), labels], K, loss) < CLOSE


def test_an_output_that_the_loss_leaves_out_changes_nothing():
    net = model(lambda s, x: (s.m(s.l(x)), s.aux(x), None), l=first, m=second, aux=first)
    assert error(net, [normal(8, 5)], K, lambda net, x: of_samples(net(x)[0]).mean()) < CLOSE


def test_outputs_may_be_nested_and_be_the_loss():
    net = model(lambda s, x: {"loss": of_samples(s.m(s.l(x))).mean()}, l=first, m=second)
    assert error(net, [normal(8, 5)], K, lambda net, x: net(x)["loss"]) < CLOSE


def test_a_detached_part_has_no_groups():
    net = model(lambda s, x: s.m(torch.tanh(s.l(x)).detach()), l=first, m=second)
    assert error(net, [normal(8, 5)], K) < CLOSE


# what is not seen


def test_two_forwards_and_one_backward_are_refused():
    net, x = network(), normal(8, 5)
    with GradientMeter(net, groups=K) as meter:
        mean_loss(net, x).backward()
        meter.read(samples=[8])
        for _ in range(3):
            net.zero_grad()
            (mean_loss(net, x) + mean_loss(net, -x)).backward()
            with refused("do not add up"):
                meter.read(samples=[8])
            meter.source.restart()


def test_a_backward_after_another_forward_is_refused():
    net, x = network(), normal(8, 5)
    with GradientMeter(net, groups=K), refused("not below the outputs of the last forward"):
        loss = mean_loss(net, x)
        net(x)
        loss.backward()


def test_a_use_outside_the_forward_is_refused():
    net, x = network(), normal(8, 5)
    with GradientMeter(net, groups=K) as meter:
        (mean_loss(net, x) + net[0].weight.square().sum()).backward()
        with refused("do not add up"):
            meter.read(samples=[8])


def test_a_hook_that_changes_a_gradient_is_refused():
    net, x = network(), normal(8, 5)
    net[0].weight.register_hook(lambda gradient: 1.5 * gradient)
    with refused("do not add up"):
        measured(net, [x], K)


def test_a_use_that_comes_later_is_found_within_eight_backwards():
    net, x = network(), normal(8, 5)
    with GradientMeter(net, groups=K) as meter:
        mean_loss(net, x).backward()
        meter.read(samples=[8])

        def measure():
            net.zero_grad()
            (mean_loss(net, x) + net[0].weight.square().sum()).backward()
            meter.read(samples=[8])

        with refused("do not add up"):
            [measure() for _ in range(8)]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_that_watch_change_nothing():
    net = network()
    net[0].register_full_backward_hook(lambda *_: None)
    net[2].register_full_backward_pre_hook(lambda *_: None)
    assert error(net, [normal(8, 5)], K) < CLOSE


def test_a_parameter_of_a_function_written_by_hand_is_refused():
    with refused(r"used in ScaledBackward, a function .* for w;"):
        measured(
            model(lambda s, x: s.l(Scaled.apply(x, s.w)), w=normal(5), l=first), [normal(8, 5)], K
        )


def test_a_function_written_by_hand_without_parameters_is_seen_through():
    net = model(lambda s, x: s.m(Scaled.apply(s.l(x), normal(10))), l=first, m=second)
    assert error(net, [normal(8, 5)], K) < CLOSE


def test_an_embedding_that_scales_by_frequency_is_refused():
    net = model(lambda s, t: s.e(t), e=nn.Embedding(8, 10, scale_grad_by_freq=True))
    with refused("scale_grad_by_freq"):
        measured(net, [normal(8, 5).mul(100).long() % 8], K)


# other kinds of backward


def test_reentrant_checkpointing_is_refused_by_name():
    def forward(self, x):
        run = lambda x: torch.tanh(self.l(x))  # noqa: E731
        return self.m(checkpoint(run, x, use_reentrant=True))

    net = model(forward, l=first, m=second)
    with refused("use_reentrant=False"):
        measured(net, [normal(8, 5).requires_grad_()], K)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("kind", ["create_graph", "gradient-penalty"])
def test_a_backward_with_a_graph_is_refused(kind):
    net, x = network(), normal(8, 5).requires_grad_()
    with GradientMeter(net, groups=K), refused("create_graph=True"):
        if kind == "create_graph":
            mean_loss(net, x).backward(create_graph=True)
        else:
            outputs = net(x)
            torch.autograd.grad(outputs.sum(), x, create_graph=True)


@pytest.mark.thorough
def test_a_compiled_model_is_refused_by_name():
    with refused("compile"):
        measured(torch.compile(network(), backend="aot_eager"), [normal(8, 5)], K)


def test_a_backward_that_fails_leaves_the_meter_usable():
    net, x = network(), normal(8, 5)
    failing = [True]

    def fail(gradient):
        if failing:
            raise RuntimeError("in the backward")

    net[0].bias.register_hook(fail)
    with GradientMeter(net, groups=K) as meter:
        with pytest.raises(RuntimeError, match="in the backward"):
            mean_loss(net, x).backward()
        net.zero_grad()
        failing.clear()
        mean_loss(net, x).backward()
        assert K == meter.read(samples=[8]).micro_batches


# tracers, and transforms of torch.func

INPUTS = normal(8, 5)
TRANSFORMS = {
    "jit.trace": lambda net: torch.jit.trace(net, INPUTS),
    "make_fx": lambda net: make_fx(net)(INPUTS),
    "symbolic_trace": torch.fx.symbolic_trace,
    "export": lambda net: torch.export.export(net, (INPUTS,)),
    "grad": lambda net: torch.func.grad(lambda x: net(x).sum())(INPUTS),
    "vmap": lambda net: torch.vmap(torch.func.grad(lambda x: net(x).sum()))(INPUTS),
    "grad of weights": lambda net: torch.func.grad(
        lambda weights: torch.func.functional_call(net, weights, INPUTS).sum()
    )(dict(net.named_parameters())),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_the_model_works_and_leaves_the_groups_of_a_step_as_they_are(transform):
    net = network()
    expected = measured(net, [INPUTS], K)
    net.zero_grad()
    with GradientMeter(net, groups=K) as meter:
        loss = mean_loss(net, INPUTS)
        transform(net)
        loss.backward()
        assert expected == meter.read(samples=[8])
