"""The algorithms: each file is one, with its settings, its equation, its usual ranges, its presets and its paper."""
