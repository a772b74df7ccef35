"""Reward sources: anything that turns completions into one score each.

`source.RewardSource` is the interface. The sources here are a Python function (`function`), a reward server (`remote`)
and a language model as judge (`judge`); `ensemble` combines several. `source` also divides the work among the ranks of
a distributed run, and has the second judge that only watches. `rules` are checks of the text, and the clipping and
penalties of scores. A trained reward model is a source too: `reward_model.source`. `rlhf.factory.rewards` builds the
source that a configuration describes.
"""
