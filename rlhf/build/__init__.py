"""Configuration -> objects: the composition root, and the only place that imports reward_model."""
