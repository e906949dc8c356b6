"""Lightning: a callback that changes the batch size at every step."""

from bigbatch.connect.packages import required

required("lightning", "lightning")

from bigbatch.connect.lightning.callback import AdaptiveBatchCallback

__all__ = ["AdaptiveBatchCallback"]
