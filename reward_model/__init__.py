"""Preference pairs to scores.

pairs ─ rlhf.data ─▶ PreferencePairs ─ model.pair_scores ─▶ (chosen, rejected) ─ losses.bradley_terry ─▶ loss
  └─ rlhf.trainers.offline: objective.PairLoss, one optimizer step a batch
       └─ calibrate.calibrate: mean 0, std 1 on reference completions, kept in the model
            └─ evaluate.evaluate_reward_model: the report card, beside the baselines of `baselines`
                 └─ source.RewardModelSource: completions to scores, all that PPO sees
"""
