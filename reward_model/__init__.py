"""Training, evaluating and serving reward models: from preference pairs to scores.

pairs ─ rlhf.data ─▶ PreferencePairs ─ model.pair_scores ─▶ (chosen, rejected) ─ model.bradley_terry ─▶ loss
  └─ rlhf.training.offline: model.BradleyTerryLoss, one optimizer step per batch
       └─ model.calibrate: mean 0, std 1 on reference completions, stored in the model
            └─ evaluate.evaluate_reward_model: the report card, next to the baselines that it has to beat
                 ├─ source.RewardModelSource: completions to scores, all that PPO sees
                 └─ server.make_app: the same over HTTP

The package itself exports nothing: import from its modules.
"""
