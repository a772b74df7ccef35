"""The fast sampler: continuous batching over a KV cache in which the completions of a prompt share it.

    engine      FastSampler, and the batch that rows enter and leave
    recorded    on a GPU: recorded steps that stay, over a slot for each row
    decoder     a step of the model's own modules over the cache, CUDA graphs, and the trial that verifies a decoder
    llama       the decode step of Llama and similar models without their modules
    kv_cache    the cache: reading the prompts into it, and attention over it

Import FastSampler from `engine`; the others are its parts.
"""
