"""An ensemble of separate reward models: one run for each member, in a folder that names them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from reward_model.ensemble_card import ensemble_card
from rlhf.config.sections import RewardModelConfig
from rlhf.factory.context import write_members
from rlhf.factory.reward_model import score_gaps
from rlhf.runtime.distributed import is_main_process
from rlhf.tracking.run_folder import RunFolder

SUBFOLDER = "members"


def member_configs(config: RewardModelConfig) -> list[RewardModelConfig]:
    """Return the configuration of each member's own run; empty unless all of several separate ones are to be trained.

    A member's run has a folder of its own and says which member it is, so that it can be repeated, or trained on
    another machine, by itself.
    """
    ensemble = config.ensemble
    if ensemble.size == 1 or ensemble.backbone == "shared" or ensemble.member is not None:
        return []
    return [_member_config(config, number) for number in range(ensemble.size)]


def _member_config(config: RewardModelConfig, number: int) -> RewardModelConfig:
    folder = Path(config.run.out_dir) / SUBFOLDER / str(number)
    run = config.run.model_copy(update={"out_dir": str(folder), "name": f"{config.run.name}, member {number}"})
    ensemble = config.ensemble.model_copy(update={"member": number})
    return config.model_copy(update={"run": run, "ensemble": ensemble})


def finish_members(config: RewardModelConfig, members: Sequence[RewardModelConfig]) -> dict[str, Any]:
    """Write the members' names and the ensemble's report card into its folder, and return the card.

    Without held-out pairs the card is empty.
    """
    if not is_main_process():
        return {}
    folder = Path(config.run.out_dir)
    write_members(folder, [f"{SUBFOLDER}/{number}" for number in range(len(members))])
    if config.data.eval_preferences is None:
        return {}
    gaps = torch.tensor([score_gaps(member, member.run.out_dir)[1] for member in members], dtype=torch.float64)
    card = {"ensemble": ensemble_card(gaps, seed=config.run.seed).as_dict()}
    RunFolder(folder).write_report_card(card)
    return card
