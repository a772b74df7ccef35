"""What a checkpoint of a run holds: models as ordinary folders; optimizers, averages and queues in one file.

Every rank calls the functions that save, because gathering the weights is collective; only the main rank writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.models.export import Origin, write_tensors
from rlhf.models.folders import CRITIC, MODEL
from rlhf.models.policy_models import Ema, Models
from rlhf.models.saving import save_policy, save_scalar_head
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.models.weight_files import NamedTensors, WeightFiles, read_header
from rlhf.runtime.engine import Engine, TrainableModel
from rlhf.runtime.optimizers import Moments
from rlhf.training.overlap import CompletionPrefetcher
from rlhf.training.prompt_queue import PromptQueue
from rlhf.training.session import TrainState

TRAINER = "trainer.pt"
OPTIMIZER = "optimizer-{:05d}-of-{:05d}.safetensors"  # what one of several ranks writes


class OnlineSaver:
    """Saves the checkpoints of an online run."""

    def __init__(
        self,
        models: Models,
        trained: dict[str, TrainableModel],
        tokenizer: PreTrainedTokenizerBase,
        origin: Origin,
        ema: Ema | None,
        ahead: CompletionPrefetcher | None,
        queue: PromptQueue | None,
        state: TrainState,
    ) -> None:
        """Take what is saved."""
        self.models, self.trained, self.tokenizer, self.origin = models, trained, tokenizer, origin
        self.ema, self.ahead, self.queue, self.state = ema, ahead, queue, state

    def __call__(self, folder: Path) -> None:
        """Fill a checkpoint folder."""
        engine, head = self.models.engine, self.models.shared_head
        save_policy(self.models.policy, self.tokenizer, folder / MODEL, engine, self.origin)
        if self.models.critic is not None:
            save_scalar_head(self.models.critic, self.tokenizer, folder / CRITIC, engine)
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


class OfflineSaver:
    """Saves the checkpoints of an offline run."""

    def __init__(
        self,
        models: Models,
        trained: TrainableModel,
        tokenizer: PreTrainedTokenizerBase,
        origin: Origin,
        ema: Ema | None,
    ) -> None:
        """Take what is saved."""
        self.models, self.trained, self.tokenizer, self.origin, self.ema = models, trained, tokenizer, origin, ema

    def __call__(self, folder: Path) -> None:
        """Fill a checkpoint folder."""
        save_policy(self.models.policy, self.tokenizer, folder / MODEL, self.models.engine, self.origin)
        extra = {"ema": self.ema.saved()} if self.ema is not None else {}
        save_trainer_state(folder, {"policy": self.trained}, extra, self.models.engine)


class RewardModelSaver:
    """Saves the checkpoints of a reward model's run."""

    def __init__(
        self, model: ScalarHeadModel, trained: TrainableModel, tokenizer: PreTrainedTokenizerBase, engine: Engine
    ) -> None:
        """Take what is saved."""
        self.model, self.trained, self.tokenizer, self.engine = model, trained, tokenizer, engine

    def __call__(self, folder: Path) -> None:
        """Fill a checkpoint folder."""
        save_scalar_head(self.model, self.tokenizer, folder / MODEL, self.engine)
        save_trainer_state(folder, {"model": self.trained}, {}, self.engine)


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


def _flatten(prefix: str, moments: Moments) -> dict[str, Tensor]:
    return {f"{prefix}{key}/{name}": value for key, named in moments.items() for name, value in named.items()}


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """Load the state that `save_trainer_state` wrote, onto the CPU; what ranks wrote is read when it is asked for."""
    state: dict[str, Any] = torch.load(folder / TRAINER, weights_only=True, map_location="cpu")
    paths = sorted(folder.glob(OPTIMIZER.format(0, 0).replace("00000", "*")))
    files = WeightFiles(folder, {path.name: read_header(path) for path in paths})
    for name, model in state.items():
        if isinstance(model, dict) and set(model) == {"step"}:
            keys = sorted({stored.split("/")[1] for stored in files.names() if stored.startswith(f"{name}/")})
            model["moments"] = {key: NamedTensors(files, f"{name}/{key}/") for key in keys}
    averages = NamedTensors(files, "ema/")
    return state | ({"ema": averages} if averages else {})
