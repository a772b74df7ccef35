"""Policy, reference, critic and reward models: loading and saving them, and the passes that read numbers from them.

- Load and save: `backbone` (causal LMs), `scalar_head` (critic and reward model), `origin` and `export` (write a model
  as it was published), `fingerprint` (a hash of the weights, for caches).
- Compute: `bundle.Models` holds the models of a run; `logprobs` (log-probabilities and entropy of completions), `head`
  (the LM head, a chunk of tokens at a time) and `beside` (policy against reference) do its work.
- Faster passes: `rows` (no padding), `lean`, `layers` and `fused` (decoder layers written out), `low` (16 bits on a
  CPU), `fast_ways` (which of these a run uses).

Nothing is re-exported: import from the modules, as in `from rlhf.models.bundle import Models`.
"""
