"""The configuration of a run: frozen sections that refuse unknown keys, read from YAML with `key=value` on top.

- `load`: reads YAML and overrides into a validated configuration (`load_train`, `load_reward_model`, `load_compare`).
- `sections`: `OnlineConfig`, `OfflineConfig`, `RewardModelConfig`; parts: `algorithm`, `rescue`, `data`,
  `reward`, `run` (how any run goes).
- `compare`: `CompareConfig`, several algorithms on one budget under one judge.
- `presets`: the named algorithms, and which of two conflicting settings wins.
- `files`: the YAML parser, `key=value`, and the folder of the project's own `configs/`.

The package itself exports nothing: import from its modules. docs/configuration is made from their docstrings.
"""
