"""Every rule, both sides; shipped files are silent; a refusal says why, and how to run the file nevertheless."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from rlhf.cli import main
from rlhf.commands.lint import run_lint, runs_of
from rlhf.config.load import load_any
from rlhf.errors import ConfigError
from rlhf.guard.alarms.kl import KlToReference
from rlhf.guard.lint import all_rules, check_settings, lint
from rlhf.guard.rule import read_facts
from rlhf.model_files import parameters_in_name
from rlhf.section import Facts

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
BILLIONS, MILLIONS, TINY, UNKNOWN = Facts(7e9), Facts(1.35e8), Facts(5e5), Facts()
FUNCTION = ["reward.source={type: function, target: 'a:b'}", "critic.init=policy"]
DISTILL = "configs/distill.yaml"
DISTILL_SFT = ["algorithm={preset: distill_sft}", "data={sft: {path: answers.jsonl}}"]
PPO, DPO, SFT, RM = "configs/ppo.yaml", "configs/dpo.yaml", "configs/sft.yaml", "configs/reward_model.yaml"
PROMPTS = ["data.eval_prompts.path=held_out.jsonl"]
BEST = ["checkpoint.best={}"]
SERVED = ["sampling.backend=server", "sampling.server.urls=[http://127.0.0.1:8001]"]
ENSEMBLE = "reward.source={type: ensemble, how: minimum, sources: [%s]}"
MEMBER = "{type: model, path: runs/reward_model}"
JUDGE = "eval.source={type: model, path: runs/%s}"
INIT = "critic.init=policy"
LAMBDA = "algorithm.advantage.gae_lambda=0.95"
ONE_TURN = ["environment.max_turns=1", "environment.max_tokens=null", "sampling.max_new_tokens=64"]
SLOW_CRITIC = ["policy.lr=2e-5", "critic.lr=5e-6"]
RULES_OVER = "reward.source={type: rules, source: %s, rules: [{type: length, max: 9}]}"
OWN_LOSS = "algorithm.policy_loss={type: function, target: 'a:b'}"
NO_KL = "algorithm.kl={coef: 0, controller: {type: fixed}}"
LAB_PPO = "configs/lab/ppo.yaml"
AGENT = "configs/agent_guess.yaml"
LAG = "configs/lab/ppo_lag.yaml"
COST = "reward={source: {type: model, path: runs/reward_model}, cost: {source: {type: model, path: runs/%s}}}"
RAISE = "guard.on_alarm=raise_kl"
SMOOTH = "algorithm.loss.label_smoothing"

# rule, file, overrides that break it, overrides that do not, facts
CASES: list[tuple[str, str, Sequence[str], Sequence[str], Facts]] = [
    ("does-not-fit", SFT, ["policy.model=Qwen/Qwen2.5-3B"], ["policy.model=Qwen/Qwen2.5-0.5B"],
     Facts(memory=24e9, device="cuda")),
    ("agent-short-actions", AGENT, ["sampling.max_new_tokens=4"], ["sampling.max_new_tokens=8"], UNKNOWN),
    ("agent-token-budget", AGENT, ["environment.max_tokens=15"], ["environment.max_tokens=16"], UNKNOWN),
    ("agent-no-deadline", AGENT, ["environment.step_timeout_s=null"], ["environment.step_timeout_s=60"], UNKNOWN),
    ("clip-zero", PPO, ["algorithm.policy_loss.clip_eps_low=0", "algorithm.policy_loss.clip_eps_high=0"],
     ["algorithm.policy_loss.clip_eps_low=0.1"], UNKNOWN),
    ("clip-never-binds", PPO, ["algorithm.policy_loss.clip_eps_low=1"],
     ["algorithm.policy_loss.clip_eps_low=0.99", "algorithm.policy_loss.clip_eps_high=1"], UNKNOWN),
    ("clip-range", PPO, ["algorithm.policy_loss.clip_eps_low=0.5"],
     ["algorithm.policy_loss.clip_eps_low=0.3"], UNKNOWN),
    ("clip-range", PPO, ["algorithm.preset=gspo", "algorithm.policy_loss.clip_eps_high=0.2"],
     ["algorithm.preset=gspo"], UNKNOWN),
    ("dual-clip", PPO, ["algorithm.policy_loss.dual_clip=1.2"], ["algorithm.policy_loss.dual_clip=3"], UNKNOWN),
    ("entropy-bonus", PPO, ["algorithm.policy_loss.entropy_coef=0.2"], ["algorithm.policy_loss.entropy_coef=0.05"],
     UNKNOWN),
    ("epochs-many-for-text", PPO, ["batch.epochs=5"], ["batch.epochs=5", "algorithm.target_kl=0.02"], UNKNOWN),
    ("epochs-beyond-ppo", PPO, ["batch.epochs=31", "algorithm.target_kl=0.02"],
     ["batch.epochs=30", "algorithm.target_kl=0.02"], UNKNOWN),
    ("target-kl", PPO, ["algorithm.target_kl=1"], ["algorithm.target_kl=0.1"], UNKNOWN),
    ("curriculum-floor", PPO, ["algorithm.curriculum={type: variance, floor: 0.001}"],
     ["algorithm.curriculum={type: variance, floor: 0.01}"], UNKNOWN),
    ("advantages-not-normalized", PPO, ["algorithm.advantage.whiten=false"],
     ["algorithm.advantage.whiten=true"], UNKNOWN),
    ("discount", PPO, ["algorithm.advantage.gamma=0.95"], ["algorithm.advantage.gamma=0.99"], UNKNOWN),
    ("gae-lambda", PPO, ["algorithm.advantage.gae_lambda=0.5"], ["algorithm.advantage.gae_lambda=0.9"], UNKNOWN),
    ("small-group", PPO, ["algorithm.preset=grpo", "sampling.completions_per_prompt=2"],
     ["algorithm.preset=rloo", "sampling.completions_per_prompt=2"], UNKNOWN),
    ("small-step", PPO, ["batch.prompts_per_step=8"], ["batch.prompts_per_step=16"], UNKNOWN),
    ("minibatch-of-one", PPO, ["batch.minibatches=128"], ["batch.minibatches=64"], UNKNOWN),
    ("uneven-minibatches", PPO, ["batch.minibatches=3"], ["batch.minibatches=4"], UNKNOWN),
    ("critic-frozen", PPO, ["critic.lr=0"], ["critic.lr=0", "policy.lr=0"], UNKNOWN),
    ("lambda-hides-the-score", PPO, [LAMBDA, *FUNCTION], [LAMBDA], UNKNOWN),  # there the critic is the reward model
    ("lambda-hides-the-score", PPO, [LAMBDA, INIT, "sampling.max_new_tokens=59"],
     [LAMBDA, INIT, "sampling.max_new_tokens=58"], UNKNOWN),
    ("lambda-hides-the-score", PPO, [LAMBDA, "critic.shared=true"], ["critic.shared=true"], UNKNOWN),
    ("lambda-hides-the-score", PPO, [LAMBDA, INIT], [LAMBDA, INIT, "reward.process={type: function, target: 'a:b'}"],
     UNKNOWN),
    ("lambda-hides-the-score", AGENT, [LAMBDA, *ONE_TURN], [LAMBDA, "sampling.max_new_tokens=64"], UNKNOWN),
    ("critic-slower-than-policy", PPO, [*SLOW_CRITIC, INIT], SLOW_CRITIC, UNKNOWN),
    ("critic-slower-than-policy", PPO, [*SLOW_CRITIC, INIT], ["policy.lr=2e-5", "critic.lr=1e-5", INIT], UNKNOWN),
    ("critic-slower-than-policy", PPO, [*SLOW_CRITIC, INIT], [*SLOW_CRITIC, INIT, "critic.shared=true"], UNKNOWN),
    ("critic-slower-than-policy", PPO, [*SLOW_CRITIC, INIT], [*SLOW_CRITIC, INIT, "policy.lora.r=16"], UNKNOWN),
    ("critic-slower-than-policy", PPO, [*SLOW_CRITIC, INIT], [*SLOW_CRITIC, INIT, "algorithm.preset=trpo"], UNKNOWN),
    ("critic-warmup-covers-the-run", PPO, ["critic.warmup_steps=500"], ["critic.warmup_steps=499"], UNKNOWN),
    ("value-loss-weight", PPO, ["critic.shared=true", "algorithm.value_loss.coef=2"], ["algorithm.value_loss.coef=2"],
     UNKNOWN),
    ("own-loss-many-updates", LAB_PPO, [OWN_LOSS, "batch.minibatches=16"], [OWN_LOSS, "batch.minibatches=8"], UNKNOWN),
    ("no-brake-on-learned-reward", PPO, ["algorithm.preset=dapo"], ["algorithm.preset=dapo", *FUNCTION[:1]], UNKNOWN),
    ("no-brake-on-learned-reward", PPO, [NO_KL], [NO_KL, *BEST], UNKNOWN),
    ("no-brake-on-learned-reward", PPO, [NO_KL, RULES_OVER % MEMBER, INIT], [NO_KL, RULES_OVER % "null", INIT],
     UNKNOWN),
    ("kl-coefficient", PPO, ["algorithm.kl.coef=2"], ["algorithm.kl.coef=0.5"], UNKNOWN),
    ("kl-estimator-in-reward", PPO, ["algorithm.kl.estimator=k3"],
     ["algorithm.kl.estimator=k3", "algorithm.kl.placement=loss"], UNKNOWN),
    ("adaptive-kl-from-zero", PPO, ["algorithm.kl.coef=0"], ["algorithm.kl={coef: 0, controller: {type: fixed}}"],
     UNKNOWN),
    ("teacher-is-start", DISTILL, ["teacher.model=runs/student"], ["teacher.model=runs/other"], UNKNOWN),
    ("teacher-is-start", DISTILL, ["algorithm.preset=opd", "teacher.model=runs/student"],
     ["algorithm.preset=opd", "teacher.model=runs/student", "reward.source={type: function, target: 'a:b'}"], UNKNOWN),
    ("teacher-template", DISTILL, ["data.chat_template=none"], ["data.chat_template=auto"], UNKNOWN),
    ("top-k-reverse-without-tail", DISTILL, ["algorithm.policy_loss={top_k: 8, tail: false}"],
     ["algorithm.policy_loss={top_k: 8, tail: false, divergence: forward}"], UNKNOWN),
    ("top-k-reverse-without-tail", DISTILL,
     [*DISTILL_SFT, "algorithm.loss={divergence: reverse, top_k: 8, tail: false}"],
     [*DISTILL_SFT, "algorithm.loss={top_k: 8, tail: false}"], UNKNOWN),
    ("adaptive-kl-target", PPO, ["algorithm.kl.controller.target=0.1"], ["algorithm.kl.controller.target=1"], UNKNOWN),
    ("adaptive-kl-horizon", PPO, ["algorithm.kl.controller.horizon=25"],
     ["algorithm.kl.controller.horizon=26"], UNKNOWN),
    ("adaptive-kl-too-slow", PPO, ["algorithm.kl.controller.horizon=1000000"],
     ["algorithm.kl.controller.horizon=100000"], UNKNOWN),
    ("kl-not-measured", PPO, ["algorithm.preset=dapo", "reference.measure=false"], ["algorithm.preset=dapo"], UNKNOWN),
    ("raise-kl-without-a-penalty", PPO, ["algorithm.preset=dapo", RAISE], [RAISE], UNKNOWN),
    ("raise-kl-without-a-penalty", DPO, [RAISE], ["guard.on_alarm=lower_lr"], UNKNOWN),
    ("raise-kl-without-a-penalty", RM, ["guard.alarms={loss-explodes: raise_kl}"], ["guard.on_alarm=stop"], UNKNOWN),
    ("temperature", PPO, ["sampling.temperature=2"], ["sampling.temperature=0.7"], UNKNOWN),
    ("temperature-mismatch", PPO, ["sampling.temperature=0.7", "algorithm.ptx_coef=1", "data.sft.path=a.jsonl"],
     ["sampling.temperature=1", "algorithm.ptx_coef=1", "data.sft.path=a.jsonl"], UNKNOWN),
    ("sampler-logprobs-in-a-narrow-clip", PPO,
     ["algorithm.preset=gspo", "policy.dtype=bfloat16", "sampling.old_log_probs=sampler"],
     ["algorithm.preset=grpo", "policy.dtype=bfloat16", "sampling.old_log_probs=sampler"], UNKNOWN),
    ("server-uncorrected", PPO, [*SERVED, "policy.dtype=bfloat16"],
     [*SERVED, "policy.dtype=bfloat16", "sampling.correction=none"], UNKNOWN),
    ("server-uncorrected", PPO, [*SERVED, "policy.dtype=bfloat16"],
     [*SERVED, "policy.dtype=bfloat16", "sampling.correction=token_mask"], UNKNOWN),
    ("server-uncorrected", PPO, [*SERVED, "policy.dtype=bfloat16"],
     [*SERVED, "policy.dtype=bfloat16", "algorithm.preset=online_dpo"], UNKNOWN),
    ("correction-cap", PPO, ["sampling.correction={type: token_truncate, cap: 1.2}"],
     ["sampling.correction={type: token_truncate, cap: 3}"], UNKNOWN),
    ("head-in-bfloat16", PPO, ["policy.dtype=bfloat16", "policy.head_dtype=model"], ["policy.dtype=bfloat16"], UNKNOWN),
    ("short-completions", PPO, ["sampling.max_new_tokens=8"], ["sampling.max_new_tokens=8", *FUNCTION], UNKNOWN),
    ("cut-off-unpunished", PPO, ["reward.shaping.missing_eos_penalty=0"],
     ["reward.shaping.missing_eos_penalty=0", "algorithm.mask_truncated=true"], UNKNOWN),
    ("penalty-on-masked-rows", PPO, ["algorithm.mask_truncated=true"],
     ["algorithm.mask_truncated=true", "reward.shaping.missing_eos_penalty=0"], UNKNOWN),
    ("clip-of-a-checked-reward", PPO, FUNCTION, [], UNKNOWN),
    ("clip-of-a-checked-reward", PPO, FUNCTION, ["reward.source={type: zero}", INIT], UNKNOWN),
    ("small-ensemble", PPO, [ENSEMBLE % ", ".join([MEMBER] * 2), "critic.init=policy"],
     [ENSEMBLE % ", ".join([MEMBER] * 3), "critic.init=policy"], UNKNOWN),
    ("judge-is-the-reward", PPO, [JUDGE % "reward_model"], [JUDGE % "judge"], UNKNOWN),
    ("cost-is-the-reward", LAG, [COST % "reward_model"], [COST % "cost_model"], UNKNOWN),
    ("multiplier-too-fast", LAG, ["algorithm.lagrange.lr=1.5"], ["algorithm.lagrange.lr=1"], UNKNOWN),
    ("multiplier-too-slow", LAG, ["algorithm.lagrange.lr=1e-3"], ["algorithm.lagrange.lr=2e-3"], UNKNOWN),
    ("best-by-the-trained-reward", PPO, BEST, [*BEST, JUDGE % "judge"], UNKNOWN),
    ("learning-rate-zero", SFT, ["policy.lr=0"], ["policy.lr=1e-5"], UNKNOWN),
    ("learning-rate-high", PPO, ["policy.lr=1e-4"], ["policy.lr=1e-5"], BILLIONS),
    ("learning-rate-high", PPO, ["policy.lr=1e-3"], ["policy.lr=1e-3"], MILLIONS),  # the other side below: tiny
    ("learning-rate-high", PPO, ["policy.lr=1e-3", "policy.lora.r=16"],
     ["policy.lr=1e-4", "policy.lora.r=16"], BILLIONS),
    ("learning-rate-high", DPO, ["policy.lr=2e-5"], ["policy.lr=5e-7"], BILLIONS),
    ("learning-rate-high", SFT, ["policy.lr=1e-3"], ["policy.lr=3e-4"], BILLIONS),
    ("learning-rate-high", RM, ["model.lr=1e-4"], ["model.lr=1e-5"], BILLIONS),
    ("learning-rate-low", PPO, ["policy.lr=1e-6"], ["policy.lr=3e-4"], TINY),
    ("learning-rate-low", PPO, ["policy.lr=1e-6"], ["policy.lr=2e-5"], MILLIONS),
    ("learning-rate-low", PPO, ["policy.lr=5e-8"], ["policy.lr=1e-6"], BILLIONS),
    ("learning-rate-low", DPO, ["policy.lr=1e-8"], ["policy.lr=5e-8"], BILLIONS),
    ("learning-rate-low", SFT, ["policy.lr=1e-6"], ["policy.lr=2e-6"], BILLIONS),  # the default is for online runs
    ("learning-rate-low", RM, ["model.lr=1e-6"], ["model.lr=2e-6"], BILLIONS),
    ("lora-scale", SFT, ["policy.lora.alpha=320"], ["policy.lora.alpha=16"], UNKNOWN),
    ("adam-epsilon", SFT, ["policy.adam_eps=1e-2"], ["policy.adam_eps=1e-8"], UNKNOWN),
    ("gradient-clip", RM, ["model.max_grad_norm=1000"], ["model.max_grad_norm=1"], UNKNOWN),
    ("weight-decay", SFT, ["policy.weight_decay=0.5"], ["policy.weight_decay=0.1"], UNKNOWN),
    ("average-is-the-start", PPO, ["policy.ema_decay=0.999"], ["policy.ema_decay=0.99"], UNKNOWN),
    ("warmup-covers-the-run", PPO, ["schedule.steps=20", "schedule.warmup_steps=20"],
     ["schedule.steps=21", "schedule.warmup_steps=20"], UNKNOWN),
    ("never-saved", PPO, ["schedule.steps=2000", "checkpoint.every=0"], ["schedule.steps=1999", "checkpoint.every=0"],
     UNKNOWN),
    ("preference-beta", DPO, ["algorithm.loss.beta=10"], ["algorithm.loss.beta=5"], UNKNOWN),
    ("preference-beta", DPO, ["algorithm.preset=simpo", "algorithm.loss.beta=0.1"],
     ["algorithm.preset=simpo"], UNKNOWN),
    ("preference-beta", DPO, ["algorithm.preset=kto", "algorithm.loss.beta=2"], ["algorithm.preset=kto"], UNKNOWN),
    ("preference-beta", PPO, ["algorithm.preset=online_dpo", "algorithm.policy_loss.loss.beta=0.001"],
     ["algorithm.preset=online_dpo"], UNKNOWN),
    ("orpo-weight", DPO, ["algorithm.preset=orpo", "algorithm.loss.coef=5"], ["algorithm.preset=orpo"], UNKNOWN),
    ("simpo-margin", DPO, ["algorithm.preset=simpo", "algorithm.loss.gamma=2.5"],
     ["algorithm.preset=simpo", "algorithm.loss.gamma=2"], UNKNOWN),
    ("label-smoothing", DPO, [f"{SMOOTH}=0.4"], [f"{SMOOTH}=0.1"], UNKNOWN),
    ("kto-one-sided", DPO, ["algorithm.preset=kto", "algorithm.loss.undesirable_weight=0"], ["algorithm.preset=kto"],
     UNKNOWN),
    ("batch-of-one", RM, ["batch.prompts_per_step=1"], ["batch.prompts_per_step=2"], UNKNOWN),
    ("no-end-to-learn", SFT, ["data.sft.too_long=truncate"], ["data.sft.too_long=skip"], UNKNOWN),
    ("pairs-many-epochs", RM, ["schedule.epochs=4"], ["schedule.epochs=3"], UNKNOWN),
    ("sft-many-epochs", SFT, ["schedule.epochs=20"], ["schedule.epochs=16"], UNKNOWN),
    ("constant-rate-many-epochs", DPO, ["schedule.epochs=3", "schedule.decay=constant"],
     ["schedule.epochs=3", "schedule.decay=cosine"], UNKNOWN),
    ("best-without-evaluation", PPO, [*BEST, "eval.every=0"], [*BEST, "eval.every=5"], UNKNOWN),
    ("best-without-held-out-rows", SFT, [*BEST, "eval.every=5", "data.holdout=null"], [*BEST, "eval.every=5"],
     UNKNOWN),
    ("held-out-is-training", PPO, ["data.eval_prompts.path=prompts.jsonl"], PROMPTS, UNKNOWN),
    ("held-out-is-training", RM, ["data.eval_preferences.path=pairs.jsonl"], [], UNKNOWN),
    ("held-out-is-training", PPO, ["data.eval_prompts.path=./prompts.jsonl"], PROMPTS, UNKNOWN),
    ("held-out-is-training", RM, ["data.preferences.sources.a.path=m.jsonl", "data.eval_preferences.path=m.jsonl"],
     ["data.preferences.sources.a.path=m.jsonl", "data.eval_preferences.path=others.jsonl"], UNKNOWN),
    ("lora-scale", RM, ["model.lora.r=1", "model.lora.alpha=100"], ["model.lora.r=1", "model.lora.alpha=2"], UNKNOWN),
    ("few-held-out-rows", PPO, [*BEST, *PROMPTS, "data.eval_prompts.limit=16"],
     [*BEST, *PROMPTS, "data.eval_prompts.limit=32"], UNKNOWN),
]  # fmt: skip


def broken(file: str, overrides: Sequence[str], facts: Facts) -> set[str]:
    config = load_any(ROOT / file, overrides)
    return {violation.rule.name for violation in lint(config, facts)}  # type: ignore[arg-type]


@pytest.mark.parametrize("rule, file, bad, good, facts", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_a_rule_is_broken_on_one_side_and_kept_on_the_other(
    rule: str, file: str, bad: Sequence[str], good: Sequence[str], facts: Facts
) -> None:
    assert rule in broken(file, bad, facts)
    other = TINY if facts is MILLIONS else facts
    assert rule not in broken(file, good, other)
    assert rule not in broken(file, [*bad, f"guard.allow=[{rule}]"], facts)


@pytest.mark.parametrize("rule, file, bad, good, facts", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_a_setting_that_a_fix_names_exists_beside_the_mistake(
    rule: str, file: str, bad: Sequence[str], good: Sequence[str], facts: Facts
) -> None:
    (fix,) = {known.fix for known in all_rules() if known.name == rule}
    settings = [word for word in re.findall(r"[a-z_.]+\.[a-z_]+=[^\s,;)]+", fix) if "RUN" not in word]
    loaded = []
    for setting in settings:
        with contextlib.suppress(ConfigError):
            loaded.append(load_any(ROOT / file, [*bad, setting]))
    assert loaded or not settings, fix


def test_every_rule_has_a_case_and_says_all_that_it_should() -> None:
    assert {rule.name for rule in all_rules()} == {case[0] for case in CASES}
    assert len({rule.name for rule in all_rules()}) == len(all_rules()) >= 50
    for rule in all_rules():
        assert all((rule.key, rule.fix, rule.source, rule.reason.endswith("."))), rule.name


def test_what_is_shipped_breaks_no_rule() -> None:
    broken = []
    for file in SHIPPED:
        facts = TINY if "lab" in file.parts else None  # the lab's models are there or not: it makes no difference
        for name, run in runs_of(file, []).items():
            broken += [f"{file.relative_to(ROOT)}: {name}: {violation}" for violation in lint(run, facts)]
    assert SHIPPED
    assert broken == []


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("Qwen/Qwen2.5-0.5B", 5e8),
        ("models/smollm2-135m-instruct", 1.35e8),
        ("../shared/models/stories260K", 2.6e5),
        ("meta-llama/Llama-3.1-8B-Instruct", 8e9),
        ("models/Llama-3-8B", 8e9),
        ("/data/models/llama_13b/", 1.3e10),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7e9),  # for a million tokens
        ("Qwen/Qwen3-30B-A3B", 3e10),
        ("microsoft/Phi-3-mini-4k-instruct", None),  # for 4,096 tokens
        ("01-ai/Yi-6B-200K", 6e9),
        ("/data/70b/smollm2-135m", 1.35e8),
        ("/tmp/run-29b", None),
        ("runs/Run29b", None),
        ("/tmp/sft-7b/model", None),
        ("runs/sft", None),
        ("gpt2", None),
    ],
)
def test_the_size_of_a_model_is_read_from_its_name(name: str, parameters: float | None) -> None:
    assert parameters_in_name(name) == parameters


def test_the_size_of_a_model_is_read_from_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model" / "model.safetensors")
    config = load_any(ROOT / PPO, [f"policy.model={tmp_path}"])
    assert read_facts(config) == Facts(17.0)  # type: ignore[arg-type]
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    assert read_facts(config) == Facts(None)  # type: ignore[arg-type]
    save_file({"a": torch.zeros(3)}, tmp_path / "model" / "more.safetensors")
    assert read_facts(config) == Facts(None)  # type: ignore[arg-type]


def test_the_name_of_a_run_says_nothing_of_its_model_and_an_adapter_is_as_large_as_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "sft-29b"
    (folder / "model").mkdir(parents=True)
    config = load_any(ROOT / PPO, [f"policy.model={folder}"])
    assert read_facts(config) == Facts(2.9e10)  # type: ignore[arg-type]  # weights of another format
    (folder / "config.yaml").touch()
    assert read_facts(config) == Facts(None)  # type: ignore[arg-type]
    assert read_facts(load_any(ROOT / PPO, [f"policy.model={folder}@best"])) == Facts(None)  # type: ignore[arg-type]
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')
    assert read_facts(config) == Facts(5e8)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["grpo", "dapo", "rloo"])
def test_the_cure_of_a_growing_kl_is_itself_no_mistake(preset: str) -> None:
    settings = [word.strip(",;") for word in KlToReference.cure.split() if "=" in word]
    config = load_any(ROOT / PPO, [f"algorithm.preset={preset}", *settings])
    about_kl = {broken.rule.name for broken in lint(config, UNKNOWN) if "algorithm.kl" in broken.rule.key}
    assert about_kl == set()


def test_a_refusal_names_rule_key_value_source_fix_and_the_way_around() -> None:
    config = load_any(ROOT / PPO, ["critic.lr=0"])
    with pytest.raises(ConfigError) as error:
        check_settings(config)  # type: ignore[arg-type]
    for text in ("critic-frozen", "critic.lr is 0", "Schulman", "Fix: remove critic.lr", "guard.allow=[critic-frozen]"):
        assert text in str(error.value)
    assert check_settings(load_any(ROOT / PPO, ["critic.lr=0", "guard.allow=[critic-frozen]"])) == []  # type: ignore[arg-type]


def test_the_share_of_the_score_is_computed() -> None:
    (violation,) = lint(load_any(ROOT / PPO, [LAMBDA, INIT]), UNKNOWN)  # type: ignore[arg-type]
    assert violation.setting == "algorithm.advantage.gae_lambda is 0.95, and 0.95 ** 128 is 0.0014"


def test_a_name_that_is_no_rule_or_no_alarm_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"guard.allow: there is no rule 'clip-rnge'; did you mean clip-range\?"):
        lint(load_any(ROOT / PPO, ["guard.allow=[clip-rnge]"]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"guard.alarms: there is no alarm 'repetitions'; did you mean repetition\?"):
        lint(load_any(ROOT / PPO, ["guard.alarms.repetitions=stop"]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no alarm 'nope'; docs/troubleshooting\.md lists every alarm"):
        lint(load_any(ROOT / PPO, ["guard.alarms.nope=stop"]))  # type: ignore[arg-type]
    assert "`kl-jump`" in (page := (ROOT / "docs" / "troubleshooting.md").read_text())
    assert "`critic-frozen`" in page


def test_the_command_prints_warnings_and_refuses_errors() -> None:
    console = Console(record=True, width=400)
    run_lint(str(ROOT / PPO), ["policy.lr=1e-6"], console)
    printed = console.export_text()
    assert f"{len(all_rules())} rules: 0 errors, 0 warnings" in printed
    assert "learning rates were not checked: the size of runs/sft is not known" in printed
    run_lint(str(ROOT / PPO), ["batch.epochs=9", "policy.model=any-135m", "policy.lr=2e-5"], console)
    printed = console.export_text()
    assert "warning  epochs-many-for-text" in printed
    assert "batch.epochs is 9. " in printed
    assert f"{len(all_rules())} rules: 0 errors, 1 warning\n" in printed
    assert "not checked" not in printed
    assert main(["lint", str(ROOT / PPO), "checkpoint.best={}", "eval.every=0"]) == 2
    assert main(["train", str(ROOT / PPO), "critic.lr=0"]) == 2


def test_a_comparison_is_refused_with_the_name_of_the_arm() -> None:
    with pytest.raises(ConfigError, match=r"arms.ppo: critic-frozen"):
        runs_of(ROOT / "configs/compare.yaml", ["arms.ppo.critic.lr=0"])
    with pytest.raises(ConfigError, match=r"arms.grpo: an alarm that stops a run"):
        runs_of(ROOT / "configs/compare.yaml", ["arms.grpo.guard.on_alarm=stop"])
