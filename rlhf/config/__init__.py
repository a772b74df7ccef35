"""The configuration of a run: frozen sections that refuse unknown keys, read from YAML with `key=value` on top.

- `load`: reads YAML and overrides into a validated configuration (`load_train`, `load_reward_model`, `load_compare`).
- `overrides`: parses `key=value`, and merges trees of settings.
- `sections`: `OnlineConfig`, `OfflineConfig`, `RewardModelConfig`; parts: `algorithm`, `data`, `reward`,
  `reward_model`, `run` (how a run goes, whatever it trains).
- `compare`: `CompareConfig`, several algorithms on one budget under one judge.
- `presets`: the named algorithms, and which of two conflicting settings wins.
- `files`: the YAML parser, and where the project's own `configs/` are, in a checkout and in an installed package.

The package itself exports nothing: import from its modules. docs/configuration.md is made from their docstrings.
"""
