"""A metric of the `evaluate` library."""
