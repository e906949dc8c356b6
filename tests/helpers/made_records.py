"""Records of steps that no training has made."""

from bigbatch.log.step_record import StepRecord
from bigbatch.policies.policy import Decision


def made_record(size, loss=1.0, statistics=None):
    """The record of a step of `size` samples, which was decided so."""
    return StepRecord(
        step=1,
        epoch=0,
        samples=size,
        batch_size=size,
        target_batch_size=size,
        micro_batches=4,
        loss=loss,
        lr=(0.1,),
        statistics=statistics,
        skipped=False,
        decision=Decision(size, ""),
        elapsed_seconds=0.0,
    )
