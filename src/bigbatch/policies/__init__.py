"""Statistics in, decision out: pure Python, no tensor, no clock, no input or output."""
