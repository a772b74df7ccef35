"""Every alarm on histories written by hand: when it goes off, when it is over, and that a healthy run has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.config.load import load_any, load_reward_model, load_train
from rlhf.config.sections import OnlineConfig
from rlhf.errors import ConfigError
from rlhf.factory.context import run_facts
from rlhf.guard.alarms.alarm import Above, all_alarms
from rlhf.guard.alarms.history import History, RunFacts
from rlhf.tracking.metrics import METRICS
from rlhf.training.health import Firing, Watch

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, float | None]
STEADY: Row = {
    "score/mean": 0.5,
    "score/std": 1.0,
    "score/disagreement": 0.2,
    "kl/old": 0.01,
    "kl/reference": 4.0,
    "kl/coef": 0.05,
    "kl/sampler_mismatch": 1e-6,
    "policy/first_ratio_deviation": 1e-6,
    "policy/clip_fraction": 0.1,
    "policy/outside_clip": 0.2,
    "policy/entropy": 2.0,
    "policy/grad_norm": 1.0,
    "critic/explained_variance": 0.5,
    "critic/value": 0.4,
    "critic/return": 0.5,
    "completion/length": 20.0,
    "completion/finished": 0.95,
    "completion/duplicates": 0.0,
    "prompt/duplicates": 0.0,
    "group/uniform": 0.1,
    "loss/sft": 2.0,
    "skipped/nonfinite": 0.0,
    "skipped/unscored": 0.0,
    "eval/score": 1.0,
    "eval/score_std": 2.0,
    "eval/proxy": 1.0,
    "eval/repetition": 0.05,
    "eval/distinct_2": 0.6,
    "eval/loss": 2.0,
    "eval/preference_loss": 0.6,
    "eval/rm_loss": 0.6,
}
STEADY_TRAINING = {name: value for name, value in STEADY.items() if not name.startswith("eval/")}
ALARMS = all_alarms()
BEFORE = 20  # steady steps before it goes wrong

# alarm, values that are wrong from step 21 on, values on the good side of the same limit
CASES: list[tuple[str, Row, Row]] = [
    ("kl-jump", {"kl/old": 1.1}, {"kl/old": 0.09}),
    ("kl-per-update", {"kl/old": 0.11}, {"kl/old": 0.1}),
    ("kl-to-reference", {"kl/reference": 10.2}, {"kl/reference": 9.9}),
    ("kl-above-target", {"kl/reference": 9.1}, {"kl/reference": 8.9}),
    ("kl-negative", {"kl/reference": -0.6}, {"kl/reference": -0.4}),
    ("clip-fraction", {"policy/clip_fraction": 0.41}, {"policy/clip_fraction": 0.4}),
    ("never-clipped", {"policy/outside_clip": 0.9e-4}, {"policy/outside_clip": 1.1e-4}),
    ("critic-explains-nothing", {"critic/explained_variance": 0.04}, {"critic/explained_variance": 0.06}),
    ("critic-worse-than-constant", {"critic/explained_variance": -0.6}, {"critic/explained_variance": -0.4}),
    ("value-offset", {"critic/value": 2.1}, {"critic/value": 1.9}),
    ("entropy-collapse", {"policy/entropy": 0.59}, {"policy/entropy": 0.61}),
    ("entropy-explosion", {"policy/entropy": 3.4}, {"policy/entropy": 3.2}),
    ("first-ratio", {"policy/first_ratio_deviation": 0.03}, {"policy/first_ratio_deviation": 0.01}),
    ("sampler-mismatch", {"kl/sampler_mismatch": 0.02}, {"kl/sampler_mismatch": 0.009}),
    ("length-grows", {"completion/length": 41.0}, {"completion/length": 39.0}),
    ("length-shrinks", {"completion/length": 7.9, "kl/reference": 1.0}, {"completion/length": 8.1}),
    ("cut-off", {"completion/finished": 0.09}, {"completion/finished": 0.11}),
    ("fewer-finish", {"completion/finished": 0.47}, {"completion/finished": 0.48}),
    ("duplicate-prompts", {"prompt/duplicates": 0.51}, {"prompt/duplicates": 0.5}),
    ("duplicate-completions", {"completion/duplicates": 0.41}, {"completion/duplicates": 0.39}),
    ("repetition", {"eval/repetition": 0.26}, {"eval/repetition": 0.24}),
    ("diversity-falls", {"eval/distinct_2": 0.29}, {"eval/distinct_2": 0.31}),
    ("proxy-against-judge", {"eval/score": 0.5, "eval/proxy": 1.1}, {"eval/score": 0.5, "eval/proxy": 0.9}),
    ("proxy-against-judge", {"eval/score": 0.5, "eval/proxy": 1.1}, {"eval/score": 0.7, "eval/proxy": 1.1}),
    ("ensemble-disagrees", {"score/disagreement": 0.51}, {"score/disagreement": 0.49}),
    ("score-falls", {"score/mean": -0.6}, {"score/mean": -0.4}),
    ("score-constant", {"score/std": 0.0}, {"score/std": 1e-5}),
    (
        "cost-above-limit",
        {"lagrange/violation": 0.1, "lagrange/at_limit": 1.0},
        {"lagrange/violation": 0.1, "lagrange/at_limit": 0.0},
    ),
    ("groups-uniform", {"group/uniform": 0.91}, {"group/uniform": 0.9}),
    ("gradient-spike", {"policy/grad_norm": 11.0}, {"policy/grad_norm": 9.0}),
    ("steps-not-finite", {"skipped/nonfinite": 1.0}, {"skipped/nonfinite": 0.0}),
    ("scores-not-finite", {"skipped/unscored": 1.0}, {"skipped/unscored": 0.0}),
    ("kl-coefficient-runaway", {"kl/coef": 1.01}, {"kl/coef": 0.99}),
    ("held-out-loss-rises", {"eval/loss": 2.11}, {"eval/loss": 2.09}),
    ("held-out-preference-loss-rises", {"eval/preference_loss": 0.67}, {"eval/preference_loss": 0.65}),
    ("held-out-pairs-rise", {"eval/rm_loss": 0.67}, {"eval/rm_loss": 0.65}),
    ("loss-explodes", {"loss/sft": 6.6}, {"loss/sft": 6.4}),
]
PATIENCE = {alarm.name: alarm.patience for alarm in ALARMS}


def firings(rows: Sequence[Row], facts: RunFacts | None = None) -> list[Firing]:
    watch = Watch(facts or RunFacts(kl_target=3.0, updates=4))
    return [firing for step, row in enumerate(rows, start=1) for firing in watch.observe(step, row)]


def history(change: Row, steps: int = 20) -> list[Row]:
    return [STEADY] * BEFORE + [{**STEADY, **change}] * steps


@pytest.mark.parametrize("name, bad, good", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_an_alarm_goes_off_after_its_patience_and_on_one_side_of_its_limit(name: str, bad: Row, good: Row) -> None:
    seen = [(firing.step, firing.since) for firing in firings(history(bad)) if firing.alarm.name == name]
    assert seen[:1] == [(BEFORE + PATIENCE[name], BEFORE + 1)]
    assert name not in {firing.alarm.name for firing in firings(history(good))}


def test_every_alarm_has_a_case_reads_known_metrics_and_says_what_it_should() -> None:
    assert {alarm.name for alarm in ALARMS} == {case[0] for case in CASES}
    assert len({alarm.name for alarm in ALARMS}) == len(ALARMS) >= 30
    for alarm in ALARMS:
        assert set(alarm.metrics) <= METRICS.keys(), alarm.name
        assert all((alarm.sees, alarm.causes, alarm.cure, alarm.source, alarm.patience >= 1)), alarm.name


def test_a_healthy_run_has_no_alarm() -> None:
    rows = [{**STEADY, "score/mean": 0.5 + step / 100, "policy/entropy": 2.0 - step / 100} for step in range(60)]
    assert firings(rows) == []
    assert firings([{}] * 60) == firings([dict.fromkeys(STEADY)] * 60) == []


def test_a_single_bad_step_is_not_enough_and_an_alarm_says_it_once() -> None:
    spike = [*[STEADY] * 5, {**STEADY, "policy/clip_fraction": 0.9}] * 4
    assert firings(spike) == []
    long = firings(history({"policy/clip_fraction": 0.9}, steps=50))
    assert [firing.step for firing in long] == [BEFORE + 3]
    assert "since step 21" in str(long[0])
    assert all(text in str(long[0]) for text in ("0.9 (limit 0.4)", "Usually: update steps", "Try: lower"))


def test_an_alarm_is_over_after_as_many_good_steps_and_may_go_off_again() -> None:
    bad: Row = {**STEADY, "policy/clip_fraction": 0.9}
    rows = [*history({}), *[bad] * 3, STEADY, STEADY, bad, *[STEADY] * 3, *[bad] * 3]
    seen = [(firing.step, firing.is_over, firing.since) for firing in firings(rows)]
    assert seen == [(43, False, 41), (49, True, 41), (52, False, 50)]


def test_a_value_that_is_not_finite_is_as_one_that_is_not_there() -> None:
    bad = {"policy/clip_fraction": 0.9}
    gaps = [
        {**STEADY, **bad},
        {**STEADY, "policy/clip_fraction": float("nan")},
        {**STEADY, "policy/clip_fraction": None},
    ]
    assert [firing.step for firing in firings(gaps * 3)] == [7]


def test_the_one_evaluation_after_training_is_enough_for_what_is_held_out() -> None:
    same_answer = [{"eval/distinct_2": 0.75}, *[STEADY_TRAINING] * 20, {**STEADY_TRAINING, "eval/distinct_2": 0.27}]
    assert firings(same_answer) == []
    seen = firings(same_answer, RunFacts(evaluates_once=True))
    assert [(firing.alarm.name, firing.step) for firing in seen] == [("diversity-falls", 22)]
    bad_step = [*history({}), {**STEADY, "policy/clip_fraction": 0.9}, STEADY]
    assert firings(bad_step, RunFacts(evaluates_once=True)) == []


def test_what_depends_on_the_run() -> None:
    ratio = history({"policy/first_ratio_deviation": 0.3, "kl/sampler_mismatch": 0.05})
    assert {firing.alarm.name for firing in firings(ratio)} == {"first-ratio", "sampler-mismatch"}
    assert firings(ratio, RunFacts(is_rounded=True)) == []
    sampled_pairs = firings(history({"policy/first_ratio_deviation": 0.3}), RunFacts(reads_ratio=False))
    assert sampled_pairs == []
    ahead = history({"kl/sampler_mismatch": 3.0})
    assert firings(ahead, RunFacts(is_ahead=True)) == []
    assert firings(history({"kl/reference": 9.1}), RunFacts()) == []  # no target, and below 0.5 a token
    unclipped = history({"policy/outside_clip": 0.0})
    assert {firing.alarm.name for firing in firings(unclipped, RunFacts(updates=2))} == {"never-clipped"}
    assert firings(unclipped, RunFacts(updates=1)) == []  # the ratio is 1 in a single update
    assert firings(history({"prompt/duplicates": 1.0}), RunFacts(repeats_prompts=True)) == []  # two rows, say
    assert firings(history({"eval/distinct_2": 0.1}), RunFacts(on_data=True)) == []  # SFT of a model that babbled


def test_a_replay_gives_the_same_state() -> None:
    rows = [*history({"policy/clip_fraction": 0.9}, steps=2), *history({"kl/old": 0.2, "policy/clip_fraction": 0.9}, 8)]
    straight = firings(rows)
    for cut in (0, 21, 22, 44, len(rows)):
        watch = Watch(RunFacts(kl_target=3.0))
        first = [firing for step, row in enumerate(rows[:cut], start=1) for firing in watch.observe(step, row)]
        rest = [firing for step, row in enumerate(rows[cut:], start=cut + 1) for firing in watch.observe(step, row)]
        assert [firing.record() for firing in first + rest] == [firing.record() for firing in straight]


def test_the_start_is_the_mean_of_the_first_values() -> None:
    past = History()
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        past.add({"policy/entropy": value, "eval/score": value})
    assert past.start("policy/entropy") is None  # not before there is something to compare
    past.add({"policy/entropy": 100.0})
    assert past.start("policy/entropy") == 3.0
    assert past.start("eval/score") == 1.0
    assert past.now("eval/score") is None
    assert past.before("policy/entropy") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert HighEntropy().read(past) is None


class HighEntropy(Above):
    """Without a name, so that no run watches for it."""

    metrics, limit, after = ("policy/entropy",), 99.0, 6


def evaluations(scores: Sequence[float | None], proxies: Sequence[float | None]) -> list[Row]:
    return [
        {"eval/score": score, "eval/score_std": 1.0, "eval/proxy": proxy, "eval/loss": score}
        for score, proxy in zip(scores, proxies, strict=True)
    ]


def test_the_best_evaluation_is_remembered_over_a_long_run() -> None:
    best_early: list[float | None] = [1.0, *[0.9] * 60, 0.75, 0.75]  # a quarter of the spread below the best
    rising: list[float | None] = [1.0, *[1.04] * 60, 1.08, 1.08]  # within a twentieth of all but the first
    judged = firings(evaluations(best_early, [1.0] * 61 + [1.1] * 2))
    assert [(firing.alarm.name, firing.step) for firing in judged] == [("proxy-against-judge", 63)]
    rows = [{"eval/loss": value} for value in rising]
    assert [(firing.alarm.name, firing.step) for firing in firings(rows)] == [("held-out-loss-rises", 63)]


def test_one_evaluation_without_the_trained_on_reward_does_not_silence_the_judge() -> None:
    rows = evaluations([1.0, 0.9, 0.5, 0.5], [1.0, None, 1.1, 1.1])
    assert [(firing.alarm.name, firing.step) for firing in firings(rows)] == [("proxy-against-judge", 4)]


def test_a_message_names_what_its_value_is() -> None:
    for change, name, text in (
        ({"kl/reference": 12.0}, "kl-to-reference", "kl/reference per token"),
        ({"critic/value": 9.0}, "value-offset", "|critic/value - critic/return|"),
        ({"completion/finished": 0.0}, "cut-off", "completion/finished"),
    ):
        on, over = [f for f in firings([*history(change), *[STEADY] * 20]) if f.alarm.name == name]
        assert on.record()["reads"] == text
        assert str(over).startswith(f"alarm over: {name}: {text} is back at ")


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        (["algorithm.preset=online_dpo", "sampling.old_log_probs=sampler"], False),
        (["algorithm.preset=online_dpo"], True),
        (["algorithm.preset=grpo", "sampling.old_log_probs=sampler"], True),
    ],
)
def test_a_pair_loss_reads_no_ratio_to_the_samplers_log_probabilities(overrides: list[str], reads: bool) -> None:
    settings = [*overrides, "sampling.completions_per_prompt=4", "policy.model=m", "reward.source.path=r"]
    config = load_any(ROOT / "configs" / "ppo.yaml", [*settings, "data.prompts.path=p"])
    assert isinstance(config, OnlineConfig)
    assert run_facts(config).reads_ratio == reads


def test_alarms_are_told_what_kind_of_run_it_is() -> None:
    settings = [
        "policy.model=m",
        "reward.source.path=r",
        "data.prompts.path=p",
        "batch.epochs=3",
        "batch.minibatches=2",
    ]
    online = run_facts(load_any(ROOT / "configs" / "ppo.yaml", settings), repeats_prompts=True)
    assert (online.updates, online.repeats_prompts, online.on_data) == (6, True, False)
    for name in ("sft", "dpo", "reward_model"):
        facts = run_facts(load_any(ROOT / "configs" / f"{name}.yaml", []))
        assert (facts.updates, facts.on_data) == (1, True)


@pytest.mark.parametrize(
    "settings, once",
    [
        (["eval.every=0"], True),
        (["eval.every=50", "schedule.steps=24"], True),
        (["eval.every=24", "schedule.steps=24"], True),
        (["eval.every=12", "schedule.steps=24"], False),
        (["eval.every=50", "schedule.steps=null", "schedule.epochs=1"], False),
    ],
)
def test_alarms_are_told_of_a_single_evaluation_after_training(settings: list[str], once: bool) -> None:
    online = ["policy.model=m", "reward.source.path=r", "data.prompts.path=p"]
    assert run_facts(load_any(ROOT / "configs" / "ppo.yaml", [*online, *settings])).evaluates_once == once
    assert run_facts(load_any(ROOT / "configs" / "reward_model.yaml", settings)).evaluates_once == once


def accepts(settings: str) -> bool:
    """Return whether a run of some preset, or the training of a reward model, takes settings."""
    for preset in ("ppo", "grpo", "rloo"):
        with suppress(ConfigError):
            load_train(ROOT / "configs" / "ppo.yaml", [f"algorithm.preset={preset}", *settings.split()])
            return True
    with suppress(ConfigError):
        load_reward_model(ROOT / "configs" / "reward_model.yaml", settings.split())
        return True
    return False


def test_every_setting_that_a_cure_names_with_a_value_is_accepted() -> None:
    given = r"\b[a-z_]+\.[a-z_.]+=[^\s,;()]+"
    advice = {words for alarm in ALARMS for words in re.findall(f"{given}(?: {given})*", alarm.cure)}
    assert len(advice) > 15
    assert [settings for settings in sorted(advice) if not accepts(settings)] == []


def test_a_held_out_loss_below_0_may_fall_further() -> None:
    """The loss of robust_dpo is negative: a tenth of its size above its smallest value is the limit."""
    name = "held-out-preference-loss-rises"

    def seen(*losses: float) -> bool:
        rows: list[Row] = [{**STEADY, "eval/preference_loss": loss} for loss in losses]
        return any(firing.alarm.name == name for firing in firings(rows))

    assert not seen(-0.816, -0.868, -0.911, -0.93, -0.95)
    assert not seen(-1.0, -0.91, -0.91, -0.91)
    assert seen(-1.0, -0.89, -0.89, -0.89)
