"""From a validated configuration to the objects of a run: the composition root.

`run.build_run` builds a training run (`online`: PPO, GRPO and the like; `offline`: SFT and preference losses), and
`reward_model.build_reward_model` a reward-model run, which `reward_card` finishes. The parts they share are next to
them: `context` (run folder, checkpoint, engine), `data`, `models`, `rewards`, `sampler`, `evaluator`.
`sampler.Completer`, `evaluation` and
`reward_service` load a model that is already trained, for `rlhf sample`, `chat`, `eval` and `serve-reward`.

No algorithm is in here. It is the only package of rlhf that imports reward_model.
"""
