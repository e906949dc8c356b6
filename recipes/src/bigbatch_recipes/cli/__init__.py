"""The commands that recipes add: train, sweep, list."""
