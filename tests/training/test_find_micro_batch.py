"""How many samples fit: what is found is so, and training afterwards never knew of the search."""

import contextlib
import copy
import os
import pickle
import random
import subprocess
import sys
import warnings
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from bigbatch import AdaptiveBatch, Batches, Fixed, largest_micro_batch
from bigbatch.errors import BatchError, RankError, SettingError
from bigbatch.optim import VRSGD, VarianceReduced, VRAdam
from bigbatch.training.oom_hints import OomHints, is_out_of_memory
from dropout_network import Network
from studies.simulated_device import NAME, simulated_device
from training_on_ranks import ENGINES

TOO_MUCH = 1 << 46  # elements, which no machine has


def data(samples=64):
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 5, generator=draw), torch.randint(3, (samples,), generator=draw)
    )


def loader(**options):
    return DataLoader(data(), **{"batch_size": 8, "shuffle": True, **options})


def loss_up_to(fitting, model, error=torch.OutOfMemoryError):
    """A loss that has memory for so many samples."""

    def loss_of(batch):
        x, y = batch
        loss = cross_entropy(model(x), y)
        if len(y) > fitting:
            raise error(f"{len(y)} samples")
        return loss

    return loss_of


def trained(model, optimizer, batches, epochs=2, clip=None):
    """Two epochs of steps of two micro-batches; every number that they can depend on."""
    seen = []
    for _ in range(epochs):
        for number, (x, y) in enumerate(batches):
            (cross_entropy(model(x), y) / 2).backward()
            seen += [x.sum().item(), random.random(), float(numpy.random.rand())]  # noqa: NPY002
            if number % 2:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return [*seen, *(t.tolist() for t in model.state_dict().values())]


def seeded():
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)  # noqa: NPY002


# the answer


@pytest.mark.thorough
@pytest.mark.parametrize("fitting", [1, 7, 8, pytest.param(100, marks=pytest.mark.thorough)])
def test_the_answer_is_what_fits_less_a_tenth(fitting):
    model = Network()
    model.norm.eval()  # which has no variance over one sample
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search = partial(largest_micro_batch, model, optimizer, loader(), loss_up_to(fitting, model))
    assert fitting == search(margin=0, most=1000)
    assert max(1, int(fitting * 0.9)) == search(most=1000)


@pytest.mark.parametrize(("most", "margin"), [(1, 0.1), (7, 0.0), (8, 0.5), (9, 0.1), (63, 0.3)])
def test_no_more_than_asked_for_is_answered_and_little_more_is_tried(most, margin):
    model = Network()
    model.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tried = []

    def loss_of(batch):
        tried.append(len(batch[1]))
        return loss_up_to(1000, model)(batch)

    answer = largest_micro_batch(model, optimizer, loader(), loss_of, most=most, margin=margin)
    assert most == answer
    assert max(tried) - 1 < most / (1 - margin) <= max(tried)


def test_the_samples_of_the_loader_are_the_default_limit():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert 64 == largest_micro_batch(model, optimizer, loader(), loss_up_to(1000, model))


@pytest.mark.parametrize("trained", ["first", "last"])
def test_every_size_is_tried_with_the_state_of_the_optimizer_and_gradients_in_place(trained):
    model = Network()
    optimizer = torch.optim.Adam(getattr(model, trained).parameters())
    seen = {}

    def loss_of(batch):
        kept = [len(optimizer.state) > 0, model.last.weight.grad is not None]
        seen.setdefault(len(batch[1]), []).append(kept)
        return loss_up_to(16, model)(batch)

    largest_micro_batch(model, optimizer, loader(), loss_of, margin=0, most=17)
    four = [[False, False], [False, True], [True, False], [True, True]]
    assert {8: four, 16: four, 17: four[:1]} == seen


def test_nothing_of_a_trial_that_failed_is_kept_when_the_next_one_begins():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []

    def loss_of(batch):
        assert [] == [ref() for ref in kept if ref() is not None]
        activations = [torch.ones(8)]
        activations.append(activations)  # a cycle, as autograd functions make them
        if len(batch[1]) > 9:
            kept.append(weakref.ref(activations[0]))
        return loss_up_to(9, model)(batch)

    assert 9 == largest_micro_batch(model, optimizer, loader(), loss_of, margin=0)
    assert 3 == len(kept)  # 16, 12 and 10 samples


# as before


class Counting(torch.optim.Optimizer):
    """Keeps numbers that are no tensors, and a list, in its state."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state.setdefault("past", []).append(p.grad.norm())
                p.sub_(p.grad, alpha=group["lr"] / (state["steps"] + len(state["past"])))
                group["lr"] *= 0.99


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "counting": Counting,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "vr-sgd": lambda p: VRSGD(p, lr=0.1, momentum=0.9),
    "vr-adam": lambda p: VRAdam(p, lr=0.01),
    "vr-adamw": lambda p: VarianceReduced(torch.optim.AdamW(p, lr=0.01), beta3=0.9, watch=True),
}
LOADERS = {
    "global generator": dict,
    "its own generator": lambda: {"generator": torch.Generator().manual_seed(5)},
    "persistent workers": lambda: {"num_workers": 1, "persistent_workers": True},
}


@pytest.mark.late
@pytest.mark.filterwarnings("ignore:k = 2 micro-batches")
@pytest.mark.parametrize("clip", [None, 0.01], ids=["", "clipped"])
@pytest.mark.parametrize("epochs_before", [0, 1], ids=["first", "between epochs"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_continues_bit_for_bit_as_without_the_search(optimizer, epochs_before, clip):
    runs = []
    for searches in (False, True):
        seeded()
        model, batches = Network(), loader()
        steps = OPTIMIZERS[optimizer](model.parameters())
        trained(model, steps, batches, epochs_before, clip)
        if searches:
            loss_of = loss_up_to(21, model)
            assert 21 == largest_micro_batch(model, steps, batches, loss_of, margin=0)
            assert {None} == {p.grad for p in model.parameters()}
            assert epochs_before == bool(steps.state)
        runs.append(trained(model, steps, batches, clip=clip))
    assert runs[0] == runs[1]


@pytest.mark.late
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.cpu if "workers" in kind else ()) for kind in LOADERS],
)
def test_the_loader_gives_the_order_that_it_would_have_given(kind):
    orders = []
    for searches in (False, True):
        seeded()
        model, batches = Network(), loader(**LOADERS[kind]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order = [x.sum().item() for x, _ in batches]
        running = iter(batches)
        order.append(next(running)[0].sum().item())
        if searches:
            largest_micro_batch(model, optimizer, batches, loss_up_to(9, model))
        order += [x.sum().item() for x, _ in running]
        order += [x.sum().item() for x, _ in batches]
        orders.append([*order, torch.rand(1).item()])
    assert orders[0] == orders[1]


def state_of(model, optimizer):
    """All that a search could leave changed, in comparable form."""
    return (
        [(n, t.tolist(), t.requires_grad) for n, t in model.named_parameters()],
        [(n, t.tolist()) for n, t in model.named_buffers()],
        [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        [m.training for m in model.modules()],
        [{name: t.tolist() for name, t in s.items()} for s in optimizer.state.values()],
        [{**g, "params": len(g["params"])} for g in optimizer.param_groups],
        torch.get_rng_state().tolist(),
        random.getstate(),
        [*map(str, numpy.random.get_state())],  # noqa: NPY002
    )


@pytest.mark.parametrize("pending", [False, True], ids=["", "in an accumulation"])
@pytest.mark.parametrize("fails", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_of_the_users_own_is_passed_on_and_leaves_everything_as_it_was(fails, pending):
    model = Network()
    model.first.bias.requires_grad_(False)
    model.drop.eval()
    optimizer = torch.optim.Adam(model.parameters())
    batches = loader()
    trained(model, optimizer, batches, 1)
    if pending:
        loss_up_to(8, model)(next(iter(batches))).backward()
    seeded()
    before = state_of(model, optimizer)

    def loss_of(batch):
        random.random()
        numpy.random.rand()  # noqa: NPY002
        model.eval().requires_grad_(True)
        return loss_up_to(20, model.train(), fails)(batch)

    with pytest.raises(fails, match="32 samples"):
        largest_micro_batch(model, optimizer, batches, loss_of)
    assert before == state_of(model, optimizer)


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    model, rate = Network(), torch.tensor(0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    assert 16 == largest_micro_batch(model, optimizer, loader(), loss_up_to(99, model), most=16)
    assert optimizer.param_groups[0]["lr"] is rate
    assert 0.25 == rate.item()


def test_a_vr_optimizer_still_warns_of_few_micro_batches_after_the_search():
    model = Network()
    optimizer = VRSGD(model.parameters(), lr=0.1, watch=True)
    with warnings.catch_warnings(action="error"):
        largest_micro_batch(model, optimizer, loader(), loss_up_to(9, model))
    assert optimizer.gsnr is None
    with pytest.warns(UserWarning, match="k = 2 micro-batches"):
        trained(model, optimizer, loader(), 1)


# memory that is really used up


PROGRAM = """
import resource, sys
import torch
from torch import nn
from bigbatch import AdaptiveBatch, Batches, Fixed, largest_micro_batch

MIB = 1 << 20

class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.ones(len(x), MIB // 4))  # 1 MiB a sample
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0][:, :1]

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )

    def forward(self, x):
        return self.layers(Keeps.apply(x.requires_grad_()))

Network()(torch.randn(2, 4)).sum().backward()  # what the first backward allocates for good
torch.manual_seed(0)
model = Network()
optimizer = torch.optim.Adam(model.parameters())
data = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
loss_of = lambda x: model(x).square().mean()

if sys.argv[1] == "search":
    rows = open("/proc/self/status").read().splitlines()
    used = next(int(row.split()[1]) for row in rows if row.startswith("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]) * MIB, -1))
    print(largest_micro_batch(model, optimizer, loader, loss_of, margin=0))
for x in loader:
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    print([*x[0].tolist(), *(t.tolist() for t in model.state_dict().values())])
"""


def limited(*arguments):
    """Lines that the program prints, in a process that gives what it frees back to the system."""
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert 0 == done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit that malloc respects")
@pytest.mark.parametrize("mib", [100, pytest.param(260, marks=pytest.mark.release)])
def test_where_the_allocator_fails_the_answer_is_what_the_layer_needs_and_training_continues(mib):
    plain = limited("plain")
    answer, *training = limited("search", mib)
    assert mib - 20 <= int(answer) <= mib  # everything small is less than 20 MiB
    assert plain == training
    assert 32 == len(plain)


# refusals


def searching(model=None, batches=None, **options):
    model = Network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader() if batches is None else batches
    return partial(largest_micro_batch, model, optimizer, batches, loss_up_to(9, model), **options)


def test_one_sample_that_does_not_fit_is_said():
    model = Network()
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="one sample does not fit"):
        largest_micro_batch(model, optimizer, loader(), loss_up_to(0, model))
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.parametrize(
    ("search", "error", "message"),
    [
        (searching(margin=1.0), SettingError, r"margin=1.0 must be a number in \[0, 1\)"),
        (searching(most=0), SettingError, "most=0 must be"),
        (searching(batches=iter(loader())), SettingError, "used up after one pass"),
        (searching(batches=[data()[:8]]), SettingError, "pass most="),
        (searching(batches=[], most=8), SettingError, "the loader is empty"),
        (
            searching(batches=DataLoader(data(), 8, collate_fn=lambda rows: torch.zeros(3, 8))),
            BatchError,
            "reads as 3 samples, the loader's batch size is 8",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(search, error, message):
    with pytest.raises(error, match=message):
        search()


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    model = Network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(SettingError, match=r"LBFGS.step\(\) needs a closure"):
        largest_micro_batch(model, optimizer, loader(), loss_up_to(9, model))


def test_an_optimizer_that_a_scheduler_has_wrapped_is_none_that_needs_a_closure():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert 9 == largest_micro_batch(model, optimizer, loader(), loss_up_to(9, model), margin=0)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before"):
        scheduler.step()  # the steps of the search are forgotten


# ranks


def loss_failing(where, fitting, model):
    """As `loss_up_to`, with the place chosen: before the forward, inside it, or in the backward."""

    def fail(size):
        if size > fitting:
            raise torch.OutOfMemoryError(f"{size} samples")

    def loss_of(batch):
        x, y = batch
        if where == "before":
            fail(len(y))
        with contextlib.ExitStack() as stack:
            if where != "before":
                handle = middle_of(model).register_forward_pre_hook(in_the_middle)
                stack.callback(handle.remove)
            return cross_entropy(model(x), y)

    def in_the_middle(layer, inputs):
        if where == "inside":
            fail(len(inputs[0]))
        inputs[0].register_hook(lambda gradient: fail(len(gradient)))

    return loss_of


def middle_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.Linear) and m.in_features == 12)


def wrapped(wrapper, ranks):
    network = Network()
    if wrapper == "ddp":
        return ENGINES["ddp"](network, ranks)
    if wrapper == "compiled ddp":
        return torch.compile(ENGINES["ddp"](network, ranks), backend="eager")
    network = nn.Sequential(
        network.first, nn.Tanh(), network.last, nn.Dropout(0.3), nn.Linear(3, 3)
    )
    return ENGINES[wrapper](network, ranks)


def require_errors_in(wrapper):
    """Skips the test where this torch cannot continue after an error in the wrapper."""
    if wrapper in ("fsdp2", "hsdp") and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("fully_shard continues after an error from torch 2.13 on")


def on_ranks(rank, ranks, *, wrapper, where, fitting, searches):
    """What is found, and training after it."""
    seeded()
    model = wrapped(wrapper, ranks)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = DataLoader(data(), batch_size=8 - rank, shuffle=True)
    largest = None
    for buffer in model.buffers():
        buffer += rank  # which DDP makes equal before the first forward of training
    if searches:
        loss_of = loss_failing(where, fitting[rank], model)
        largest = largest_micro_batch(model, optimizer, batches, loss_of, margin=0)
    values = []
    for x, y in [*batches][:4]:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        values += [local(tensor).tolist() for tensor in model.state_dict().values()]
    return largest, values


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("wrapper", "where"),
    [
        *[(w, "before") for w in ("ddp", "fsdp2", "hsdp", "compiled ddp")],
        *[("fsdp2", p) for p in ("inside", "backward")],
        *[
            pytest.param(w, p, marks=pytest.mark.release)
            for w in ("ddp", "hsdp")
            for p in ("inside", "backward")
        ],
    ],
)
def test_all_ranks_find_what_fits_on_each_and_train_as_without(ranks, wrapper, where):
    require_errors_in(wrapper)
    fitting = [21, 5] if "ddp" in wrapper else [5, 5]  # fully_shard waits for other ranks
    run = partial(on_ranks, wrapper=wrapper, where=where, fitting=fitting)
    plain = ranks(2)(partial(run, searches=False))
    searched = ranks(2)(partial(run, searches=True))
    assert [5, 5] == [largest for largest, _ in searched]
    assert [values for _, values in plain] == [values for _, values in searched]


def failing_on_one(rank, ranks):
    model = wrapped("ddp", ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = ZeroDivisionError if rank else torch.OutOfMemoryError
    try:
        largest_micro_batch(model, optimizer, loader(), loss_up_to(20 - rank, model, error))
    except (ZeroDivisionError, RankError) as raised:
        return f"{type(raised).__name__}: {raised}"


def test_an_error_of_one_rank_ends_the_search_on_all(ranks):
    failing, waiting = ranks(2)(failing_on_one)
    assert "ZeroDivisionError: 32 samples" == waiting
    assert "RankError: a micro-batch of 32 samples failed on another rank; see there" == failing


# advice


def out_of_memory():
    """The error of an allocator that has not so much."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(TOO_MUCH)
    return raised.value


def test_what_is_out_of_memory_and_what_is_not():
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for error in (out_of_memory(), MemoryError(), gpu, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shape"), ValueError("out of memory"), KeyboardInterrupt()):
        assert not is_out_of_memory(error)


def advise(error, samples):
    hints = OomHints()
    hints.samples = samples
    hints.advise(error)


def test_the_advice_is_half_of_the_samples_and_is_given_once():
    error = out_of_memory()
    error.add_note("of somebody else")
    advise(error, 256)
    advise(error, 128)
    assert [
        "of somebody else",
        "bigbatch: this micro-batch had 256 samples; set micro_batch=128, or find it by "
        "bb.largest_micro_batch(model, optimizer, loader, loss_of); a trainer's loader needs "
        "batch_size=128",
    ] == error.__notes__
    single, other = out_of_memory(), ValueError("no")
    advise(single, 1)
    advise(other, 256)
    assert "had 1 sample; activation checkpointing" in single.__notes__[0]
    assert not hasattr(other, "__notes__")


class Hungry(nn.Module):
    """Allocates what is not there for more than 8 samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        y = self.layer(x)
        if len(x) > 8:
            y = y + torch.empty(TOO_MUCH)[0]
        return y


def in_place(model):
    model.compile(backend="eager")
    return model


FORMS = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in place": in_place,
}


def notes_of(model, samples):
    """What an error of the model's forward says, the advice being for so many samples."""
    hints = OomHints()
    handle = model.register_forward_hook(hints, always_call=True)
    hints.samples = 4
    assert (4, 1) == model(torch.zeros(4, 4)).shape
    hints.samples = samples
    try:
        model(torch.zeros(16, 4))
    except RuntimeError as error:
        return getattr(error, "__notes__", [])
    finally:
        handle.remove()


@pytest.mark.parametrize("form", FORMS)
def test_an_error_inside_the_users_forward_gets_the_advice(form):
    torch._dynamo.reset()
    (note,) = notes_of(FORMS[form](Hungry()), 16)
    assert "this micro-batch had 16 samples; set micro_batch=8" in note
    assert [] == notes_of(FORMS[form](Hungry()), 0)  # outside of any micro-batch


def notes_on_ranks(rank, ranks, *, wrapper):
    model = Hungry()
    if wrapper == "fsdp2":
        torch.distributed.fsdp.fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return notes_of(model, 16)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_so_does_one_inside_a_wrapper(ranks, wrapper):
    for (note,) in ranks(2)(partial(notes_on_ranks, wrapper=wrapper)):
        assert "this micro-batch had 16 samples" in note


def test_advice_that_stays_on_makes_torch_compile_no_more_often():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, hints = nn.Linear(4, 1), OomHints()
    model.register_forward_hook(hints, always_call=True)
    step = torch.compile(lambda x: model(x).sum(), backend=counting, fullgraph=True)
    for samples in (0, 4, 8, 0, 6):
        hints.samples = samples
        step(torch.zeros(4, 4))
    assert 1 == len(graphs)


def test_a_model_with_advice_can_be_saved_and_copied():
    model = nn.Linear(4, 1)
    model.register_forward_hook(OomHints(), always_call=True)
    for replica in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(model(torch.ones(2, 4)), replica(torch.ones(2, 4)))


# on a device


def largest_on_device(rank, ranks):
    """The largest micro-batch where 24 samples fit and the device has no memory for more."""
    simulated_device()
    model = nn.Linear(4, 1).to(NAME)

    def loss_of(x):
        torch.empty(1 << (46 if len(x) > 24 else 4), device=NAME)
        return model(x.to(NAME)).square().mean()

    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(torch.randn(64, 4), batch_size=16)
    return largest_micro_batch(model, optimizer, loader, loss_of, margin=0)


def test_memory_that_ends_on_a_device_bounds_the_micro_batch(on_simulated_device):
    assert 24 == on_simulated_device(largest_on_device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to run out of its memory")
def test_on_a_gpu_the_answer_is_what_the_layer_needs_and_no_copy_takes_room():
    mib, device = 1 << 20, torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    model = nn.Sequential(nn.Linear(4, mib // 4), nn.Dropout(0.5)).to(device)  # 5 MiB of weights
    optimizer = torch.optim.Adam(model.parameters())
    batches = DataLoader(torch.randn(4096, 4), batch_size=16)
    loss_of = lambda x: model(x.to(device)).mean()  # noqa: E731
    before = copy.deepcopy(model.state_dict())
    torch.cuda.set_per_process_memory_fraction(1024 * mib / total, device)
    try:
        answer = largest_micro_batch(model, optimizer, batches, loss_of, margin=0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    # output, dropped output and their gradients are 1 MiB a sample each, a mask is a quarter
    assert 1024 / 4.5 <= answer <= 1024 / 2
    assert not optimizer.state
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_a_failed_forward_leaves_no_micro_batch_in_memory():
    class TooLarge(nn.Linear):
        def forward(self, x):
            raise RuntimeError("CUDA out of memory")

    placed = []

    def to_device(batch):
        copy_on_device = batch.clone()
        placed.append(weakref.ref(copy_on_device))
        return copy_on_device

    batches = Batches([torch.randn(8, 4)])
    batches.place = to_device
    model = TooLarge(4, 1)
    train = AdaptiveBatch(
        model, torch.optim.SGD(model.parameters()), batches, policy=Fixed(8), micro_batch=2, every=1
    )

    def one_pass():
        for step in train:
            for x in step:
                step.backward(model(x).mean())

    with pytest.raises(RuntimeError, match="out of memory"):
        one_pass()
    assert [None] == [reference() for reference in placed]
