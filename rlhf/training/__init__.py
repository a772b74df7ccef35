"""The training loops, the losses that they give to the optimizer step, and the course of a run.

    online        the online loop: sample, score, annotate, compute advantages, update (PPO, GRPO, online DPO, ...)
    offline       the offline loop, one optimizer step per batch of fixed data, and the losses of DPO, KTO and others
    losses        the losses of an online update, and of demonstrations
    collect       samples and scores a step's completions: rescued and refilled groups, greedy baselines
    rollout       log-probabilities and values of scored completions, and their metrics
    step          the optimizer step, the only one: micro-batches, gradients over ranks, checks for NaN
    micro_batches rows as micro-batches over the ranks, and the numbers of all of them together
    online_run    the collaborators of an online run, and their state at a step
    annotate, update_record, kl_control, finish    the parts of an online step around the update
    prompt_queue  the prompts of a step if unsolved ones are replayed
    overlap       sampling during the update before; scoring one part while the next is sampled
    searched      a policy whose loss searches its step (TRPO, NPG)
    backtracking  moves an update that went too far back towards its start
    running_scores  scores on the scale of all scores of the run so far
    ratios        the distribution of a step's importance ratios, for the report
    watch         a judge that looks at training completions
    health        the watch over a run: alarms, and the best checkpoint
    checkpoints   the content of a checkpoint: models, optimizers, averages, queues
    reference     the reference's log-probabilities of offline data, kept on disk between runs
    feed          the mixed and streamed data of a run
    session       the course of a run: steps, evaluation, checkpoints, interruption, records

rlhf.factory makes the collaborators of a run; `online.train` and `offline.train_offline` run it.
"""
