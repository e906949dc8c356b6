"""What AdaptiveBatchCallback refuses, and what it says to do instead."""

import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.integrations.lightning.lightning_checks import require_strategy
from bigbatch.optim import VRSGD
from lightning_training import Training, adaptive, fit, loader, sgd

BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import bigbatch.integrations.lightning
except ImportError as error:
    print(type(error).__name__, error)
"""


def refused(match, module=None, callback=None, **options):
    with pytest.raises(SettingError, match=match):
        fit(callback or adaptive(bb.Fixed(16)), loader(64), module or Training(), **options)


def stepped(make, **rest):
    return Training(scheduler=lambda o: {"scheduler": make(o), "interval": "step", **rest})


def vrsgd(parameters):
    return VRSGD(parameters, lr=0.05)


def test_a_missing_package_is_named_with_its_command():
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True
    )
    expected = (
        "MissingPackageError bigbatch[lightning] needs lightning, which is not installed; run: "
        'pip install "lightning>=2.6"'
    )
    assert expected == result.stdout.strip()


def test_manual_optimization_is_refused():
    module = Training()
    module.automatic_optimization = False

    refused("automatic_optimization=False.*bigbatch.AdaptiveBatch in that loop", module)


def test_several_optimizers_are_refused_by_lightning_itself():
    class Two(Training):
        def configure_optimizers(self):
            return [sgd(self.parameters()), sgd(self.parameters())]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual"):
        fit(adaptive(bb.Fixed(16)), loader(64), Two())


def test_an_accumulation_along_with_it_is_refused():
    refused(r"accumulate_grad_batches=2 is set along with.*batch_size=", accumulate_grad_batches=2)


@pytest.mark.parametrize(
    "other", [GradientAccumulationScheduler({2: 4}), StochasticWeightAveraging(1e-2)]
)
def test_a_callback_that_sets_the_accumulation_too_is_refused(other):
    refused(f"{type(other).__name__} sets accumulate_grad_batches too", callbacks=[other])


def test_fsdp1_is_refused_by_name():
    with pytest.raises(SettingError, match=r"FSDP1.*use ModelParallelStrategy, and fully_shard"):
        require_strategy(FSDPStrategy())


def test_an_untested_strategy_is_refused():
    class Mine:
        pass

    with pytest.raises(SettingError, match="Mine is not supported; use one device, DDPStrategy"):
        require_strategy(Mine())


def test_a_plateau_scheduler_of_steps_is_refused():
    refused(
        'ReduceLROnPlateau has interval="step".*give it interval="epoch"',
        stepped(ReduceLROnPlateau, monitor="loss"),
    )


def test_a_scheduler_of_every_other_step_is_refused():
    refused(
        r"LambdaLR has frequency=2 steps.*base_batch=",
        stepped(lambda optimizer: LambdaLR(optimizer, lambda _: 1.0), frequency=2),
    )


def test_two_schedulers_of_steps_are_refused():
    class Two(Training):
        def configure_optimizers(self):
            optimizer = sgd(self.parameters())
            return [optimizer], [
                {"scheduler": LambdaLR(optimizer, lambda _: 1.0), "interval": "step"}
                for _ in range(2)
            ]

    refused(r'2 schedulers have interval="step"; join them by .*ChainedScheduler', Two())


def test_a_step_of_the_scheduler_of_ones_own_is_refused():
    class Own(Training):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    module = Own(scheduler=lambda o: {"scheduler": LambdaLR(o, lambda _: 1.0), "interval": "step"})
    refused(r"lr_scheduler_step\(\) is overridden, and LambdaLR", module)


def test_clipping_by_value_is_refused_under_variance_reduction():
    refused(
        'gradient_clip_algorithm="value" would clip r g',
        Training(vrsgd),
        gradient_clip_val=0.1,
        gradient_clip_algorithm="value",
    )


def test_clipping_of_ones_own_is_refused_under_variance_reduction():
    class Own(Training):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **_):
            self.clip_gradients(optimizer, 0.1, "norm")

    refused(r"configure_gradient_clipping\(\) is overridden", Own(vrsgd))
    fit(adaptive(bb.Fixed(16)), loader(64), Own())  # and continues with any other optimizer


def test_a_loader_without_a_batch_size_is_refused():
    ready = [(torch.zeros(4, 5).double(), torch.zeros(4).long())] * 8
    batches = DataLoader(ready, batch_size=None)

    with pytest.raises(SettingError, match=r"DataLoader has no batch_size;.*micro_batch="):
        fit(adaptive(bb.Fixed(16)), batches)
    assert 2 == len(fit(adaptive(bb.Fixed(16), micro_batch=4), batches).records)


def test_a_policy_that_cannot_decide_is_refused_where_it_is_given():
    with pytest.raises(SettingError, match="has no method decide"):
        adaptive(0.3)
