"""The records of a run: metrics, samples, checkpoints, and lines in the terminal.

- `metrics`: the table of every metric's name, unit and meaning. A name that is not in it cannot be logged.
- `run_folder`: the files of a run, and its lock. `checkpoint`: checkpoints that are whole or absent.
- `trackers`: JSONL, TensorBoard, Weights & Biases, trackio, MLflow.
- `view`: the messages of a run while it trains. `progress`: the terminal display of its steps.

This package exports nothing: import from its modules, as in `from rlhf.tracking.run_folder import RunFolder`.
"""
