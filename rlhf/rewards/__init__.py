"""Reward sources: anything that turns completions into one score each.

`source.RewardSource` is the interface. The sources here are a Python function (`function`), a reward server (`remote`)
and a language model as judge (`chat_score`, asked through `chat`); `ensemble` combines several. `shaping` clips scores
and subtracts penalties, and `spread` divides the work among the ranks of a distributed run. A trained reward model is
a source too: `reward_model.source`. `rlhf.build.rewards` builds the source that a configuration describes.

Import the classes from these modules; `texts`, `post` and `timeout` hold what the sources share.
"""
