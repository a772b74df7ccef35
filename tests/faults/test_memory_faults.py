"""Out of memory in a micro-batch: halved, begun again, reported once; the result is the same as with more memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import largest_difference, make_model, offline, offline_tree, online, ppo_tree, trained, weights
from torch import nn

from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.errors import ResourceError
from rlhf.factory.online import no_grad_batch_multiplier
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.engine import Engine
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.offline import train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun

EXACT: dict[str, Any] = {
    "policy": {"dtype": "float64", "optimizer": "sgd", "packing": "off"},  # short_of_memory counts rows
    "critic": {"optimizer": "sgd"},
    "schedule": {"steps": 2},
    "data": {"eval_prompts": None},
}


def short_of_memory(module: nn.Module, rows: int, *, backward: bool = False) -> list[int]:
    """Let forward (or backward) passes of `module` with gradient over more than `rows` rows fail; sizes tried."""
    tried: list[int] = []

    def check(_module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not torch.is_grad_enabled():
            return None
        tried.append(len(ids))
        if len(ids) > rows and not backward:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        if len(ids) > rows:
            output.logits.register_hook(_fail)
        return None

    if backward:
        module.register_forward_hook(check, with_kwargs=True)
    else:
        module.register_forward_pre_hook(check, with_kwargs=True)
    return tried


def _fail(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (a test)")


def tree_of(folder: Path, name: str) -> dict[str, Any]:
    make_model(folder / "model", dtype=torch.float64)
    return merge(ppo_tree(folder, run={"out_dir": str(folder / name)}), EXACT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> OnlineRun:
    """The run that has memory enough."""
    return trained(tree_of(tmp_path_factory.mktemp("whole"), "whole"))


@pytest.mark.parametrize("backward", [False, True], ids=["in forward", "in backward"])
def test_a_halved_run_is_the_whole_one(tmp_path: Path, whole: OnlineRun, backward: bool) -> None:
    run = online(tree_of(tmp_path, "halved"))
    tried = short_of_memory(run.models.policy, 2, backward=backward)
    train(run)
    assert tried[:3] == [8, 4, 2]
    assert set(tried[3:]) == {2}  # it is not tried again
    assert run.rows.size == 2
    assert largest_difference(weights(whole.models.policy), weights(run.models.policy)) < 1e-10
    assert whole.models.critic is not None
    assert run.models.critic is not None
    assert largest_difference(weights(whole.models.critic), weights(run.models.critic)) < 1e-10
    messages = [row["text"] for row in run.session.recorder.folder.read_notes() if "out of memory" in row["text"]]
    assert len(messages) == 1
    assert "of 8 rows: halved" in messages[0]


def test_gradients_of_the_failed_pass_are_forgotten(tmp_path: Path, whole: OnlineRun) -> None:
    """The second pass of a minibatch fails: the first one's gradient must not be counted twice."""
    run = online(tree_of(tmp_path, "halved"))
    run.rows.size = 3  # passes of 3, 3, 2 rows
    left = [1]

    def second(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if torch.is_grad_enabled():
            left[0] -= 1
            if left[0] == -1:
                raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    run.models.policy.register_forward_pre_hook(second, with_kwargs=True)
    train(run)
    assert run.rows.size == 2
    assert largest_difference(weights(whole.models.policy), weights(run.models.policy)) < 1e-10


def test_an_offline_run_halves_too(tmp_path: Path) -> None:
    make_model(tmp_path / "model", dtype=torch.float64)
    final_weights = []
    for name in ("whole", "halved"):
        tree = offline_tree(
            tmp_path, "dpo", policy=EXACT["policy"], schedule={"steps": 2}, run={"out_dir": str(tmp_path / name)}
        )
        run = offline(tree)
        if name == "halved":
            short_of_memory(run.trained.module, 4)  # both sides of 2 pairs
        train_offline(run)
        final_weights.append(weights(run.trained.module))
    assert largest_difference(*final_weights) < 1e-10


def test_passes_without_gradient_are_halved_too(tmp_path: Path, whole: OnlineRun) -> None:
    run = online(tree_of(tmp_path, "halved"))
    assert run.models.reference is not None

    def check(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    run.session.evaluate = lambda _: {}  # its passes are not begun again
    run.models.reference.register_forward_pre_hook(check, with_kwargs=True)
    train(run)
    assert run.passes.size == 4
    assert largest_difference(weights(whole.models.policy), weights(run.models.policy)) < 1e-10


def test_one_row_that_does_not_fit_ends_the_run_with_advice(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path, "run"))
    short_of_memory(run.models.policy, 0)
    with pytest.raises(ResourceError, match=r"of 1 row: .*gradient_checkpointing"):
        train(run)


def test_another_error_is_not_taken_for_it() -> None:
    def fail(_rows: int) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        AdaptiveMicroBatch(8).run(fail)


def test_in_company_a_rank_does_not_go_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.runtime.memory._in_company", lambda: True)

    def fail(_rows: int) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory (a test)")

    with pytest.raises(
        ResourceError, match=r"cannot shrink the micro-batch automatically: set batch\.micro_batch_size lower"
    ):
        AdaptiveMicroBatch(8).run(fail)


def test_frozen_passes_of_one_gpu_begin_with_the_whole_step(tmp_path: Path) -> None:
    config = train_config(tree_of(tmp_path, "run"))  # 16 completions a step, micro-batches of 8
    assert no_grad_batch_multiplier(config, Engine(torch.device("cpu"))) == 4
    many = config.model_copy(update={"batch": config.batch.model_copy(update={"prompts_per_step": 100})})
    assert no_grad_batch_multiplier(many, Engine(torch.device("cuda"))) == 13
    assert no_grad_batch_multiplier(many, Engine(torch.device("cuda"), ranks=Distributed(0, 2))) == 4


@pytest.mark.parametrize(
    "minibatches, rows_of_a_pass, passes",
    [(1, 8, 1), (2, 4, 2), (4, 2, 4), (8, 1, 4), (1, 4, 2), (1, 16, 4), (2, 8, 4)],
)
def test_frozen_passes_have_half_of_a_step_whose_minibatches_take_two(
    tmp_path: Path, minibatches: int, rows_of_a_pass: int, passes: int
) -> None:
    """They are then the passes of two processes. A step whose minibatches take one pass stays whole."""
    sizes = {"prompts_per_step": 16, "minibatches": minibatches, "micro_batch_size": rows_of_a_pass}
    config = train_config(merge(tree_of(tmp_path, "run"), {"batch": sizes}))
    for ranks in (Distributed(), Distributed(0, 2)):
        assert no_grad_batch_multiplier(config, Engine(torch.device("cpu"), ranks=ranks)) == passes
