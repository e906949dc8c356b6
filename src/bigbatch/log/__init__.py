"""The log of a training: written by any loop, read by `report`, `compare` and `replay`."""
