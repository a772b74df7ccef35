"""Train language models from human preferences: SFT, reward models, PPO, GRPO, DPO and related algorithms.

`types` defines the batches that flow through an online step: Prompts -> Completions -> Rollout -> Experience.
`sampling` draws completions, `rewards` scores them, `rollout` adds log-probabilities and values, `algo` computes
advantages and losses, `trainers` has the loops, and `runtime` the ranks, optimizer steps, checkpoints and logging.
`data` and `models` load the inputs, `config` reads YAML, and `build` makes a run of it. `evaluation` and `compare`
measure trained policies, `lab` is a small synthetic task, and `cli` and `commands` are the `rlhf` program.

The package itself exports nothing: import from its modules, as in `from rlhf.commands.train import run_train`.
"""
