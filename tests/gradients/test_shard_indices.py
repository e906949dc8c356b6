"""Which elements of a gradient a rank's shard holds, and that nobody makes an array to ask."""

import pytest
import torch
from torch import nn

from bigbatch import GradientMeter
from bigbatch.gradients.rank_reducer import indices_in_rows, indices_in_runs, places_in_memory
from bigbatch.statistics.norms import flattened
from kernel_recorder import Allocated

torch.set_num_threads(1)  # small tensors: a second thread only waits
COUNT = 256  # elements asked for
SHAPES = [(1000,), (7,), (40, 30), (3, 300), (300, 2), (8, 3, 5, 5), (2, 1, 700)]


def numbered(shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def those_asked_for(shard, count):
    """The slow way: from the numbers of all elements of a shard."""
    flat = shard.reshape(-1)
    places = (flat < count).nonzero().squeeze(1)
    return dict(zip(places.tolist(), flat[places].tolist(), strict=True))


def as_dict(indices):
    places, numbers = indices
    assert len(places) == len(numbers)
    return dict(zip(places.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 400])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_chunk_hold_what_is_in_them(shape, ranks):
    whole = numbered(shape)
    count = min(COUNT, whole.numel())
    for dim, size in enumerate(shape):
        chunks, rows = whole.chunk(ranks, dim), -(-size // ranks)
        for rank in range(ranks):
            first = min(size, rank * rows)
            shard = chunks[rank] if rank < len(chunks) else whole[:0]
            indices = indices_in_rows(count, shape, dim, first, min(rows, size - first))
            assert those_asked_for(shard, count) == as_dict(indices)


@pytest.mark.parametrize("runs", [[], [(0, 1000)], [(100, 50)], [(900, 100)], [(0, 7), (200, 90)]])
def test_runs_hold_what_is_in_them_one_after_another(runs):
    whole = numbered((1000,))
    shard = torch.cat([whole[:0], *(whole[first : first + length] for first, length in runs)])
    indices = indices_in_runs(torch.arange(COUNT), runs)
    assert those_asked_for(shard, COUNT) == as_dict(indices)


@pytest.mark.parametrize("shape", SHAPES)
def test_places_in_memory_are_those_of_a_dense_tensor_in_any_order_of_its_dimensions(shape):
    for first in range(len(shape)):
        order = [*range(first, len(shape)), *range(first)]
        strides = (
            torch.empty(shape)
            .permute(order)
            .contiguous()
            .permute([order.index(dim) for dim in range(len(shape))])
            .stride()
        )
        flat = flattened(numbered(shape), strides)
        count = min(COUNT, flat.numel())
        assert list(range(count)) == flat[places_in_memory(count, shape, strides)].tolist()


def bytes_of_a_step(weight, meter, options):
    """Of four backwards and a read, by this meter or one that is made for the step."""
    gradients = torch.randn(4, *weight.shape, generator=torch.Generator().manual_seed(0))
    weight.grad = None
    with Allocated() as allocated:
        made = meter or GradientMeter([weight], **options)
        for gradient in gradients:
            weight.backward(gradient)
        made.read([1] * 4)
    if meter is None:
        made.close()
    return allocated.bytes


@pytest.mark.parametrize("options", [{}, {"confidence": 0.9}], ids=["plain", "interval"])
def test_a_meter_made_for_each_step_allocates_no_array_of_a_parameters_size(options):
    weight = nn.Parameter(torch.zeros(1000, 1000))
    with GradientMeter([weight], **options) as meter:
        first, second = (bytes_of_a_step(weight, meter, options) for _ in range(2))
    without = bytes_of_a_step(weight, None, options)
    # 40 KB: eight rows of 256 signs, and one sign a row of 1,021; an array of a byte a weight: 1 MB
    assert first - second < 40e3
    assert without - second < 80e3
