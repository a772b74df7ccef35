"""Data sets: read rows in many formats, render them with the chat template, encode them, and collate batches.

A row goes through `files` (JSON, JSONL, CSV, Parquet, the hub), `formats` (columns to prompts, pairs and other forms),
`templates` (conversations to text) and `tokenizer` (text to token ids); `datasets` runs these steps in order. `rows`
counts the rows left out by their reason.

Import from the modules:
    prompts             prompt_pipeline, PromptStream: the prompts of the online algorithms
    pairs               pair_pipeline and others: the rows of preference losses, reward models, SFT;
                        AnnotatedPairSet: pairs with the reference's log-probabilities
    datasets            BatchStream: the shuffled batch of a step, computed from the seed and the step number
    mixture             MixedStream: batches from several sources, in memory or streamed, by the schedule of quotas
    files               LazyDataset: the rows of files a few at a time, from any place in them
    tokenizer           load_tokenizer, and the places of models and tokenizers; encode, cut and pad
"""
