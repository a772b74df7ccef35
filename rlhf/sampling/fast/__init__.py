"""The fast sampler: continuous batching over a KV cache in which the completions of a prompt share it.

    engine      FastSampler, and the batch that rows enter and leave
    recorded    on a GPU: recorded steps that stay, over a slot for each row
    decoder     a decode step (written-out Llama, the model's own modules, CUDA graphs), the draw, and the trial
    kv_cache    the cache: reading the prompts into it, and attention over it
    prefix_cache  the keys and values of a prompt, kept from one turn of an episode to the next

Import FastSampler from `engine`; the others are its parts.
"""
