"""All comparisons, by the names of their logs."""

from bigbatch.results import measured_batch
from bigbatch.results.comparison import Comparison

COMPARISONS: dict[str, Comparison] = {one.name: one for one in measured_batch.COMPARISONS}
