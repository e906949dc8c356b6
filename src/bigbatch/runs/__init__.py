"""Runs on disk, on the screen and on a page."""
