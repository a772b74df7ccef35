"""The content of a run's checkpoint: models as ordinary folders; optimizers, averages and queues in one file.

Every rank calls the functions that save, because gathering the weights is collective; only the main rank writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.models.export import write_tensors
from rlhf.models.policy_models import Ema, Models
from rlhf.models.weight_files import NamedTensors, WeightFiles, read_tensors
from rlhf.runtime.engine import Engine, TrainableModel
from rlhf.runtime.optimizers import MomentTensors
from rlhf.training.overlap import CompletionPrefetcher
from rlhf.training.prompt_queue import PromptQueue
from rlhf.training.session import TrainState

TRAINER = "trainer.pt"
OPTIMIZER = "optimizer-{:05d}-of-{:05d}.safetensors"  # the file of one of several ranks


class Saver:
    """Fills a checkpoint folder of an offline or a reward-model run."""

    def __init__(
        self, save_models: Callable[[Path], None], trained: dict[str, TrainableModel], ema: Ema | None, engine: Engine
    ) -> None:
        """Take the objects to save; `save_models` writes the models as folders in a folder."""
        self.save_models, self.trained, self.ema, self.engine = save_models, trained, ema, engine

    def __call__(self, folder: Path) -> None:
        """Fill a checkpoint folder."""
        self.save_models(folder)
        extra = {"ema": self.ema.saved()} if self.ema is not None else {}
        save_trainer_state(folder, self.trained, extra, self.engine)


class OnlineSaver:
    """Fills a checkpoint folder of an online run."""

    def __init__(
        self,
        save_models: Callable[[Path], None],
        models: Models,
        trained: dict[str, TrainableModel],
        ema: Ema | None,
        ahead: CompletionPrefetcher | None,
        queue: PromptQueue | None,
        state: TrainState,
    ) -> None:
        """Take the objects to save; `save_models` writes the models as folders in a folder."""
        self.save_models, self.models, self.trained = save_models, models, trained
        self.ema, self.ahead, self.queue, self.state = ema, ahead, queue, state

    def __call__(self, folder: Path) -> None:
        """Fill a checkpoint folder."""
        engine, head = self.models.engine, self.models.shared_head
        self.save_models(folder)
        extra: dict[str, Any] = {}
        if head is not None:
            full_state = engine.full_state(head)
            extra["shared_head"] = head.state_dict() if full_state is None else full_state
        if self.ema is not None:
            extra["ema"] = self.ema.saved()
        if self.ahead is not None:
            extra["ahead"] = self.ahead.saved(self.state)
        if self.queue is not None:
            extra["queue"] = self.queue.saved()
        save_trainer_state(folder, self.trained, extra, engine)


def restore_trainer_state(state: dict[str, Any], trained: dict[str, TrainableModel], ema: Ema | None) -> None:
    """Restore the optimizers and the moving average from the state of a checkpoint."""
    for name, model in trained.items():
        if name in state:  # not a critic that checkpoint.resume=always adds
            model.load_state(state[name])
    if ema is not None and "ema" in state:
        ema.load(state["ema"])


def save_trainer_state(
    folder: Path, trained: dict[str, TrainableModel], besides: dict[str, Any], engine: Engine
) -> None:
    """Save optimizer states by parameter name, and `besides`, unsharded so that any number of processes can resume.

    Under DeepSpeed every rank writes the moments of the weights that it owns to a file of its own, and under ZeRO-3
    the averaged weights too.
    """
    states = {name: model.state() for name, model in trained.items()}
    parts: dict[str, Tensor] = {}
    if engine.sharding.uses_deepspeed:
        for name, state in states.items():
            parts |= _flatten(f"{name}/", state.pop("moments"))
        if engine.splits_weights:
            parts |= {f"ema/{name}": weight for name, weight in besides.pop("ema", {}).items()}
        file = OPTIMIZER.format(engine.ranks.rank + 1, engine.ranks.world)
        engine.ranks.all_succeed(lambda: write_tensors(parts, folder / file))
    engine.ranks.on_main(lambda: torch.save(states | besides, folder / TRAINER))


def _flatten(prefix: str, moments: MomentTensors) -> dict[str, Tensor]:
    return {f"{prefix}{key}/{name}": value for key, named in moments.items() for name, value in named.items()}


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """Load the state that `save_trainer_state` wrote, onto the CPU; the ranks' files are read on demand."""
    state: dict[str, Any] = torch.load(folder / TRAINER, weights_only=True, map_location="cpu")
    paths = sorted(folder.glob(OPTIMIZER.format(0, 0).replace("00000", "*")))
    files = WeightFiles(folder, {path.name: read_tensors(path) for path in paths})
    for name, model in state.items():
        if isinstance(model, dict) and set(model) == {"step"}:
            keys = sorted({stored.split("/")[1] for stored in files.names() if stored.startswith(f"{name}/")})
            model["moments"] = {key: NamedTensors(files, f"{name}/{key}/") for key in keys}
    averages = NamedTensors(files, "ema/")
    return state | ({"ema": averages} if averages else {})
