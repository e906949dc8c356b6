"""Any loader's batches, cut again into the micro-batches of a plan."""
