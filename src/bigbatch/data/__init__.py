"""Decision in, training changed."""
