"""The machine that a run uses: devices, ranks, memory, optimizers and random numbers.

- `engine`: the device, and trained models, however they are sharded. `optimizers`: their optimizers by name.
- `distributed`: torch.distributed. `deepspeed`: ZeRO. `device`: the differences of devices.
- `offload`: tensors that leave the device between their uses.
- `memory`: peak memory, allocators, and micro-batches that shrink when memory runs out.
- `seeding`: counter-based randomness, from the seed and the step alone.

This package exports nothing: import from its modules, as in `from rlhf.runtime.engine import Engine`.
"""
