"""What measuring and scaling cost, and how far the measurement can be trusted."""
