"""The states of all ranks as one value, for torch.distributed.checkpoint (DCP)."""

import io
from typing import Any

import torch

from bigbatch.data.rank_consistency import HostCollectives
from bigbatch.digest import load_state, save_state
from bigbatch.setting_types import checked
from bigbatch.state_checks import loads_state
from bigbatch.training.adaptive_batch import AdaptiveBatch


class DistributedState:
    """A training's states on all ranks, the same value on each, so that DCP may save any rank's.

        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        state["train"] = DistributedState(train)
        dcp.save(state, checkpoint_id=folder)  # or dcp.async_save, or dcp.load and set_state_dict

    `train.state_dict()` differs between ranks, and DCP keeps one value per key, so all would load
    that of some rank. On as many ranks each now loads its own state and resumes bit for bit; on
    another number all load rank 0's and continue with the same samples.

    Args:
        train: the training.
    """

    @checked
    def __init__(self, train: AdaptiveBatch) -> None:
        self._train = train
        self._collectives = HostCollectives(train.meter.source)

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, packed. Collective, also when DCP calls it to load.

        Raises:
            LoopError: inside a step.
        """
        state = torch.frombuffer(_pack(self._train.state_dict()), dtype=torch.uint8)
        return {"ranks": bytes(_pack(self._collectives.all_gather_bytes(state)))}

    @loads_state
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where the states were saved. Collective.

        Raises:
            StateError: they are damaged, not from this class, of another version, or of other data.
        """
        states, own = _unpack(memoryview(state["ranks"])), self._collectives
        data = states[own.process if len(states) == own.processes else 0]
        self._train.load_state_dict(_unpack(data.numpy()))


def _pack(state: Any) -> bytearray:
    file = io.BytesIO()
    save_state(state, file)
    return bytearray(file.getbuffer())


def _unpack(data: Any) -> Any:
    return load_state(io.BytesIO(data), "the state of DistributedState")
