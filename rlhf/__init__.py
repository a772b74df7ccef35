"""Train language models from human preferences: SFT, reward models, PPO, GRPO, DPO and related algorithms.

A run passes through these packages, top to bottom; imports point down only:

    cli, commands       the `rlhf` program
    compare             several algorithms on one budget under one judge
    factory             from a configuration to the objects of a run
    suites, report      benchmarks; the HTML page of a run
    evaluation          trained policies on held-out prompts
    training            the online and the offline loop, their losses, the optimizer step
    sampling, rewards   prompts to completions, completions to scores
    models              policy, reference, critic: log-probabilities and values
    data                rows of a file to batches of token ids
    tracking, runtime   metrics, checkpoints; devices, ranks, memory
    algo                advantages and losses: tensors in, tensors out
    config              YAML to frozen, typed sections

`types` has the batches that flow through an online step: Prompts -> Completions -> Rollout -> Experience. Start reading
there, then in algo/objective.py and training/online.py. `lab` is a small world with a known true reward, `constraints`
a reward without a model. Beside this package, reward_model trains and serves reward models.

The package itself exports nothing: import from its modules, as in `from rlhf.commands.train import run_train`.
"""
