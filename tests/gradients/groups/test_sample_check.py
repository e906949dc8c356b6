"""What a check of one batch cannot show: it is made again, and training is what it was without."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bigbatch import GradientMeter
from bigbatch.errors import GradientError
from bigbatch.gradients import GroupTap
from group_gradients import Function, Scaled, error, expected_noise, loop, mean_loss, measured
from tensors import difference

torch.set_num_threads(1)
K = 4
CLOSE = 1e-9  # of float64 sums in another order
ELSEWHERE = "a group's samples influence others in "


def model(function, **parts):
    return Function(function, **parts).double()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def zeros(layer):
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def batches(count, *shape):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(count)]


def train(net, inputs):
    """Steps of SGD whose noise is that of a loop of backwards."""
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    with GradientMeter(net, groups=K, per_layer=True) as meter:
        for x in inputs:
            expected = expected_noise(net, [x], K)
            optimizer.zero_grad()
            mean_loss(net, x).backward()
            noise = meter.read(samples=[len(x)])
            for name in ("grad_variance", "grad_sqnorm"):
                assert pytest.approx(getattr(expected, name), rel=CLOSE) == getattr(noise, name)
            optimizer.step()


# gradients of zeros


def gated(s, x):
    hidden = torch.tanh(s.l(x))
    over_samples = torch.softmax(hidden @ hidden.t(), -1) @ s.v(hidden)
    return s.m(hidden + s.g * over_samples)


def attending(s, x):
    return s.m(s.a(*3 * [s.l(x)], need_weights=False)[0].mean(1))


def late_coupling(kind):
    if kind == "gate":
        parts = {"l": nn.Linear(5, 10), "v": nn.Linear(10, 10), "m": nn.Linear(10, 9)}
        return model(gated, g=torch.zeros(()), **parts), (8, 5)
    attention = nn.MultiheadAttention(10, 2)  # takes time first
    parts = {"l": nn.Linear(5, 10), "a": attention, "m": zeros(nn.Linear(10, 9))}
    return model(attending, **parts), (8, 6, 5)


@pytest.mark.parametrize("kind", ["gate", "head"])
def test_samples_that_influence_others_once_a_zero_has_grown_are_refused(kind):
    net, shape = late_coupling(kind)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    first, second = batches(2, *shape)
    with GradientMeter(net, groups=K) as meter:
        mean_loss(net, first).backward()
        meter.read(samples=[8])
        optimizer.step()
        net.zero_grad()
        with pytest.raises(GradientError, match=ELSEWHERE):
            mean_loss(net, second).backward()


def positions_looked_up(s, x):
    hidden = s.l(x) + s.p(torch.arange(x.shape[1]))
    return s.m(torch.tanh(hidden))


def low_rank_with_time_first(s, x):
    x = x.transpose(0, 1)
    return s.m(torch.tanh(s.l(x) + s.b(s.a(x))).mean(0))


@pytest.mark.parametrize(
    ("function", "zero"), [(positions_looked_up, "m"), (low_rank_with_time_first, "b")]
)
def test_a_layer_that_starts_at_zero_hides_no_place(function, zero):
    parts = {
        "l": nn.Linear(5, 10),
        "p": nn.Embedding(8, 10),
        "a": nn.Linear(5, 4),
        "b": nn.Linear(4, 10),
        "m": nn.Linear(10, 9),
    }
    zeros(parts[zero])
    if function is positions_looked_up:
        del parts["a"], parts["b"]
    else:
        del parts["p"]
    train(model(function, **parts), batches(5, 8, 8, 5))


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_dead_units_hide_no_place(samples):
    def function(s, x):
        hidden = torch.tanh(s.a(x)).transpose(0, 1).flatten(0, 1)
        hidden = hidden + torch.relu(s.b(hidden))
        return s.c(hidden.view(x.shape[1], len(x), -1).mean(0))

    for seed in range(20):
        parts = {"a": nn.Linear(5, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 9)}
        net = model(function, **parts)
        torch.manual_seed(seed)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        assert error(net, [torch.randn(samples, 3, 5).double()], samples) < CLOSE


def test_three_samples_that_are_mirrored_are_refused():
    net = model(
        lambda s, x: s.m(torch.tanh(s.l(x)).flip(0)), l=nn.Linear(5, 10), m=nn.Linear(10, 9)
    )
    with pytest.raises(GradientError, match=ELSEWHERE):
        measured(net, batches(1, 3, 5), 3)


# another batch


def without_padding(s, x):
    rows = torch.tanh(s.l(x[x[..., 0] != 0]))
    padded = rows.new_zeros(*x.shape[:2], 10).index_put((x[..., 0] != 0,), rows)
    return s.m(padded.sum(1))


def sorted_by_length(s, x):
    order = (x[..., 0] != 0).sum(1).argsort(stable=True)
    hidden = torch.tanh(s.l(x[order]))
    return s.m(hidden[order.argsort()].sum(1))


@pytest.mark.parametrize("function", [without_padding, sorted_by_length])
def test_samples_that_only_a_later_batch_moves_are_refused(function):
    net = model(function, l=nn.Linear(5, 10), m=nn.Linear(10, 9))
    full, other = batches(2, 8, 6, 5)
    train(net, [full] * 3)
    other[0, 1:, 0] = other[3, 4:, 0] = 0
    with pytest.raises(GradientError, match=f"{ELSEWHERE}|has no dimension of the batch's size"):
        train(net, [full] * 3 + [other])


def test_more_views_of_a_sample_are_found_where_they_are():
    """Stacked view after view; one view alone shows no order."""
    net = model(
        lambda s, x: (
            s.m(torch.tanh(s.l(torch.cat(x.unbind(1))))).view(x.shape[1], len(x), -1).mean(0)
        ),
        l=nn.Linear(5, 10),
        m=nn.Linear(10, 9),
    )
    with GradientMeter(net, groups=K, per_layer=True) as meter:
        for views in (1, 2, 3, 1, 3):
            (x,) = batches(1, 8, views, 5)
            expected = expected_noise(net, [x], K).grad_variance
            net.zero_grad()
            mean_loss(net, x).backward()
            found = meter.read(samples=[8]).grad_variance
            assert pytest.approx(expected, rel=CLOSE) == found


def test_graphs_of_the_same_functions_may_be_connected_in_other_ways():
    def function(s, x):
        scales = one, other = s.g[0], s.g[1]
        hidden = torch.tanh(s.l(x) * scales[s.scale])
        return s.m(torch.tanh(torch.tanh(hidden * other) * one))

    (g,) = batches(1, 2, 10)
    net = model(function, l=nn.Linear(5, 10), m=nn.Linear(10, 9), g=g)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with GradientMeter(net, groups=K, per_layer=True) as meter:
        for number, x in enumerate(batches(6, 8, 5)):
            net.scale = number % 2
            expected = expected_noise(net, [x], K).grad_variance
            optimizer.zero_grad()
            mean_loss(net, x).backward()
            assert pytest.approx(expected, rel=CLOSE) == meter.read(samples=[8]).grad_variance


def test_batch_norm_that_begins_to_train_is_refused():
    net = nn.Sequential(nn.Linear(5, 10), nn.BatchNorm1d(10), nn.Linear(10, 9)).double().eval()
    x, later = batches(2, 8, 5)
    train(net, [x] * 3)
    with GradientMeter(net, groups=K) as meter:
        for mode in (False, False, True):
            net.train(mode).zero_grad()
            if not mode:
                mean_loss(net, x).backward()
                meter.read(samples=[8])
        with pytest.raises(GradientError, match="BatchNorm"):
            mean_loss(net, later).backward()


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_checked_graph_is_checked_again_at_powers_of_four(needs_gradient):
    """An input with a gradient is another leaf each time."""
    net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 9)).double()
    arrived = []
    net[1].register_forward_hook(lambda m, a, output: output.register_hook(arrived.append) and None)
    with GradientMeter(net, groups=K) as meter:
        counts = []
        for x in batches(9, 8, 5):
            mean_loss(net, x.requires_grad_(needs_gradient)).backward()
            meter.read(samples=[8])
            net.zero_grad()
            counts.append(len(arrived))
            arrived.clear()
    assert [3, 1, 1, 3, 1, 1, 1, 1, 1] == counts  # the backward, and two of half of the samples


# samples that no shape shows


def centred_frames(s, x):
    hidden = s.c(x.flatten(0, 1)).mean(2)
    hidden = hidden - hidden.mean(0)
    return s.m(torch.tanh(hidden.view(len(x), -1)))


def test_convolutions_of_frames_are_covered():
    net = model(
        lambda s, x: s.m(torch.tanh(s.c(x.flatten(0, 1)).mean(2).view(len(x), -1))),
        c=nn.Conv1d(3, 6, 3),
        m=nn.Linear(24, 9),
    )
    assert error(net, batches(1, 8, 4, 3, 5), K) < CLOSE


def test_frames_of_all_samples_that_are_centred_are_refused():
    net = model(centred_frames, c=nn.Conv1d(3, 6, 3), m=nn.Linear(24, 9))
    with pytest.raises(GradientError, match=ELSEWHERE):
        measured(net, batches(1, 8, 4, 3, 5), K)


def test_tokens_of_all_samples_that_are_centred_are_refused():
    def function(s, tokens):
        rows = s.e(tokens[tokens != 0])
        rows = rows - rows.mean(0)
        return s.m(torch.tanh(rows.new_zeros(*tokens.shape, 10).index_put((tokens != 0,), rows)))

    net = model(function, e=nn.Embedding(9, 10), m=nn.Linear(10, 9))
    tokens = (torch.arange(48) % 9).view(8, 6)
    with pytest.raises(GradientError, match="whose output has no dimension of the batch's size"):
        measured(net, [tokens], K)


@pytest.mark.parametrize("time", [6, 8])
def test_a_head_on_rows_of_all_samples_is_refused_until_its_output_has_a_dimension_of_them(time):
    def loss(net, x):
        return net(x).sin().sum(-1).mean()

    (x,), is_reshaped = batches(1, 8, time, 5), False

    def function(s, x):
        rows = s.m(s.r(x)[0].flatten(0, 1))
        return rows.unflatten(0, x.shape[:2]) if is_reshaped else rows

    net = model(function, r=nn.GRU(5, 10, batch_first=True), m=nn.Linear(10, 9))
    with pytest.raises(GradientError, match="no value from the loss down to AddmmBackward0"):
        measured(net, [x], K, loss)
    is_reshaped = True
    assert error(net, [x], K, loss) < CLOSE


def test_outputs_whose_samples_nothing_shows_are_refused():
    """Labelled samples, and three views of each sample without labels."""

    def loss(net, x, views):
        outputs = net(torch.cat([x, views.flatten(0, 1)]))
        labelled, others = outputs[: len(x)], outputs[len(x) :]
        return labelled.sin().sum(1).mean() + F.softmax(others, -1).square().sum(-1).mean()

    net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 9)).double()
    x, views = batches(1, 8, 5) + batches(1, 8, 3, 5)
    with GradientMeter(net) as meter:
        meter.cut_backwards(K, net)
        total = loss(net, x, views)
        meter.source.prepare_groups([total], 8)
        with pytest.raises(GradientError, match="no value from the loss down to AddmmBackward0"):
            total.backward()


# without a check, as under fully_shard


def unchecked(net, x):
    """The groups' gradients of a tap that cannot run a backward of its own, by parameter."""
    parameters, loss = dict.fromkeys(net.parameters()), mean_loss(net, x)
    watched = lambda leaves: [p if p in parameters else None for p in leaves]  # noqa: E731
    tap = GroupTap(K, watched, {}, net, checks_samples=False)
    tap.exact = True
    tap.prepare([loss], len(x))
    gradients = torch.autograd.grad(loss, list(parameters))
    found = [tap.take(p, g) for p, g in zip(parameters, gradients, strict=True)]
    return [None if groups is None else groups.gradients for groups in found]


FUNCTIONS_OF_PARAMETERS = {
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "squeeze": lambda w: w[None].squeeze(0),
    "squeeze-all": lambda w: w[None].squeeze(),
    "stack": lambda w: torch.stack([w, w])[1],
    "unbind": lambda w: w[None].unbind(0)[0],
    "cat": lambda w: torch.cat([w[:4], w[4:]]),
    "split": lambda w: w.split(8)[0],
    "clone": lambda w: w.clone(),
    "cast": lambda w: w.float().double(),
    "view": lambda w: w.view(64).view(8, 8),
    "view-as": lambda w: w.view_as(w),
}


@pytest.mark.parametrize("kind", FUNCTIONS_OF_PARAMETERS)
def test_views_of_a_parameter_as_large_as_the_batch_are_no_samples(kind):
    net = model(
        lambda s, x: torch.tanh(x @ FUNCTIONS_OF_PARAMETERS[kind](s.w)), w=batches(1, 8, 8)[0]
    )
    (x,) = batches(1, 8, 8)
    assert difference(loop(net, [x], K), unchecked(net, x)) < 1e-6  # of a cast


ELEMENTWISE = {
    "addcmul": lambda h, p: torch.addcmul(h, p, p),
    "divided": lambda h, p: h / p,
    "power": lambda h, p: (1.5 + h) ** p,
    "where": lambda h, p: torch.where(torch.arange(8)[:, None] % 2 == 0, h, p),
    "expanded": lambda h, p: torch.cat([h, p.expand(len(h), -1, -1)], 2),
}


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_samples_are_where_a_parameter_of_all_positions_is_broadcast(kind):
    """With as many positions as samples."""
    net = model(
        lambda s, x: ELEMENTWISE[kind](torch.tanh(x), s.p).sum(1), p=1 + batches(1, 8, 5)[0].abs()
    )
    (x,) = batches(1, 8, 8, 5)
    assert difference(loop(net, [x], K), unchecked(net, x)) < CLOSE


def test_samples_that_two_dimensions_may_have_are_refused():
    net = model(lambda s, x: s.m(torch.tanh(s.e(x))), e=nn.Embedding(9, 8), m=nn.Linear(8, 9))
    tokens = torch.arange(64).view(8, 8) % 9
    assert all(groups is None for groups in unchecked(net, tokens))


def test_a_width_of_the_batch_size_is_not_taken_for_samples_where_these_may_be_rows():
    """Rows of 8 samples x 3 others, and 8 features."""
    net = model(lambda s, x: s.norm(torch.tanh(x).flatten(0, 1)), norm=nn.LayerNorm(8).double())
    (x,) = batches(1, 8, 3, 2, 8)
    assert all(groups is None for groups in unchecked(net, x))


# the training


class Overwriting(torch.autograd.Function):
    """silu(a) * b, whose backward writes its results over a and b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.a, ctx.b = a.detach().clone(), b.detach().clone()
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, gradient):
        gate = torch.sigmoid(ctx.a)
        of_a = gradient * gate * (1 + ctx.a * (1 - gate)) * ctx.b
        ctx.b.copy_(gradient * gate * ctx.a)
        ctx.a.copy_(of_a)
        return ctx.a, ctx.b


class OverwritingSaved(torch.autograd.Function):
    """exp, whose backward multiplies into what it saved."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result.clone())
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return result.mul_(gradient)


class Drawing(torch.autograd.Function):
    """A function that draws random numbers in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 0.1 * torch.rand_like(gradient))


FUNCTIONS = {
    "overwriting": lambda s, x: s.m(Overwriting.apply(s.l(x), s.l(-x))),
    "overwriting-saved": lambda s, x: s.m(OverwritingSaved.apply(s.l(x))),
    "drawing": lambda s, x: s.m(Drawing.apply(s.l(x))),
}


@pytest.mark.cpu  # they make tensors in a backward, whose thread has another default device
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_of_the_user_computes_the_gradients_that_it_did_without_groups(kind):
    """One that overwrites what it saved is refused, and what it saved is put back first."""
    gradients = []
    for groups in (None, K):
        torch.manual_seed(0)
        net = model(FUNCTIONS[kind], l=nn.Linear(5, 10), m=nn.Linear(10, 9))
        refusal = contextlib.nullcontext()
        if groups and "overwriting" in kind:
            refusal = pytest.raises(GradientError, match="overwrites what its forward saved")
        with GradientMeter(net, groups=groups), refusal:
            mean_loss(net, *batches(1, 8, 5)).backward()
        gradients.append([p.grad for p in net.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


# parameters behind functions of their own


REFUSED_ROUTES = {
    "straight-through": (
        lambda s, x: F.linear(x, Scaled.apply(s.w, s.g), s.b),
        "computed by ScaledBackward, a function written in Python",
    ),
    "filter": (
        lambda s, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(s.c), n=5),
        "whose values are complex numbers",
    ),
    "real-filter": (
        lambda s, x: torch.fft.irfft(torch.fft.rfft(x) * s.g[:3], n=5),
        "whose values are complex numbers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_ROUTES)
def test_a_parameter_is_refused_by_the_function_between(kind):
    function, reason = REFUSED_ROUTES[kind]
    w, c, g, b = batches(1, 9, 5) + batches(1, 3, 2) + batches(1, 5) + batches(1, 9)
    with pytest.raises(GradientError, match=reason):
        measured(model(function, w=w, c=c, g=g, b=b), batches(1, 8, 5), K)


SMALL_OPERANDS = {
    "bias-of-a-row": lambda s, x: torch.addmm(s.r, x, s.w.t()),
    "bias-of-one-number": lambda s, x: F.linear(x, s.w, s.o),
    "transposed-vector": lambda s, x: F.linear(x, s.w, s.b.t()),
}


@pytest.mark.parametrize("kind", SMALL_OPERANDS)
def test_biases_of_other_shapes_are_covered(kind):
    w, b = batches(1, 9, 5) + batches(1, 9)
    net = model(SMALL_OPERANDS[kind], w=w, b=b, r=b[None].clone(), o=b[:1].clone())
    assert error(net, batches(1, 8, 5), K) < CLOSE


def test_a_deep_network_of_parameters_alone_is_followed_once():
    """Its routes double with each of 40 residual blocks."""

    def function(s, x):
        prompt = s.p
        for layer in s.layers:
            prompt = prompt + torch.tanh(layer(prompt))
        return x @ prompt.mean(0)[:, None] + s.p.sum(0)

    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(40))
    (p,) = batches(1, 3, 5)
    assert error(model(function, p=p, layers=layers), batches(1, 8, 5), K) < CLOSE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:the gradient of micro-batch 1 is not finite")
def test_a_training_that_diverges_is_not_said_to_mix_samples(value):
    """0 x inf is nan for every sample; once the weights are finite again, all is as before."""
    net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 9)).double()
    x, other = batches(2, 8, 5)
    with GradientMeter(net, groups=K, per_layer=True) as meter:
        kept = net[2].weight.detach().clone()
        net[2].weight.data[0, 0] = value
        mean_loss(net, x).backward()
        assert not torch.isfinite(torch.tensor(meter.read(samples=[8]).grad_variance))
        net[2].weight.data.copy_(kept)
        net.zero_grad()
        expected = expected_noise(net, [other], K)
        mean_loss(net, other).backward()
        assert (
            pytest.approx(expected.grad_variance, rel=CLOSE)
            == meter.read(samples=[8]).grad_variance
        )
