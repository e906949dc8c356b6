"""Settings that have no effect on a training, because of others."""

from bigbatch.experiments.settings import Settings
from bigbatch.policies.parse import without_effect


def unused_in(settings: Settings) -> set[str]:
    """All of them."""
    return unused_by_policy(settings.policy) | unused_by_optimizer(settings.optimizer)


def unused_by_policy(policy: str) -> set[str]:
    """Those that the policy of this text does not listen to, or says itself."""
    unused = without_effect(policy, ("target", "min_batch", "max_batch"))
    name, _, own = policy.partition(":")
    if name in ("fixed", "schedule"):  # whatever was measured
        unused |= {"smoothing", "dead_band"} | ({"batch_size"} if own else set())
    return unused | ({"warmup"} if name == "fixed" else set())


def unused_by_optimizer(optimizer: str) -> set[str]:
    """Those that the optimizer of this name does not have."""
    base = optimizer.removeprefix("vr-")
    unused = set() if optimizer.startswith("vr-") else {"gamma", "r_max"}
    unused |= set() if base in ("momentum", "lars") else {"momentum"}
    return unused | ({"decay_all"} if base in ("lars", "lamb") else set())
