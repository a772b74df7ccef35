"""Sample completions from the policy as it is now.

    sampler       the Sampler protocol, and make_sampler: the sampler that `sampling.backend` asks for
    generate      HFSampler: transformers' generate, the reference implementation
    fast          FastSampler: continuous batching over a KV cache with shared prompts

Other packages mostly need make_sampler and the Sampler protocol.
"""
