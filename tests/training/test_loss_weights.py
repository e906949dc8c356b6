"""A mean over labels: a step that is cut trains as the uncut loop does."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import SGD

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError
from bigbatch.optim import VRSGD
from bigbatch.training.loss_weights import label_weights
from numbered_samples import whole

torch.set_num_threads(1)
CLASSES, SAMPLES, LENGTH = 5, 24, 7
CLOSE = 1e-13  # of float64 sums in another order
RARE = torch.tensor([0.1, 1.0, 3.0, 0.0, 20.0], dtype=torch.float64)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, CLASSES)).double()


def batch_of(*shape, ignored=0.0):
    """Inputs with six numbers each, and labels of this shape, some of them -100."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, shape, generator=draw)
    return x, y.masked_fill(torch.rand(shape, generator=draw) < ignored, -100)


PLAIN = batch_of(SAMPLES)
PADDED = batch_of(SAMPLES, LENGTH, ignored=0.7)
IMAGES = batch_of(SAMPLES, 3, 4, ignored=0.3)


def flat(z, y, **options):
    return F.cross_entropy(z.flatten(0, -2), y.flatten(), **options)


def channels_first(z, y, **options):
    return F.cross_entropy(z.movedim(-1, 1), y, **options)


def where_finite(loss):
    return torch.where(loss.isfinite(), loss, 0.0)


LOSSES = {  # name: batch, loss of logits and labels
    "class weights": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE)),
    "ignored labels": (PLAIN, lambda z, y: F.cross_entropy(z, y, ignore_index=2)),
    "smoothed": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE, label_smoothing=0.1)),
    "nll": (PLAIN, lambda z, y: F.nll_loss(z.log_softmax(1), y, weight=RARE)),
    "times a number": (PLAIN, lambda z, y: -(F.cross_entropy(z, y, weight=RARE) * -0.5) / 3),
    "summed alone": (PLAIN, lambda z, y: sum([F.cross_entropy(z, y, weight=RARE)])),
    "averaged alone": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE)[None].mean()),
    "stacked alone": (
        PLAIN,
        lambda z, y: torch.stack([F.cross_entropy(z, y, weight=RARE)]).clone()[0].view(1),
    ),
    "squeezed": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE)[None].squeeze(0)),
    "averaged over a dimension": (
        PLAIN,
        lambda z, y: F.cross_entropy(z, y, weight=RARE).view(1).sum(0).mean(0),
    ),
    "expanded": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE).expand(1)),
    "without nan": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE).nan_to_num()),
    "where finite": (PLAIN, lambda z, y: where_finite(F.cross_entropy(z, y, weight=RARE))),
    "clamped": (PLAIN, lambda z, y: F.cross_entropy(z, y, weight=RARE).clamp(max=50).clamp_min(0)),
    "concatenated": (PLAIN, lambda z, y: torch.cat([F.cross_entropy(z, y, weight=RARE)[None]])),
    "smoothed, times a number": (PADDED, lambda z, y: flat(z, y, label_smoothing=0.1) / 3),
    "sequences, smoothed": (
        PADDED,
        lambda z, y: channels_first(z, y, weight=RARE, label_smoothing=0.1),
    ),
    "padding": (PADDED, flat),
    "padding of classes with weights": (PADDED, lambda z, y: flat(z, y, weight=RARE)),
    "sequences": (PADDED, channels_first),
    "images": (IMAGES, lambda z, y: channels_first(z, y, weight=RARE)),
    "checkpointed": (
        PADDED,
        lambda z, y: torch.utils.checkpoint.checkpoint(flat, z, y, use_reentrant=False),
    ),
}


def plain_vr(parameters, lr):
    return VRSGD(parameters, lr=lr, gamma=1.0)  # r = 1


def uncut(batch, loss_of):
    """The loss and gradients of the loop that was not converted."""
    model = network()
    x, y = batch
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


def cut(batch, loss_of, micro_batch=4, groups=None, optimizer=SGD, **weights):
    """The record of a step of the converted loop, and the gradients that it stepped by."""
    model = network()
    train = bb.AdaptiveBatch(
        model,
        optimizer(model.parameters(), lr=1.0),
        [batch],
        policy=bb.Fixed(SAMPLES),
        micro_batch=micro_batch,
        groups=groups,
        every=1,
        meter=bb.GradientMeter(model, per_layer=True),  # exact norms of groups
    )
    before = copy.deepcopy(list(model.parameters()))
    for step in train:
        for x, y in step:
            step.backward(loss_of(model(x), y), **weights)
        record = step.update()
    return record, [a.data - b.data for a, b in zip(before, model.parameters(), strict=True)]


def distance(gradients, expected):
    squares = [((a - b).norm() / b.norm()) ** 2 for a, b in zip(gradients, expected, strict=True)]
    return float(sum(squares)) ** 0.5


@pytest.mark.parametrize("micro_batch", [3, 5, 24])
@pytest.mark.parametrize("name", LOSSES)
def test_a_converted_loop_trains_on_the_loss_of_the_uncut_one(name, micro_batch):
    loss, gradients = uncut(*LOSSES[name])
    record, found = cut(*LOSSES[name], micro_batch)
    assert pytest.approx(loss, rel=CLOSE) == record.loss
    assert distance(found, gradients) < CLOSE


def share(y):
    return (y != -100).double().mean()


def each_sample(z, y):
    return [F.cross_entropy(a, b) for a, b in zip(z, y, strict=True)]


def added_up(z, y):
    total = 0
    for i in range(len(z)):
        total += F.cross_entropy(z[i], y[i])
    return total / len(z)


BY_SAMPLES = {  # although it has means over labels
    "times the labels": lambda z, y: flat(z, y) * (y != -100).sum() / len(y),
    "times a share": lambda z, y: flat(z, y) * share(y),
    "a share times it": lambda z, y: share(y) * flat(z, y, label_smoothing=0.1),
    "a stack": lambda z, y: torch.stack(each_sample(z, y)).mean(),
    "a list": lambda z, y: sum(each_sample(z, y)) / len(z),
    "added up": added_up,
    "of chosen labels": lambda z, y: (
        sum(F.cross_entropy(a[b >= 0], b[b >= 0]) for a, b in zip(z, y, strict=True)) / len(z)
    ),
}


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.parametrize("name", BY_SAMPLES)
def test_a_mean_over_samples_that_is_made_of_means_over_labels_is_one(name, micro_batch):
    x, y = PADDED
    batch = x, y.clone().index_fill_(1, torch.tensor([0]), 1)  # a label in each sample
    loss, gradients = uncut(batch, BY_SAMPLES[name])
    with warnings.catch_warnings(action="error"):
        record, found = cut(batch, BY_SAMPLES[name], micro_batch)
    assert pytest.approx(loss, rel=CLOSE) == record.loss
    assert distance(found, gradients) < CLOSE


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "checkpointed"])
def test_groups_of_one_backward_have_the_weights_of_their_labels(name):
    record, _ = cut(*LOSSES[name], micro_batch=3)
    one_backward, found = cut(*LOSSES[name], micro_batch=SAMPLES, groups=8)
    assert pytest.approx(record.statistics.similarity, rel=1e-9) == (
        one_backward.statistics.similarity
    )
    assert distance(found, uncut(*LOSSES[name])[1]) < CLOSE


def test_variance_reduced_optimizers_read_the_mean_over_labels():
    _, found = cut(*LOSSES["class weights"], micro_batch=3, optimizer=plain_vr)
    assert distance(found, uncut(*LOSSES["class weights"])[1]) < CLOSE


def test_weight_wins_over_what_the_graph_says():
    batch, loss_of = LOSSES["class weights"]
    record, _ = cut(batch, loss_of, weight=1.0)
    x, y = batch
    losses = [float(loss_of(network()(a), b)) for a, b in zip(x.split(4), y.split(4), strict=True)]
    assert pytest.approx(sum(losses) / len(losses), rel=CLOSE) == record.loss


@pytest.mark.parametrize("time_first", [False, True])
def test_each_label_of_a_sequence_counts_for_its_sample(time_first):
    labels = torch.arange(5)[:, None].where(torch.arange(5)[:, None] <= torch.arange(4), -100)
    outputs = torch.randn(5, 4, 6, requires_grad=True)  # time, samples, classes
    if not time_first:
        outputs, labels = outputs.transpose(0, 1), labels.T
    loss = F.cross_entropy(outputs.reshape(-1, 6), labels.reshape(-1))
    assert [1, 2, 3, 4] == label_weights(loss, 4).tolist()


def test_labels_that_are_no_multiple_of_the_samples_weigh_a_micro_batch_and_refuse_groups():
    z = torch.randn(7, CLASSES, requires_grad=True)
    y = torch.tensor([0, 1, -100, 2, 3, 4, 1])
    assert [6.0] == label_weights(F.cross_entropy(z, y), 3).tolist()
    nodes = PLAIN, lambda z, y: F.cross_entropy(z[:-1], y[:-1])
    with pytest.raises(SettingError, match="weight of each sample"):
        cut(*nodes, micro_batch=24, groups=4)


@torch.jit.script
def scripted(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.9 * F.cross_entropy(z, y) + 0.1 * z.logsumexp(-1).square().mean()


OTHER = {
    "a script of two terms": lambda z, y: scripted(z, y),
    "times a tensor": lambda z, y: F.cross_entropy(z, y) * torch.tensor(2.0, dtype=torch.float64),
    "divided by a tensor": lambda z, y: F.cross_entropy(z, y) / (y >= 0).sum(),
    "divides a tensor": lambda z, y: torch.tensor(2) / F.cross_entropy(z, y),
    "times a constant loss": lambda z, y: (
        (1 - (-F.cross_entropy(z, y).detach()).exp()) ** 2 * F.cross_entropy(z, y)
    ),
    "squares": lambda z, y: F.mse_loss(z, z.detach() + 1),
    "two terms": lambda z, y: F.cross_entropy(z, y) + z.square().mean(),
    "a sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "each by itself": lambda z, y: F.cross_entropy(z, y, reduction="none").mean(),
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, CLASSES).double()),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_loss_is_weighted_by_samples(name):
    x, y = PLAIN
    assert label_weights(OTHER[name](network()(x), y), SAMPLES) is None


def test_a_micro_batch_without_labels_is_left_out_and_a_step_without_any_is_skipped():
    x, y = PLAIN
    some = x, y.clone().index_fill_(0, torch.arange(4), -100)
    loss, gradients = uncut(some, F.cross_entropy)
    record, found = cut(some, F.cross_entropy)
    assert pytest.approx(loss, rel=CLOSE) == record.loss
    assert distance(found, gradients) < CLOSE
    with warnings.catch_warnings(action="ignore"):
        record, found = cut((x, torch.full_like(y, -100)), F.cross_entropy)
    assert record.skipped
    assert record.loss != record.loss
    assert not any(gradient.any() for gradient in found)


def penalized(z, y):
    return flat(z, y) + z.square().mean()


@pytest.mark.parametrize("kinds", [[flat, penalized], [penalized, flat]])
@pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, LENGTH)])
@pytest.mark.parametrize("groups", [None, 4])
def test_a_term_in_some_micro_batches_is_weighted_by_samples_where_labels_are_even(
    groups, shape, kinds
):
    x, y = batch_of(*shape)
    parts = [*zip(x.split(4), y.split(4), kinds * 3, strict=True)]
    loss, gradients = uncut(
        (x, y),
        lambda z, _: (
            sum(loss_of(part, b) for part, (_, b, loss_of) in zip(z.split(4), parts, strict=True))
            / 6
        ),
    )
    turn = iter(kinds * 3)
    record, found = cut((x, y), lambda z, y: next(turn)(z, y), groups=groups)
    assert pytest.approx(loss, rel=CLOSE) == record.loss
    assert distance(found, gradients) < CLOSE


@pytest.mark.parametrize("first", [0, 1])
def test_uneven_weights_that_are_read_in_some_micro_batches_only_are_refused(first):
    kinds = [lambda z, y: F.cross_entropy(z, y, weight=RARE), lambda z, y: z.square().mean()]
    kinds = iter([kinds[first], kinds[0], kinds[1]])
    with pytest.raises(LoopError, match="pass weight= always"):
        cut(PLAIN, lambda z, y: next(kinds)(z, y))


class Scored(nn.Module):
    """Returns its loss, as the models of transformers do."""

    def __init__(self, loss_of):
        super().__init__()
        self.body, self.loss_of = network(), loss_of

    def forward(self, x, y):
        z = self.body(x)
        return {"logits": z, "loss": self.loss_of(z, y)}


def step_on_ranks(rank, ranks, ignored, engine="ddp", optimizer=SGD):
    batch, loss_of = LOSSES["padding"]
    x, y = (part[rank::ranks] for part in batch)
    if ignored == "everywhere" or (ignored == "here" and rank):
        y = torch.full_like(y, -100)
    model = network()
    if engine == "ddp, its own loss":  # torch puts a node of DDP's between loss and backward
        scored = Scored(loss_of)
        model = nn.parallel.DistributedDataParallel(scored, find_unused_parameters=True)
    else:
        model = (
            nn.parallel.DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
        )
    before = [whole(p).clone() for p in model.parameters()]
    train = bb.AdaptiveBatch(
        model,
        optimizer(model.parameters(), lr=1.0),
        [(x, y)],
        policy=bb.Fixed(SAMPLES),
        micro_batch=3,
        every=1,
    )
    for step in train:
        for x, y in step:
            has_loss = engine.endswith("loss")
            step.backward(model(x, y)["loss"] if has_loss else loss_of(model(x), y))
        loss = step.loss
        record = step.update()
        assert loss == record.loss or record.skipped
    return record, [a - whole(b) for a, b in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("optimizer", [SGD, plain_vr])
@pytest.mark.parametrize("engine", ["ddp", "ddp, its own loss", "fsdp2"])
@pytest.mark.parametrize("ignored", ["some", "here"])
def test_ranks_train_on_the_mean_over_the_labels_of_all(ranks, ignored, engine, optimizer):
    (x, y), loss_of = LOSSES["padding"]
    if ignored == "here":
        y = y.clone()
        y[1::2] = -100
    loss, gradients = uncut((x, y), loss_of)
    for record, found in ranks(2)(step_on_ranks, ignored, engine, optimizer):
        assert pytest.approx(loss, rel=CLOSE) == record.loss
        assert distance(found, gradients) < CLOSE


def test_a_step_without_labels_on_any_rank_is_skipped_on_all(ranks):
    for record, found in ranks(2)(step_on_ranks, "everywhere"):
        assert record.skipped
        assert not any(gradient.any() for gradient in found)


def branches(micro_batch, ignored=0):
    model = network()
    x, y = batch_of(400)
    y[8 + 16 : 8 + 16 + ignored] = -100  # a step of each branch
    loader = [*zip(x.split(8), y.split(8), strict=True)]
    settings = {"policy": bb.Fixed(8), "micro_batch": micro_batch, "every": 1}
    train = bb.AdaptiveBatch(model, SGD(model.parameters(), lr=0.1), loader, **settings)
    next(iter(train))
    torch.manual_seed(3)
    with warnings.catch_warnings(action="ignore"):
        result = train.branch_test(
            lambda batch: F.cross_entropy(model(batch[0]), batch[1], weight=RARE + 1),
            [8, 16],
            samples=64,
            held_aside=2,  # at once: evaluation, which has no graph, weighs its parts by samples
        )
    return [loss for of_branch in result.losses for loss in of_branch]


def test_branches_train_on_the_mean_over_the_labels_of_a_step():
    assert pytest.approx(branches(16), rel=1e-10) == branches(2)


def test_a_step_of_a_branch_without_labels_changes_nothing():
    assert all(loss == loss for loss in branches(4, ignored=24))


def test_check_groups_knows_the_weights_of_the_labels():
    (x, y), loss_of = LOSSES["class weights"]
    assert bb.check_groups(network(), loss_of, x, y, groups=8).ok
