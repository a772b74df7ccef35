"""What every trainer needs around its loss: devices, ranks, optimizer steps, checkpoints, logging and progress.

- The run: `session` (the loop over steps, with evaluation and interruption), `step` (one optimizer step), `memory`
  (micro-batches that shrink when memory runs out), `seeding` (counter-based randomness).
- The machine: `engine` (device and trained models), `ranks` (torch.distributed), `zero` (DeepSpeed), `optimizers`,
  `gauge` (peak memory), `allocator` (glibc settings).
- The output: `run_folder` (its files), `lock`, `checkpoint`, `metrics` (the table of names), `recorder`, `loggers`
  (JSONL and trackers), `progress` (the terminal display).

The package itself exports nothing: import from its modules, as in `from rlhf.runtime.session import Session`.
"""
