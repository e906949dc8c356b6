"""Loops whose numbers would be wrong are refused by name, and train as alone."""

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader

import bigbatch as bb
from advised_loops import advised, batches, loss_of, network, plain_step, sgd
from bigbatch.advisor.observations import Limits
from bigbatch.advisor.training_observer import TrainingObserver
from tensors import same


def observed(train, **limits):
    """What an observer of a whole program finds."""
    observer = TrainingObserver(Limits(**{"steps": None, "seconds": None, "groups": 8} | limits))
    with observer:
        train()
    return observer.observations


def lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(batch):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    return optimizer, step


def never_zeroed(model):
    optimizer = sgd(model, lr=1e-3)

    def step(batch):
        loss_of(model, batch).backward()
        optimizer.step()

    return optimizer, step


def weights_changed(model):
    """Both backwards of a step add up, at other weights."""
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        loss_of(model, tuple(x + 0 for x in batch)).backward()
        optimizer.step()

    return optimizer, step


def zeroed_between(model):
    optimizer = sgd(model)

    def step(batch):
        for part in zip(*(x.chunk(2) for x in batch), strict=True):
            optimizer.zero_grad()
            loss_of(model, part).backward()
        optimizer.step()

    return optimizer, step


def by_hand(model, how):
    optimizer, parameters = sgd(model), list(model.parameters())
    names = [name for name, _ in model.named_parameters()]

    def functional(values, batch):
        output = torch.func.functional_call(model, dict(zip(names, values, strict=True)), batch[0])
        return F.mse_loss(output, batch[1])

    def step(batch):
        optimizer.zero_grad()
        if how == "func":
            values = [p.detach() for p in parameters]
            gradients = torch.func.grad(functional)(values, batch)
        else:
            gradients = torch.autograd.grad(loss_of(model, batch), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        optimizer.step()

    return optimizer, step


def two_sizes(model):
    """One backward of two forwards, as of labelled and unlabelled samples."""
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        (loss_of(model, batch) + model(batch[0][:5]).square().mean()).backward()
        optimizer.step()

    return optimizer, step


def several_losses(model):
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        output = model(batch[0])
        F.mse_loss(output, batch[1]).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()

    return optimizer, step


def same_samples(model):
    """Two losses of the same samples, each with a forward of its own."""
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        model(batch[0]).square().mean().backward()
        optimizer.step()

    return optimizer, step


def growing_accumulation(model):
    optimizer, step_number = sgd(model), iter(range(1000))

    def step(batch):
        optimizer.zero_grad()
        for _ in range(next(step_number) + 1):
            loss_of(model, tuple(x + 0 for x in batch)).backward()
        optimizer.step()

    return optimizer, step


def infinite(model):
    optimizer = sgd(model, lr=0.0)

    def step(batch):
        optimizer.zero_grad()
        (loss_of(model, batch) * float("inf")).backward()
        optimizer.step()

    return optimizer, step


@dataclass(frozen=True)
class Refused:
    """A loop that cannot be measured, and what is said of it."""

    loop: object
    said: str


CASES = {
    "LBFGS": Refused(lbfgs, "LBFGS evaluates the gradient several times"),
    "never zeroed": Refused(never_zeroed, "zero_grad"),
    "weights changed": Refused(weights_changed, "weights changed between two backwards|sharpness"),
    "zeroed between": Refused(zeroed_between, "zeroed between two backwards"),
    "torch.func": Refused(partial(by_hand, how="func"), r"autograd\.grad or torch\.func"),
    "autograd.grad": Refused(partial(by_hand, how="grad"), r"autograd\.grad"),
    "two sizes": Refused(two_sizes, "called 2 times before one backward, with 16, 5 samples"),
    "several losses": Refused(several_losses, "no forward of its own"),
    "same samples": Refused(same_samples, "of the same samples"),
    "growing": Refused(growing_accumulation, "same number each time|must not change"),
    "infinite": Refused(infinite, "not finite"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_what_was_seen(name):
    case, model = CASES[name], network()
    optimizer, step = case.loop(model)
    advice = advised(model, optimizer, step, batches(20))
    assert re.search(case.said, advice.refusal), advice.refusal
    assert advice.batch_size is None


@pytest.mark.parametrize("name", CASES)
def test_a_refused_loop_trains_as_alone(name):
    models = []
    for is_advised in (False, True):
        model = network()
        optimizer, step = CASES[name].loop(model)
        if is_advised:
            advised(model, optimizer, step, batches(20))
        else:
            for batch in batches(20):
                step(batch)
        models.append([torch.nan_to_num(p.detach()) for p in model.parameters()])
    assert same(*models)


def test_sparse_gradients_are_refused():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.out = nn.Linear(4, 2)

        def forward(self, index):
            return self.out(self.table(index))

    model = Bag()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        index = (batch[0][:, 0].abs() * 3).long().clamp(max=9)
        F.mse_loss(model(index), batch[1]).backward()
        optimizer.step()

    assert "sparse" in advised(model, optimizer, step).refusal


def test_complex_parameters_are_refused():
    model = nn.Linear(6, 2, dtype=torch.complex64)
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        (model(batch[0].to(torch.complex64)) - batch[1]).abs().square().mean().backward()
        optimizer.step()

    said = "a complex parameter cannot be measured; hold torch.view_as_real of it"
    assert said == advised(model, optimizer, step).refusal


def test_a_model_without_a_tensor_of_samples_is_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.data = nn.Linear(6, 2), iter(batches(100))

        def forward(self):
            x, y = next(self.data)
            return F.mse_loss(self.inner(x), y)

    model = Own()
    optimizer = sgd(model)

    def step(_):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    assert "with None samples, so it is unknown how many" in advised(model, optimizer, step).refusal


def test_a_model_that_is_called_twice_by_equal_samples_is_measured():
    """A siamese network: its samples are pairs."""
    model = network()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        (model(batch[0]) - model(batch[0].flip(1)) - batch[1]).square().mean().backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert "" == advice.refusal
    assert 16 == advice.found.batch_size
    assert "consecutive steps" == advice.observations.way


def test_a_number_of_backwards_that_changes_at_times_is_measured_at_the_others():
    model = network()
    optimizer, number = sgd(model), iter(range(1000))

    def step(batch):
        optimizer.zero_grad()
        parts = 2 if next(number) % 10 == 9 else 4
        for part in zip(*(x.chunk(parts) for x in batch), strict=True):
            (loss_of(model, part) / parts).backward()
        optimizer.step()

    advice = advised(model, optimizer, step, batches(60))
    assert "" == advice.refusal or "must not change" in advice.refusal
    assert {4} == {one.statistics.micro_batches for one in advice.observations.measurements}


# samples that influence each other


def info_nce(one, other):
    similarities = 10 * F.normalize(one, dim=1) @ F.normalize(other, dim=1).t()
    return F.cross_entropy(similarities, torch.arange(len(one)))


def views(x):
    return [x + 0.1 * torch.randn_like(x) for _ in range(2)]


class OwnLoss(nn.Module):
    """Returns a loss of its encoder's outputs."""

    def __init__(self, loss, *parts):
        super().__init__()
        self.encoder, self.loss = network(*parts), loss

    def forward(self, x):
        return self.loss(self.encoder, x)


def of_doubled_batch(encoder, x):
    return info_nce(*encoder(torch.cat(views(x))).chunk(2))


def of_two_calls(encoder, x):
    return info_nce(*map(encoder, views(x)))


def triplets(encoder, x):
    z = encoder(x)
    distances = torch.cdist(z, z)
    return F.softplus(distances.amin(1) - distances.amax(1)).mean()


def decorrelated(encoder, x):
    z = encoder(x)
    return F.relu(1 - z.std(0)).mean() + (z.t() @ z).square().mean()


def ranked(encoder, x):
    score = encoder(x)[:, 0]
    return F.softplus(score[:, None] - score[None]).mean()


def dice(encoder, x):
    share = encoder(x).sigmoid()
    return 1 - 2 * (share * (x[:, :2] > 0)).sum(0).div(share.sum(0) + 1).mean()


def dice_of_a_loop(encoder, x):
    shares = encoder(x).sigmoid()
    overlaps = [share[0] for share in shares]
    return 1 - sum(overlaps) / (sum(share.sum() for share in shares) + 1)


def ranked_in_a_loop(encoder, x):
    score = encoder(x).exp()
    return sum((score[i] / score[i - 1]).sum() for i in range(len(x)))


def attention_over_the_batch(encoder, x):
    z = encoder(x)
    return ((z @ z.t()).softmax(1) @ z - 1).square().mean()


def root_of_the_mean(encoder, x):
    return F.mse_loss(encoder(x), x[:, :2] + 1).sqrt()


COUPLED = [
    of_doubled_batch,
    of_two_calls,
    triplets,
    decorrelated,
    ranked,
    dice,
    dice_of_a_loop,
    ranked_in_a_loop,
    attention_over_the_batch,
    root_of_the_mean,
]


@pytest.mark.parametrize("loss", COUPLED)
@pytest.mark.parametrize("is_in_model", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
def test_a_loss_that_couples_samples_is_refused_by_name(loss, is_in_model, normalizes):
    parts = [nn.BatchNorm1d(8)] if normalizes else []
    model = OwnLoss(loss, *parts) if is_in_model else network(*parts)
    optimizer = sgd(model, lr=1e-3)

    def step(batch):
        optimizer.zero_grad()
        (model(batch[0]) if is_in_model else loss(model, batch[0])).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert "the samples of a backward influence each other in " in advice.refusal
    assert (None, True) == (advice.batch_size, str(advice).startswith("No advice"))


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_alone_is_measured_by_micro_batches_that_are_cut(affine):
    model = network(nn.BatchNorm1d(8, affine=affine))
    advice = advised(model, sgd(model), plain_step)
    assert ("", "cut micro-batches") == (advice.refusal, advice.observations.way)
    normalizes = "groups of samples of one backward: BatchNorm normalizes over"
    assert any(unseen.startswith(normalizes) for unseen in advice.observations.unseen)


def test_rows_that_an_expert_gets_are_no_samples():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.expert, self.out = nn.Linear(6, 8), nn.Linear(4, 4), nn.Linear(8, 2)

        def forward(self, x):
            tokens = self.into(x).view(-1, 4)  # two of a sample
            chosen = torch.randperm(len(tokens))[: len(x)]  # by chance as many as samples
            tokens = tokens.index_add(0, chosen, self.expert(tokens[chosen]))
            return self.out(tokens.view(len(x), 8))

    model = Experts()
    advice = advised(model, sgd(model), plain_step)
    assert ("", "cut micro-batches") == (advice.refusal, advice.observations.way)


def test_a_coupled_loss_is_measured_by_backwards_that_keep_their_size():
    model = network()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        for x in batch[0].chunk(4):
            of_doubled_batch(model, x).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert ("", "micro-batches") == (advice.refusal, advice.observations.way)
    assert "so this is about the number of backwards" in str(advice)


def per_sample_dice(encoder, x):
    share = encoder(x).sigmoid()
    overlap = (share * (x[:, :2] > 0)).sum(1)
    return (1 - 2 * overlap / (share.sum(1) + 1)).mean()


def with_constant_negatives(encoder, x):
    return F.cross_entropy(encoder(x) @ torch.randn(2, 16), torch.arange(16))


def of_matched_rows(encoder, x):
    boxes = encoder(x)[[0, 3, 5]].exp()
    return (1 - boxes[:, 0] / (boxes[:, 1] + 1)).mean()


def pairs_in_a_sample(encoder, x):
    z = encoder(x)[:, :1] * torch.linspace(0, 1, 32)  # 32 numbers, where the batch has 16
    return (z[:, :, None] - z[:, None]).square().mean()


def loop_over_samples(encoder, x):
    maps = [torch.outer(z, z) for z in encoder(x).sigmoid()]
    ratios = [m.diagonal().sum() / (m.sum() + 1) + m.norm() for m in maps]
    return torch.stack(ratios).sqrt().mean()


UNCOUPLED = [
    per_sample_dice,
    with_constant_negatives,
    of_matched_rows,
    pairs_in_a_sample,
    loop_over_samples,
]


def test_a_mean_of_as_many_classes_as_samples_is_measured_by_groups():
    def of_classes(encoder, x):
        logits = (encoder(x) @ torch.linspace(-1, 1, 32).view(2, 16)).log_softmax(1)
        return -(logits * F.one_hot(torch.arange(16))).mean(0).sum()

    model = OwnLoss(of_classes)
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        model(batch[0]).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert ("", "groups") == (advice.refusal, advice.observations.way)


@pytest.mark.parametrize("loss", UNCOUPLED)
def test_a_loss_that_couples_no_samples_is_measured_by_groups(loss):
    model = network()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        loss(model, batch[0]).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert ("", "groups") == (advice.refusal, advice.observations.way)


# what a whole program shows


def generator_and_critic(n):
    """Two optimizers in turn, of `n` and one backwards."""
    one, two = network(), network(seed=1)
    optimizers = sgd(one), sgd(two)

    def train():
        for batch in batches():
            for model, optimizer, repeats in zip((one, two), optimizers, (n, 1), strict=True):
                for _ in range(repeats):
                    plain_step(model, optimizer, tuple(x + 0 for x in batch))

    return train


@pytest.mark.parametrize("repeats", [1, 3])
def test_two_optimizers_in_turn_are_refused(repeats):
    observations = observed(generator_and_critic(repeats))
    assert re.search("step in turn|do not step together|optimizers", observations.refusal)
    assert "with bb.advise(model, optimizer)" in observations.refusal
    assert [] == observations.measurements


def test_two_optimizers_of_one_backward_are_one_training():
    model = network()
    optimizers = SGD(model[0].parameters(), lr=0.05), torch.optim.Adam(model[2].parameters())

    def train():
        for batch in batches():
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()

    observations = observed(train)
    assert "" == observations.refusal
    assert "SGD and Adam" == observations.found.optimizer
    assert 30 == observations.steps


@pytest.mark.parametrize("at", [5, 20])
def test_an_optimizer_that_begins_later_is_refused(at):
    model, other = network(), network(seed=1)
    optimizer, later = sgd(model), torch.optim.Adam(other.parameters())

    def train():
        for number, batch in enumerate(batches()):
            plain_step(model, optimizer, batch)
            if number >= at:
                plain_step(other, later, batch)

    refusal = observed(train).refusal
    assert "Adam began to step after SGD had been found" in refusal


def test_parameters_of_no_module_are_refused():
    weight = torch.zeros(6, 2, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)

    def train():
        for x, y in batches():
            optimizer.zero_grad()
            F.mse_loss(x @ weight, y).backward()
            optimizer.step()

    refusal = observed(train).refusal
    assert "no nn.Module holds the 1 parameters of SGD" in refusal


def test_a_program_without_a_step_is_refused():
    assert "without a step of a torch.optim.Optimizer" in observed(lambda: None).refusal


def test_a_model_is_found_by_its_optimizer_alone():
    model, other = network(nn.LayerNorm(8)), network(seed=1)
    optimizer = sgd(model)
    whole = nn.ModuleDict({"inner": model, "other": other})  # the outermost module

    def train():
        for batch in batches():
            plain_step(model, optimizer, batch)

    observations = observed(train)
    assert ("", "ModuleDict") == (observations.refusal, observations.found.model)
    assert len(whole) == 2
    names = {name for one in observations.measurements for name in one.statistics.layers}
    assert {"inner.0", "inner.1", "inner.3"} <= names


@pytest.mark.parametrize("settings", [{"steps": 0}, {"groups": 1}, {"budget": "5 days"}])
def test_settings_out_of_range_are_refused_before_the_block(settings):
    model = network()
    with pytest.raises(bb.BigbatchError), bb.advise(model, sgd(model), **settings):
        pytest.fail("the block began")


def full_batch(model):
    """The same samples at every step, in another order."""
    optimizer, (x, y) = sgd(model), batches(1)[0]

    def step(_):
        order = torch.randperm(len(x))
        plain_step(model, optimizer, (x[order], y[order]))

    return optimizer, step


def test_consecutive_steps_of_the_same_samples_are_refused():
    model = network(nn.BatchNorm1d(8))
    optimizer, step = full_batch(model)
    with torch.device("cpu"):  # under which batches are not cut
        advice = advised(model, optimizer, step)
    assert "two consecutive steps are of the same samples" in advice.refusal


@pytest.mark.parametrize("sizes", [(16, 16, 16, 2), (16, 3)])
def test_backwards_of_different_sizes_in_one_step_are_refused(sizes):
    model = network()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        for size in sizes:
            (loss_of(model, [tensor[:size].clone() for tensor in batch]) / len(sizes)).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert "it cannot be seen how the loss weights them" in advice.refusal


def test_domains_with_a_backward_each_are_refused():
    """Their gradients are as long as each other, and point elsewhere."""
    model = network()
    nn.init.zeros_(model[2].bias)
    nn.init.zeros_(model[2].weight)
    optimizer, shift = sgd(model, lr=1e-6), torch.tensor([1.0, -1.0])

    def step(batch):
        optimizer.zero_grad()
        for sign in (1, -1, 1, -1):
            x = torch.randn(16, 6)
            (F.mse_loss(model(x), 3 * sign * shift + torch.randn(16, 2)) / 4).backward()
        optimizer.step()

    advice = advised(model, optimizer, step, batches(200))
    assert "other gradients than backward" in advice.refusal


class TwoInputs(nn.Module):
    """Takes a constant tensor of 5 anchors first."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, anchors, x):
        return self.body(x) + anchors.mean()


def test_tensors_of_different_lengths_are_refused_unless_the_samples_are_stated():
    model = TwoInputs()
    optimizer, anchors = sgd(model), torch.randn(5)

    def step(batch):
        optimizer.zero_grad()
        F.mse_loss(model(anchors, batch[0]), batch[1]).backward()
        optimizer.step()

    advice = advised(model, optimizer, step)
    assert "5, 16 in dimension 0" in advice.refusal
    assert "--micro-batch" in advice.refusal
    advice = advised(model, optimizer, step, micro_batch=16)
    assert "" == advice.refusal
    assert 16 == advice.found.micro_batch == advice.found.batch_size


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])


@pytest.mark.parametrize("stated", [None, 16])
def test_layers_that_take_positions_first_are_refused_unless_the_samples_are_stated(stated):
    torch.manual_seed(0)
    model = SequenceFirst()
    optimizer = sgd(model)

    def step(batch):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(9, 16, 6)), batch[1]).backward()
        optimizer.step()

    advice = advised(model, optimizer, step, micro_batch=stated)
    assert (stated is None) == ("LSTM has batch_first=False" in advice.refusal)
    assert stated is None or 16 == advice.found.batch_size


@pytest.mark.parametrize(("size", "doubts"), [(23, 0), (29, 1)])
def test_a_loader_settles_or_doubts_the_number_of_samples(size, doubts):
    """Other tests may have left loaders, of other sizes than these."""
    model, loader = network(), DataLoader(torch.zeros(99, 1), batch_size=size)
    advice = advised(model, sgd(model), plain_step, batches(size=23))
    assert "" == advice.refusal
    found = [line for line in advice.observations.unseen if "no DataLoader has such" in line]
    assert doubts == len(found)
    assert all(str(loader.batch_size) in line for line in found)
