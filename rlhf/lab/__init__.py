"""The lab: a small world whose true reward is known, generated from one seed.

lexicon (words) -> world (prompts, reviews, the SFT corpus) -> gold (their true worth; noisy preferences from it);
tokenizer and model are made to fit. Nothing is downloaded.
"""
