"""Loops whose policy decides by single steps, so that a test can follow its rule by hand."""

import bigbatch as bb
from bigbatch.policies.policy import needs_of

_SIZES = ("batch_size", "base_batch")


def by_single_steps(settings, batch_size=None):
    """The settings of an AdaptiveBatch, with averages left out of a policy that wants them.

    Args:
        settings: the settings, `policy` among them; a controller stays as it is.
        batch_size: the first batch size where the settings have none; None to leave them as
            they are then.
    """
    policy = settings["policy"]
    sizes = {name: settings.get(name) for name in _SIZES}
    if sizes["batch_size"] is None:
        sizes["batch_size"] = batch_size
    has_controller = isinstance(policy, bb.Controller)
    if has_controller or not needs_of(policy).average or sizes["batch_size"] is None:
        return settings
    others = {name: value for name, value in settings.items() if name not in _SIZES}
    return others | {"policy": bb.Controller(policy, smoothing=None, **sizes)}
