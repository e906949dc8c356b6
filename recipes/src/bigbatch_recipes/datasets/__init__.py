"""Official formats in, data sets out; nothing is downloaded."""
