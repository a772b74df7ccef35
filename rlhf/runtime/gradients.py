"""The sum of gradients over the ranks, bucket by bucket, while the backward pass that completes them goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from rlhf.runtime.distributed import Distributed, in_buckets


@contextmanager
def sum_gradients(parameters: Sequence[nn.Parameter], ranks: Distributed) -> Iterator[None]:
    """Run the last backward pass of a step in this context: at its end gradients are summed over the ranks.

    A bucket's sum starts as soon as its gradients are complete, the parameters that come last in the model first, so
    that all but the last one overlap with the pass. Buckets and their order depend on the parameters alone and so are
    the same on every rank, whatever the order in which gradients arrive.

    Raises:
        RuntimeError: a gradient changed after its bucket's sum had started.
    """
    if ranks.world == 1:
        yield
        return
    buckets = _Buckets(parameters, ranks)
    # Only for this pass: a parameter with a hook of its own keeps layers from being written out (supports_fused).
    hooks = [parameter.register_post_accumulate_grad_hook(buckets.arrived) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    buckets.finish()


class _Buckets:
    """The parameters in buckets, from the last to the first, and the sums that have been started."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Distributed) -> None:
        self._ranks = ranks
        self._buckets: list[list[Tensor]] = list(in_buckets(parameters[::-1]))
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        self._sums: list[Callable[[], None]] = []
        self._started = 0

    def arrived(self, parameter: Tensor) -> None:
        """Record that a gradient is complete, and start the sums that wait for nothing else."""
        index = self._bucket_of[id(parameter)]
        if index < self._started:
            raise RuntimeError("a gradient changed after its sum over the ranks had started")
        self._missing[index].discard(id(parameter))
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start()

    def finish(self) -> None:
        """Start the sums of what this pass did not reach but earlier ones did, and wait for all of them."""
        while self._started < len(self._buckets):
            self._start()
        for wait in self._sums:
            wait()

    def _start(self) -> None:
        gradients = [parameter.grad for parameter in self._buckets[self._started] if parameter.grad is not None]
        self._started += 1
        if gradients:
            self._sums.append(self._ranks.start_sum(gradients))
