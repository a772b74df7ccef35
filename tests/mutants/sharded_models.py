"""Bugs seeded where models are split over processes: what each loads, keeps and writes."""

from __future__ import annotations

from mutant import Mutant

SHARDED_MODELS = [
    Mutant(
        name="adam-s-count-on-the-cpu",
        file="rlhf/runtime/optimizers.py",
        before="torch.tensor(float(step), device=flat.device)",
        after="torch.tensor(float(step))",
        why="a run continued under ZeRO on GPUs gives the fused kernel a count of steps that it cannot read",
        tests=("tests/runtime/test_optimizers.py",),
    ),
    Mutant(
        name="sums-of-gradients-that-are-not-complete",
        file="rlhf/runtime/engine.py",
        before="while self._started < len(self._buckets) and not self._missing[self._started]:",
        after="while self._started <= index:",
        why="a bucket is summed over the processes before the backward pass has reached all its weights",
        tests=("tests/runtime/test_gradients.py",),
    ),
    Mutant(
        name="sums-of-gradients-without-the-rest-of-a-bucket",
        file="rlhf/runtime/engine.py",
        before="        if gradients:",
        after="        if len(gradients) == len(self._buckets[self._started - 1]):",
        why="a bucket with a weight that got no gradient is never summed, and the processes drift apart",
        tests=("tests/runtime/test_gradients.py",),
    ),
    Mutant(
        name="a-gradient-after-its-sum",
        file="rlhf/runtime/engine.py",
        before="        if index < self._started:",
        after="        if index < 0:",
        why="what arrives after a sum has started is lost or counted in one process only",
        tests=("tests/runtime/test_gradients.py",),
    ),
    Mutant(
        name="an-embedding-rounded-to-16-bits",
        file="rlhf/models/policy_models.py",
        before="not in HALF_DTYPES and weight not in elsewhere:",
        after="not in HALF_DTYPES:",
        why="the reference reads other embeddings than the model it is a copy of: the KL does not begin at zero",
        tests=("tests/models/test_frozen.py",),
    ),
    Mutant(
        name="part-of-a-weight-from-the-next-byte",
        file="rlhf/models/weight_files.py",
        before="opened.seek(stored.start + start * size)",
        after="opened.seek(stored.start + start)",
        why="every process but the first trains on weights cut in the middle of numbers",
        tests=("tests/models/test_weight_files.py",),
    ),
    Mutant(
        name="owners-that-forget-their-load",
        file="rlhf/runtime/distributed.py",
        before="            loads[rank] += sizes[name]",
        after="            loads[rank] += 1",
        why="one process holds and writes most of a checkpoint",
        tests=("tests/runtime/test_distributed.py",),
    ),
    Mutant(
        name="a-weight-of-another-shape-read-in-parts",
        file="rlhf/models/weight_files.py",
        before="    if stored.shape != tuple(parameter.shape):",
        after="    if len(stored.shape) != parameter.ndim:",
        why="numbers of one place of the file become another place's weights",
        tests=("tests/models/test_split_load.py",),
    ),
    Mutant(
        name="local-rank-as-the-number-of-a-hidden-gpu",
        file="rlhf/runtime/engine.py",
        before='torch.device("cuda", local_rank % visible)',
        after='torch.device("cuda", local_rank)',
        why="where each process is shown its own GPU, all but the first ask for one that is not there",
        tests=("tests/runtime/test_device.py",),
    ),
    Mutant(
        name="layered-rollout-with-rows-evicted",
        file="rlhf/sampling/sampler.py",
        before='        reason = reason or "sharding.rollout=layered gathers the layers in their own forward"',
        after="        reason = reason or None",
        why="each process makes its own number of passes over layers that all must gather together: they wait forever",
        tests=("tests/sampling/test_layered_rollout.py",),
    ),
]
