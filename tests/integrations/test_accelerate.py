"""AdaptiveBatch on what accelerate prepares, in one process."""

import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, ParallelismConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.integrations.accelerate import adaptive_batch, batches
from numbered_samples import each_step, steps_of
from tensors import same

SEED = 3
SAMPLES = 103
EPOCHS = 3


class Numbered(Dataset):
    """Samples that carry their number."""

    def __init__(self, samples=SAMPLES):
        draw = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(samples, 5, generator=draw)
        self.y = (self.x[:, 0] + torch.randn(samples, generator=draw) > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], self.y[number], number


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbered())


@pytest.fixture(autouse=True)
def _nothing_kept():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def network():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def parts(data=None, **options):
    """Model, optimizer, loader and scheduler, as a script has them."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=40)
    options = {"batch_size": 8} | options
    return model, optimizer, DataLoader(data or Numbered(), **options), scheduler


POLICY = {"policy": bb.SimiGrad(target=0.4, min_batch=8, max_batch=60), "batch_size": 16}


def prepared(accelerator, *given, **settings):
    model, optimizer, loader, scheduler = accelerator.prepare(*given)
    settings = POLICY | settings
    train = adaptive_batch(
        accelerator, model, optimizer, loader, scheduler=scheduler, **{"every": 1, **settings}
    )
    return train, model


def trained(train, epochs=EPOCHS, most=10**9):
    """(numbers of the samples, record) of every step, from the seed."""
    torch.manual_seed(SEED)
    return steps_of(train, epochs, most, clip=1.0)


def numbers_of(done):
    """Of the samples, in order."""
    return [number for step, _ in done for chunk in step for number in chunk]


def sizes(done):
    return [record.batch_size for _, record in done]


def test_a_prepared_training_is_the_plain_one():
    model, optimizer, loader, scheduler = parts(shuffle=True)
    plain = bb.AdaptiveBatch(
        model, optimizer, loader, scheduler=scheduler, **{"every": 1, **POLICY}
    )
    plain.scheduler_batch = 8  # accelerate's: one batch of the loader
    expected = trained(plain)

    train, other = prepared(Accelerator(cpu=True), *parts(shuffle=True))
    actual = trained(train)

    assert [numbers for numbers, _ in expected] == [numbers for numbers, _ in actual]
    assert [(r.loss, r.lr) for _, r in expected] == [(r.loss, r.lr) for _, r in actual]
    assert len(set(sizes(actual))) > 3
    assert same(model, other)


def test_a_function_of_the_iteration_gives_the_rate_by_base_batches():
    model, optimizer, loader, _ = parts()
    train, _ = prepared(Accelerator(cpu=True), model, optimizer, loader, lambda it: 0.1 / (1 + it))
    records = [record for _, record in trained(train)]
    base = train.controller.base_batch
    for record in records:
        rate = 0.1 / (1 + (record.samples - record.batch_size) // base)
        assert pytest.approx(rate * (record.batch_size / base) ** 0.5) == record.lr[0]
    assert len({record.batch_size for record in records}) > 3


def test_a_float16_scaler_of_accelerate_scales_and_steps():
    model, optimizer, loader, scheduler = parts()
    plain = bb.AdaptiveBatch(
        model, optimizer, loader, scheduler=scheduler, **{"every": 1, **POLICY}
    )
    plain.scheduler_batch = 8  # accelerate's: one batch of the loader
    expected = trained(plain)

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    train, other = prepared(accelerator, *parts())
    actual = trained(train)

    assert sizes(expected) == sizes(actual)
    assert 4.0 * 2 ** (len(actual) // 5) == accelerator.scaler.get_scale()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


def test_bfloat16_is_that_of_autocast():
    model, optimizer, loader, scheduler = parts()
    plain = bb.AdaptiveBatch(
        model, optimizer, loader, scheduler=scheduler, **{"every": 1, **POLICY}
    )
    plain.scheduler_batch = 8  # accelerate's: one batch of the loader
    forward = model.forward

    def autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x).float()

    model.forward = autocast
    expected = trained(plain)
    train, _ = prepared(Accelerator(cpu=True, mixed_precision="bf16"), *parts())
    actual = trained(train)
    assert [r.loss for _, r in expected] == [r.loss for _, r in actual]


@pytest.mark.parametrize("context", ["accumulate", "autocast"])
def test_gradients_sync_in_the_last_micro_batch_of_a_step_alone(context):
    """So that what a script does once a step, it does once; accumulate may be left in it."""
    accelerator = Accelerator(cpu=True)
    train, model = prepared(accelerator, *parts())
    syncs, backwards = [], 0
    for step in train:
        for x, y, _ in step:
            with getattr(accelerator, context)(*[model] * (context == "accumulate")):
                step.backward(cross_entropy(model(x), y))
                syncs.append((step.complete, accelerator.sync_gradients))
            assert 1 == accelerator.gradient_accumulation_steps
        assert accelerator.sync_gradients
        backwards += step.update().micro_batches
    assert SAMPLES == train.samples
    assert len(syncs) == backwards > 3 * train.steps == 3 * sum(sync for _, sync in syncs)
    assert all(ends == sync for ends, sync in syncs)


def test_gradients_sync_after_a_step_that_was_left():
    accelerator = Accelerator(cpu=True)
    train, _ = prepared(accelerator, *parts())
    for step in train:
        for _ in step:
            assert not accelerator.sync_gradients
            break
        break
    del step
    assert accelerator.sync_gradients


@pytest.mark.parametrize(
    ("configuration", "options"),
    [
        ({}, {"shuffle": True}),
        ({"use_seedable_sampler": True}, {"shuffle": True}),
        ({"split_batches": True}, {"shuffle": True}),
        ({"use_stateful_dataloader": True}, {"shuffle": True}),
        ({}, {"num_workers": 1, "persistent_workers": True}),
        ({"dispatch_batches": True}, {}),
    ],
)
def test_every_sample_comes_once_an_epoch(configuration, options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    train, _ = prepared(accelerator, *parts(**options))
    done = trained(train, epochs=2)
    numbers = numbers_of(done)
    assert list(range(SAMPLES)) == sorted(numbers[:SAMPLES]) == sorted(numbers[SAMPLES:])
    assert len(set(sizes(done))) > 1


def test_a_seeded_order_changes_with_the_epoch():
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    train, _ = prepared(accelerator, *parts(shuffle=True))
    done = trained(train, epochs=2)
    numbers = numbers_of(done)
    assert numbers[:SAMPLES] != numbers[SAMPLES:]


def test_a_stream_continues_until_it_ends():
    train, _ = prepared(Accelerator(cpu=True), *parts(Stream()))
    done = trained(train, epochs=1)
    assert list(range(SAMPLES)) == numbers_of(done)


def test_what_the_loader_would_drop_is_dropped():
    train, _ = prepared(Accelerator(cpu=True), *parts(drop_last=True))
    done = trained(train, epochs=1)
    assert list(range(SAMPLES // 8 * 8)) == numbers_of(done)


def test_batches_take_options():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    cut = batches(accelerator, loader, remainder="drop")
    train = adaptive_batch(accelerator, model, optimizer, cut, policy=bb.Fixed(32), every=1)
    assert [32, 32, 32] == sizes(trained(train, epochs=1))


@pytest.mark.parametrize("seedable", [False, True])
def test_a_loaded_state_continues_as_if_never_interrupted(tmp_path, seedable):
    def build():
        AcceleratorState._reset_state(reset_partial_state=True)
        configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        given = parts(shuffle=True)
        torch.manual_seed(seeds.pop())  # accelerate's sampler keeps it
        train, _ = prepared(accelerator, *given)
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        return accelerator, train

    seeds = [SEED + 2, SEED, SEED]  # of the order
    _, train = build()
    whole = trained(train)
    accelerator, train = build()
    half = trained(train, most=7)
    accelerator.save_state(tmp_path)

    accelerator, train = build()
    torch.manual_seed(SEED + 1)
    accelerator.load_state(tmp_path)
    rest = steps_of(train, EPOCHS, clip=1.0)
    expected = [(numbers, r.loss, r.lr) for numbers, r in whole]
    assert expected == [(numbers, r.loss, r.lr) for numbers, r in half + rest]


# refused


def test_accumulation_by_accelerate_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(SettingError, match=r"gradient_accumulation_steps=4.*leave it at 1"):
        prepared(accelerator, *parts())


def test_tensor_parallelism_is_refused():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(SettingError, match="2 ranks that share samples"):
        adaptive_batch(accelerator, model, optimizer, loader, **{"every": 1, **POLICY})


def test_an_engine_with_a_step_of_its_own_is_refused():
    accelerator = Accelerator(cpu=True)
    given = accelerator.prepare(*parts())
    accelerator.state.distributed_type = "MEGATRON_LM"
    with pytest.raises(SettingError, match="DDP, FSDP2 and DeepSpeed"):
        adaptive_batch(accelerator, *given[:3], scheduler=given[3], **{"every": 1, **POLICY})


def test_a_loader_that_skips_batches_is_refused():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    rest = skip_first_batches(loader, 2)
    with pytest.raises(SettingError, match="restores its place by itself"):
        adaptive_batch(accelerator, model, optimizer, rest, **{"every": 1, **POLICY})


@pytest.mark.parametrize("number", [1, 2, 3], ids=["optimizer", "loader", "scheduler"])
def test_what_was_not_prepared_is_refused(number):
    accelerator = Accelerator(cpu=True)
    given = parts()
    ready = list(accelerator.prepare(*given))
    ready[number] = given[number]
    model, optimizer, loader, scheduler = ready
    with pytest.raises(SettingError, match=r"accelerate did not prepare.*accelerator\.prepare"):
        adaptive_batch(
            accelerator, model, optimizer, loader, scheduler=scheduler, **{"every": 1, **POLICY}
        )


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
import {module}
"""
TRANSFORMERS = 'pip install "accelerate>=1.15" "tokenizers>=0.22" "transformers>=5.23"'


@pytest.mark.late
@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("accelerate", "accelerate", 'pip install "accelerate>=1.15"'),
        ("transformers", "transformers", TRANSFORMERS),
        ("transformers", "accelerate", TRANSFORMERS),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_command(module, package, command):
    code = BLOCKED.format(package=package, module=f"bigbatch.integrations.{module}")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .endswith(f"[{module}] needs {package}, which is not installed; run: {command}")
    )


@pytest.mark.parametrize("within", [False, True], ids=["between epochs", "within one"])
def test_an_evaluation_changes_nothing(within):
    accelerator = Accelerator(cpu=True)
    plain, _ = prepared(accelerator, *parts())
    expected = trained(plain)

    train, model = prepared(accelerator, *parts())
    loader = DataLoader(Numbered(20), 6, generator=torch.Generator())  # apart from dropout's
    test_loader = accelerator.prepare(loader)
    done = []
    torch.manual_seed(SEED)
    for _ in train.epochs(EPOCHS):
        for each in each_step(train, clip=1.0):
            done.append(each)
            if within:
                assert 20 == evaluated(accelerator, model, test_loader)
        assert 20 == evaluated(accelerator, model, test_loader)

    assert [numbers for numbers, _ in expected] == [numbers for numbers, _ in done]
    assert [(r.loss, r.lr) for _, r in expected] == [(r.loss, r.lr) for _, r in done]


def evaluated(accelerator, model, test_loader):
    """How many samples were seen, as Hugging Face's examples evaluate."""
    model.eval()
    seen = 0
    with torch.no_grad():
        for x, y, _ in test_loader:
            right, _ = accelerator.gather_for_metrics((model(x).argmax(-1) == y, y))
            seen += len(right)
    model.train()
    return seen


@pytest.mark.parametrize("options", [{"every": 3}, {"every": None}])
def test_the_interval_of_measured_steps_is_that_of_the_options(options):
    train, _ = prepared(Accelerator(cpu=True), *parts(), **options)
    done = trained(train, most=5)
    every = options["every"] or 1
    measured = [r.step for _, r in done if r.statistics is not None]
    assert [*range(1, 6, every)] == measured


def test_of_its_optimizer_alone_the_one_inside_is_named():
    model, optimizer, loader, _ = Accelerator(cpu=True).prepare(*parts())
    with pytest.raises(
        SettingError, match=r"no hook can .*accelerate\.adaptive_batch, or pass the opt"
    ):
        bb.AdaptiveBatch(model, optimizer, loader, policy=bb.Fixed(16))
