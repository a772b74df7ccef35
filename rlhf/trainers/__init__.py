"""The training loops and the losses that they give to the optimizer step.

    online        the online loop: sample, score, annotate, compute advantages, update (PPO, GRPO, online DPO, ...)
    offline       the offline loop: one optimizer step per batch of fixed data (SFT, DPO, KTO, ...)
    losses        losses over models for the online loop, and the likelihood of demonstrations
    preference    losses over models on pairs and labelled completions
    collect       a step's scored completions, with refilled groups and greedy baselines
    observe       a step's metrics
    overlap       scoring while sampling, and sampling while updating

rlhf.build makes the collaborators of a run; `online.train` and `offline.train_offline` run it.
"""
