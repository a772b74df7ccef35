"""Data sets: read rows in many formats, render them with the chat template, encode them, and collate batches.

A row goes through `files` (JSON, JSONL, CSV, Parquet, the hub), `dialects` (columns to prompts, pairs and other forms),
`templates` (conversations to text) and `encode` (text to token ids); `load` runs these steps in order. `skips` counts
what was left out and why, and `lengths` handles rows that are too long.

Import from the modules:
    prompts         load_prompts, PromptStream: what the online algorithms sample from
    pairs           load_pairs, load_demonstrations, load_labelled: what preference losses, reward models and SFT read
    annotated       the same with reference log-probabilities, which `reference_cache` keeps on disk
    stream          BatchStream: the shuffled batch of a step, computed from the seed and the step number
    chat, encode    load_tokenizer, make_encoder
"""
