"""The memory and time of a run, from Python: `rlhf.plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.api.inputs import nested
from rlhf.config.files import Tree, merge_overrides
from rlhf.config.load import check_kind, read_yaml, reward_model_config, train_config
from rlhf.errors import called_from_python
from rlhf.lab.build import resolve_lab_paths
from rlhf.planning.options import PlanOptions
from rlhf.planning.plan import Plan


def plan(
    config: str | Path | None = None,
    *,
    memory: str | float | None = None,
    gpus: int | None = None,
    device: str | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    **settings: Any,
) -> Plan:
    """Plan a run, like `rlhf plan`: its memory by role, kind and phase, before anything is loaded.

        plan = rlhf.plan("configs/ppo.yaml", memory="24GB")
        plan.peak, plan.fits, plan.largest_micro_batch()

    Args:
        config: a configuration file of `rlhf train` or `rlhf reward`; None: the settings alone.
        memory: of one GPU, or of the machine with device="cpu": "24GB", "80GiB", or a number of GB.
        gpus: processes, one for each GPU.
        device: "cpu" or "cuda"; None: the device of the configuration, or else of this machine.
        prompt_tokens: tokens of a prompt; None: the limit of the configuration.
        completion_tokens: tokens of a completion; None: the limit of the configuration.
        **settings: settings over the file's, by section (`policy={"lr": 1e-5}`) or by key.

    Returns:
        The plan; sizes are bytes. `as_dict` gives the output of `rlhf plan --json`.

    Raises:
        UserError: a setting or an option is wrong, or the shape of a model is not known before it is loaded.
    """
    file: Tree = {} if config is None else read_yaml(config)
    is_reward_model = "model" in {*file, *settings} and "policy" not in file
    if config is not None:
        check_kind("reward" if is_reward_model else "train", config, file)
    tree = merge_overrides(file, nested(settings, plan, "model" if is_reward_model else "policy"))
    made = reward_model_config(tree) if is_reward_model else train_config(tree)
    size = None if memory is None else str(memory)
    options = PlanOptions(
        memory=size, gpus=gpus, device=device, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
    )
    with called_from_python():
        return options.plan(resolve_lab_paths(made))
