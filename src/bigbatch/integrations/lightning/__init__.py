"""Lightning: a callback that changes the batch size at every step."""

from bigbatch.optional_packages import import_optional

import_optional("lightning", "lightning")

from bigbatch.integrations.lightning.callback import AdaptiveBatchCallback

__all__ = ["AdaptiveBatchCallback"]
