"""The training loops, the losses that they give to the optimizer step, and the course of a run.

    online        the online loop: sample, score, annotate, compute advantages, update (PPO, GRPO, online DPO, ...)
    offline       the offline loop: one optimizer step per batch of fixed data (SFT, DPO, KTO, ...)
    losses        losses over models: online, of demonstrations, of preference pairs and labelled completions
    collect       samples and scores a step's completions: rescued and refilled groups, greedy baselines
    overlap       scoring while sampling, and sampling during the update before
    rollout       log-probabilities and values of scored completions, and their metrics
    step          the optimizer step, the only one: micro-batches, gradients over ranks, checks for NaN
    online_run    the collaborators of an online run, and the parts of its step around the update
    session       the course of a run: steps, evaluation, checkpoints, interruption, records

rlhf.factory makes the collaborators of a run; `online.train` and `offline.train_offline` run it.
"""
