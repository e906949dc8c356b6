"""Some samples of a data set."""

from typing import Any

from torch.utils.data import Subset


class Part(Subset[Any]):
    """A subset that passes on the epoch which it is told, to a data set that goes by it."""

    def set_epoch(self, epoch: int) -> None:
        """As the whole data set is told."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
