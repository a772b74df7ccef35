"""Judge the final model of a cell on the held-out prompts.

All cells of one seed are judged with the same random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.build.context import model_folder
from rlhf.build.evaluation import evaluate_model
from rlhf.build.models import build_tokenizer, decoder
from rlhf.build.rewards import build_source
from rlhf.config.compare import CellConfig
from rlhf.rollout import sample_records
from rlhf.runtime.engine import make_engine
from rlhf.runtime.loggers import plain
from rlhf.runtime.run_folder import write_aside

JUDGED = "judged.json"


@dataclass(frozen=True)
class Judged:
    """The content of judged.json: the mean metrics, and one record for each held-out prompt.

    A record has row, prompt, completion, score (the judge's), proxy (the trained-on reward's, where there is one),
    kl and kl_exact (in nats; for best-of-n, kl is null and kl_exact is absent), length (in tokens) and finished.
    """

    metrics: Mapping[str, float | None]
    rows: Sequence[Mapping[str, Any]]

    def column(self, name: str) -> Float[Tensor, " P"]:
        """Return one number of every record, in the order of the prompts."""
        return torch.tensor([row[name] for row in self.rows], dtype=torch.float64)

    def write(self, folder: Path) -> None:
        """Write judged.json atomically: the cell is done once it exists."""
        content = {"metrics": plain(self.metrics), "rows": plain(list(self.rows))}
        write_aside(folder / JUDGED, json.dumps(content, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Judged | None:
        """Read judged.json; None if it does not exist."""
        path = folder / JUDGED
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content["metrics"], content["rows"])


def judge_model(cell: CellConfig, path: str | None) -> Judged:
    """Judge the model in `path` (None: the start model) on the cell's held-out prompts.

    Raises:
        UserError: a model, the data, the judge or the proxy is missing or unusable.
    """
    train = cell.train
    tokenizer_path = model_folder(path or train.policy.model)
    evaluation = evaluate_model(train, path, tokenizer_path)
    tokenizer = build_tokenizer(train.policy.model_copy(update={"model": tokenizer_path}))
    records = sample_records(
        evaluation.rollout,
        decoder(tokenizer),
        step=-1,
        split="judged",
        limit=len(evaluation.rollout),
        parts=evaluation.scores.parts,
    )
    exact = evaluation.exact_kl.tolist()
    records = [{**record, "kl_exact": value} for record, value in zip(records, exact, strict=True)]
    metrics: dict[str, float | None] = dict(evaluation.metrics)
    if cell.proxy is not None:
        proxy = build_source(cell.proxy, tokenizer, make_engine(train.run))(evaluation.rollout).values
        metrics["eval/proxy"] = float(proxy.double().mean())
        records = [{**record, "proxy": float(value)} for record, value in zip(records, proxy, strict=True)]
    return Judged(metrics, records)
