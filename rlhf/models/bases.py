"""The frozen bases below a run's adapters: each is in memory once, for any number of models that stand on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from rlhf.models.backbone import freeze, load_causal_lm, move_to
from rlhf.models.stored import store_weights, twin
from rlhf.runtime.engine import Engine


@dataclass(frozen=True)
class _Key:
    """The properties that two models must have in common to share their weights."""

    path: str
    weights: str
    dtype: str
    trust_remote_code: bool


@dataclass
class Bases:
    """The frozen causal LMs of a run by folder and kind of weights.

    Every model that is asked for has modules of its own, which can get an adapter, over the tensors of one base. So
    policy, reference, critic and reward model need the memory of one, and no pass has to switch between adapters.
    """

    engine: Engine
    loaded: dict[_Key, PreTrainedModel] = field(default_factory=dict)

    def load(self, path: str, weights: str, *, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
        """Return a frozen model with modules of its own; its weights are read once, then shared.

        Args:
            path: folder, GGUF file or hub id; an adapter's folder is merged into its base.
            weights: how they are kept, a value of the setting of this name.
            dtype: the dtype of the arithmetic; see backbone.autocast.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if self.engine.splits_weights:  # each rank has its part of each model
            return load_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code, engine=self.engine)
        kind = "float32" if weights == "auto" else weights
        place = str(Path(path).resolve()) if Path(path).exists() else path
        key = _Key(place, kind, "float64" if dtype == "float64" else "float32", trust_remote_code)
        if key not in self.loaded:
            kept = "auto" if kind == "float32" or dtype == "float64" else kind
            device = self.engine.device
            base = load_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code, kept=kept, device=device)
            self.loaded[key] = move_to(store_weights(freeze(base), kind, device), device)
        return twin(self.loaded[key])

    def holds(self, model: nn.Module) -> bool:
        """Return whether a model stands on one of the bases."""
        shared = {id(parameter) for base in self.loaded.values() for parameter in base.parameters()}
        return any(id(parameter) in shared for parameter in model.parameters())


_BASES: WeakKeyDictionary[Engine, Bases] = WeakKeyDictionary()


def bases_of(engine: Engine) -> Bases:
    """Return the bases of the run that has this engine."""
    return _BASES.setdefault(engine, Bases(engine))
