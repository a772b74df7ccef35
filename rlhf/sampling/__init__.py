"""Sampling completions from the policy as it is now.

    sampler       the Sampler protocol: prompts to completions
    choice        make_sampler: builds the sampler that `sampling.backend` asks for
    hf            HFSampler: transformers' generate, the reference implementation
    fast          FastSampler: continuous batching over a key-value cache with shared prompts

The other modules are parts of the fast sampler: flight (the batch), slots and attention (the cache and how it is read),
decoders, lean, products and graphs (the decode step), drawing (from logits to tokens), trial (checks it before use).
Other packages mostly need make_sampler and the Sampler protocol.
"""
