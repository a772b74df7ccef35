"""Load validated configurations from YAML and `key=value` overrides: defaults < preset < file < command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhf.algorithms.online import Online
from rlhf.algorithms.presets import PRESETS
from rlhf.config.algorithm import algorithm_kind
from rlhf.config.compare import BestOfNArm, CompareConfig, TrainedArm
from rlhf.config.data import ChatFormat, DataConfig
from rlhf.config.files import (
    COMPARE_CONFIG,
    RUN_CONFIG,
    Tree,
    locate_config,
    merge,
    merge_over,
    merge_overrides,
    nearest_config,
    parse_overrides,
    parse_yaml,
)
from rlhf.config.presets import drop_keys, get_setting, has_critic, release_held_out, sizes_of_preset
from rlhf.config.sections import OfflineConfig, OnlineConfig, OptimizerConfig, RewardModelConfig, TrainConfig
from rlhf.errors import ConfigError, command_or_call, did_you_mean
from rlhf.plugins import load_plugins
from rlhf.section import Choice, Needed, Section, members_of, sections_of

C = TypeVar("C", bound=Section)

EXTENDS = "extends"  # key of a file with the name of another, whose settings come first
RUN_FOLDER_KEYS = ("versions", "git_commit", "functions", "settings_since")  # in a run folder's config.yaml besides

ALIASES = {
    "learning_rate": "lr",
    "batch_size": "prompts_per_step or batch.micro_batch_size",
    "mini_batch_size": "minibatches",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "ppo_epochs": "epochs",
    "max_steps": "steps",
    "beta": "coef (algorithm.kl.coef)",
    "kl_coef": "coef (algorithm.kl.coef)",
    "cliprange": "clip_eps_low and clip_eps_high",
    "clip_range": "clip_eps_low and clip_eps_high",
    "clip_eps": "clip_eps_low and clip_eps_high",
    "lam": "gae_lambda",
    "n": "completions_per_prompt",
    "group_size": "completions_per_prompt",
    "num_generations": "completions_per_prompt",
    "max_length": "max_new_tokens or max_tokens or max_prompt_tokens",
    "output_dir": "out_dir",
    "resume": "checkpoint.resume",
}

SHORTHANDS = {
    "lr": "{model}.lr",
    "learning_rate": "{model}.lr",
    "steps": "schedule.steps",
    "epochs": "schedule.epochs",
    "seed": "run.seed",
    "temperature": "sampling.temperature",
    "max_new_tokens": "sampling.max_new_tokens",
}
"""Short names of keys: keywords of rlhf.train, of which the command line names the full key."""


def load_train(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load the training run that a YAML file and `key=value` overrides describe.

    Raises:
        ConfigError: the file, a key, a value or a combination is wrong; the message names it and says what to do.
    """
    return train_config(_tree_for("train", path, overrides))


def _kind(tree: Tree) -> str:
    """Return the verb that runs what the settings describe: a comparison, a reward model, or training."""
    if "arms" in tree:
        return "compare"
    return "reward" if "model" in tree and "policy" not in tree else "train"


def check_kind(verb: str, path: str | Path, file: Tree) -> None:
    """Check that the settings of a file are for `rlhf train`, `reward` or `compare`, whichever `verb` names.

    Raises:
        ConfigError: they are for another verb, which the message names.
    """
    kind = _kind(file)
    is_empty = kind == "train" and not {"policy", "algorithm"} & set(file)  # settings of the command line say which
    if kind == verb or is_empty:
        return
    what = {"compare": "a comparison", "reward": "a reward model", "train": "the training of a policy"}[kind]
    command = f"run `rlhf {kind} {path}`"
    call = {
        "reward": f"call rlhf.reward_model(config={str(path)!r})",
        "train": f"call rlhf.train(config={str(path)!r})",
    }
    raise ConfigError(f"{path} describes {what}: {command_or_call(command, call.get(kind, command))}")


def _tree_for(verb: str, path: str | Path, overrides: Sequence[str]) -> Tree:
    """Return the settings of a file and the command line, which have to be for this verb.

    Raises:
        ConfigError: the file is for another verb, which the message names; or as `read_yaml`.
    """
    check_kind(verb, path, read_yaml(path))
    return _file_and_command_line(path, overrides)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig | RewardModelConfig:
    """Read the settings that a run folder was made with, with `key=value` overrides on top.

    Raises:
        ConfigError: the path is not a run folder; otherwise as `load_train`.
    """
    folder = Path(path)
    if not folder.exists():
        near = did_you_mean(folder.name, [other.name for other in folder.parent.glob("*")])
        raise ConfigError(f"no such run folder: {path}{near}")
    if (folder / COMPARE_CONFIG).is_file():
        raise ConfigError(f"{path} is a comparison: name a run of it, {path}/ARM/seed-N (rlhf report shows all)")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{path} is not a run folder (it has no config.yaml)")
    given = parse_overrides(overrides)
    tree = merge_over(release_held_out(read_yaml(path), given, has_trained=True), given)
    if "model" in tree and "policy" not in tree:
        return reward_model_config(tree)
    return train_config(tree)


def load_chat_format(path: str) -> ChatFormat:
    """Read the chat format from a run's configuration; return the default for a plain model folder.

    Raises:
        ConfigError: the configuration cannot be read, or its data are no section.
    """
    run = Path(path).expanduser() / "config.yaml"
    if not run.is_file():
        return ChatFormat()
    data = read_yaml(run).get("data") or {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{run}: data is a section, not {data!r}")
    keys = ("chat_template", "chat_template_kwargs", "system")
    return validate(DataConfig, {key: data[key] for key in keys if key in data}).chat_format


def train_config(tree: Tree, *, trains: bool = True, parameters: float | None = None) -> TrainConfig:
    """Build the training run, online or offline, that a tree of settings describes, after expanding its preset.

    Args:
        trains: False skips the rules of training, for settings that only judge a model.
        parameters: the size of a model that is in memory; None reads it from the model's folder or name.
    """
    load_plugins(tree)
    expanded = expand_preset(tree)
    if algorithm_kind(expanded.get("algorithm")) == "online":
        return validate(OnlineConfig, expanded, trains=trains, parameters=parameters)
    return validate(OfflineConfig, expanded, trains=trains)


def reward_model_config(tree: Tree) -> RewardModelConfig:
    """Build the reward-model run that a tree of settings describes."""
    load_plugins(tree)
    return validate(RewardModelConfig, tree)


def load_reward_model(path: str | Path, overrides: Sequence[str] = ()) -> RewardModelConfig:
    """Load the reward-model run that a YAML file and `key=value` overrides describe.

    Raises:
        ConfigError: as `load_train`.
    """
    return reward_model_config(_tree_for("reward", path, overrides))


def load_compare(path: str | Path, overrides: Sequence[str] = ()) -> CompareConfig:
    """Load the comparison that a YAML file and `key=value` overrides describe; `arms.name=null` leaves an arm out.

    Raises:
        ConfigError: as `load_train`.
    """
    return compare_config(_tree_for("compare", path, overrides))


def compare_config(tree: Tree) -> CompareConfig:
    """Build the comparison that a tree of settings describes; an arm and a suite that is null is left out."""
    load_plugins(tree)
    named = {key: tree[key] for key in ("arms", "suites") if isinstance(tree.get(key), Mapping)}
    kept = {key: {name: part for name, part in parts.items() if part is not None} for key, parts in named.items()}
    return validate(CompareConfig, {**tree, **kept})


def read_yaml(path: str | Path) -> Tree:
    """Read the settings in a YAML file or run folder, without what a run folder adds to them.

    A name that begins with `configs/` and is not in the working folder is one of the project's own configurations. A
    file with `extends: other.yaml` has the settings of that file, beside it, with its own over them.

    Raises:
        ConfigError: there is no such file, it is not YAML, it is not a mapping, or it extends itself.
    """
    return _read_yaml(path, ())


def _read_yaml(path: str | Path, extended_by: tuple[Path, ...]) -> Tree:
    file = locate_config(path)
    if file.is_dir():
        raise ConfigError(
            f"{path} is a folder without {RUN_CONFIG} or {COMPARE_CONFIG}: name a YAML file in it, or a run"
        )
    if not file.is_file():
        near = nearest_config(path)
        raise ConfigError(f"no configuration file {str(path)!r}{f'; did you mean {near}?' if near else ''}")
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(_without_sections(path, tree))
    settings = {str(key): value for key, value in tree.items() if key not in RUN_FOLDER_KEYS}
    return _extended(settings, file, extended_by)


def _without_sections(path: str | Path, tree: object) -> str:
    if tree is None:
        return f"{path} is empty: write sections into it (run:, policy:, ...), or begin with a copy of configs/ppo.yaml"
    kind = "list" if isinstance(tree, list) else "single value"
    return f"{path} must hold sections (run:, policy:, ...), not a {kind}"


def _extended(settings: Tree, file: Path, extended_by: tuple[Path, ...]) -> Tree:
    """Merge the settings of a file into the settings of the file that it extends, if any."""
    other = settings.pop(EXTENDS, None)
    if other is None:
        return settings
    if not isinstance(other, str):
        raise ConfigError(f"{file}: {EXTENDS} names one file, beside this one: {EXTENDS}: base.yaml")
    if file.resolve() in extended_by:
        raise ConfigError(f"{file} extends itself: {' -> '.join(str(name) for name in extended_by)}")
    return merge_overrides(_read_yaml(file.parent / other, (*extended_by, file.resolve())), settings)


def _arm_names(file: Tree) -> list[str]:
    """Return the names of the arms of a comparison's file; none for a file of another kind."""
    arms = file.get("arms")
    return [str(name) for name in arms] if isinstance(arms, Mapping) else []


def _file_and_command_line(path: str | Path, overrides: Sequence[str]) -> Tree:
    """Merge the command line into the file, without the file's settings that only another algorithm would read."""
    file = read_yaml(path)
    given = parse_overrides(overrides, arms=_arm_names(file))
    tree = merge_overrides(file, given)
    if not _names_another_algorithm(file, given):
        return tree
    try:
        config = train_config(tree)
    except ConfigError:
        return tree  # validating the tree again raises this error for the caller to report
    return drop_unread(tree, given, config)


def _names_another_algorithm(base: Tree, over: Tree) -> bool:
    keys = ("algorithm.preset", "algorithm.advantage.type", "algorithm.loss.type")
    return any(get_setting(over, key) not in (None, get_setting(base, key)) for key in keys)


def drop_unread(tree: Tree, given: Tree, config: TrainConfig) -> Tree:
    """Remove settings that `config`'s algorithm does not read and `given` does not set: a file may serve several."""
    return drop_keys(tree, [key for key in unread_keys(config) if get_setting(given, key) is None])


def expand_preset(tree: Tree) -> Tree:
    """Expand `algorithm.preset` into the tree, sizes included; explicit settings win.

    Raises:
        ConfigError: there is no such preset.
    """
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, Mapping) or "preset" not in algorithm or algorithm["preset"] is None:
        return tree
    name = algorithm["preset"]
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"algorithm.preset: {_not_one_of(name, PRESETS)}")
    preset = _with_matching_kl(_with_matching_value_loss(PRESETS[name]["algorithm"], algorithm), algorithm)
    return merge(sizes_of_preset(name), {**tree, "algorithm": merge(preset, algorithm)})


def _with_matching_value_loss(preset: Tree, algorithm: Mapping[str, Any]) -> Tree:
    """Match the preset's value loss to an advantage that `algorithm` sets: added for a critic, removed without one."""
    advantage = get_setting(algorithm, "advantage.type")
    if advantage is None or "loss" in preset:
        return preset
    return {"value_loss": {}, **preset} if has_critic(advantage) else drop_keys(preset, ["value_loss"])


def _with_matching_kl(preset: Tree, algorithm: Mapping[str, Any]) -> Tree:
    """Leave the KL penalty out of a preset without one, unless `algorithm` places it: another key is not enough.

    Raises:
        ConfigError: `algorithm` sets a coefficient, but no placement.
    """
    given = algorithm.get("kl")
    is_placed = get_setting(algorithm, "kl.placement") not in (None, "none")
    if {"kl", "loss"} & preset.keys() or not isinstance(given, Mapping) or is_placed:
        return preset
    if given.get("coef") and "placement" not in given:
        raise ConfigError(
            f"algorithm.kl.coef: algorithm.preset={algorithm['preset']} has no KL penalty that the coefficient weighs: "
            "set algorithm.kl.placement=reward too, or loss with algorithm.kl.estimator=k2 or k3, or leave it out"
        )
    return {**preset, "kl": {"placement": "none", "coef": 0.0}}


def _is_unplaced(algorithm: Online) -> bool:
    """Return whether a coefficient is set for a KL penalty that neither the settings nor their preset have."""
    preset = PRESETS[algorithm.preset]["algorithm"] if algorithm.preset in PRESETS else {}
    return algorithm.kl.placement == "none" and algorithm.kl.coef > 0 and "kl" not in preset


def dump(config: Section) -> Tree:
    """Return the configuration as plain data with every default filled in; loading it gives the same configuration."""
    return config.model_dump(mode="json")


def validate(kind: type[C], tree: Tree, *, trains: bool = True, parameters: float | None = None) -> C:
    """Validate a tree of settings and build a `kind` from it.

    Args:
        trains: False skips the rules of training.
        parameters: the size of the model, by which an online run chooses its learning rate; None: it is read.

    Raises:
        ConfigError: the tree is invalid; the message has one line for every mistake.
    """
    try:
        return kind.model_validate(tree, context={"trains": trains, "parameters": parameters})
    except ValidationError as error:
        lines = [_explain(kind, dict(mistake)) for mistake in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def unread_warnings(config: TrainConfig | RewardModelConfig | CompareConfig) -> list[str]:
    """Return one warning for each section that is set but that nothing in this run reads."""
    if isinstance(config, CompareConfig):  # an arm need not read all of its base; its own are warned of later
        return []
    return [f"{key} is set, but {why}: it has no effect" for key, why in _unread(config)]


def unread_keys(config: TrainConfig | RewardModelConfig) -> list[str]:
    """List the dotted keys that are set but that nothing in this run reads."""
    return [key for key, _ in _unread(config)]


def _unread(config: TrainConfig | RewardModelConfig) -> list[tuple[str, str]]:
    match config:
        case OnlineConfig():
            return _unread_by_online(config)
        case OfflineConfig():
            return _unread_by_offline(config)
        case RewardModelConfig():
            return _unread_by_reward_model(config)


def _unread_by_online(config: OnlineConfig) -> list[tuple[str, str]]:
    changed, algorithm = _changed_fields(config), config.algorithm
    advantage, is_pair_loss = algorithm.advantage, algorithm.policy_loss.pair_loss is not None
    named = f"advantage.type={advantage.type}"
    kl_is_set = "kl" in _changed_fields(algorithm) and algorithm.kl.coef > 0
    unweighted = f"policy_loss.type={algorithm.policy_loss.type} reads no advantages, which it weighs"
    unread = [
        ("critic", "critic" in changed and not advantage.needs_critic, f"{named} has no critic"),
        (
            "critic.lr",
            config.critic.shared and "lr" in _changed_fields(config.critic),
            "critic.shared trains the head with the policy",
        ),
        (
            "critic.head",
            "head" in _changed_fields(config.critic) and not config.critic.has_new_head(config.reward.source),
            "the critic starts from a reward model, head included",
        ),
        (
            "environment.prefix_cache",
            getattr(config.environment, "prefix_cache", False) and not config.remembers_prompts,
            "the fast sampler has it, in episodes of several turns",
        ),
        (
            "sampling.server",
            config.sampling.server is not None and config.sampling.backend != "server",
            f"sampling.backend is {config.sampling.backend}",
        ),
        ("sampling.correction", config.sampling.corrects and not algorithm.reads_weights, unweighted),
        (
            "overlap.ratio_cap",
            "ratio_cap" in _changed_fields(config.overlap) and config.overlap.ahead and not algorithm.reads_weights,
            unweighted,
        ),
        (
            "overlap.ratio_cap",
            "ratio_cap" in _changed_fields(config.overlap) and not config.overlap.ahead,
            "overlap.ahead is false",
        ),
        (
            "algorithm.target_kl",
            algorithm.target_kl is not None and config.batch.epochs * config.batch.minibatches == 1,
            "a step has one update, after which no other is left out",
        ),
        (
            "reward.shaping.overlong_penalty",
            "overlong_penalty" in _changed_fields(config.reward.shaping) and config.reward.shaping.overlong_buffer == 0,
            "reward.shaping.overlong_buffer is 0",
        ),
        (
            "teacher.dtype",
            getattr(config.teacher, "dtype", None) is not None and not algorithm.compares_with_teacher,
            "the teacher is the reference, which computes in policy.dtype",
        ),
        ("data.sft", "sft" in _changed_fields(config.data) and algorithm.ptx_coef == 0, "algorithm.ptx_coef is 0"),
        ("algorithm.kl.coef", _is_unplaced(algorithm) and not is_pair_loss, "algorithm.kl.placement is none"),
        (
            "algorithm.kl",
            kl_is_set and is_pair_loss,
            "the beta of policy_loss.loss is a pair loss's pull to the reference",
        ),
    ]
    others = ("preferences", "eval_preferences", "eval_sft")
    return (
        [(key, why) for key, is_unread, why in unread if is_unread]
        + _changed_among(config.data, "data.", others, "an online algorithm does not read it")
        + _unread_holdout(config.data, "prompts")
        + _unread_optimizer(config)
    )


def _unread_holdout(data: DataConfig, name: str) -> list[tuple[str, str]]:
    """List data.holdout if no rows of the data set of this name can be held out by it."""
    if data.holdout is None or getattr(data, name) is None or getattr(data, f"eval_{name}") is not None:
        return []
    why = f"data.{name} is mixed, streamed or has a part of its own (set data.eval_{name}.path)"
    return [("data.holdout", why)]


def _unread_optimizer(config: OnlineConfig) -> list[tuple[str, str]]:
    """List the policy's optimizer settings if the policy loss searches its step instead."""
    loss = config.algorithm.policy_loss
    settings = tuple(OptimizerConfig.model_fields) if loss.searches else ()
    return _changed_among(config.policy, "policy.", settings, loss.unread_optimizer)


def _unread_by_offline(config: OfflineConfig) -> list[tuple[str, str]]:
    name, is_sft = config.algorithm.name, config.algorithm.loss.data == "demonstrations"
    others = ("preferences", "eval_preferences") if is_sft else ("sft", "eval_sft")
    offline = "an offline algorithm does not read it"
    unread = _changed_among(config, "", ("critic", "reward", "overlap", "offload"), offline)
    unread += _changed_among(config.sampling, "sampling.", ("server", "correction"), offline)
    if not config.uses_reference:
        unread += _changed_among(config, "", ("reference",), f"{name} has no reference")
    unread += _changed_among(config.data, "data.", ("prompts",), offline)
    unread += _changed_among(config.data, "data.", others, f"{name} does not read it")
    unread += _unread_holdout(config.data, "sft" if is_sft else "preferences")
    if config.eval.source is None:
        why = "eval.source, the judge of an offline run, is not"
        unread += _changed_among(config.data, "data.", ("eval_prompts",), why)
    return unread + _changed_among(config.batch, "batch.", ("epochs", "minibatches", "shuffle"), offline)


def _unread_by_reward_model(config: RewardModelConfig) -> list[tuple[str, str]]:
    why, of_steps = "a reward model does not read it", "a process reward model does not read it"
    is_of_steps = config.process is not None
    return [
        *_changed_among(config.data, "data.", ("prompts", "eval_prompts", "sft", "eval_sft"), why),
        *_unread_holdout(config.data, "preferences"),
        *_changed_among(config.batch, "batch.", ("epochs", "minibatches", "shuffle"), why),
        *_changed_among(config.model, "model.", ("ema_decay",), why),
        *(_changed_among(config, "", ("calibration",), of_steps) if is_of_steps else []),
        *(_changed_among(config.model, "model.", ("export_dtype",), of_steps) if is_of_steps else []),
    ]


def _changed_among(section: Section, prefix: str, names: Sequence[str], why: str) -> list[tuple[str, str]]:
    """Return the keys of those fields that are set to something else than their default, each with `why`."""
    changed = _changed_fields(section)
    return [(f"{prefix}{name}", why) for name in names if name in changed]


def _changed_fields(section: Section) -> set[str]:
    """Return the names of the fields that differ from their default: a run folder's config.yaml sets all of them."""
    fields = type(section).model_fields
    return {name for name in section.model_fields_set if getattr(section, name) != fields[name].get_default()}


def _explain(kind: type[Section], mistake: Mapping[str, Any]) -> str:
    keys, models = _walk(kind, mistake["loc"])
    members = [model for model in models if keys and _is_tagged(model, keys[-1])]
    if mistake["type"] in ("value_error", "model_type") and members:
        keys.pop()  # a whole member of a union is wrong, and its tag is not a key that the user wrote
        models = members
    if mistake["type"] == "union_tag_invalid":
        keys.append("type")
    where = ".".join(keys)
    reason = _reason_if_needed(mistake, keys, models)
    if reason is not None:
        return f"{where} is missing: {reason}"
    message = _message(mistake, keys, models)
    return f"{where}: {message}" if where else message


def _reason_if_needed(mistake: Mapping[str, Any], keys: Sequence[str], models: Sequence[type[BaseModel]]) -> str | None:
    """Return the reason that an unset key has to be set, if its section gives one (`Needed`)."""
    if not keys or (mistake["type"] != "missing" and mistake.get("input") is not None):
        return None
    fields = [model.model_fields[keys[-1]] for model in models if keys[-1] in model.model_fields]
    return next((mark.reason for field in fields for mark in field.metadata if isinstance(mark, Needed)), None)


def _message(mistake: Mapping[str, Any], keys: Sequence[str], models: Sequence[type[BaseModel]]) -> str:
    message = str(mistake["msg"])
    match mistake["type"]:
        case "extra_forbidden":
            return f"unknown key{_of_best_of_n(keys, models) or _full_key(keys, models) or _nearest(keys[-1], models)}"
        case "missing":
            return "is required; set it in the file or on the command line"
        case "value_error":
            return message.removeprefix("Value error, ")
        case "union_tag_not_found" | "model_type":
            return _no_section(mistake.get("input"), keys, models)
        case "union_tag_invalid":
            return _not_one_of(mistake["ctx"]["tag"], re.findall(r"'(.+?)'", mistake["ctx"]["expected_tags"]))
        case "literal_error" if isinstance(mistake.get("input"), str):
            return _not_one_of(mistake["input"], re.findall(r"'(.+?)'", mistake["ctx"]["expected"]))
        case _:
            return f"{message} (got {mistake.get('input')!r})" if keys else message


def _no_section(value: object, keys: Sequence[str], models: Sequence[type[BaseModel]]) -> str:
    """Describe how to set a section that has no type, or that was given a value; name the key that is wanted."""
    fields = [model.model_fields[keys[-1]] for model in models if keys and keys[-1] in model.model_fields]
    sections = [section for field in fields for section in sections_of(field.annotation)] or models  # of a list: these
    types = [name for field in fields for name in members_of(field.annotation, field.metadata)]
    types = types or [str(kind.model_fields["type"].default) for kind in sections if issubclass(kind, Choice)]
    choices = f", one of {', '.join(types)}"
    if isinstance(value, Mapping):
        return f"set its type{choices}"
    choices = choices if len(types) > 1 else ""
    if value is None:
        cure = f"set its type{choices}" if choices else "leave it out for its defaults"
        return f"is a section, which cannot be null: {cure}"
    key = _needed_key(sections)
    example = value if isinstance(value, str) else key.rpartition(".")[2].upper()
    if keys == ["algorithm"] and isinstance(value, str) and value in PRESETS:
        key = "preset"
    elif len(types) > 1:
        key, example = "type", value if value in types else "TYPE"
    setting = f"{key}={example}" if key else "KEY=VALUE"
    return f"is a section, not {value!r}: set {'.'.join(keys)}.{setting}{choices} (rlhf config FILE prints its keys)"


def _needed_key(sections: Sequence[type[BaseModel]]) -> str:
    """Return the first key that one of the sections needs, with the one needed within it, or `path`; empty if none."""
    fields = {name: field for kind in sections for name, field in kind.model_fields.items()}
    name = next((name for name, field in fields.items() if field.is_required()), "path")
    if name not in fields:
        return ""
    kinds = sections_of(fields[name].annotation)
    inner = "" if any(issubclass(kind, Choice) for kind in kinds) else _needed_key(kinds)
    return f"{name}.{inner}" if inner else name


def _not_one_of(value: object, choices: Iterable[str]) -> str:
    choices = list(choices)
    near = did_you_mean("cuda" if value == "gpu" else str(value), choices)  # gpu is most like cpu
    return f"{value!r} is not one of {', '.join(choices)}{near}"


def _walk(kind: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[type[BaseModel]]]:
    """Find the keys that a user wrote on the way to a mistake (no union tags), and the sections that hold the last."""
    models: list[type[BaseModel]] = [kind]
    keys: list[str] = []
    is_tag_next = False  # a tag may be the name of a field too, as `model` is of the source `openai`
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        is_tag = is_tag_next and any(_is_tagged(model, str(part)) for model in models)
        is_tag_next = is_tag_next and isinstance(part, int)
        if index and location[index - 1] in ("arms", "sources", "space"):  # a name that the user gave
            keys.append(str(part))
            continue
        fields = [] if is_tag else [model.model_fields[part] for model in models if part in model.model_fields]
        if fields or is_last or isinstance(part, int):
            keys.append(str(part))
        else:
            models = [model for model in models if _is_tagged(model, part)] or models
        if fields and not is_last:
            models = [section for field in fields for section in sections_of(field.annotation)]
            is_tag_next = len(models) > 1
    return keys, models


def _is_tagged(model: type[BaseModel], tag: str) -> bool:
    field = model.model_fields.get("type")
    return (field is not None and field.default == tag) or model.__name__.lower().removesuffix("config") == tag


def full_key(name: str, fields: Iterable[str] = ("policy",)) -> str | None:
    """Return the key that a short name stands for in a configuration with these sections; None if it is not one."""
    model = "policy" if "policy" in fields else "model"
    return SHORTHANDS[name].format(model=model) if name in SHORTHANDS else None


def _full_key(keys: Sequence[str], models: Sequence[type[BaseModel]]) -> str:
    """Name the key that a name at the top of a configuration stands for; empty if it stands for none."""
    if len(keys) != 1 or CompareConfig in models:
        return ""
    name, fields, below = keys[0], models[0].model_fields, _keys_below(models[0])
    if short := full_key(name, fields):
        return f"; the full key is {short}"
    if alias := _with_full_keys(ALIASES.get(name, ""), fields, below):
        return f"; here it is called {alias}"
    if did_you_mean(name, fields):
        return ""
    exact = _called(name, below)
    if 0 < len(exact) <= 3:
        return f"; the full key is {' or '.join(exact)}"
    in_sections = {key.partition(".")[2] for key in below if key.count(".") == 1}
    near = difflib.get_close_matches(name, in_sections, n=1, cutoff=0.8)
    return f"; did you mean {' or '.join(_called(near[0], below))}?" if near else ""


def _keys_below(model: type[BaseModel], prefix: str = "", above: tuple[type, ...] = ()) -> list[str]:
    """Return the full keys of a configuration, of all members of its sections; a section in itself is left out."""
    keys = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        keys.append(key)
        annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        for section in sections_of(annotation):
            if section not in above:
                keys += _keys_below(section, f"{key}.", (*above, section))
    return list(dict.fromkeys(keys))


def _called(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that end in a name, of the least depth at which there is one."""
    ending = [key for key in keys if key.endswith(f".{name}")]
    depth = min((key.count(".") for key in ending), default=0)
    return [key for key in ending if key.count(".") == depth]


def _with_full_keys(alias: str, fields: Iterable[str], below: Sequence[str]) -> str:
    """Return the names of an alias as full keys, if each stands for one; empty if the configuration lacks a key."""
    if any(key not in below for key in re.findall(r"\w+\.[\w.]+", alias)):
        return ""

    def full(match: re.Match[str]) -> str:
        called = [key for key in below if key.endswith(f".{match[0]}")]
        return full_key(match[0], fields) or (called[0] if len(called) == 1 else match[0])

    return re.sub(r"(?<![\w.])\w+(?![\w.])", full, alias)


def _of_best_of_n(keys: Sequence[str], models: Sequence[type[BaseModel]]) -> str:
    """Say that a key is of another type of arm; a name that is no arm's begins an arm that trains."""
    if TrainedArm not in models or keys[-1] not in BestOfNArm.model_fields:
        return ""
    return f"; arms of type best_of_n have it: name one, or set {'.'.join(keys[:-1])}.type=best_of_n"


def _nearest(key: str, models: Sequence[type[BaseModel]]) -> str:
    valid = sorted({name for model in models for name in model.model_fields})
    near = did_you_mean(key, valid)
    if near:
        return near
    if key in ALIASES:
        here = " or ".join(name for name in ALIASES[key].split(" or ") if name in valid)
        return f"; here it is called {here or ALIASES[key]}"
    return f"; valid keys here: {', '.join(valid)}" if valid else ""


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig | RewardModelConfig | CompareConfig:
    """Load the configuration in the file: a reward model (`model:`), a comparison (`arms:`), otherwise a training run.

    Raises:
        ConfigError: as `load_train`.
    """
    tree = _file_and_command_line(path, overrides)
    match _kind(tree):
        case "compare":
            return compare_config(tree)
        case "reward":
            return reward_model_config(tree)
        case _:
            return train_config(tree)
