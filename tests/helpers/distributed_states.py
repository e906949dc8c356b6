"""What is in a checkpoint's states of all ranks."""

import io

from bigbatch.digest import load_state


def states_of(packed):
    """The state of each rank's AdaptiveBatch, from what `DistributedState.state_dict` gave."""
    return [_unpacked(bytes(own.numpy())) for own in _unpacked(packed["ranks"])]


def _unpacked(data):
    return load_state(io.BytesIO(data), "the test")
