"""Settings that have no effect on a training, because of others."""

from bigbatch.experiments.settings import CONTROLLER_SETTINGS, Settings, policy_settings
from bigbatch.policies.parse import POLICIES


def unused_in(settings: Settings) -> set[str]:
    """All of them."""
    return unused_by_policy(settings.policy) | unused_by_optimizer(settings.optimizer)


def unused_by_policy(policy: str) -> set[str]:
    """Those that the policy of this name does not have, or that cannot change what it decides."""
    unused = {name for each in POLICIES for name in policy_settings(each).values()}
    unused -= {"batch_size", *policy_settings(policy).values()}
    if policy == "schedule":  # whatever was measured
        unused |= {"smoothing", "dead_band", "confidence", "batch_size"}
    return unused | set(CONTROLLER_SETTINGS if policy == "fixed" else ())


def unused_by_optimizer(optimizer: str) -> set[str]:
    """Those that the optimizer of this name does not have."""
    base = optimizer.removeprefix("vr-")
    unused = set() if optimizer.startswith("vr-") else {"gamma", "r_max"}
    unused |= set() if base in ("momentum", "lars") else {"momentum"}
    return unused | ({"decay_all"} if base in ("lars", "lamb") else set())
