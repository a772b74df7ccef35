"""Policy, reference, critic and reward models: load, export, and compute log-probabilities and values.

- Load and save: `backbone` (causal LMs), `scalar_head` (critic and reward model), `export` (write a model as it was
  published), `saving` (with its exact weights), `folders` (where models are), `gguf_export`, `weight_files` (parts of a
  checkpoint).
- Compute: `policy_models.Models` holds the models of a run; `logprobs` computes log-probabilities and entropies.
- `kernels`: the same numbers in less time and memory.

Nothing is re-exported: import from the modules, as in `from rlhf.models.policy_models import Models`.
"""
