"""GradientMeter on real processes: DDP, FSDP2 and HSDP against one process in float64."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from bigbatch import GradientMeter
from training_on_ranks import (
    ENGINES,
    EQUAL,
    RAGGED,
    RAGGED_SAME_TOTAL,
    SAME_COUNT,
    SAME_TOTAL,
    STEPS,
    accumulate,
    all_close,
    batches,
    ddp,
    expected,
    fsdp2,
    gradients,
    hsdp,
    network,
    one_step,
    share,
    train,
)

COUNTS = [2, 3, 4]
WRAPPERS = {
    "ddp": ddp(),
    "ddp-views": ddp(gradient_as_bucket_view=True),
    "ddp-static": ddp(static_graph=True),
    "ddp-unused": ddp(find_unused_parameters=True),
    "ddp-small-buckets": ddp(bucket_cap_mb=1e-4, gradient_as_bucket_view=True),
    "fsdp2": fsdp2(),
    "fsdp2-kept": fsdp2(reshard_after_forward=False),
    "hsdp": hsdp(),
}


def possible(wrappers, counts=COUNTS):
    """Wrappers and numbers of ranks; a mesh of two rows needs an even one."""
    return [(w, count) for w in wrappers for count in counts if w != "hsdp" or count % 2 == 0]


def measured(rank, ranks, *, wrapper, sizes, loss="weighted", **how):
    model = WRAPPERS[wrapper](network(), ranks)
    if wrapper == "ddp-static":
        # torch itself asserts where the first backward of a static graph does not reduce
        accumulate(model, rank, 9, [[2]] * ranks)
        model.zero_grad()
    return train(rank, ranks, model, sizes, loss, **how)


# right numbers


@pytest.mark.parametrize("always_sync", [False, True], ids=["no_sync", "sync"])
@pytest.mark.parametrize(("wrapper", "count"), possible(WRAPPERS))
def test_every_engine_measures_what_one_process_would(ranks, wrapper, count, always_sync):
    sizes = EQUAL[:count]
    run = partial(measured, wrapper=wrapper, sizes=sizes, always_sync=always_sync)
    results = ranks(count)(run)
    assert all_close(expected(network, sizes), results)
    assert {(3 * count, 12 * count)} == {(r.micro_batches, r.samples) for rs in results for r in rs}


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize(("wrapper", "count"), possible(ENGINES))
def test_micro_batches_of_different_sizes_count_by_their_samples(ranks, wrapper, count, loss):
    sizes = (SAME_TOTAL if loss == "weighted" else SAME_COUNT)[:count]
    results = ranks(count)(partial(measured, wrapper=wrapper, sizes=sizes, loss=loss))
    assert all_close(expected(network, sizes, loss), results)


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize("wrapper", ["ddp", "ddp-views", "ddp-unused"])
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_may_run_different_numbers_of_micro_batches_under_ddp(ranks, wrapper, count, loss):
    sizes = (RAGGED_SAME_TOTAL if loss == "weighted" else RAGGED)[:count]
    results = ranks(count)(partial(measured, wrapper=wrapper, sizes=sizes, loss=loss))
    assert all_close(expected(network, sizes, loss), results)


def kept_whole_within_a_step(rank, ranks, *, sizes):
    """FSDP2 gathers in a step's first forward only, so that the others may differ in number."""
    model = fsdp2(reshard_after_forward=False)(network(), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    readings = []
    with GradientMeter(model, loss="mean") as meter:
        for step in range(STEPS):
            for number, (x, y) in enumerate(batches(step, sizes)):
                owner, place = owner_of(number, sizes)
                if owner == rank:
                    last = place == len(sizes[rank]) - 1
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last)
                    cross_entropy(model(x), y).backward()
            readings.append(meter.read(sizes[rank]))
            optimizer.step()
            optimizer.zero_grad()
    return readings


def owner_of(number, sizes):
    """The rank of a micro-batch counted over all ranks, and its place there."""
    return [(rank, place) for rank, own in enumerate(sizes) for place in range(len(own))][number]


@pytest.mark.parametrize("count", COUNTS)
def test_ranks_may_run_different_numbers_under_fsdp2_that_keeps_its_weights(ranks, count):
    sizes = RAGGED[:count]
    results = ranks(count)(partial(kept_whole_within_a_step, sizes=sizes))
    assert all_close(expected(network, sizes, "mean"), results)


@pytest.mark.parametrize(("wrapper", "count"), possible(ENGINES))
def test_one_micro_batch_a_rank_is_enough(ranks, wrapper, count):
    sizes = [[5]] * count
    results = ranks(count)(partial(measured, wrapper=wrapper, sizes=sizes))
    assert all_close(expected(network, sizes), results)


# every


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_steps_that_every_leaves_out_are_not_read_and_the_others_are_right(ranks, wrapper):
    run = partial(measured, wrapper=wrapper, sizes=EQUAL[:3], every=3, steps=7)
    answers = expected(network, EQUAL[:3], steps=7)
    for readings in ranks(3)(run):
        assert [0, 3, 6] == [step for step, r in enumerate(readings) if r is not None]
        assert all_close(answers[::3], [readings[::3]])


# layers


@pytest.mark.parametrize("wrapper", ["ddp", "ddp-views", "fsdp2", "hsdp"])
def test_each_layer_is_measured_by_itself(ranks, wrapper):
    count = 4 if wrapper == "hsdp" else 3
    sizes = SAME_TOTAL[:count]
    results = ranks(count)(partial(measured, wrapper=wrapper, sizes=sizes, per_layer=True))
    assert all_close(expected(network, sizes), results)  # the whole is what it was
    for place in (0, 2, 4):
        answers = expected(network, sizes, columns=columns_of(place))
        of_layer = [[r.layers[str(place)] for r in readings] for readings in results]
        assert all_close(answers, of_layer)
    assert {("0", "2", "4")} == {tuple(r.layers) for rs in results for r in rs}


def columns_of(place):
    """Where the gradient of one layer stands in that of all."""
    lengths = [sum(p.numel() for p in layer.parameters()) for layer in network()]
    return slice(sum(lengths[:place]), sum(lengths[: place + 1]))


def names_of_layers(rank, ranks, *, wrap):
    model = LAYERED[wrap](network())
    with GradientMeter(model, per_layer=True) as meter:
        accumulate(model, rank, 0, EQUAL)
        return [*meter.read(EQUAL[rank]).layers]


LAYERED = {
    "ddp": lambda m: ddp()(m, 2),
    "ddp of compiled": lambda m: ddp()(torch.compile(m, backend="eager"), 2),
    "compiled ddp": lambda m: torch.compile(ddp()(m, 2), backend="eager"),
}


@pytest.mark.parametrize("wrap", LAYERED)
def test_layers_are_named_as_in_the_model_that_was_wrapped(ranks, wrap):
    assert [["0", "2", "4"]] * 2 == ranks(2)(partial(names_of_layers, wrap=wrap))


# halves


def cosines(sizes, loss):
    """Of the two halves by parity of rank + number, the exact gradient of every step."""
    model, answers = network(), []
    places = [(rank, number) for rank, own in enumerate(sizes) for number in range(len(own))]
    factors = [share(loss, n, own, sizes) for own in sizes for n in own]
    odd = torch.tensor([(rank + number) % 2 for rank, number in places], dtype=torch.bool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        h = torch.tensor(factors).double()[:, None] * gradients(model, step, sizes)
        answers.append(float(cosine_similarity(h[odd].sum(0), h[~odd].sum(0), dim=0)))
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()).detach()
            - 0.1 * (h.sum(0) / len(sizes)).float(),
            model.parameters(),
        )
        optimizer.zero_grad()
    return answers


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize(("wrapper", "count"), possible(["ddp", "ddp-views", "fsdp2", "hsdp"]))
def test_halves_are_the_cosine_of_two_half_gradients(ranks, wrapper, count, loss):
    # 3 micro-batches on each of 3 ranks: one half has five, the other four
    sizes = (SAME_TOTAL if loss == "weighted" else SAME_COUNT)[:count]
    run = partial(measured, wrapper=wrapper, sizes=sizes, loss=loss, half_batch_cosine=True)
    answers = cosines(sizes, loss)
    for readings in ranks(count)(run):
        # float32 sums of some ten gradients, in another order
        assert pytest.approx(answers, abs=1e-4) == [r.half_batch_cosine for r in readings]


def test_halves_are_right_where_ranks_have_different_numbers_of_micro_batches(ranks):
    answers = cosines(RAGGED, "mean")
    for readings in ranks(4)(
        partial(measured, wrapper="ddp", sizes=RAGGED, loss="mean", half_batch_cosine=True)
    ):
        assert pytest.approx(answers, abs=1e-4) == [r.half_batch_cosine for r in readings]


# interval


def on_one_process(sizes, loss, steps=STEPS, **options):
    """A meter on this process that sees all ranks' micro-batches, and the same weights."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = [n for own in sizes for n in own]
    readings = []
    with GradientMeter(model, loss=loss, **options) as meter:
        for step in range(steps):
            for x, y in batches(step, sizes):
                factor = 1.0 if loss == "mean" else len(y) / sum(flat)
                (cross_entropy(model(x), y) * factor).backward()
            readings.append(meter.read(flat))
            for p in model.parameters():
                p.grad /= len(sizes) if loss == "mean" else 1.0  # as the ranks' mean
            optimizer.step()
            optimizer.zero_grad()
    return readings


@pytest.mark.parametrize("loss", ["weighted", "mean"])
@pytest.mark.parametrize(("wrapper", "count"), possible(["ddp", "fsdp2", "hsdp"]))
def test_the_interval_is_that_of_one_process_that_saw_all_micro_batches(
    ranks, wrapper, count, loss
):
    sizes = (SAME_TOTAL if loss == "weighted" else SAME_COUNT)[:count]
    run = partial(measured, wrapper=wrapper, sizes=sizes, loss=loss, confidence=0.9)
    alone = [r.interval for r in on_one_process(sizes, loss, confidence=0.9)]
    for readings in ranks(count)(run):
        seen = [r.interval for r in readings]
        # the sketches are the same; float32 gradients of the ranks' weights differ by 1e-7, and x
        # is the logarithm of a difference
        assert pytest.approx([i.low for i in alone], abs=2e-3) == [i.low for i in seen]
        assert pytest.approx([i.high for i in alone], abs=2e-3) == [i.high for i in seen]
        assert {(0.9, "step")} == {(i.level, i.covers) for i in seen}


def test_the_interval_is_right_where_ranks_have_different_numbers_of_micro_batches(ranks):
    alone = [r.interval for r in on_one_process(RAGGED, "mean", confidence=0.9)]
    run = partial(measured, wrapper="ddp", sizes=RAGGED, loss="mean", confidence=0.9)
    for readings in ranks(4)(run):
        assert pytest.approx([i.low for i in alone], abs=2e-3) == [r.interval.low for r in readings]


# what training does is left alone


def weights_after(rank, ranks, *, wrapper, metered):
    """Weights after four steps of Adam with clipping, and the gradients it was given."""
    model = WRAPPERS[wrapper](network(), ranks)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"confidence": 0.9, "per_layer": True, "half_batch_cosine": True}
    meter = GradientMeter(model, **options) if metered else None
    seen = []
    for step in range(4):
        accumulate(model, rank, step, SAME_TOTAL)
        if meter is not None:
            meter.read(SAME_TOTAL[rank])
        seen += [local(p.grad).clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [x.tolist() for x in (*seen, *(local(p.detach()) for p in model.parameters()))]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("wrapper", ["ddp", "ddp-views", "fsdp2", "hsdp"])
def test_gradients_and_weights_are_bit_for_bit_those_without_a_meter(ranks, wrapper):
    count = 4 if wrapper == "hsdp" else 3
    plain = ranks(count)(partial(weights_after, wrapper=wrapper, metered=False))
    assert plain == ranks(count)(partial(weights_after, wrapper=wrapper, metered=True))


def clipped_after_reading(rank, ranks, *, wrapper):
    model = WRAPPERS[wrapper](network(), ranks)
    readings = []
    with GradientMeter(model) as meter:
        for step in range(2):
            model.zero_grad()
            accumulate(model, rank, step, EQUAL)
            readings.append(meter.read(EQUAL[rank]))
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return readings


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_clipping_after_read_is_the_users_own_affair(ranks, wrapper):
    answers = [one_step(network, step, EQUAL[:2]) for step in range(2)]
    assert all_close(answers, ranks(2)(partial(clipped_after_reading, wrapper=wrapper)))


def two_meters(rank, ranks, *, wrapper):
    """The second one continues when the first one is closed."""
    model = WRAPPERS[wrapper](network(), ranks)
    readings = []
    meters = [GradientMeter(model), GradientMeter(model)]
    for _ in range(STEPS):
        model.zero_grad()
        accumulate(model, rank, 0, EQUAL)
        readings += [meter.read(EQUAL[rank]) for meter in meters]
        if len(meters) == 2:
            meters.pop(0).close()
    return readings


def hooks_after_dropping(rank, ranks, *, wrapper):
    model = WRAPPERS[wrapper](network(), ranks)

    def hooks():
        return [len(module._forward_pre_hooks) for module in model.modules()]

    before = hooks()
    for step in range(3):
        meter = GradientMeter(model)
        accumulate(model, rank, step, EQUAL)
        meter.read(EQUAL[rank])
        model.zero_grad()
        del meter
    gc.collect()
    return before, hooks()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "hsdp"])
def test_a_meter_that_nobody_holds_leaves_no_forward_hook(ranks, wrapper):
    for before, after in ranks(4)(partial(hooks_after_dropping, wrapper=wrapper)):
        assert before == after


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_meters_on_one_model_agree_and_one_may_be_closed(ranks, wrapper):
    answers = [one_step(network, 0, EQUAL[:2])] * (STEPS + 1)
    assert all_close(answers, ranks(2)(partial(two_meters, wrapper=wrapper)))
