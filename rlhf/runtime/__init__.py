"""The machine that a run uses: devices, ranks, memory, optimizers and random numbers.

- `engine`: the device, and trained models however they are sharded. `distributed`: torch.distributed.
- `deepspeed`: ZeRO. `optimizers`: AdamW and its states.
- `memory`: peak memory and allocators. `micro_batch`: micro-batches that shrink when memory runs out.
- `seeding`: counter-based randomness, from the seed and the step alone.

This package exports nothing: import from its modules, as in `from rlhf.runtime.engine import Engine`.
"""
