"""The lab: a small synthetic task whose true reward is known, generated from one seed. Nothing is downloaded.

The task is to write short reviews. `lexicon` has the words, `world` the grammar that writes prompts, reviews and the
SFT corpus, `gold` the true reward, and `preferences` pairs of completions labelled by it with noise. `model` makes a
tokenizer and an untrained Llama that fit the task; `build` writes all of it to a cache on disk, where configurations
refer to it as `lab:NAME`.
"""
