"""The configuration is closed, typed, and names the cure of a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.algorithms.gae import Gae
from rlhf.algorithms.grpo import Group
from rlhf.algorithms.kl import AdaptiveKl, Kl
from rlhf.algorithms.online import Online
from rlhf.algorithms.penalty import PenaltyLoss
from rlhf.algorithms.presets import PRESETS
from rlhf.config.compare import CellConfig, CompareConfig
from rlhf.config.data import DataConfig
from rlhf.config.files import InvalidYaml, format_yaml, merge, merge_overrides, parse_overrides, parse_yaml
from rlhf.config.load import (
    dump,
    expand_preset,
    load_any,
    load_chat_format,
    load_compare,
    load_reward_model,
    load_run,
    load_train,
    train_config,
    unread_warnings,
    validate,
)
from rlhf.config.presets import drop_keys, get_setting
from rlhf.config.sections import (
    CriticConfig,
    OfflineConfig,
    OnlineConfig,
    RewardModelConfig,
    TrainConfig,
    TrainSections,
)
from rlhf.errors import ConfigError
from rlhf.guard.lint import sections_below
from rlhf.section import description

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))


def base(**algorithm: Any) -> dict[str, Any]:
    return {
        "policy": {"model": "m"},
        "data": {"prompts": {"path": "p"}, "sft": {"path": "s"}, "preferences": {"path": "d"}},
        "reward": {"source": {"type": "model", "path": "rm"}},
        "sampling": {"completions_per_prompt": 4},
        "algorithm": algorithm or {"preset": "ppo"},
        "batch": {"epochs": 2},
    }


def test_every_shipped_file_loads_and_every_section_is_read() -> None:
    warnings = {str(file.relative_to(ROOT)): unread_warnings(load_any(file)) for file in FILES}
    assert {file: texts for file, texts in warnings.items() if texts} == {}


def test_there_are_shipped_files() -> None:
    assert {"ppo.yaml", "sft.yaml", "reward_model.yaml"} <= {f.name for f in FILES}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_coherent_and_dumps_to_itself(name: str) -> None:
    batch = {"epochs": 1} if name in ("a2c", "reinforce", "remax") else {}
    cost = {"reward": {"cost": {"source": {"type": "model", "path": "cm"}}}} if name == "ppo_lag" else {}
    tree = merge(base(preset=name), {"batch": batch, "sampling": {"completions_per_prompt": 12}, **cost})
    if name in ("distill", "opd", "minillm", "distill_sft"):
        tree = {**tree, "teacher": {"model": "t"}, "batch": {"epochs": 1}}
    config = train_config(tree)
    assert config.algorithm.preset == name
    assert train_config(dump(config)) == config
    assert type(config) is (OfflineConfig if "loss" in PRESETS[name]["algorithm"] else OnlineConfig)
    assert list(dump(config)) == list(TrainSections.model_fields), "both kinds have the keys of a run folder's file"
    assert list(dump(config.data)) == list(DataConfig.model_fields)


@pytest.mark.parametrize(
    ("override", "key", "word"),
    [
        ("policy.packing=off", "policy.packing", "off"),
        ("reward.source={type: verifier, name: math, symbolic: off}", "reward.source.grader.symbolic", "off"),
    ],
)
def test_off_is_a_word_where_a_setting_has_it(override: str, key: str, word: str) -> None:
    assert get_setting(dump(load_train(ROOT / "configs" / "ppo.yaml", [override])), key) == word


def test_how_a_head_starts_is_read_where_there_is_a_new_one() -> None:
    for init, is_read in (("policy", True), ("auto", False), ("reward", False)):
        config = train_config(merge(base(), {"critic": {"init": init, "head": "orthogonal"}}))
        assert any(text.startswith("critic.head is set") for text in unread_warnings(config)) != is_read
    with pytest.raises(ConfigError, match=r"set critic\.head=zero"):
        train_config(merge(base(), {"critic": {"init": "policy", "head": "normal", "shared": True}}))


@pytest.mark.parametrize("missing", [["reward"], ["data"], ["data.prompts", "reward"]])
@pytest.mark.parametrize("is_null", [True, False])
def test_all_that_an_online_run_lacks_is_named_at_once(missing: list[str], is_null: bool) -> None:
    tree = drop_keys(base(), missing)
    if is_null:
        tree = merge(tree, parse_overrides([f"{key}=null" for key in missing]))
    with pytest.raises(ConfigError) as error:
        train_config(tree)
    cures = {"data": "set data.prompts.path", "data.prompts": "set data.prompts.path", "reward": "set reward.source"}
    lines = str(error.value).splitlines()
    assert len(lines) == len(missing)
    for line, key in zip(lines, missing, strict=True):
        assert line.startswith(f"{key} is missing: ")
        assert cures[key] in line


@pytest.mark.parametrize("preset", ["ppo", "dpo"])
def test_a_mistake_in_the_run_of_a_cell_is_named_by_its_key(preset: str) -> None:
    train = dump(train_config(base(preset=preset)))
    cell = {"arm": "a", "seed": 0, "train": merge(train, {"policy": {"lrr": 1.0}})}
    with pytest.raises(ConfigError, match=r"^train\.policy\.lrr: unknown key; did you mean lr\?$"):
        validate(CellConfig, cell)


@pytest.mark.parametrize(
    "override, message",
    [
        ("reward.source.path=null", r"^reward\.source\.path: Input should be a valid string"),
        ("reward.source.pth=a", r"^reward\.source\.pth: unknown key; did you mean path\?$"),
        ("reward.source={type: openai, base_url: a, model: 1}", r"^reward\.source\.model: Input should be a valid"),
        (
            "reward.source={type: ensemble, sources: [{type: function, target: a}, {type: model, path: a, hwo: mean}]}",
            r"^reward\.source\.sources\.1\.hwo: unknown key; did you mean how\?$",
        ),
        (
            "reward.source={type: ensemble, sources: [{type: ensemble, sources: [{type: function, targt: a}]}]}",
            r"reward\.source\.sources\.0\.sources\.0\.targt: unknown key; did you mean target\?$",
        ),
    ],
)
def test_a_mistake_in_a_reward_source_is_named_without_its_type(override: str, message: str) -> None:
    """`model` is the type of one source and a key of another."""
    with pytest.raises(ConfigError, match=message):
        load_train(ROOT / "configs" / "ppo.yaml", [override, "critic.init=policy"])


def test_exponents_without_a_dot_are_numbers() -> None:
    assert yaml.safe_load("1e-6") == "1e-6"  # PyYAML's reading of it
    config = train_config(merge(base(), parse_overrides(["policy.lr=1e-6"])))
    assert config.policy.lr == 1e-6
    assert parse_yaml("[1e-3, -2E+5, 1e3x, '1e3', e3]") == [1e-3, -2e5, "1e3x", "1e3", "e3"]
    assert parse_yaml("[1.5e3, -.5e2, 2.e1, .e3, '1.5e3']") == [1500.0, -50.0, 20.0, ".e3", "1.5e3"]


def test_texts_that_look_like_numbers_survive_a_file(tmp_path: Path) -> None:
    """PyYAML would write the text 1e3 without quotes, and then it would be read as the number."""
    settings = {
        "kwargs": {"text": "1e3", "dotted": "1.5e3", "number": 1e3, "small": 1e-7, "version": "1.0", "flag": "no"}
    }
    assert parse_yaml(format_yaml(settings)) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.learning_rate=1", "policy.learning_rate: unknown key; here it is called lr"),
        ("run.device=gpu", "run.device: 'gpu' is not one of auto, cpu, cuda, mps; did you mean cuda?"),
        ("algorithm=null", "algorithm is missing: set algorithm.preset, e.g. algorithm.preset=grpo"),
        (
            "algorithm.advantage=null",
            "algorithm.advantage is missing: set algorithm.preset, e.g. algorithm.preset=grpo",
        ),
        ("policy=null", "policy is missing: set policy.model"),
        ("sampling.temprature=1", "sampling.temprature: unknown key; did you mean temperature?"),
        ("smapling.temperature=1", "smapling: unknown key; did you mean sampling?"),
        ("algorithm.advantage.gae_lamda=.9", "algorithm.advantage.gae_lamda: unknown key; did you mean gae_lambda?"),
        (
            "algorithm.kl.controller={type: adaptive, targt: 3}",
            "algorithm.kl.controller.targt: unknown key; did you mean",
        ),
        ("sampling.temperature=0", "sampling.temperature: Input should be greater than 0 (got 0)"),
        ("sampling.max_new_tokens=many", "sampling.max_new_tokens: Input should be a valid integer"),
        ("policy.lr=.nan", "policy.lr"),
        ("policy.lr=true", r"policy.lr: Input should be a number (got True)"),
        ("schedule.steps=true", r"schedule.steps: Input should be a number (got True)"),
        ("data.prompts.part=[false, true]", r"data.prompts.part: Input should be a number (got [False, True])"),
        ("algorithm.preset=grpoo", "'grpoo' is not one of"),
        (
            "reward.source.type=modle",
            "reward.source.type: 'modle' is not one of ensemble, environment, function, model, openai, remote, "
            "rules, verifier, zero; did you mean model?",
        ),
        (
            "policy.optimizer=adamv",
            "policy.optimizer: 'adamv' is not one of adamw, adamw_8bit, sgd; did you mean adamw?",
        ),
        ("algorithm.preset=gpro", "did you mean grpo or gspo?"),
        ("reward=null", "reward is missing: set reward.source"),
        ("data.prompts=null", "data.prompts is missing"),
        ("algorithm.kl={placement: loss, estimator: k1}", "k1 in the loss has an expected gradient of zero"),
        ("algorithm.value_loss=null", "advantage.type=gae has a critic, which needs algorithm.value_loss"),
        ("algorithm.drop_uniform_groups=true", "drop_uniform_groups needs a group advantage"),
        ("algorithm.refill_rounds=2", "refill_rounds replaces dropped groups: set drop_uniform_groups=true"),
        (
            "algorithm.policy_loss.type=policy_gradient",
            "set batch.epochs=1 batch.minibatches=1, or algorithm.policy_loss",
        ),
        ("algorithm.policy_loss={type: cispo, clip_eps: 1}", "algorithm.policy_loss.clip_eps: unknown key"),
        ("schedule.epochs=2", "give schedule.steps or schedule.epochs"),
        (
            "batch.prompts_per_step=1",
            "4 completions is noise: raise batch.prompts_per_step x sampling.completions_per_prompt to 8",
        ),
        ("policy.lr", "cannot read 'policy.lr': write section.key=value"),
        ("=3", "cannot read '=3'"),
        ("policy.lr=[", "not valid YAML"),
        ("schedule={steps:20}", "schedule: 'steps:20' is one word in YAML: write a space after the colon"),
        ("data.prompts={path: p.jsonl, columns: {prompt:q}}", "data.prompts: 'prompt:q' is one word"),
        ("critic.init=reward", None),
    ],
)
def test_a_mistake_is_named(override: str, message: str | None) -> None:
    tree = merge(base(), {"schedule": {"steps": 10}})
    if message is None:
        train_config(merge(tree, parse_overrides([override])))
        return
    with pytest.raises(ConfigError) as error:
        train_config(merge(tree, parse_overrides([override])))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [("sampling.max_length=9", "max_new_tokens"), ("data.prompts.max_length=9", "max_prompt_tokens")],
)
def test_a_hint_names_a_key_of_its_own_section(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf": unknown key; here it is called {key}$"):
        train_config(merge(base(), parse_overrides([override])))


@pytest.mark.parametrize(
    ("preset", "override", "message"),
    [
        ("online_dpo", "sampling.completions_per_prompt=1", "a pair of a prompt's completions needs"),
        (
            "online_dpo",
            "algorithm.policy_loss.loss={type: null}",
            "algorithm.policy_loss.loss: set its type, one of dpo, hinge, ipo, robust_dpo",
        ),
        ("online_dpo", "algorithm.advantage.type=group", "set both or neither"),
        ("grpo", "algorithm.advantage.type=best_and_worst", "set both or neither"),
        (
            "online_dpo",
            "algorithm.kl={placement: loss, estimator: k3}",
            "reads no KL penalty, but kl.placement is loss",
        ),
        ("online_dpo", "algorithm.kl.placement=reward", "reads no KL penalty, but kl.placement is reward"),
        ("online_dpo", "algorithm.kl.controller.type=adaptive", "controller needs kl.placement to be reward or loss"),
        ("online_dpo", "algorithm.advantage.whiten=true", "algorithm.advantage.whiten: unknown key"),
        ("online_dpo", "algorithm.policy_loss.beta=1", "algorithm.policy_loss.beta: unknown key"),
        ("online_dpo", "algorithm.policy_loss.loss.beta=0", "algorithm.policy_loss.loss.beta: Input should be greater"),
        (
            "online_dpo",
            "algorithm.policy_loss.loss.type=simpo",
            "policy_loss.loss.type: 'simpo' is not one of dpo, hinge, ipo, robust_dpo",
        ),
        ("online_dpo", "algorithm.policy_loss.entropy_coef=0.1", "algorithm.policy_loss.entropy_coef: unknown key"),
        ("online_dpo", "batch={prompts_per_step: 3, minibatches: 4}", "at most 3 pairs are made in a step"),
        ("online_dpo", "algorithm.drop_uniform_groups=true", "drop_uniform_groups needs a group advantage"),
        ("rejection_sampling", "algorithm.advantage.keep=4", "keep is 4 of 4 completions, so nothing is chosen"),
        ("rejection_sampling", "sampling.completions_per_prompt=1", "keep is 1 of 1 completions"),
        ("rejection_sampling", "algorithm.advantage.keep=0", "algorithm.advantage.keep: Input should be greater"),
        ("rejection_sampling", "batch={prompts_per_step: 3, minibatches: 4}", "at most 3 completions are kept"),
    ],
)
def test_a_mistake_in_what_is_chosen_is_named(preset: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        train_config(merge(base(preset=preset), parse_overrides([override])))
    assert message in str(error.value)


def test_likelihood_of_a_fixed_choice_may_be_climbed_by_several_steps() -> None:
    for choice in ("{keep: 1}", "{keep: 4, min_score: 0.5}"):
        overrides = [f"algorithm.advantage={choice}", "batch={epochs: 2, minibatches: 4}"]
        config = train_config(merge(base(preset="rejection_sampling"), parse_overrides(overrides)))
        assert config.batch.epochs * config.batch.minibatches == 8


SIZED = {"a2c": 1, "reinforce": 1, "remax": 1, "online_dpo": 2, "rejection_sampling": 8}


@pytest.mark.parametrize("name", SIZED)
def test_a_preset_brings_its_sizes_where_it_is_named(name: str, tmp_path: Path) -> None:
    """Over the defaults; over a file of another preset from the command line; under the settings named beside it."""
    file = {"data": {"prompts": {"path": "p"}}, **{key: base()[key] for key in ("policy", "reward")}}
    alone = train_config({**file, "algorithm": {"preset": name}})
    ppo = tmp_path / "ppo.yaml"
    sizes = {"sampling": {"completions_per_prompt": 1}, "batch": {"epochs": 4, "minibatches": 2}}
    ppo.write_text(yaml.safe_dump({**file, "algorithm": {"preset": "ppo"}, **sizes}))
    over = load_train(ppo, [f"algorithm.preset={name}"])
    for config in (alone, over):
        assert (config.batch.epochs, config.batch.minibatches) == (1, 1)
        assert config.sampling.completions_per_prompt == SIZED[name]
    assert load_any(ppo, [f"algorithm.preset={name}"]) == over
    changed = load_train(ppo, [f"algorithm.preset={name}", "sampling.completions_per_prompt=3"])
    assert changed.sampling.completions_per_prompt == 3
    assert load_train(ppo, ["algorithm.preset=ppo"]).batch.epochs == 4


GROUPED = ("rloo", "grpo", "dr_grpo", "dapo", "cispo", "gspo")


@pytest.mark.parametrize("name", GROUPED)
def test_a_preset_with_groups_brings_one_of_eight_unless_there_is_a_group(name: str) -> None:
    def size(*overrides: str) -> int:
        return load_train(ROOT / "configs" / "ppo.yaml", overrides).sampling.completions_per_prompt

    preset = f"algorithm.preset={name}"
    assert (size(), size(preset), size(preset, "sampling.completions_per_prompt=4")) == (1, 8, 4)
    file = merge(base(), {"sampling": {"completions_per_prompt": 16}})
    over = train_config(merge_overrides(file, {"algorithm": {"preset": name}}))
    assert over.sampling.completions_per_prompt == 16


def test_the_presets_that_bring_a_group_are_those_that_need_one() -> None:
    needing = {name for name, preset in PRESETS.items() if get_setting(preset, "algorithm.advantage.type") == "group"}
    assert needing == set(GROUPED)


UNPENALIZED = ("dr_grpo", "dapo", "cispo", "gspo", "rejection_sampling")


@pytest.mark.parametrize("name", UNPENALIZED)
def test_a_key_of_the_penalty_does_not_turn_it_on_in_a_preset_without_one(name: str) -> None:
    def kl(*overrides: str) -> Kl:
        algorithm = train_config(merge(base(preset=name), parse_overrides(overrides))).algorithm
        assert isinstance(algorithm, Online)
        return algorithm.kl

    assert kl() == kl("algorithm.kl.estimator=k1") == kl("algorithm.kl.coef=0") == Kl(placement="none", coef=0.0)
    assert kl("algorithm.kl.coef=0.1", "algorithm.kl.placement=reward") == Kl(placement="reward", coef=0.1)
    assert kl("algorithm.kl.placement=reward") == Kl(placement="reward", coef=0.05)  # the section's own coefficient
    with pytest.raises(ConfigError, match=f"algorithm.kl.coef: algorithm.preset={name} has no KL penalty"):
        kl("algorithm.kl.coef=0.1")


def test_a_penalty_that_a_user_turns_off_may_keep_its_coefficient() -> None:
    config = train_config(merge(base(preset="grpo"), parse_overrides(["algorithm.kl.placement=none"])))
    assert isinstance(config.algorithm, Online)
    assert (config.algorithm.kl.placement, config.algorithm.kl.coef) == ("none", 0.04)
    assert not [note for note in unread_warnings(config) if note.startswith("algorithm.kl")]


def test_the_file_that_names_a_preset_goes_before_its_sizes() -> None:
    config = train_config(merge(base(preset="online_dpo"), {"batch": {"epochs": 2}}))
    assert (config.batch.epochs, config.sampling.completions_per_prompt) == (2, 4)


def test_a_mistake_of_a_whole_algorithm_is_under_the_key_that_a_user_writes() -> None:
    with pytest.raises(ConfigError) as error:
        train_config(merge(base(preset="online_dpo"), parse_overrides(["algorithm.kl.placement=reward"])))
    assert str(error.value).startswith("algorithm: a pair loss reads no KL penalty")


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        train_config(merge(base(), parse_overrides(["policy.learning_rate=1", "sampling.temperature=-1"])))
    assert len(str(error.value).splitlines()) == 2


def test_a_group_baseline_needs_a_group() -> None:
    with pytest.raises(ConfigError, match="completions_per_prompt >= 2"):
        train_config(merge(base(preset="grpo"), {"sampling": {"completions_per_prompt": 1}}))


def test_merge_is_deep_but_another_tag_replaces_the_section() -> None:
    file = {"algorithm": {"preset": "ppo", "advantage": {"gae_lambda": 0.9}}, "policy": {"lr": 1, "model": "a"}}
    assert merge(file, {"policy": {"lr": 2}})["policy"] == {"lr": 2, "model": "a"}
    assert merge(file, {"algorithm": {"preset": "grpo"}})["algorithm"] == {"preset": "grpo"}
    assert merge(file, {"algorithm": {"preset": "ppo"}}) == file


def test_precedence_is_preset_then_file_then_command_line() -> None:
    file = base(preset="ppo", kl={"coef": 0.2})
    assert _online(train_config(base())).kl.coef == 0.05
    assert _online(train_config(file)).kl.coef == 0.2
    assert _online(train_config(merge(file, parse_overrides(["algorithm.kl.coef=0.3"])))).kl.coef == 0.3


def test_presets_are_what_they_say() -> None:
    ppo, grpo, penalty = (_online(train_config(base(preset=name))) for name in ("ppo", "grpo", "ppo_penalty"))
    assert isinstance(ppo.advantage, Gae)
    assert (ppo.advantage.gamma, ppo.advantage.gae_lambda) == (1.0, 1.0)
    assert isinstance(grpo.advantage, Group)
    assert grpo.kl.estimator == "k3"
    assert isinstance(penalty.policy_loss, PenaltyLoss)


def test_an_adaptive_controller_from_the_command_line() -> None:
    overrides = ["algorithm.kl.controller.type=adaptive", "algorithm.kl.controller.target=3"]
    controller = _online(train_config(merge(base(), parse_overrides(overrides)))).kl.controller
    assert isinstance(controller, AdaptiveKl)
    assert controller.target == 3.0


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        ("grpo", {"critic": {"lr": 1.0}}, "critic is set, but advantage.type=group has no critic"),
        ("ppo", {}, "data.sft is set, but algorithm.ptx_coef is 0"),
        ("sft", {"critic": {"lr": 1.0}}, "critic is set, but an offline algorithm does not read it"),
        ("sft", {"batch": {"epochs": 3}}, "batch.epochs is set, but an offline algorithm"),
        ("sft", {"reference": {"model": "r"}}, "reference is set, but sft has no reference"),
        ("sft", {}, "data.preferences is set, but sft does not read it"),
        ("simpo", {"reference": {"model": "r"}}, "reference is set, but simpo has no reference"),
        ("dpo", {}, "data.sft is set, but dpo does not read it"),
        ("online_dpo", {}, "data.preferences is set, but an online algorithm does not read it"),
        ("online_dpo", {"algorithm": {"kl": {"placement": "none", "coef": 0.1}}}, "algorithm.kl is set, but the beta"),
        (
            "dapo",
            {"algorithm": {"kl": {"placement": "none", "coef": 0.1}}},
            "algorithm.kl.coef is set, but algorithm.kl",
        ),
        ("rejection_sampling", {"critic": {"lr": 1.0}}, "critic is set, but advantage.type=best has no critic"),
        ("cdpo", {"data": {"eval_prompts": {"path": "e"}}}, "data.eval_prompts is set, but eval.source, the judge"),
        ("online_dpo", {"sampling": {"correction": "token_mask"}}, "sampling.correction is set, but policy_loss.type"),
        (
            "distill",
            {"teacher": {"model": "t"}, "sampling": {"correction": "token_mask"}},
            "sampling.correction is set, but policy_loss.type=distill reads no advantages",
        ),
        ("distill", {"teacher": {"model": "t"}, "overlap": {"ahead": True, "ratio_cap": 3.0}}, "overlap.ratio_cap is"),
        ("ppo", {"overlap": {"ratio_cap": 3.0}}, "overlap.ratio_cap is set, but overlap.ahead is false"),
        (
            "ppo",
            {"algorithm": {"target_kl": 0.02}, "batch": {"epochs": 1}},
            "algorithm.target_kl is set, but a step has one update",
        ),
        ("ppo", {"reward": {"shaping": {"overlong_penalty": 2.0}}}, "reward.shaping.overlong_penalty is set, but "),
        (
            "opd",
            {"teacher": {"model": "t", "dtype": "float64"}, "batch": {"epochs": 1}},
            "teacher.dtype is set, but the teacher is the reference",
        ),
    ],
)
def test_a_section_that_nothing_reads_is_named(algorithm: str, changes: dict[str, Any], expected: str) -> None:
    notes = unread_warnings(train_config(merge(base(preset=algorithm), changes)))
    assert any(note.startswith(expected) for note in notes), notes


@pytest.mark.parametrize(
    "change,expected",
    [
        ({"algorithm": "grpo"}, "algorithm: is a section, not 'grpo': set algorithm.preset=grpo"),
        ({"algorithm": [1]}, "algorithm: is a section, not [1]: set algorithm."),
        ({"policy": "model"}, "policy: is a section, not 'model': set policy.model=model"),
        ({"data": "p.jsonl"}, "data: is a section, not 'p.jsonl': set data.prompts.path=p.jsonl"),
        ({"data": [1]}, "data: is a section, not [1]: set data.prompts.path=PATH"),
        ({"policy": 3}, "policy: is a section, not 3: set policy.model=MODEL"),
        ({"schedule": 10}, "schedule: is a section, not 10: set schedule.KEY=VALUE"),
        ({"reward": "vader"}, "reward: is a section, not 'vader': set reward.source=vader"),
        ({"teacher": "m"}, "teacher: is a section, not 'm': set teacher.model=m"),
        ({"reward": {"source": "a"}}, "reward.source: is a section, not 'a': set reward.source.type=TYPE, one of "),
        ({"critic": None}, "critic: is a section, which cannot be null: leave it out for its defaults"),
    ],
)
def test_a_value_in_place_of_a_section_is_told_with_the_key_that_it_is_for(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        train_config({**base(), **change})
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "environment,sampling", [({"max_turns": 1}, {}), ({}, {"backend": "hf"}), ({}, {"backend": "fast"})]
)
def test_a_prefix_cache_that_nothing_reads_is_named(environment: dict[str, Any], sampling: dict[str, Any]) -> None:
    tree = base(preset="grpo")
    del tree["reward"]
    tree["environment"] = {"target": "guess_number.py:GuessNumber", "prefix_cache": True, **environment}
    notes = unread_warnings(train_config(merge(tree, {"sampling": sampling})))
    is_named = any(note.startswith("environment.prefix_cache is set, but") for note in notes)
    assert is_named == (environment == {"max_turns": 1} or sampling == {"backend": "hf"})


def test_a_cap_a_target_and_a_penalty_that_act_are_not_named() -> None:
    changes = {
        "overlap": {"ahead": True, "ratio_cap": 3.0},
        "algorithm": {"target_kl": 0.02},
        "batch": {"epochs": 2},
        "reward": {"shaping": {"overlong_penalty": 2.0, "overlong_buffer": 4}},
    }
    named = [note.split(" is set")[0] for note in unread_warnings(train_config(merge(base(), changes)))]
    assert not {"overlap.ratio_cap", "algorithm.target_kl", "reward.shaping.overlong_penalty"} & {*named}


def test_what_weights_advantages_and_a_teacher_s_own_dtype_are_read() -> None:
    grpo = {"sampling": {"correction": "token_mask", "completions_per_prompt": 2}}
    distill = {"teacher": {"model": "t", "dtype": "float64"}}
    for preset, changes in (("grpo", grpo), ("distill", distill)):
        notes = unread_warnings(train_config(merge(base(preset=preset), changes)))
        assert not [note for note in notes if note.startswith(("sampling", "overlap", "teacher"))]


def test_a_teacher_in_place_of_the_reference_has_weights_of_its_own_beside_adapters() -> None:
    changes = {"policy": {"lora": {"r": 2}}, "reference": {"weights": "bfloat16"}, "batch": {"epochs": 1}}
    opd = train_config(merge(base(preset="opd"), {**changes, "teacher": {"model": "t"}}))
    assert opd.reference.weights == "bfloat16"
    with pytest.raises(ConfigError, match="the reference is the policy without its adapter"):
        train_config(merge(base(preset="grpo"), changes))


JUDGED = {"data": {"eval_prompts": {"path": "e"}}, "eval": {"source": {"type": "model", "path": "judge"}}}


@pytest.mark.parametrize(
    ("preset", "changes"), [("dpo", {}), ("kto", {}), ("simpo", JUDGED), ("sft", JUDGED), ("ipo", JUDGED)]
)
def test_a_reference_that_has_a_part_is_not_warned_of(preset: str, changes: dict[str, Any]) -> None:
    config = train_config(merge(merge(base(preset=preset), {"reference": {"model": "r"}}), changes))
    assert not [note for note in unread_warnings(config) if note.startswith(("reference", "data.eval_prompts"))]


@pytest.mark.parametrize(
    ("preset", "override", "message"),
    [
        ("dpo", "algorithm.loss.label_smoothing=0.5", "algorithm.loss.label_smoothing: Input should be less than 0.5"),
        ("robust_dpo", "algorithm.loss.label_smoothing=0.7", "should be less than 0.5"),
        ("dpo", "algorithm.loss.beta=0", "algorithm.loss.beta: Input should be greater than 0"),
        ("ipo", "algorithm.loss.normalize=sum", "algorithm.loss.normalize"),
        ("simpo", "algorithm.loss.gama=1", "algorithm.loss.gama: unknown key; did you mean gamma?"),
        ("orpo", "algorithm.loss.beta=1", "algorithm.loss.beta: unknown key; here it is called coef"),
        ("kto", "algorithm.loss={desirable_weight: 0, undesirable_weight: 0}", "nothing would be learned"),
        ("kto", "batch.prompts_per_step=1", "batch.prompts_per_step must be >= 2"),
        ("dpo", "data.preferences=null", "data.preferences is missing: dpo needs pairs"),
        ("sft", "data.sft=null", "data.sft is missing: SFT needs texts"),
        ("dpo", "algorithm.loss.type=dppo", "algorithm.loss.type: 'dppo' is not one of"),
    ],
)
def test_a_mistake_in_an_offline_loss_is_named(preset: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        train_config(merge(base(preset=preset), parse_overrides([override])))
    assert message in str(error.value)


def test_a_run_folder_is_a_configuration_file(tmp_path: Path) -> None:
    config = train_config(base())
    written = {**dump(config), "versions": {"torch": "x"}, "git_commit": None}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert load_train(tmp_path) == config


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_what_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_train(file)


def test_a_missing_file_names_its_neighbor(tmp_path: Path) -> None:
    (tmp_path / "ppo.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean .*ppo\.yaml"):
        load_train(tmp_path / "pppo.yaml")


def test_every_field_has_a_description() -> None:
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections_below(TrainSections, OnlineConfig, OfflineConfig, RewardModelConfig, CompareConfig)
        for name in section.model_fields
        if not description(section, name) and name != "type"
    ]
    assert undocumented == []


def test_expanding_leaves_an_explicit_algorithm_alone() -> None:
    tree = {"algorithm": {"advantage": {"type": "gae"}, "value_loss": {}}}
    assert expand_preset(tree) == tree


def _online(config: TrainConfig) -> Online:
    assert isinstance(config, OnlineConfig)
    return config.algorithm


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty: write sections"),
        ("- run", "must hold sections .*, not a list"),
        ("run: !!timestamp 2001-99-99", "not valid YAML"),
        ("run: !!int ''", "not valid YAML"),
        ("run: &a [*a]", "Circular"),
        ("run: " + "[" * 2000 + "]" * 2000, "nested too deep"),
        ("arms: {a: !!binary gA==}", "bytes"),
        ("arms: {? [a] : 1}", "unhashable"),
        ("run:\n  seed: 1\nrun: {name: a}", r"'run' is there twice.*\n.*c\.yaml.*line 3, column 1"),
        ("policy: {lr: 1e-6, lr: 1e-5}", "'lr' is there twice"),
        ('arms: {a: "\\ud800"}', "not valid YAML"),
        ("algorithm: {preset: [ppo]}", "is not one of"),
    ],
)  # fmt: skip
def test_odd_yaml_is_one_plain_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_any(tmp_path / "c.yaml")


def test_a_short_form_is_a_section_to_what_goes_over_it() -> None:
    """Otherwise a setting of the section would drop the setting of the short form."""
    reward = {"model": {"model": "m"}, "data": {"preferences": {"path": "p"}}, "ensemble": 4}
    tree = merge_overrides(reward, parse_overrides(["ensemble.backbone=separate"]))
    assert validate(RewardModelConfig, tree).ensemble.size == 4
    corrected = base(preset="grpo") | {"sampling": {"completions_per_prompt": 4, "correction": "token_truncate"}}
    tree = merge_overrides(corrected, parse_overrides(["sampling.correction.cap=3"]))
    assert dump(train_config(tree))["sampling"]["correction"] == {"type": "token_truncate", "cap": 3.0}
    tree = merge_overrides(tree, parse_overrides(["sampling.correction=token_mask"]))
    assert dump(train_config(tree))["sampling"]["correction"]["type"] == "token_mask"


@pytest.mark.parametrize(
    "override, message",
    [
        ("algorithm.advantage=gae", "algorithm.advantage: is a section, not 'gae': set algorithm.advantage.type=gae"),
        ("reward.source=null", "reward.source: is a section, which cannot be null: set its type, one of "),
        ("sampling.correction={cap: 3}", "sampling.correction: set its type, one of "),
        ("policy.betas=[0.9, 1.5]", "policy.betas.1: Input should be less than 1"),
    ],
)
def test_a_section_without_its_type_and_a_decay_rate_above_1_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        train_config(merge_overrides(base(preset="ppo"), parse_overrides([override])))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change, is_unread",
    [
        ({"prompts": {"path": "p", "stream": True}}, True),
        ({"prompts": {"sources": {"a": {"path": "p"}, "b": {"path": "q"}}}}, True),
        ({"prompts": {"path": "p", "part": [0, 0.5]}}, True),
        ({"prompts": {"path": "p", "stream": True}, "eval_prompts": {"path": "e"}}, False),
        ({"prompts": {"path": "p"}}, False),
    ],
)
def test_rows_that_are_not_held_out_are_told(change: dict[str, Any], is_unread: bool) -> None:
    config = train_config(base(preset="ppo") | {"data": change | {"holdout": 0.1}})
    notes = [note for note in unread_warnings(config) if note.startswith("data.holdout is set, but data.prompts is")]
    assert len(notes) == is_unread
    again = train_config(dump(config))
    assert unread_warnings(again) == unread_warnings(config)


def test_a_date_is_text_and_so_the_same_when_it_is_read_again() -> None:
    """A reward function got a date in the first run, and its text from the run folder's config.yaml."""
    assert parse_yaml("2000-01-01") == "2000-01-01"
    source = {"type": "function", "target": "m:f", "kwargs": {}}
    tree = base(preset="grpo") | {"reward": {"source": source}, "batch": {}}
    override = "reward.source.kwargs.since=2000-01-01"
    config = train_config(merge(tree, parse_overrides([override])))
    assert validate(type(config), dump(config)) == config
    with pytest.raises(InvalidYaml, match="type date"):
        parse_yaml("!!timestamp 2000-01-01")


def test_a_merged_mapping_may_have_the_key() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\n<<: *b\nc: {<<: *b, y: 3}"
    assert parse_yaml(text) == {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}, "x": 1, "y": 2}


def test_keys_are_text_at_every_depth(tmp_path: Path) -> None:
    assert parse_yaml("a: [{16: {}}, {true: {null: 1.5}}]") == {"a": [{"16": {}}, {"True": {"None": 1.5}}]}
    with pytest.raises(InvalidYaml, match="twice"):
        parse_yaml("a: {1: x, '1': y}")
    file = tmp_path / "job.yaml"
    file.write_text("batch: {16: {}}\n")
    with pytest.raises(ConfigError, match=r"batch\.16"):
        load_train(file)


def write(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(
    ("in_file", "overrides", "steps", "epochs"),
    [
        ({"epochs": 2}, ["schedule.steps=60"], 60, None),
        ({"steps": 10}, ["schedule.epochs=3"], None, 3.0),
        ({"steps": 10}, ["schedule.epochs=3", "schedule.steps=4"], 4, None),
        ({"steps": 10}, ["schedule={epochs: 3}", "schedule.decay=linear"], None, 3.0),
        ({"steps": 10, "epochs": None}, ["schedule.epochs=3", "schedule.steps=null"], None, 3.0),
    ],
)
def test_of_two_lengths_the_last_one_counts(
    tmp_path: Path, in_file: dict[str, Any], overrides: list[str], steps: int | None, epochs: float | None
) -> None:
    path = write(tmp_path, base() | {"schedule": {**in_file, "warmup_steps": 7}})
    for load in (load_train, load_any):
        config = load(path, overrides)
        assert isinstance(config, TrainConfig)
        assert (config.schedule.steps, config.schedule.epochs, config.schedule.warmup_steps) == (steps, epochs, 7)
    model = {"model": {"model": "m"}, "data": {"preferences": {"path": "p"}}, "schedule": in_file}
    length = load_reward_model(write(tmp_path, model), overrides).schedule
    assert (length.steps, length.epochs) == (steps, epochs)


@pytest.mark.parametrize("overrides", [[], ["schedule={steps: 3, epochs: 4}"], ["schedule.steps=null"]])
def test_two_lengths_or_none_in_one_place_are_an_error(tmp_path: Path, overrides: list[str]) -> None:
    both = {"steps": 3} if overrides else {"steps": 3, "epochs": 4}
    with pytest.raises(ConfigError, match=r"give schedule\.steps or schedule\.epochs"):
        load_train(write(tmp_path, base() | {"schedule": both}), overrides)


def test_of_a_path_and_sources_the_last_one_counts(tmp_path: Path) -> None:
    mixture = "data.prompts.sources={a: {path: a.jsonl}, b: {path: b.jsonl}}"
    config = load_train(write(tmp_path, merge(base(), {"data": {"prompts": {"path": "p.jsonl"}}})), [mixture])
    assert isinstance(config, OnlineConfig)
    assert (config.data.prompts.path, list(config.data.prompts.sources)) == ("", ["a", "b"])
    mixed = write(tmp_path, {**base(), "data": {"prompts": {"sources": {"a": {"path": "a.jsonl"}}}}})
    config = load_train(mixed, ["data.prompts.path=p.jsonl"])
    assert isinstance(config, OnlineConfig)
    assert (config.data.prompts.path, config.data.prompts.sources) == ("p.jsonl", {})
    both = {"path": "p.jsonl", "sources": {"a": {"path": "a.jsonl"}}}
    with pytest.raises(ConfigError, match="has both path and sources"):
        load_train(write(tmp_path, {**base(), "data": {"prompts": both}}))


def test_of_two_budgets_the_last_one_counts(tmp_path: Path) -> None:
    tree = {"base": "b.yaml", "arms": {"a": {}}, "budget": {"completions": 10}}
    path = write(tmp_path, tree)
    assert load_compare(path).budget.limit == 10
    for overrides in (["budget.seconds=60"], ["budget.flops=1", "budget.seconds=60"]):
        config = load_compare(path, overrides)
        assert (config.budget.unit, config.budget.limit, load_any(path, overrides)) == ("seconds", 60.0, config)
    with pytest.raises(ConfigError, match="exactly one of budget"):
        load_compare(write(tmp_path, tree | {"budget": {"completions": 10, "tokens": 10}}))


@pytest.mark.parametrize(
    ("in_file", "override", "key", "value"),
    [
        ({"sharding": {"mode": "zero2", "deepspeed": {"a": 1}}}, "sharding=ddp", "sharding.deepspeed", {}),
        ({"sharding": {"mode": "zero2", "deepspeed": {"a": 1}}}, "sharding=zero3", "sharding.deepspeed", {"a": 1}),
        ({"sharding": {"mode": "zero3_offload", "cpu_adam": True}}, "sharding=zero3", "sharding.cpu_adam", False),
        ({"critic": {"init": "reward", "warmup_steps": 3}}, "critic.shared=true", "critic.init", "auto"),
        ({"critic": {"init": "reward", "warmup_steps": 3}}, "critic.shared=false", "critic.warmup_steps", 3),
        ({}, "algorithm.advantage.type=group", "algorithm.value_loss", None),
        ({"algorithm": {"preset": "grpo"}}, "algorithm.advantage.type=gae", "algorithm.value_loss.coef", 0.1),
        (
            {"algorithm": {"preset": "ppo", "value_loss": {"coef": 1.0}}},
            "algorithm.advantage.type=group",
            "algorithm.value_loss",
            None,
        ),
    ],
)
def test_a_choice_on_the_command_line_leaves_out_what_it_excludes(
    tmp_path: Path, in_file: dict[str, Any], override: str, key: str, value: object
) -> None:
    config = load_train(write(tmp_path, base() | in_file), [override])
    assert get_setting(dump(config), key) == value


def test_what_is_said_beside_the_choice_that_excludes_it_stays_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, base())
    with pytest.raises(ConfigError, match="init must then be policy or auto"):
        load_train(path, ["critic.init=reward", "critic.shared=true"])
    with pytest.raises(ConfigError, match="does not use DeepSpeed"):
        load_train(path, ["sharding.deepspeed.a=1", "sharding=ddp"])


FUNCTION = {"source": {"type": "function", "target": "m:f"}}


@pytest.mark.parametrize("file", [None, "configs/ppo.yaml"])
@pytest.mark.parametrize("preset", ["grpo", "rloo", "reinforce_pp", "dpo", "sft"])
def test_a_preset_leaves_out_the_sections_of_the_file_that_it_does_not_read(
    tmp_path: Path, preset: str, file: str | None
) -> None:
    tree = base() | {"critic": {"init": "reward", "lr": 1.0, "optimizer": "adamw_8bit"}, "sharding": "zero1"}
    path = write(tmp_path, tree) if file is None else ROOT / file
    overrides = [f"algorithm.preset={preset}", "data.sft.path=s", "data.preferences.path=p"]
    overrides += ["sampling.completions_per_prompt=4"]
    if preset in ("grpo", "rloo", "reinforce_pp"):
        overrides += ["reward.source={type: function, target: m:f}"]  # from which a critic could not start
    for load in (load_train, load_any):
        config = load(path, overrides)
        assert isinstance(config, TrainConfig)
        assert config.critic == CriticConfig()
        named = {note.split(" is set")[0] for note in unread_warnings(config)}
        assert named == {"grpo": {"data.sft", "data.preferences"}, "dpo": {"data.sft"}}.get(
            preset, {"data.preferences"} if preset == "sft" else {"data.sft", "data.preferences"}
        )


def test_a_section_said_beside_a_preset_that_does_not_read_it_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, base() | {"reward": FUNCTION, "critic": {"init": "reward"}, "algorithm": {"preset": "grpo"}})
    for overrides in (["algorithm.preset=rloo", "critic.lr=1e-3"], ["policy.lr=1"], ["algorithm.preset=grpo"]):
        notes = unread_warnings(load_train(path, overrides))
        assert "critic is set, but advantage.type=group has no critic: it has no effect" in notes, overrides
    quiet = unread_warnings(load_train(path, ["algorithm.preset=rloo"]))
    assert quiet == []


@pytest.mark.parametrize("preset", ["grpo", "ppo", "sft", "dpo", "simpo", "online_dpo"])
def test_the_defaults_that_a_run_folder_spells_out_are_no_sections_that_were_set(tmp_path: Path, preset: str) -> None:
    tree = base(preset=preset)
    tree["data"] = {"prompts": tree["data"]["prompts"]} if preset in ("grpo", "ppo", "online_dpo") else tree["data"]
    config = train_config(tree)
    again = load_train(write(tmp_path, dump(config)))
    assert unread_warnings(again) == unread_warnings(config)
    reward_model = validate(RewardModelConfig, {"model": {"model": "m"}, "data": {"preferences": {"path": "p"}}})
    assert unread_warnings(validate(RewardModelConfig, dump(reward_model))) == []


SMALL, LARGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    "model, preset, rate, critic",
    [
        (SMALL, "ppo", 2e-5, 1e-4),
        (SMALL, "grpo", 2e-5, 5e-6),  # which has no critic
        (LARGE, "ppo", 1e-6, 5e-6),
        ("m", "ppo", 1e-6, 5e-6),  # of unknown size
        (SMALL, "trpo", 1e-6, 5e-6),  # the bound sets the length of its step
        (SMALL, "sft", 1e-6, 5e-6),
        (SMALL, "dpo", 1e-6, 5e-6),
    ],
)
def test_an_online_run_of_a_small_model_learns_with_no_key_but_its_preset(
    model: str, preset: str, rate: float, critic: float
) -> None:
    tree = merge(base(preset=preset), {"policy": {"model": model}, "batch": {"epochs": 1}})
    config = train_config(tree)
    assert (config.policy.lr, config.critic.lr) == (rate, critic)
    assert train_config(merge(tree, {"policy": {"lr": 3e-6}})).policy.lr == 3e-6
    assert dump(train_config(dump(config))) == dump(config)


def test_adapters_get_ten_times_the_rate_and_a_model_in_memory_is_counted() -> None:
    adapters = merge(base(preset="grpo"), {"policy": {"model": SMALL, "lora": {"r": 16}}})
    assert train_config(adapters).policy.lr == 2e-4
    sizes = {5e7: 2e-5, 2.9e8: 2e-5, 4.9e7: 1e-6, 3e8: 1e-6}
    rates = {size: train_config(base(preset="ppo"), parameters=size).policy.lr for size in sizes}
    assert rates == sizes
    assert train_config(base(preset="ppo"), trains=False, parameters=1e8).policy.lr == 1e-6


def test_a_type_replaces_a_section_that_leaves_its_type_to_the_preset() -> None:
    file = {"algorithm": {"preset": "ppo", "advantage": {"gae_lambda": 0.9, "whiten": False}}}
    named = {"type": "function", "target": "my.py:advantage"}
    other = merge_overrides(file, {"algorithm": {"advantage": named}})
    assert other["algorithm"] == {"preset": "ppo", "advantage": named}
    same = merge_overrides(file, {"algorithm": {"advantage": {"type": "gae", "whiten": True}}})
    assert same["algorithm"]["advantage"] == {"type": "gae", "gae_lambda": 0.9, "whiten": True}
    more = merge_overrides(file, {"algorithm": {"advantage": {"whiten": True}}})
    assert more["algorithm"]["advantage"] == {"gae_lambda": 0.9, "whiten": True}
    arms = merge_overrides(
        {"arms": {"ppo": {**file, "policy": {"lr": 1e-6}}, "b": file}},
        parse_overrides(["arms.ppo.algorithm.advantage={type: function, target: 'my.py:advantage'}"]),
    )
    assert arms["arms"] == {
        "ppo": {"policy": {"lr": 1e-6}, "algorithm": {"preset": "ppo", "advantage": named}},
        "b": file,
    }


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands it after `run.out_dir=`, nor in a file: the run was written into a folder called ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_train("configs/ppo.yaml", ["run.out_dir=~/runs/{algorithm}"])
    assert config.run.out_dir == str(tmp_path / "runs" / "ppo")
    compare = load_compare("configs/compare.yaml", ["out_dir=~/compare", "lab.folder=~/lab"])
    assert compare.out_dir == str(tmp_path / "compare")
    assert compare.lab is not None
    assert compare.lab.folder == str(tmp_path / "lab")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("data: {system: Be brief.}")
    assert load_chat_format("~/run").system == "Be brief."


@pytest.mark.parametrize("data", ["[1]", "3", "x"])
def test_data_that_are_no_section_are_one_plain_error(tmp_path: Path, data: str) -> None:
    (tmp_path / "config.yaml").write_text(f"data: {data}")
    with pytest.raises(ConfigError, match=r"config\.yaml: data is a section, not "):
        load_chat_format(str(tmp_path))


def test_a_file_that_cannot_be_read_is_one_plain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", deny)
    with pytest.raises(ConfigError, match=r"configs/ppo\.yaml cannot be read: Permission denied"):
        load_train("configs/ppo.yaml")


def test_a_comparison_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "compare.yaml").write_text("arms: {}\n")
    with pytest.raises(ConfigError, match=r"is a comparison: name a run of it, .*/ARM/seed-N"):
        load_run(tmp_path)
