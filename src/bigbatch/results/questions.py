"""All comparisons, by the names of their logs."""

from bigbatch.results import any_start, measured_batch
from bigbatch.results.comparison import Comparison

COMPARISONS: dict[str, Comparison] = {
    one.name: one for one in (*measured_batch.COMPARISONS, any_start.COMPARISON)
}
