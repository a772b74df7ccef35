"""Numbers of README and docs equal the numbers in the files of results that they name."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.suites.questions import share_estimate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?")
SEEDS = "compare_smollm2_seeds.json"
NAMES = {"online DPO": "online_dpo", "DPO": "dpo", "PPO": "ppo", "GRPO": "grpo"}
SPEED = ("offline", "grpo", "ppo")
STEPS = {"SFT": "sft", "reward model": "reward", "DPO": "dpo_cached", "GRPO": "grpo", "PPO": "ppo"}


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def read_list(name: str) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def numbers(cell: str) -> list[str]:
    return [number.replace("−", "-") for number in NUMBER.findall(cell)]


def is_rounded(shown: str, value: float) -> bool:
    decimals = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-decimals + 1e-9 + 1e-4 * abs(value)


def wrong(shown: list[str], values: list[float]) -> list[str]:
    pairs = zip(shown, values, strict=True)
    return [f"{number}, measured {value:.5g}" for number, value in pairs if not is_rounded(number, value)]


@pytest.mark.parametrize("name", ["docs/results.md", "docs/experiments/smollm2.md"])
def test_the_comparison_on_smollm2(name: str) -> None:
    arms, seen = read(SEEDS)["arms"], set()
    for row in rows(page(name)):
        arm = NAMES.get(row[0])
        if arm is None or arm in seen or row[1][0] not in "+−":  # of another experiment
            continue
        seen.add(arm)
        gain = numbers(row[1].replace("[95 %]", ""))
        assert wrong(gain, arms[arm]["gain"]) == [], arm
        assert wrong(numbers(row[2]), [arms[arm]["kl"]]) == [], arm
    assert seen == set(NAMES.values())


def test_the_seeds_that_the_page_of_results_names() -> None:
    grpo = read(SEEDS)["arms"]["grpo"]["by_seed"]
    named = re.search(r"GRPO's two seeds disagree \((\S+) and (\S+)\)", page("docs/results.md"))
    assert named is not None
    assert wrong([n for text in named.groups() for n in numbers(text)], [gain[0] for gain in grpo]) == []
    start = re.search(r"start model \(([\d.]+) \[([\d.]+), ([\d.]+)\]", page("docs/experiments/smollm2.md"))
    assert start is not None
    assert wrong(list(start.groups()), read(SEEDS)["start"]) == []


JSON_ARMS = {
    "the start": "start",
    "PPO": "ppo",
    "GRPO": "grpo",
    "SFT on a program's answers": "sft",
    "best of 8": "best_of_n",
    "online DPO": "online_dpo",
    "rejection sampling": "rejection_sampling",
    "RLOO": "rloo",
}
ON_A_GPU = "## 4,096 completions on one GPU"
ON_A_CPU = "## 4,096 completions on a CPU"
CHEAPER_MEANS = "## GRPO by cheaper means"
JSON_TABLES = [
    ("README.md", "compare_json.json"),
    ("docs/results.md", "compare_json.json"),
    ("docs/experiments/json.md", "compare_json.json"),
    ("docs/experiments/json.md", "compare_json_4096.json"),
    ("docs/experiments/json.md", "compare_json_h100.json"),
    ("docs/experiments/json.md", "compare_json_h200.json"),
]


@pytest.mark.parametrize(("name", "file"), JSON_TABLES)
def test_the_comparison_on_json(name: str, file: str) -> None:
    results, seen = read(file), set()
    short, long = page(name).split(ON_A_GPU)[0], page(name).split(ON_A_GPU)[-1]
    cpu = short.split(ON_A_CPU)[-1].split(CHEAPER_MEANS)[0]
    for row in rows(long if "_h" in file else cpu if "_4096" in file else short.split(ON_A_CPU)[0]):
        label, _, seed = row[0].partition(", seed ")
        if JSON_ARMS.get(label) not in results or not re.fullmatch(r"\d+ \[\d+, \d+\]", row[1]):
            continue
        cells = results[JSON_ARMS[label]]
        cell = cells[seed or min(cells)]
        assert seed or len(cells) == 1, "the seed is not named"
        full = [100 * cell["full"][key] for key in ("value", "low", "high")]
        assert wrong(numbers(row[1]), full) == [], row
        assert wrong(numbers(row[2]), [100 * cell["parses"]["value"]]) == [], row
        assert wrong(numbers(row[3]), [cell["kl"]]) == [], row
        seen |= {(JSON_ARMS[label], seed or min(cells))}
    assert seen == {(arm, seed) for arm, cells in results.items() for seed in cells}


CHEAPER = {
    "all weights, on policy": "grpo",
    "LoRA of rank 16": "lora",
    "LoRA on an `nf4` base": "qlora",
    "all weights, samples two steps old": "none_2",
    "the same, weighted by `token_truncate`": "token_2",
}


def test_grpo_by_cheaper_means() -> None:
    text = page("docs/experiments/json.md").split(CHEAPER_MEANS)[1].split(ON_A_GPU)[0]
    short, long = text.split("Four times as many")
    for part, file in ((short, "compare_json_grpo.json"), (long, "compare_json_grpo_h200.json")):
        results, seen = read(file), {"start"}
        for row in rows(part):
            if (arm := CHEAPER.get(row[0])) is None:
                continue
            cell = results[arm]["0"]
            assert wrong(numbers(row[1]), [100 * cell["full"][key] for key in ("value", "low", "high")]) == [], row
            others = [100 * cell["parses"]["value"], cell["kl"], cell["peak_memory_mb"] / 1024]
            assert wrong([number for part in row[2:] for number in numbers(part)], others) == [], row
            seen.add(arm)
        assert seen == set(results)
        for name, arms in (("docs/vllm.md", ("none_2", "token_2")), ("docs/adapters.md", ("lora", "qlora"))):
            shares = {f"{100 * results[arm]['0']['full']['value']:.0f}" for arm in arms}
            assert shares <= set(re.findall(r"(\d+) %", page(name))), (name, file)


TAUGHT = {
    "`distill`": ("compare_json_distill.json", "distill"),
    "SFT on the teacher's samples": ("compare_json_distill.json", "sft_samples"),
    "the teacher, PPO": ("compare_json.json", "ppo"),
    "GRPO from the grades": ("compare_json.json", "grpo"),
    "the start": ("compare_json_distill.json", "start"),
}


def test_distillation_on_json() -> None:
    seen = set()
    for row in rows(page("docs/algorithms/distillation.md").split("On SmolLM2-135M-Instruct and")[1]):
        label, _, seed = row[0].partition(", seed ")
        if label not in TAUGHT:
            continue
        file, arm = TAUGHT[label]
        cell = read(file)[arm][seed or "0"]
        assert wrong(numbers(row[1]), [100 * cell["full"][key] for key in ("value", "low", "high")]) == [], row
        assert wrong([row[2], row[3]], [100 * cell["parses"]["value"], cell["kl"]]) == [], row
        if row[4] != "–":
            costs = cell["costs"]
            assert (int(row[4].replace(",", "")), row[5]) == (costs["completions"], f"{costs['flops']:.1e}"), row
        seen |= {(arm, seed or "0")} if file == "compare_json_distill.json" else set()
    measured = read("compare_json_distill.json")
    assert seen == {(arm, seed) for arm, cells in measured.items() for seed in cells if arm != "start" or seed == "0"}


def check_suites(section: str, file: str, columns: list[tuple[str, str]], names: dict[str, str]) -> dict[str, Any]:
    """Each row of the table is a model's figures in percent (of J the share), and each model has a row."""
    models, seen = read(file)["models"], set()
    for label, *cells in rows(section):
        if len(cells) != len(columns) or label.startswith("%"):
            continue
        model = f"{names.get(label, label.replace(' ', '_').lower())}-seed-0"
        for cell, (suite, name) in zip(cells, columns, strict=True):
            figure = models[model][suite]["figures"][name]
            scale, shown = (1, cell.replace(".", "0.")) if suite == "detox" else (100, cell)
            values = [scale * figure[key] for key in ("value", "low", "high")]
            assert cell == "–" or wrong(numbers(shown), values) == [], (label, suite)
        seen.add(model)
    assert seen == set(models)
    return dict(models)


def test_the_suites_on_the_models_of_json() -> None:
    columns = [("blimp", "accuracy"), ("harmful", "refused"), ("xstest", "refused_unsafe"), ("toxicity", "toxic")]
    section = page("docs/experiments/json.md").split("### What else")[1].split("\n## ")[0]
    models = check_suites(section, "alignment_evals.json", columns, JSON_ARMS)
    assert all(model["xstest"]["figures"]["refused_safe"]["value"] == 0 for model in models.values())


COLUMNS = [
    ("ifeval", "prompt_strict"),
    ("blimp", "accuracy"),
    ("harmful", "refused"),
    ("xstest", "refused_safe"),
    ("toxicity", "toxic"),
]


DETOX_ARMS = {
    "SFT on 800 rewrites, the start": "start",
    "GRPO, its KL in the reward": "grpo_kl_in_reward",
    "DPO, pairs of the start's samples": "dpo_sampled",
}


def test_the_suites_on_the_models_of_detox() -> None:
    section = page("docs/experiments/detox.md").split("### What else")[1].split("arms were trained once more")[0]
    models = check_suites(section, "alignment_detox.json", COLUMNS, DETOX_ARMS)
    one_line = " ".join(page("docs/experiments/detox.md").split())
    for pattern, arm, suite, name in (
        (r"instructions of (.*?) points fewer of IFEval", "grpo", "ifeval", "prompt_strict"),
        (r"and (\S+ \[[^\]]*\]) points fewer of the single", "grpo", "ifeval", "instruction_strict"),
        (r"after DPO \((.*?)\) and RLOO", "dpo", "toxicity", "toxic"),
        (r"and RLOO \((.*?)\);", "rloo", "toxicity", "toxic"),
    ):
        (told,) = re.findall(pattern, one_line)
        gain = models[f"{arm}-seed-0"][suite]["gains"][name]
        assert wrong(numbers(told), [-100 * gain[key] for key in ("value", "high", "low")]) == [], pattern


def test_the_suites_on_the_models_of_the_pairs_with_own_samples() -> None:
    columns = [
        ("gsm8k", "pass_at_1"),
        ("truthfulqa", "mc1"),
        ("persona", "matching_rate"),
        ("hh", "logprob_accuracy"),
        ("hh", "win_rate_start"),
    ]
    section = page("docs/experiments/detox.md").split("tables above leave out")[1].split("\n#")[0]
    models = check_suites(section, "alignment_detox_own.json", columns, DETOX_ARMS)
    one_line = " ".join(section.split())
    (chance,) = re.findall(r"near chance \(([\d.]+) %\)", one_line)
    assert wrong([chance], [100 * models["start-seed-0"]["truthfulqa"]["figures"]["chance_mc1"]["value"]]) == []
    arms = [models[f"{arm}-seed-0"] for arm in ("ppo", "grpo_kl_in_reward", "dpo")]
    (shares,) = re.findall(r"the questions, (.*?) % before", one_line)
    rates = [100 * model["persona"]["figures"]["yes_rate"]["value"] for model in (*arms, models["start-seed-0"])]
    assert wrong(numbers(shares), rates) == []
    for pattern, gains in (
        (r"fewer answers match: by (.*?) points", [model["persona"]["gains"]["matching_rate"] for model in arms]),
        (r"true answers, falls by (.*?) after DPO", [arms[n]["truthfulqa"]["gains"]["mc2"] for n in (0, 2)]),
    ):
        (lost,) = re.findall(pattern, one_line)
        assert wrong(numbers(lost), [-100 * gain[key] for gain in gains for key in ("value", "high", "low")]) == []
    unchanged = [model["truthfulqa"]["gains"]["mc1"] for model in arms]
    unchanged += [model["hh"]["gains"]["logprob_accuracy"] for model in arms]
    assert all(gain["low"] <= 0 <= gain["high"] for gain in unchanged)


def test_the_suites_on_the_other_models_of_detox() -> None:
    section = (
        page("docs/experiments/detox.md").split("arms were trained once more")[1].split("tables above leave out")[0]
    )
    models = check_suites(section, "alignment_detox_more.json", [("detox", "j"), *COLUMNS], DETOX_ARMS)
    one_line = " ".join(section.split())
    for pattern, arm, suite, name, scale in (
        (r"less\*\*: (.*?\]) points fewer", "online_dpo", "ifeval", "prompt_strict", -100),
        (r"and (\S+ \[[^\]]*\]) after rejection", "rejection_sampling", "ifeval", "prompt_strict", -100),
        (r"sampled pairs (\S+ \[[^\]]*\]), whose", "dpo_sampled", "ifeval", "prompt_strict", -100),
        (r"harmful requests\*\*, (.*?\]) points", "online_dpo", "harmful", "refused", -100),
        (r"J gains (.*?\]) by online", "online_dpo", "detox", "j", 1),
        (r"DPO, (\S+ \[[^\]]*\]) by DPO on", "dpo_sampled", "detox", "j", 1),
        (r"and (\S+ \[[^\]]*\]) by rejection", "rejection_sampling", "detox", "j", 1),
    ):
        (told,) = re.findall(pattern, one_line)
        gain = models[f"{arm}-seed-0"][suite]["gains"][name]
        ends = ("value", "high", "low") if scale < 0 else ("value", "low", "high")
        shown = told if scale < 0 else told.replace(".", "0.")
        assert wrong(numbers(shown), [scale * gain[key] for key in ends]) == [], pattern
    distances = [models[f"{arm}-seed-0"]["kl"] for arm in ("online_dpo", "dpo_sampled", "rejection_sampling")]
    assert wrong(["7", "10"], [min(distances), max(distances)]) == []


def test_what_the_page_says_of_json_on_a_cpu() -> None:
    text = " ".join(page("docs/experiments/json.md").split(ON_A_CPU)[1].split(CHEAPER_MEANS)[0].split())
    cells = list(read("compare_json_4096.json")["ppo"].values())
    minutes = re.search(r"first two in (\d+) and (\d+) minutes of one core", text)
    assert minutes is not None
    assert wrong(list(minutes.groups()), [cell["costs"]["seconds"] / 60 for cell in cells[:2]]) == []
    learned = re.search(r"of 128, (\d+), (\d+) and (\d+) % .*?16 steps (\d+), (\d+) and (\d+) %", text)
    assert learned is not None
    shares = [100 * cell["full_in_training"][eighth] for eighth in (3, 7) for cell in cells]
    assert wrong(list(learned.groups()), shares) == []
    told = re.search(
        r"(\.\d+), (\.\d+) and (\.\d+) of their variance .*?, (\.\d+), (\.\d+) and (\.\d+) in the first", text
    )
    assert told is not None
    assert wrong(decimals(" ".join(told.groups()[:3])), [cell["explained_variance"][1] for cell in cells]) == []
    assert wrong(decimals(" ".join(told.groups()[3:])), [cell["explained_variance"][0] for cell in cells]) == []
    share = re.search(r"the prompt alone explains (\.\d+)", text)
    assert share is not None
    (ceiling,) = read_list("critic_ceiling_json.json")
    assert wrong(decimals(share[1]), [ceiling["between prompts"]]) == []
    heads = re.search(r"explains (\.\d+) from the prompt, and (\.\d+) from the prompt and the tokens", text)
    assert heads is not None
    fitted = [ceiling[f"linear head on the policy, {seen}"] for seen in ("prompt only", "prompt and tokens so far")]
    assert wrong(decimals(" ".join(heads.groups())), fitted) == []


CRITICS = {
    "as shipped: λ 1, one epoch": "default",
    "four epochs (`critic.epochs=4`)": "epochs_4",
    "λ .95": "lambda_95",
    "λ .95, the critic's λ 1": "lambda_decoupled",
}


OTHER_CRITICS = {
    "as shipped, with AMX": "default",
    "a head on the policy (`critic.shared=true`)": "shared",
    "warm-up (`critic.warmup_steps=4`)": "warmup",
    "λ .95, with AMX": "lambda_95",
    "λ .95, the critic's λ 1, with AMX": "lambda_decoupled",
}


def check_critics(text: str, names: dict[str, str], arms: dict[str, Any]) -> None:
    """Check the rows of a table of critics, and that it has all seeds of the arms."""
    shown = set[tuple[str, str]]()
    for row in rows(text):
        name, _, seed = row[0].rpartition(", seed ")
        if name not in names:
            continue
        cell = arms[names[name]][seed]
        full = [100 * cell["full"][key] for key in ("value", "low", "high")]
        explained = [cell[key][1] for key in ("explained_variance", "explained_beyond_position")]
        assert wrong(numbers(row[1]), full) == [], row
        assert wrong([row[2], row[3]], [100 * cell["parses"]["value"], cell["kl"]]) == [], row
        assert wrong(decimals(f"{row[4]} {row[5]}".replace("−", "-")), explained) == [], row
        assert wrong([row[6]], [cell["costs"]["flops"] / 1e12]) == [], row
        shown.add((names[name], seed))
    assert shown == {(arm, seed) for arm in names.values() for seed in arms[arm]}


def test_which_critic_learns_strict_json() -> None:
    arms = read("compare_critic.json")
    text = page("docs/experiments/json.md").split("### Which critic?")[1].split("\n## ")[0]
    check_critics(text, CRITICS, arms)
    one, four, flat = arms["default"], arms["epochs_4"], " ".join(text.split())
    told_of_epochs = re.search(
        r"four times\*\*: (\d+) % right against (\d+), (\d+) % right against (\d+), (\d+) % right against (\d+)\. .*? "
        r"is (\S+) \[(\S+), (\S+)\] higher \(three seeds\), and the critic explains (\S+) to (\S+) of the returns; "
        r"with one epoch (\S+) to (\S+)\. -",
        flat.replace("−", "-"),
    )
    assert told_of_epochs is not None
    lead = arms["lead of epochs_4"]
    right = [100 * cell["full"]["value"] for seed in one for cell in (four[seed], one[seed])]
    assert lead["seeds"] == len(one) == len(four) == 3
    assert wrong(list(told_of_epochs.groups()[:6]), right) == []
    halves = [sorted(cell["explained_variance"][1] for cell in arm.values()) for arm in (four, one)]
    values = [lead["value"], lead["low"], lead["high"], *(half[end] for half in halves for end in (0, -1))]
    assert wrong(decimals(" ".join(told_of_epochs.groups()[6:])), values) == []
    flops = [four[seed]["costs"]["flops"] / one[seed]["costs"]["flops"] for seed in one]
    assert wrong(told(text, r": (\S+ to \S+) times the FLOPs\."), [min(flops), max(flops)]) == []
    assert all(13 < 32 / ratio < 18 for ratio in flops)
    as_much = [100 * cell["full_in_training"][3] for cell in four.values()]
    in_the_end = [100 * cell["full_in_training"][7] for cell in one.values()]
    shown = told(text, r"with one epoch, (.*) % of the training answers are right; with one epoch (.*) % in the last")
    assert wrong(shown, [*as_much, *in_the_end]) == []


def test_a_critic_on_the_policy_and_a_warm_up_of_the_critic() -> None:
    arms, older = read("compare_critic_amx.json"), read("compare_critic.json")["default"]
    text = page("docs/experiments/json.md").split("### Which critic?")[1].split("\n## ")[0]
    check_critics(text, OTHER_CRITICS, arms)
    default, shared, warm = arms["default"], arms["shared"], arms["warmup"]
    flat = " ".join(text.split()).replace("−", "-")

    def cells(arm: dict[str, Any], key: str) -> list[float]:
        return [cell[key] for cell in arm.values()]

    def share(arm: dict[str, Any], key: str) -> list[float]:
        return [100 * cell[key]["value"] for cell in arm.values()]

    flops = [shared[seed]["costs"]["flops"] / default[seed]["costs"]["flops"] for seed in shared]
    assert len(flops) == len(default) == arms["lead of shared"]["seeds"] == 3
    assert {f"{ratio:.1f}" for ratio in flops} == {"0.6"}
    assert "**A head on the policy costs .6 of the FLOPs" in flat
    means = [sum(share(arm, "full")) / 3 for arm in (shared, default)]
    assert wrong(told(flat, r"no difference in score\*\*: (\d+ % right on average against \d+),"), means) == []
    lead = [-arms["lead of shared"][key] for key in ("value", "high", "low")]
    behind = re.search(r"a held-out score lower by (\S+ \[\S+ \S+\])\. The interval", flat)
    assert behind is not None
    assert wrong(decimals(behind[1]), lead) == []
    peaks = [max(cells(arm, "peak_memory_mb")) / 1000 for arm in (shared, default)]
    assert wrong(told(flat, r"needs (\S+ GB at its peak in place of \S+)\. The head"), peaks) == []
    explained = sorted(cell["explained_variance"][1] for cell in shared.values())
    explains = re.search(r"The head predicts worse than a constant \((\S+ to \S+)\)\.", flat)
    assert explains is not None
    assert wrong(decimals(explains[1]), [explained[0], explained[-1]]) == []
    against = told(
        flat, r"without warm-up\. (\d+, \d+ and \d+) % of the answers are right against (\d+, \d+ and \d+)\."
    )
    assert wrong(against, [*share(warm, "full"), *share(default, "full")]) == []
    fenced = told(flat, r"keep their fence: (\d+ % have the right keys and types, and \d+) % are JSON alone")
    assert wrong(fenced, [100 * warm["1"][key]["value"] for key in ("right", "only")]) == []
    every = share(default, "full") + share(older, "full")
    assert len(every) == 6
    assert wrong(told(flat, r"the critic as shipped get (\d+ to \d+) % right\."), [min(every), max(every)]) == []


def test_lambda_one_learns_more_in_every_seed() -> None:
    here, there = read("compare_critic_amx.json"), read("compare_critic.json")
    flat = " ".join(page("docs/experiments/json.md").split("### Which critic?")[1].split("\n## ")[0].split())

    def right(arms: dict[str, Any], arm: str, seeds: str) -> list[float]:
        return [100 * arms[arm][seed]["full"]["value"] for seed in seeds]

    short, critic_alone = right(here, "lambda_95", "012"), right(here, "lambda_decoupled", "12")
    elsewhere = [right(there, arm, "0") for arm in ("lambda_95", "lambda_decoupled", "default")]
    shown = told(
        flat, r"in every seed\*\*: (.*?) % right against (.*?), and on the EPYC (\d+) against (\d+)\. The critic"
    )
    assert wrong(shown, [*short, *right(here, "default", "012"), *elsewhere[0], *elsewhere[2]]) == []
    shown = told(
        flat, r"helps too little: (.*?) % right against (.*?) in seeds 1 .*? the EPYC (\d+) against (\d+) in seed 0"
    )
    assert wrong(shown, [*critic_alone, *right(here, "default", "12"), *elsewhere[1], *elsewhere[2]]) == []
    explained = [cell["explained_variance"][1] for arms in (here, there) for cell in arms["lambda_95"].values()]
    between = re.search(r"what it explains \((\S+ to \S+)\)", flat)
    assert between is not None
    assert wrong(decimals(between[1]), [min(explained), max(explained)]) == []


def test_ppo_learns_with_its_preset_alone() -> None:
    run = read("json_preset.json")
    text = page("docs/experiments/json.md").split("### PPO with its preset alone")[1].split("\n## ")[0]
    flat = " ".join(text.split())
    told_of_scores = re.search(
        r"rises from (\S+) to (\S+)\*\*, by (\S+) \[(\S+), (\S+)\], at (\S+) nats "
        r"\((\S+) completions, one seed, (\d+) min",
        flat,
    )
    assert told_of_scores is not None
    after, gain = run["held_out"], run["held_out"]["difference"]
    measured = [after["start"], after["score"], gain["value"], gain["low"], gain["high"], after["kl"]]
    assert wrong(decimals(" ".join(told_of_scores.groups()[:6])), measured) == []
    assert told_of_scores[7] == f"{run['completions']:,}"
    assert wrong([told_of_scores[8]], [run["minutes"]]) == []
    assert run["full_in_training"][0] == 0
    assert "none of the answers of the first eight steps" in flat
    assert (
        wrong(told(flat, r"right and (\d+) % of the answers of the last eight"), [100 * run["full_in_training"][7]])
        == []
    )
    explains = re.search(r"explains (\S+) of the returns\*\* in the second half", flat)
    assert explains is not None
    assert wrong(decimals(explains[1]), [run["explained_variance"][1]]) == []


def test_what_the_page_says_of_a_critic_that_counts_tokens() -> None:
    text = " ".join(page("docs/experiments/json.md").split(ON_A_CPU)[1].split(CHEAPER_MEANS)[0].split())
    steps = read("critic_beyond_position.json")["rows"]
    told = re.search(
        r"it is (\.\d+) on average, and the usual measure (\.\d+)\. .* measure is (\.\d+) to (\.\d+)\.", text
    )
    assert told is not None
    means = [sum(step[key] for step in steps) / 8 for key in ("explained_beyond_position", "explained_variance")]
    alike = [step["explained_variance"] for step in steps if step["score_std"] == 0]
    assert len(steps) == 8
    assert len(alike) == 3
    assert wrong(decimals(" ".join(told.groups())), [*means, min(alike), max(alike)]) == []


def test_what_the_page_says_of_j_over_time() -> None:
    text = " ".join(page("docs/experiments/detox.md").split("detox_over_time.svg")[1].split())
    results = read("compare_detox_800_own.json")
    cells = [*results["seeds"].values(), *results["others"]["grpo_kl_in_reward"]["seeds"].values()]
    curves = [cell["judge_on_256_dev_sentences"] for cell in cells]
    assert [rows[1]["step"] * 64 for rows in curves] == [1024] * 4
    early = [(rows[1]["score"] - rows[0]["score"]) / (rows[-1]["score"] - rows[0]["score"]) for rows in curves]
    assert 2 / 3 < min(early) < 0.72
    assert 0.78 < max(early) < 0.83
    rises = re.search(r"still rises by (\.\d+) to (\.\d+):", text)
    assert rises is not None
    later = [rows[-1]["reward_model"] - rows[1]["reward_model"] for rows in curves]
    assert wrong(decimals(" ".join(rises.groups())), [min(later), max(later)]) == []
    assert all(rows[-1]["score"] > rows[1]["score"] for rows in curves)


def test_what_the_page_says_of_json_in_1024_completions() -> None:
    text = " ".join(page("docs/experiments/json.md").split("### What else")[0].split())
    arms = {name: cells["0"] for name, cells in read("compare_json.json").items()}
    share = {arm: {part: cell[part]["value"] for part in JSON_PARTS} for arm, cell in arms.items()}
    behind = re.search(
        r"GRPO is (\d+) points behind it .*?: (\d+) minutes of one thread \(a CPU with AVX2 alone\), PPO (\d+)\.", text
    )
    assert behind is not None
    minutes = [arms[arm]["costs"]["seconds"] / 60 for arm in ("grpo", "ppo")]
    points = 100 * (share["ppo"]["full"] - share["grpo"]["full"])
    assert wrong(list(behind.groups()), [points, *minutes]) == []
    order = re.search(
        r"After GRPO (\d+) % .*? alone, (\d+) % have the right keys and (\d+) % the right types too; "
        r"after PPO (\d+), (\d+) and (\d+) %, at the start (\d+), (\d+) and (\d+) %",
        text,
    )
    assert order is not None
    values = [100 * share[arm][part] for arm in ("grpo", "ppo", "start") for part in ("only", "keys", "right")]
    assert wrong(list(order.groups()), values) == []
    errors = re.search(
        r"after GRPO: (\d+) of 200 answers have a wrong type .*?, (\d+) wrong keys, (\d+) do not parse, "
        r"and (\d+) say more",
        text,
    )
    assert errors is not None
    grpo = share["grpo"]
    lacking = [grpo["keys"] - grpo["right"], grpo["parses"] - grpo["keys"], 1 - grpo["parses"]]
    assert wrong(list(errors.groups()), [200 * part for part in (*lacking, grpo["right"] - grpo["full"])]) == []


JSON_PARTS = ("parses", "keys", "right", "only", "full")


def test_the_seed_of_ppo_that_lacks_types(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(page("docs/experiments/json.md").split(ON_A_GPU)[1].split())
    cells = read("compare_json_h200.json")["ppo"]
    told = re.search(
        r"PPO (\d+) % on average\. PPO's third seed stays at (\d+) %: (\d+) % of its answers "
        r"parse and (\d+) % have the right keys, so that it lacks the types\. (\d+) of the 200 prompts ask for "
        r"an array",
        text,
    )
    assert told is not None
    average = statistics.mean(cell["full"]["value"] for cell in cells.values())
    values = [100 * average, *(100 * cells["2"][part]["value"] for part in ("full", "parses", "keys"))]
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    task = importlib.import_module("make_json_task")
    prompts = task.generate(200, split="test", tiers=["flat"], seed=0)
    arrays = sum("array of" in row["prompt"] for row in prompts)
    assert wrong(list(told.groups()), [*values, arrays]) == []
    seconds = re.search(r"PPO's 128 steps took (\d+) to (\d+) s", text)
    assert seconds is not None
    took = [cell["costs"]["seconds"] for cell in cells.values()]
    assert wrong(list(seconds.groups()), [min(took), max(took)]) == []
    assert f"[stays at {told[2]} %](#4096-completions-on-one-gpu)" in page("docs/experiments/json.md")


def test_what_critics_explain_on_the_page_of_results() -> None:
    told = re.search(
        r"pairs, (\S+) and (\S+) of the variance in the second half of 8,192 \((\S+) to (\S+) with a reward model of "
        r"all pairs, \S+ and \S+ with samples of the start\), (\S+) to (\S+) in the second half of 4,096 on "
        r"strict JSON",
        " ".join(page("docs/results.md").split()),
    )
    assert told is not None
    best = read("compare_detox_800_best.json")["ppo"]
    of_all = explained_by_seed(read("compare_detox_800_all_pairs.json"))
    of_all += [seed["explained_variance_second_half"] for seed in best.values()]
    on_json = [cell["explained_variance"][1] for cell in read("compare_json_4096.json")["ppo"].values()]
    values = [*explained_by_seed(read("compare_detox_800_bf16.json")), min(of_all), max(of_all)]
    assert wrong(decimals(" ".join(told.groups())), [*values, min(on_json), max(on_json)]) == []
    run = read("detox.json")["ppo_run"]["explained_variance"]
    assert statistics.mean(run) < 0, "nothing in 1,536 completions"


def test_what_pages_say_of_json_with_more_completions() -> None:
    measured = {"GRPO": read("compare_json_h100.json")["grpo"], "PPO": read("compare_json_4096.json")["ppo"]}
    for name in ("README.md", "docs/results.md"):
        for arm, told in (("GRPO", r"GRPO in"), ("PPO", "PPO gets everything right in")):
            figures = re.search(rf"{told}\s+(\d+), (\d+) and (\d+) %", page(name))
            assert figures is not None, (name, arm)
            assert wrong(list(figures.groups()), [100 * cell["full"]["value"] for cell in measured[arm].values()]) == []


def test_the_steps_on_a_gpu() -> None:
    steps, seen = read("gpu_h100.json")["steps"], set()
    for row in rows(page("docs/gpu.md")):
        if (run := steps.get(row[0].lower())) is None:
            continue
        phases = [run["median_s"][phase] for phase in ("sample", "annotate", "update")]
        assert wrong(row[1:], [run["completions"], run["step_s"], *phases, run["peak_mib"]]) == [], row
        seen.add(row[0])
    assert seen == {"GRPO", "PPO"}


def test_the_plan_on_a_gpu() -> None:
    text, runs = page("docs/memory.md"), read("plan_h200.json")["runs"]
    shown = {row[0]: row for row in rows(text)}
    for run in runs:
        planned, measured = run["planned_gb"], run["measured_gb"]
        assert run["measured_phases_gb"][run["measured_phase"]] == max(run["measured_phases_gb"].values()) == measured
        assert run["planned_phases_gb"][run["planned_phase"]] == max(run["planned_phases_gb"].values()) == planned
        assert run["error"] == pytest.approx(planned / measured - 1, abs=2e-3)
        cells = shown[run["run"]]
        assert wrong([*cells[1:3], *numbers(cells[3])], [planned, measured, 100 * run["error"]]) == [], run["run"]
        assert cells[4] == run["measured_phase"]
    (count,) = re.findall(r"On one H200, (\d+ of \d+) runs are within 10 %", text)
    assert count == f"{sum(abs(run['error']) <= 0.1 for run in runs)} of {len(runs)}"


def test_the_step_of_8_billion_weights() -> None:
    text, cpu, gpu = page("docs/memory.md"), read("eight_billion.json"), read("eight_billion_h200.json")
    gb = 2**20 / 1e9
    on_cpu = r"Its peak was ([\d.]+) GB; the plan says ([\d.]+)\. It took (\d+) minutes, and loading (\d+)"
    (shown,) = re.findall(on_cpu, text)
    values = [cpu["peak_mb"] * gb, cpu["planned_mb"] * gb, cpu["step_s"] / 60, cpu["loading_s"] / 60]
    assert wrong(list(shown), values) == []
    on_gpu = (
        r"to prompts of (\d+)\. Its peak was ([\d.]+) GB, while it sampled, and ([\d.]+) GB in the update\.\s+"
        r"Loading took (\d+) s, with quantization on the GPU, and the step (\d+) s"
    )
    (shown,) = re.findall(on_gpu, text)
    assert max(gpu["phases_mb"], key=gpu["phases_mb"].get) == "sample"
    peaks = [gpu["peak_mb"] * gb, gpu["phases_mb"]["update"] * gb]
    assert wrong(list(shown), [gpu["prompt_tokens"], *peaks, gpu["loading_s"], gpu["step_s"]]) == []


WHEN = ("before", "after")


def test_the_public_run_on_json() -> None:
    measured = read("public_json_run.json")
    told = re.search(
        r"reports that (\d+) % of (\d+) answers parse before training, and (\d+) % after\.[^.]*\n?[^.]*"
        r"in (\d+) % before and (\d+) % after",
        page("docs/experiments/json.md"),
    )
    assert told is not None
    parses, rows_of, after, before_all, after_all = map(int, told.groups())
    assert rows_of == measured["before"]["rows"]
    shares = [measured[when][what] for what in ("parses, as published", "everything that is checked") for when in WHEN]
    assert [parses, after, before_all, after_all] == [round(100 * share) for share in shares]
    ours = re.search(
        r"to these (\d+) prompts: (\d+) % parse and (\d+) % \[(\d+), (\d+)\] meet", page("docs/experiments/json.md")
    )
    assert ours is not None
    cell = measured["PPO, seed 0"]
    met = share_estimate("met", [1.0] * 133 + [0.0] * 167, "")
    assert cell["everything that is checked"] == met.value
    expected = [cell["rows"], *(100 * share for share in (cell["parses, as published"], met.value, met.low, met.high))]
    assert wrong(list(ours.groups()), expected) == []


DETOX = {
    "DPO": "dpo",
    "PPO": "ppo",
    "RLOO": "rloo",
    "GRPO": "grpo",
    "SFT, more rewrites": "sft",
    "online DPO": "online_dpo",
    "rejection sampling": "rejection_sampling",
}


def test_the_comparison_from_more_rewrites() -> None:
    results = read("compare_detox.json")
    start = results["start_model"]["suites"]["detox"]
    seen = set()
    for row in rows(page("docs/experiments/detox.md").split("## From 2,000 rewrites")[1].split("\n### ")[0]):
        if len(row) != 6 or not row[1].startswith("."):
            continue
        if row[0] in ("SFT, the start", "people"):
            prefix = "human_" if row[0] == "people" else ""
            shown = [*numbers(row[1].replace(".", "0.")), f"0{row[3]}", f"0{row[4]}"]
            j, style, similarity = (start[prefix + figure] for figure in ("j", "style", "similarity"))
            assert wrong(shown, [j["value"], j["low"], j["high"], style["value"], similarity["value"]]) == [], row
            continue
        first, second = results["arms"][DETOX[row[0]]]["seeds"]
        suite = first["suites"]["detox"]
        j = suite["j"]
        assert wrong(numbers(row[1].replace(".", "0.")), [j["value"], j["low"], j["high"]]) == [], row
        assert ("suites" in second and bool(second["suites"])) == (row[2] != "–"), row
        if row[2] != "–":
            assert wrong([f"0{row[2]}"], [second["suites"]["detox"]["j"]["value"]]) == [], row
        assert wrong([f"0{row[3]}", f"0{row[4]}"], [suite["style"]["value"], suite["similarity"]["value"]]) == [], row
        assert wrong(numbers(row[5]), [first["kl"]]) == [], row
        seen.add(row[0])
    assert seen == set(DETOX)


FEWER = {
    "PPO": "ppo",
    "RLOO": "rloo",
    "GRPO": "grpo",
    "GRPO, its KL in the reward": "grpo_kl_in_reward",
    "DPO": "dpo",
    "DPO, rate 1e-6": "dpo_low",
    "SFT, the same pairs": "sft_same",
    "online DPO": "online_dpo",
    "DPO, pairs of the start's samples": "dpo_sampled",
    "rejection sampling": "rejection_sampling",
}


def test_the_chain_from_an_empty_folder() -> None:
    measured, text = read("detox.json"), " ".join(page("docs/experiments/detox.md").split())
    told = re.search(
        r"in (\d+) minutes\*\* .*? installation (\S+) minutes, \w+ (\S+), SFT (\S+), .*? (\S+), PPO (\S+)\. ", text
    )
    assert told is not None
    seconds = [measured["seconds"][name] for name in ("setup", "smollm2", "sft", "reward_model", "ppo")]
    whole = sum(seconds) + measured["seconds"]["paradetox"]
    assert wrong(list(told.groups()), [part / 60 for part in (whole, *seconds)]) == []
    assert f"up to here {told[1]} minutes on two cores, installation included" in page("README.md")
    told = re.search(r"PPO gains (\S+) \[(\S+), (\S+)\]\. The KL to the SFT model", text)
    assert told is not None
    gain = measured["paired_gain_of_ppo"]
    assert wrong(decimals(" ".join(told.groups())), [gain[key] for key in ("value", "low", "high")]) == []


def test_what_the_chain_of_the_first_command_did() -> None:
    measured, text = read("detox.json"), " ".join(page("docs/experiments/detox.md").split())
    run, judged = measured["ppo_run"], measured["reward_model"]
    told = re.search(r"The KL to the SFT model is (\S+) nats on held-out prompts", text)
    assert told is not None
    assert wrong([told[1]], [run["eval_kl"]]) == []
    told = re.search(r"The reward model\*\* is right on (\S+) \[(\S+), (\S+)\] of 400", text)
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), [judged[key] for key in ("accuracy", "low", "high")]) == []
    told = re.search(r"\"Shorter wins\" is right on (\S+) of them, a bag of words on (\S+)\. ", text)
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), [judged["shorter_wins"], judged["bag_of_words"]]) == []
    told = re.search(r"rises from (\S+) to (\S+) in eight steps", text)
    assert told is not None
    scores = run["score_by_step"]
    assert wrong(decimals(" ".join(told.groups())), [scores[0], scores[7]]) == []
    told = re.search(r"is (\S+) on average in the first twelve steps and (\S+) in the last twelve", text)
    assert told is not None
    explained = run["explained_variance"]
    shown = decimals(" ".join(told.groups()).replace("−", "-"))
    assert wrong(shown, [sum(half) / 12 for half in (explained[:12], explained[12:])]) == []
    told = re.search(r"\(\"(.*?)\", for row (\d+)\)", text)
    assert told is not None
    assert measured["examples"][int(told[2]) - 1]["ppo"] == told[1]
    told = re.search(r"(\S+) tokens became (\S+) on held-out prompts", text)
    assert told is not None
    assert wrong(list(told.groups()), [run["start_length"], run["eval_length"]]) == []
    results = page("docs/results.md")
    told = re.search(r"J (\S+) → (\S+) \[(\S+), (\S+)\] after 1,536", results)
    assert told is not None
    sft, ppo = (measured["models"][name]["figures"]["j"] for name in ("sft", "ppo"))
    assert wrong(decimals(" ".join(told.groups())), [sft["value"], ppo["value"], ppo["low"], ppo["high"]]) == []


def test_what_rounding_to_bfloat16_costs() -> None:
    measured, text = read("bf16_dither.json"), page("docs/decisions/023-dither-before-bfloat16.md")
    ways = {"float32": "float32", "bfloat16, weights rounded to the nearest": "nearest"}
    ways |= {"bfloat16, dithered weights": "dithered"}
    seen = set()
    for row in rows(text):
        if row[0] in ways:
            runs = measured["runs"][ways[row[0]]]
            assert wrong(decimals(f"{row[1]} {row[2]}"), [runs[seed]["j"]["value"] for seed in "01"]) == [], row
            seen.add(row[0])
    assert seen == set(ways)
    shown = " and ".join([r"(\.\d+)"] * 2)
    told = re.search(
        rf"{shown} in float32, {shown} in bfloat16[^;]*; [^;]* J is {shown}\.", " ".join(page("docs/speed.md").split())
    )
    assert told is not None
    values = [measured["runs"][way][seed]["j"]["value"] for way in ("float32", "dithered", "nearest") for seed in "01"]
    assert wrong(decimals(" ".join(told.groups())), values) == []
    told = re.search(r"(\S+) before, (\S+) rounded to the\s+nearest, (\S+) dithered and rounded", text)
    assert told is not None
    assert wrong(list(told.groups()), list(measured["loss_of_256_other_rewrites"].values())[:3]) == []
    judged = measured["float32_runs_judged_in_bfloat16"]
    spread, nearest = ([judged[way][seed]["j"]["value"] for seed in "01"] for way in ("spread", "nearest"))
    speed = " ".join(page("docs/speed.md").split())
    told = re.search(
        rf"judged in bfloat16, have J {shown}\. "
        rf"In programs that round weights to the nearest bfloat16 number they have {shown}",
        speed,
    )
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), [*spread, *nearest]) == []
    told = re.search(
        rf"arithmetic in bfloat16: J {shown} if weights are rounded to the nearest, {shown}", " ".join(text.split())
    )
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), [*nearest, *spread]) == []
    told = re.search(r"keep (\S+) % of the change", text)
    assert told is not None
    kept = measured["change_kept_by_export_in_bfloat16"]["sft, 800 rewrites"]
    assert wrong([told[1]], [100 * kept]) == []
    assert f"{told[1]} % in SFT on 800 rewrites" in page("docs/own_model_and_data.md")
    told = re.search(r"\((\S+) nats a completion in the detox chain\)", text)
    assert told is not None
    assert wrong(decimals(told[1]), [measured["start_kl_of_ppo"]]) == []


ALONE_ON_THE_PAGE = {"DPO, rate 1e-6", "DPO, pairs of the start's samples"}


@pytest.mark.parametrize("name", ["README.md", "docs/experiments/detox.md"])
def test_the_comparison_on_people_s_pairs(name: str) -> None:
    results = read("compare_detox_800.json")
    text = page(name) if name == "README.md" else algorithms_of_detox()
    left_out = ALONE_ON_THE_PAGE if name == "README.md" else set()
    arms = results["arms"] | results["others"]
    start = results["start_model"]["suites"]["detox"]
    by_people = {figure: start[f"human_{figure}"] for figure in ("j", "style", "similarity")}
    seen = set()
    for row in rows(text):
        if len(row) != 7 or not row[1].startswith("."):
            continue
        name = row[0].partition(" on 800")[0]
        arm = arms.get(
            FEWER.get(name, ""), {"kl": 0.0, "suites": {"detox": {"SFT": start, "people": by_people}.get(name)}}
        )
        figures = arm["suites"]["detox"]
        j = figures["j"]
        assert wrong(decimals(row[1]), [j["value"], j["low"], j["high"]]) == [], row
        if name in FEWER:
            by_seed = [seed["suites"]["detox"]["j"]["value"] for seed in arm["seeds"]]
            assert wrong(decimals(row[2]), by_seed) == [], row
            assert wrong(decimals(row[3]), [j["gain"][key] for key in ("value", "low", "high")]) == [], row
        shown = decimals(f"{row[4]} {row[5]}")
        assert wrong(shown, [figures["style"]["value"], figures["similarity"]["value"]]) == [], row
        assert row[6] == "–" or wrong(numbers(row[6]), [arm["kl"]]) == [], row
        seen.add(name)
    assert seen == {*FEWER, "SFT", "people"} - left_out


def algorithms_of_detox() -> str:
    """The part of the page that compares algorithms from 800 rewrites."""
    return page("docs/experiments/detox.md").split("## Which algorithm?")[1].split("\n### ")[0]


def test_ppo_or_dpo_on_people_s_pairs() -> None:
    results = read("compare_detox_800.json")
    told = re.search(
        r"people's pairs, J \| (\S+) at (\S+) nats \| (\S+) at (\S+) nats \| PPO is (\S+) \[(\S+), (\S+)\] higher",
        page("docs/choosing.md"),
    )
    assert told is not None
    values = [figure for name in ("ppo", "dpo") for figure in (j_of(results, name), results["arms"][name]["kl"])]
    (more,) = (row for row in results["suite_differences"] if (row["a"], row["b"]) == ("ppo", "dpo"))
    values += [more[key] for key in ("value", "low", "high")]
    assert wrong(decimals(" ".join(told.groups())), values) == []


def j_of(results: dict[str, Any], arm: str) -> float:
    """The mean J of an arm."""
    value: float = results["arms"][arm]["suites"]["detox"]["j"]["value"]
    return value


def test_grpo_learns_json_in_bfloat16_as_in_float32() -> None:
    measured, wide = read("bf16_dither.json")["grpo_strict_json"], read("compare_json.json")["grpo"]["0"]["full"]
    narrow, nearest = measured["dithered"]["full"], measured["nearest"]["full"]
    told = re.search(
        r"bfloat16: (\d+) % \[(\d+), (\d+)\] of all answers are right with \[dithered weights\]\S+ "
        r"(\d+) % \[(\d+), (\d+)\]",
        " ".join(page("docs/experiments/json.md").split()),
    )
    assert told is not None
    both = [100 * figure[key] for figure in (narrow, nearest) for key in ("value", "low", "high")]
    assert wrong(list(told.groups()), both) == []
    shares = [100 * figure["value"] for figure in (wide, nearest, narrow)]
    told = re.search(
        r"in (\d+) % of the answers in float32, in (\d+) % in bfloat16 rounded to the nearest and "
        r"in (\d+) % with dither",
        " ".join(page("docs/decisions/023-dither-before-bfloat16.md").split()),
    )
    assert told is not None
    assert wrong(list(told.groups()), shares) == []
    told = re.search(
        r"gets (\d+) % right in float32, (\d+) % in bfloat16 and (\d+) % without dither",
        " ".join(page("docs/speed.md").split()),
    )
    assert told is not None
    assert wrong(list(told.groups()), [shares[0], shares[2], shares[1]]) == []


def further_of_detox() -> str:
    """The part of the page about other settings of PPO, in one line."""
    return " ".join(page("docs/experiments/detox.md").split("### How far can PPO go?")[1].split("\n### ")[0].split())


PPO_BY_PAIRS = {
    "2,400 by people, float32": "compare_detox_800.json",
    "2,400 by people": "compare_detox_800_bf16.json",
    "all 9,694 by people": "compare_detox_800_all_pairs.json",
    "4,000 by people, 2,348 with samples of the start": "compare_detox_800_own.json",
}


def test_ppo_by_the_pairs_of_the_reward_model() -> None:
    table = page("docs/experiments/detox.md").split("### How far can PPO go?")[1].split("\n### ")[0]
    starts, seen = list[float](), set[str]()
    for row in rows(table):
        if row[0] not in PPO_BY_PAIRS:
            continue
        results = read(PPO_BY_PAIRS[row[0]])
        arm = results["arms"]["ppo"] if "arms" in results else results["arm"]
        figures = arm["suites"]["detox"] if "suites" in arm else arm
        start = results["start"] if isinstance(results["start"], dict) else results["start_model"]["suites"]["detox"]
        starts.append(start["j"]["value"])
        bounds, j, gain = ("value", "low", "high"), figures["j"], figures["j"]["gain"]
        values = [j[key] for key in bounds] + j_by_seed(results) + [gain[key] for key in bounds]
        values += [figures["style"]["value"], figures["similarity"]["value"], arm.get("kl", results.get("kl"))]
        shown = decimals(" ".join(row[1:7]))
        seen.add(row[0])
        if row[0] != "2,400 by people, float32":  # whose critic was not stored
            shown += decimals(row[7])
            values += explained_by_seed(results)
        assert wrong(shown, values) == [], row
    assert seen == set(PPO_BY_PAIRS)
    told = re.search(r"the starts have J (\S+), (\S+), (\S+) and (\S+)\.", further_of_detox())
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), starts) == []


def j_by_seed(results: dict[str, Any]) -> list[float]:
    """J of PPO in both seeds."""
    if isinstance(results["seeds"], dict):
        return [results["seeds"][seed]["j"]["value"] for seed in "01"]
    if "suites_of_seeds" in results:
        return [results["suites_of_seeds"][seed]["j"]["value"] for seed in "01"]
    return [seed["suites"]["detox"]["j"]["value"] for seed in results["arms"]["ppo"]["seeds"]]


def explained_by_seed(results: dict[str, Any]) -> list[float]:
    """The explained variance of the critic in the second half of both seeds."""
    if isinstance(results["seeds"], dict):
        return [results["seeds"][seed]["explained_variance_second_half"] for seed in "01"]
    return [results["explained_variance_second_half"][seed] for seed in "01"]


def test_other_algorithms_by_pairs_with_samples_of_the_start() -> None:
    results, seen = read("compare_detox_800_own.json"), set[str]()
    ppo = {**results["arm"], "kl": results["kl"], "seeds": results["seeds"]}
    arms = {"PPO": ppo, "GRPO, its KL in the reward": results["others"]["grpo_kl_in_reward"]}
    arms["DPO"] = results["others"]["dpo"]
    table = page("docs/experiments/detox.md").split("DPO learns from the pairs themselves:")[1].split("\n### ")[0]
    for row in rows(table):
        if row[0] not in arms:
            continue
        arm, bounds = arms[row[0]], ("value", "low", "high")
        values = [arm["j"][key] for key in bounds] + [arm["seeds"][seed]["j"]["value"] for seed in "01"]
        values += [arm["j"]["gain"][key] for key in bounds]
        values += [arm["style"]["value"], arm["similarity"]["value"], arm["kl"]]
        assert wrong(decimals(" ".join(row[1:])), values) == [], row
        seen.add(row[0])
    assert seen == set(arms)
    told = re.search(
        r"PPO is (\S+) \[(\S+), (\S+)\] above GRPO and (\S+) \[(\S+), (\S+)\] above DPO", " ".join(table.split())
    )
    assert told is not None
    more = {row["b"]: row for row in results["suite_differences"] if row["a"] == "ppo"}
    values = [more[arm][key] for arm in ("grpo_kl_in_reward", "dpo") for key in ("value", "low", "high")]
    assert wrong(decimals(" ".join(told.groups()).replace("−", "-")), values) == []


def test_the_models_of_the_own_pairs_on_other_sentences() -> None:
    results = read("compare_detox_800_other_sentences.json")
    arms, bounds = results["arms"], ("value", "low", "high")
    start = [results["start"]["j"][key] for key in bounds]
    j = {arm: [arms[arm]["j"][key] for key in bounds] for arm in arms}
    told = re.search(
        r"PPO has J (\S+) \[(\S+), (\S+)\] \((\S+) and (\S+) by seed\), a gain of (\S+) \[(\S+), (\S+)\] over a start "
        r"of (\S+) \[(\S+), (\S+)\]\.",
        further_of_detox(),
    )
    assert told is not None
    seeds = [arms["ppo"]["seeds"][seed]["j"]["value"] for seed in "01"]
    gain = [arms["ppo"]["j"]["gain"][key] for key in bounds]
    assert wrong(decimals(" ".join(told.groups())), [*j["ppo"], *seeds, *gain, *start]) == []
    told = re.search(
        r"GRPO has J (\S+) \[(\S+), (\S+)\], DPO (\S+) \[(\S+), (\S+)\] and people (\S+); PPO is (\S+) \[(\S+), "
        r"(\S+)\] above GRPO and (\S+) \[(\S+), (\S+)\] above DPO",
        further_of_detox(),
    )
    assert told is not None
    more = {row["b"]: row for row in results["suite_differences"] if row["a"] == "ppo"}
    differences = [more[arm][key] for arm in ("grpo_kl_in_reward", "dpo") for key in bounds]
    people = results["people"]["human_j"]
    values = [*j["grpo_kl_in_reward"], *j["dpo"], people, *differences]
    assert wrong(decimals(" ".join(told.groups())), values) == []
    told = re.search(
        r"PPO ends at (\.\d+) \[(\S+), (\S+)\], from (\S+) \[(\S+), (\S+)\]\.", " ".join(page("README.md").split())
    )
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), [*j["ppo"], *start]) == []


def test_ppo_from_fewer_rewrites_in_bfloat16() -> None:
    results = read("compare_detox_800_bf16.json")
    told = re.search(r"is (\.\d+) and (\.\d+); it then stays in one seed and falls to (\.\d+)", further_of_detox())
    assert told is not None
    curves = [{row["step"]: row["score"] for row in results["evaluations"] if row["seed"] == seed} for seed in (0, 1)]
    assert wrong(decimals(" ".join(told.groups())), [curves[0][32], curves[1][32], curves[1][128]]) == []
    whole = read("compare_detox_800.json")["arms"]["ppo"]["suites"]["detox"]["j"]["gain"]["value"]
    told = re.search(
        r"gains (\.\d+) in J in float32 and (\.\d+) in bfloat16", page("docs/decisions/023-dither-before-bfloat16.md")
    )
    assert told is not None
    gain = results["arms"]["ppo"]["suites"]["detox"]["j"]["gain"]["value"]
    assert wrong(decimals(" ".join(told.groups())), [whole, gain]) == []


def test_ppo_with_a_reward_model_of_all_pairs() -> None:
    results = read("compare_detox_800_all_pairs.json")
    told = re.search(
        r"right on (\d+) of (\d+) held-out pairs\. J of PPO is (.*?) \[(.*?), (.*?)\] and similarity "
        r"(.*?) \[(.*?), (.*?)\] higher than with 2,400 pairs\. J on the dev sentences is (.*?) and (.*?) after "
        r"three quarters of the completions, and (.*?) and (.*?) at the end",
        further_of_detox(),
    )
    assert told is not None
    more = results["difference_from_2400_pairs"]
    curves = [{row["step"]: row["score"] for row in results["evaluations"] if row["seed"] == seed} for seed in (0, 1)]
    values = [results["reward_model"]["right"], results["reward_model"]["of"]]
    values += [more[name][key] for name in ("j", "similarity") for key in ("value", "low", "high")]
    values += [curve[step] for step in (96, 128) for curve in curves]
    assert wrong(decimals(" ".join(told.groups())), values) == []


def test_bfloat16_on_an_amd_processor() -> None:
    told = re.search(r"(\S+) to (\S+) times on an AMD EPYC with AVX512-BF16", page("docs/speed.md"))
    assert told is not None
    rates = [rate["bfloat16"] / rate["float32"] for rate in read("bf16_amd.json")["tokens_per_second"].values()]
    assert wrong(list(told.groups()), [min(rates), max(rates)]) == []


def test_the_best_checkpoint_on_dev_sentences() -> None:
    results = read("compare_detox_800_best.json")
    told = re.search(
        r"from a start with J (\S+): the last models have J (\S+) and (\S+), the chosen ones (\S+) \(step (\d+) of "
        r"128\) and (\S+) \(step (\d+)\)\. From step 32 on J on the dev sentences is between (\S+) and (\S+), so",
        further_of_detox(),
    )
    assert told is not None
    seeds = [results["ppo"][seed] for seed in "01"]
    last = [seed["last"]["j"]["value"] for seed in seeds]
    best = [seed["best"][key] for seed in seeds for key in ("j", "step")]
    late = [row["score"] for seed in seeds for row in seed["judge_on_256_dev_sentences"] if row["step"] >= 32]
    values = [results["start"]["j"]["value"], *last, best[0]["value"], best[1], best[2]["value"], best[3]]
    assert wrong(decimals(" ".join(told.groups())), [*values, min(late), max(late)]) == []


def test_the_reward_model_that_saw_the_start_s_samples() -> None:
    results, text = read("compare_detox_800_own.json"), further_of_detox()
    told = re.search(r"cleaner \(style (\S+)\) and keeps less of the meaning \((\S+); people (\S+)\)", text)
    assert told is not None
    people = read("compare_detox_800.json")["start_model"]["suites"]["detox"]["human_similarity"]["value"]
    values = [results["arm"]["style"]["value"], results["arm"]["similarity"]["value"], people]
    assert wrong(decimals(" ".join(told.groups())), values) == []
    told = re.search(r"all pairs, (\S+) and (\S+) with samples of the start", page("docs/results.md"))
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), explained_by_seed(results)) == []
    told = re.search(r"clean from toxic with an AUC of (\S+), this one with (\S+)\. ", text)
    assert told is not None
    measured = results["toxic_outputs_told_from_clean_ones"]
    assert wrong(decimals(" ".join(told.groups())), [measured["all_pairs"], measured["with_own_samples"]]) == []
    told = re.search(r"J on the dev sentences is (\S+) and (\S+), and (\S+), after 16 and 32 steps", text)
    assert told is not None
    lower = [results["lower_kl"][coef][step] for coef, step in (("0.02", "16"), ("0.02", "32"), ("0.01", "16"))]
    assert wrong(decimals(" ".join(told.groups())), lower) == []
    assert all(seed["j"]["low"] > 0.645 and seed["j"]["gain"]["low"] > 0.2 for seed in results["seeds"].values())
    j = [f"{results['arm']['j'][key]:.3f}".removeprefix("0") for key in ("value", "low", "high")]
    assert "PPO ends at {} [{}, {}] ([how]".format(*j) in page("README.md")
    told = re.search(
        r"reward at (\S+) \[(\S+), (\S+)\], and DPO on the same pairs at (\S+) \[(\S+), (\S+)\]", page("README.md")
    )
    assert told is not None
    others = [
        results["others"][arm]["j"][key] for arm in ("grpo_kl_in_reward", "dpo") for key in ("value", "low", "high")
    ]
    assert wrong(decimals(" ".join(told.groups())), others) == []
    assert f"{results['arm']['j']['gain']['value']:.3f} with samples of the start".removeprefix("0") in page(
        "docs/results.md"
    )


def decimals(cell: str) -> list[str]:
    """The numbers of a cell that has them without the zero before the point."""
    return numbers(re.sub(r"(?<!\d)\.(?=\d)", "0.", cell))


def test_what_the_page_says_of_fewer_rewrites() -> None:
    results, one_line = read("compare_detox_800.json"), " ".join(algorithms_of_detox().split())
    start, both = results["start_model"]["suites"]["detox"], results["arms"]["ppo"]["suites"]["detox"]["j"]
    told = re.search(r"PPO gains (.*?) over both seeds.*?people \((.*?)\), and ends at (.*?)\. PPO is", one_line)
    assert told is not None
    gain = [both["gain"][key] for key in ("value", "low", "high")]
    expected = [*gain, start["human_j"]["value"], both["value"], both["low"], both["high"]]
    assert wrong(decimals(" ".join(told.groups())), expected) == []
    differences = {(row["a"], row["b"]): row for row in (*results["suite_differences"], *results["differences"])}
    for pattern, pair in (
        (r"and J is (.*?) higher", ("grpo", "grpo_kl_in_reward")),
        (r"has the same J \((.*?)\)", ("dpo_low", "dpo")),
        (r"PPO is (.*?) above GRPO", ("ppo", "grpo")),
        (r"above GRPO, (.*?) above DPO", ("ppo", "dpo")),
        (r"above DPO and (.*?) above RLOO", ("ppo", "rloo")),
        (r"pairs, imitated in 7 minutes, end (.*?) below PPO", ("ppo", "sft_same")),
        (r"for 1,024 prompts, end (.*?) below as many steps", ("dpo", "dpo_sampled")),
        (r"PPO is (\.\d+ \[[^\]]*\]) above online DPO", ("ppo", "online_dpo")),
    ):
        (shown,) = re.findall(pattern, one_line)
        row = differences[pair]
        sign = -1 if row["value"] < 0 and pair[0] == "grpo" else 1
        bounds = ("value", "high", "low") if sign < 0 else ("value", "low", "high")
        assert wrong(decimals(shown), [sign * row[key] for key in bounds]) == [], pattern
    (within,) = re.findall(r"higher, within (\.\d+) of PPO", one_line)
    assert wrong(decimals(within), [differences["ppo", "grpo_kl_in_reward"]["value"]]) == []
    curves = results["curves"]
    in_loss = curves["grpo, seed 0"]
    told = re.search(
        r"seed is (\S+) nats from its start after 32 steps and (\S+) after 96.*?stay at (\d) nats", one_line
    )
    assert told is not None
    assert wrong(list(told.groups()[:2]), [in_loss[1]["kl"], in_loss[3]["kl"]]) == []
    in_reward = [point["kl"] for seed in "01" for point in curves[f"grpo_kl_in_reward, seed {seed}"][1:]]
    assert {round(kl) for kl in in_reward} == {int(told[3])}
    (of_dev,) = re.findall(r"costs no training: J (.*?) on the 64 .*?PPO at (.*?) and the start at (\.\d+)", one_line)
    dev = [results["arms"][arm]["score"] for arm in ("best_of_n", "ppo")]
    assert wrong(decimals(" ".join(of_dev)), [*dev, results["start_model"]["score"]]) == []
    (bests,) = re.findall(r"J was (\S+) and (\S+) at its best, after one pass in one seed and two", one_line)
    of_samples = [results["curves"][f"dpo_sampled, seed {seed}"] for seed in "01"]
    tops = [max(curve, key=lambda point: float(point["score"])) for curve in of_samples]
    assert wrong(decimals(" ".join(bests)), [top["score"] for top in tops]) == []
    assert [top["step"] for top in tops] == [64, 128]
    for seed in "01":
        curve = results["curves"][f"online_dpo, seed {seed}"][1:]
        assert max(curve, key=lambda point: float(point["score"])) == curve[0]
    (best,) = re.findall(r"highest after a quarter of the pairs \((.*?)\)", one_line)
    curve = curves["dpo_low, seed 0"]
    assert max(curve, key=lambda point: float(point["score"])) == curve[1]
    assert wrong(decimals(best), [curve[1]["score"]]) == []
    gains = [
        (results["others"] | results["arms"])[arm]["suites"]["detox"]["j"]["gain"]["value"]
        for arm in ("ppo", "grpo_kl_in_reward", "rloo", "dpo", "grpo", "sft_same")
    ]
    sentence = (
        r"From J (\.\d+) PPO gains (\.\d+) .*?in the reward (\.\d+), RLOO (\.\d+), DPO (\.\d+), GRPO (\.\d+), and SFT "
        r".*? pairs (\.\d+)\."
    )
    (told,) = re.findall(sentence, " ".join(page("docs/results.md").split()))
    assert wrong(decimals(" ".join(told)), [start["j"]["value"], *gains]) == []


LIKELY = {
    "the start": "start",
    "GRPO": "grpo",
    "rejection sampling": "rejection_sampling",
    "online DPO": "online_dpo",
    "DPO": "dpo",
    "PPO": "ppo",
    "GRPO with its KL in the reward": "grpo_kl_in_reward",
    "RLOO": "rloo",
    "DPO on sampled pairs": "dpo_sampled",
}


def test_the_log_perplexities_of_rewrites() -> None:
    results, one_line = read("compare_detox_800.json"), " ".join(algorithms_of_detox().split())
    models = {"start": results["start_model"], **results["arms"]}
    (told,) = re.findall(r"do not count in J: (.*?)\. People's", one_line)
    likely = {arm: models[arm]["suites"]["detox"]["log_perplexity"] for arm in LIKELY.values()}
    shown = dict(re.findall(r"([A-Za-z ]+?) (\d\.\d+ \[\d\.\d+, \d\.\d+\])(?:, )?", told))
    assert shown.keys() == LIKELY.keys()
    for name, arm in LIKELY.items():
        assert wrong(numbers(shown[name]), [likely[arm][key] for key in ("value", "low", "high")]) == [], name
    assert max(likely, key=lambda arm: float(likely[arm]["value"])) == "start", "no arm writes less likely text"


def test_a_quarter_of_the_completions_on_people_s_pairs() -> None:
    arms = read("compare_detox_2048.json")["arms"]
    told = re.search(r"PPO \.(\d+), GRPO \.(\d+), online DPO \.(\d+)", page("docs/experiments/detox.md"))
    assert told is not None
    j = [arms[name]["seeds"][0]["suites"]["detox"]["j"]["value"] for name in ("ppo", "grpo", "online_dpo")]
    assert wrong([f"0.{figure}" for figure in told.groups()], j) == []


def test_the_hacked_run() -> None:
    measured, text = read("detox_hacked.json"), page("docs/experiments/detox.md").split("hacked\n")[1]
    steps = {str(step["step"]): step for step in measured["steps"]}
    table = {row[0]: row[1:] for row in rows(text) if row[0] in ("step", "score", "KL, nats")}
    for at, score, kl in zip(table["step"], table["score"], table["KL, nats"], strict=True):
        assert wrong([score, kl], [steps[at]["score"], steps[at]["kl"]]) == [], at
    j = measured["figures"]["j"]["value"]
    assert f"J {j:.3f}".replace("0.", ".") in text
    told = re.search(r"right on (\S+)\s+of the held-out pairs, the one of \[the chain above\]\S+ on (\S+)\. ", text)
    assert told is not None
    accuracies = [measured["reward_model_accuracy_on_held_out_pairs"], read("detox.json")["reward_model"]["accuracy"]]
    assert wrong(decimals(" ".join(told.groups())), accuracies) == []
    rewrite = "This man is not a good leader."
    assert {row["completion"] for row in measured["examples"]} == {rewrite}
    assert f'the first {len(measured["examples"])} all become "{rewrite}"' in text
    assert (measured["rows"], measured["distinct_completions"]) == (500, 4)
    assert "the 500 test sentences have four rewrites" in text
    assert f'answers 500 sentences with four different ones, such as "{rewrite}"' in page("README.md")


@pytest.mark.parametrize(("name", "columns"), [("detox", "sft ppo j_sft j_ppo"), ("detox_hacked", "completion j")])
def test_examples_name_the_row_of_their_sentence(name: str, columns: str) -> None:
    """ParaDetox's sentences are not copied into the repository."""
    examples = read(f"{name}.json")["examples"]
    assert [example["row"] for example in examples] == [*range(1, len(examples) + 1)]
    assert {tuple(example) for example in examples} == {("row", *columns.split())}


def test_the_reward_for_keeping_words() -> None:
    arms = read("compare_detox_kept.json")["arms"]
    text = " ".join(page("docs/experiments/detox.md").split("### A reward for keeping words")[1].split())
    for arm in ("ppo", "rloo", "grpo"):
        j = [seed["suites"]["detox"]["j"]["value"] for seed in arms[arm]["seeds"]]
        assert f"{arm.upper()} {j[0]:.3f} and {j[1]:.3f}".replace("0.", ".") in text, arm


def test_what_the_page_of_results_says_of_people_s_pairs() -> None:
    arms = read("compare_detox.json")["arms"]
    gain = {name: arms[name]["seeds"][0]["suites"]["detox"]["j"]["gain"]["value"] for name in DETOX.values()}
    ppo, rloo, sft = (f"{gain[name]:.3f}" for name in ("ppo", "rloo", "sft"))
    told = f"PPO gains {ppo} over the start, RLOO {rloo}, and more rewrites by people {sft}"
    assert told.replace("0.", ".") in page("docs/results.md")


LIMITED = {"`ppo`, no limit": "ppo", "`ppo_lag`": "ppo_lag", "`grpo` with the limit": "grpo_lag"}
LIMITED["`rloo` with the limit"] = "rloo_lag"
OF_LIMITED = ("late_cost", "multiplier", "eval_score", "eval_cost", "eval_kl")


def test_the_limit_in_the_lab() -> None:
    measured, seen = read("compare_lag.json"), set()
    arms, text = measured["arms"], page("docs/algorithms/safe_rlhf.md").split("## A limit on toxicity")[0]
    for row in rows(text):
        if (arm := LIMITED.get(row[0])) is None:
            continue
        for shown, key in zip(row[1:], OF_LIMITED, strict=True):
            values = [cell[key] for cell in arms[arm].values() if cell[key] is not None]
            assert wrong(numbers(shown), values) == [], (row, key)
        seen.add(arm)
    assert seen == set(arms)
    over = {
        arm: [100 * (cell["late_cost"] / measured["limit"] - 1) for cell in cells.values()]
        for arm, cells in arms.items()
    }
    told = re.search(r"RLOO ends (\d+) to (\d+) % above it", text)
    within = re.search(r"PPO and GRPO hold the cost of training within (\d+) % of the limit", text)
    assert told is not None
    assert within is not None
    assert wrong(list(told.groups()), [min(over["rloo_lag"]), max(over["rloo_lag"])]) == []
    assert max(map(abs, over["ppo_lag"] + over["grpo_lag"])) <= float(within[1])
    lost = {
        arm: [arms["ppo"][seed]["eval_score"] - cell["eval_score"] for seed, cell in cells.items()]
        for arm, cells in arms.items()
    }
    told = re.search(r"for (\S+) to (\S+) of the score under PPO and RLOO and for (\S+) to (\S+) under GRPO", text)
    assert told is not None
    of_both = lost["ppo_lag"] + lost["rloo_lag"]
    ends = [min(of_both), max(of_both), min(lost["grpo_lag"]), max(lost["grpo_lag"])]
    assert wrong([figure.removesuffix(".") for figure in told.groups()], ends) == []
    lowered = [
        100 * (1 - cell["late_cost"] / arms["ppo"][seed]["late_cost"])
        for arm, cells in arms.items()
        for seed, cell in cells.items()
        if arm != "ppo"
    ]
    told = re.search(r"lowers the cost of training by (\d+) to (\d+) %", text)
    assert told is not None
    assert wrong(list(told.groups()), [min(lowered), max(lowered)]) == []


def test_the_limit_on_toxicity() -> None:
    measured, seen = read("detox_lag.json"), list[str]()
    arms = {
        "λ from 1.5, rate 0.5, lookahead 4, 8,192 completions": measured["arms"]["ppo_lag"],
        "the same, 4,096 completions, seeds 11, 0 and 1": measured["4,096 completions"],
        "λ from 1.5, rate 0.2, lookahead 10, 4,096 completions": measured["rate 0.2"],
        "λ from 3, rate 0.1, lookahead 10, 4,096 completions": measured["from 3"],
        "λ from 0.5, rate 0.5, lookahead 4, 3,072 completions, learning rate to 0": measured["late"],
    }
    cells, half, slow, high, late = (list(arm.values()) for arm in arms.values())
    text = page("docs/algorithms/safe_rlhf.md").split("## A limit on toxicity")[1]
    for row in rows(text):
        if row[0] not in arms:
            continue
        for shown, key in zip(row[1:], ("late_cost", "multiplier", "eval_score", "eval_cost", "eval_kl"), strict=True):
            assert wrong(numbers(shown), [cell[key] for cell in arms[row[0]].values()]) == [], (row, key)
        seen.append(row[0])
    assert seen == list(arms)
    flat = " ".join(text.replace("−", "-").split())
    off, half_off, slow_off, high_off, late_off = (
        [100 * (cell["late_cost"] / measured["limit"] - 1) for cell in arm] for arm in (cells, half, slow, high, late)
    )
    assert all(abs(value) <= 10 for value in off)
    assert list(measured["arms"]["ppo_lag"]) == ["0", "1", "2"]
    near = re.search(r"of the steps it is (\S+), (\S+) and (\S+) % off \(seeds 0, 1 and 2\)", flat)
    final = re.search(r"its cost is (\S+), (\S+) and (\S+) % off the limit, with standard errors of (\d+) %", flat)
    with_half = re.search(r"controller is (\S+), (\S+) and (\S+) % off\*\* \(seeds 11, 0 and 1\)", flat)
    slower = re.search(r"is slower: (\d+), (\d+) and (\d+) % below the limit", flat)
    below = re.search(r"below its limit\*\*, by (\d+), (\d+) and (\d+) %", flat)
    above = re.search(r"ends (\d+), (\d+) and (\d+) % above", flat)
    start = re.search(r"a cost of ([\d.]+) and a score of ([\d.]+) on 200", flat)
    spread = re.search(r"deviation of about ([\d.]+), and the mean of these 38 steps of ([\d.]+)\.", flat)
    ranges = re.search(r"steps λ ranges from ([\d.]+) to ([\d.]+),", flat)
    for told in (near, final, with_half, slower, below, above, start, spread, ranges):
        assert told is not None
    assert wrong(list(near.groups()), off) == []
    distances = [100 * (cell["eval_cost"] / measured["limit"] - 1) for cell in cells]
    error = statistics.mean(100 * cell["eval_cost_se"] / measured["limit"] for cell in cells)
    assert wrong(list(final.groups()), [*distances, error]) == []
    assert wrong(list(with_half.groups()), half_off) == []
    assert wrong(list(slower.groups()), [-value for value in slow_off]) == []
    assert wrong(list(below.groups()), sorted(-value for value in high_off)) == []
    assert wrong(list(above.groups()), sorted(late_off)) == []
    assert wrong(list(start.groups()), [measured["start"]["eval_cost"], measured["start"]["eval_score"]]) == []
    multipliers = [value for cell in cells for value in cell["multipliers"][-38:]]
    assert wrong(list(ranges.groups()), [min(multipliers), max(multipliers)]) == []
    of_a_step = statistics.mean(statistics.pstdev(cell["costs"][-38:]) for cell in cells)
    assert wrong(list(spread.groups()), [of_a_step, of_a_step / 38**0.5]) == []


def test_what_is_off_by_default_in_the_lab() -> None:
    text = page("docs/experiments/ppo_details.md").split("## Off by default")[1]
    arms, seen = read("ablate_seeds.json")["arms"], {"ppo"}
    for row in rows(text):
        if len(row) != 5 or (name := row[1].strip("`")) not in arms:
            continue
        arm = arms[name]
        assert wrong(numbers(row[2]), [arm["difference"], arm["low"], arm["high"]]) == [], row
        assert wrong(numbers(row[3]), arm["by_seed"]) == [], row
        assert wrong([row[4]], [arm["kl"]]) == [], row
        assert arm["low"] < 0 < arm["high"], name
        seen.add(name)
    assert seen == set(arms)
    told = re.search(r"PPO has ([\d.]+) at ([\d.]+) nats", text)
    assert told is not None
    assert wrong(list(told.groups()), [arms["ppo"]["score"], arms["ppo"]["kl"]]) == []


TRUST_REGION = {
    "PPO with the clip": "ppo",
    "PPO with a penalty": "ppo_penalty",
    "TRPO": "trpo",
    "natural gradient": "npg",
}


def test_the_trust_region_beside_the_clip() -> None:
    text, results = page("docs/experiments/trust_region.md"), read("compare_trust_region.json")
    arms, searched = results["arms"], results["trust_region"]["arms"]
    for row in [row for row in rows(text) if row[0] in TRUST_REGION]:
        arm = arms[TRUST_REGION[row[0]]]
        parts = (arm["gain"].values(), [arm["kl"]], [arm["at_equal_kl"][key] for key in ("score", "low", "high")])
        values = [*(value for part in parts for value in part), arm["costs"]["seconds"]]
        assert wrong([number for cell in row[1:] for number in numbers(cell)], values) == [], row
    assert wrong(told(text, r"score at ([\d.]+) nats"), [results["equal_kl"]]) == []
    assert sum(seed["above_max_kl"] for seed in searched["trpo"].values()) == 0
    assert wrong(told(text, r"\(largest ([\d.]+)\)"), [max(seed["kl_max"] for seed in searched["trpo"].values())]) == []
    npg = searched["npg"].values()
    above, times = sum(seed["above_max_kl"] for seed in npg), max(seed["kl_max"] for seed in npg) / 0.02
    assert wrong(told(text, r"exceeded it in (\d+) of 150 steps, at most ([\d.]+) times"), [above, times]) == []
    passes = [seed["forward_passes"] for seed in searched["trpo"].values()]
    assert wrong(told(text, r"as much as (\d+) forward passes") * 3, passes) == []
    shown = told(text, r"the clip leads by (.*?) over TRPO and by (.*?) over the natural gradient")
    leads = [lead for arm in ("trpo", "npg") for lead in results["lead_of_ppo"][arm].values()]
    assert wrong(shown, leads) == []
    ratio = arms["trpo"]["costs"]["seconds"] / arms["ppo"]["costs"]["seconds"]
    assert round(ratio) == 5
    assert "a fifth of the time" in page("docs/results.md")


def test_the_flops_of_dpo_and_kto_in_the_lab() -> None:
    arms = read("compare_lab.json")["arms"]
    (behind, *shares) = told(
        page("docs/results.md"), r"DPO and KTO are ([\d.]+) behind PPO for (\d+) and (\d+) % of its"
    )
    costs = [100 * arms[arm]["costs"]["flops"] / arms["ppo"]["costs"]["flops"] for arm in ("dpo", "kto")]
    assert wrong(shares, costs) == []
    assert wrong([behind] * 2, [arms["ppo"]["score"] - arms[arm]["score"] for arm in ("dpo", "kto")]) == []


def test_what_smollm2_learned_of_a_game() -> None:
    runs, seen = read("agents_smollm2.json")["runs"], set()
    for row in rows(page("docs/agents.md")):
        label, _, seed = row[0].partition(", seed ")
        if (run := runs.get(label.lower(), {}).get(seed)) is None:
            continue
        won = share_estimate("won", [1.0] * run["won"] + [0.0] * (run["stored_games"] - run["won"]), "")
        shown = [*numbers(row[1]), row[2], f"0{row[3]}", row[4]]
        shares = [won.value, won.low, won.high, run["start_won"] / run["stored_games"]]
        values = [*(100 * share for share in shares), run["score"], run["kl"]]
        assert wrong(shown, values) == [], row
        seen.add((label.lower(), seed))
    assert seen == {(name, seed) for name, seeds in runs.items() for seed in seeds}
    rounded, *dithered = (
        runs[name][seed]["return_by_15_steps"]
        for name, seed in (("grpo", "0"), ("grpo with dither", "1"), ("grpo with dither", "2"))
    )
    without = r"after 75 steps \((\.\d+)\), and is (\.\d+) in the last 15\."
    (curves,) = re.findall(
        rf"{without} With dither it is (\.\d+) and (\.\d+) in steps 31 to 45, and (\.\d+) and (\.\d+) in the last 15",
        " ".join(page("docs/agents.md").split()),
    )
    ends = [rounded[4], rounded[-1], *(curve[n] for n in (2, -1) for curve in dithered)]
    assert wrong([f"0{end}" for end in curves], ends) == []
    more = read("agents_smollm2.json")["more_sft"]
    assert more["games_imitated"] == runs["grpo with dither"]["1"]["games_trained_on"]
    imitated = told(page("docs/agents.md"), r"PPO and GRPO play, the model wins (.*?) of 1,000 held-out games")
    won = share_estimate("won", [1.0] * more["won"] + [0.0] * (more["held_out_games"] - more["won"]), "")
    assert wrong(imitated, [100 * end for end in (won.value, won.low, won.high)]) == []
    before = told(page("docs/agents.md"), r"GRPO's of seed 1, wins (\d+) % of 64")
    assert wrong(before, [100 * more["start_won"] / more["start_stored_games"]]) == []
    won_by = [100 * runs["ppo"][seed][key] / 64 for key in ("won", "start_won") for seed in "012"]
    by_ppo = told(page("docs/results.md"), r"wins (\d+, \d+ and \d+ % of its games, from \d+, \d+ and \d+)")
    assert wrong(by_ppo, won_by) == []
    by_grpo = told(page("docs/results.md"), r"GRPO with dither (\d+ and \d+ %, from \d+ and \d+) \(two seeds\)")
    by_seed = runs["grpo with dither"]
    assert wrong(by_grpo, [100 * by_seed[seed][key] / 64 for key in ("won", "start_won") for seed in "12"]) == []


def agent_cells(task: str) -> list[dict[str, Any]]:
    """The models of a task's three seeds."""
    cells = read("agents_learn.json")["cells"]
    return [cells[f"{task}/{seed}"] for seed in "012"]


def points(task: str, arm: str) -> list[float]:
    return [100 * cell[arm]["success"] for cell in agent_cells(task)]


def gains(task: str, arm: str) -> list[float]:
    return [after - before for after, before in zip(points(task, arm), points(task, "start"), strict=True)]


def told(text: str, pattern: str) -> list[str]:
    """The numbers of a passage, whose lines may be broken anywhere."""
    passages = re.findall(pattern, " ".join(text.split()))
    assert len(passages) == 1, pattern
    return numbers(passages[0] if isinstance(passages[0], str) else " ".join(passages[0]))


def test_what_agents_gain() -> None:
    text, easy = page("docs/agents.md"), ("guess_7", "calculator", "palindrome")
    (ppo,) = told(text, r"PPO gains at least (\d+) points in every seed of `guess_7`, `calculator` and `palindrome`")
    (grpo,) = told(text, r"GRPO gains at least (\d+) in these three tasks")
    assert int(ppo) == int(min(gain for task in easy for gain in gains(task, "ppo")))
    assert int(grpo) == int(min(gain for task in easy for gain in gains(task, "grpo")))
    assert wrong(told(text, r"`palindrome`, and (\d+, \d+ and \d+) in `cups`"), gains("cups", "ppo")) == []
    cups = told(text, r"in `cups` one seed gained (\d+) and two hardly moved \((\d+) and (\d+)\)")
    assert wrong(sorted(cups, key=int), sorted(gains("cups", "grpo"))) == []
    more = told(text, r"\(`cups_8192`\) PPO gains at least (\d+) and GRPO at least (\d+) in every seed")
    assert [int(gain) for gain in more] == [int(min(gains("cups_8192", arm))) for arm in ("ppo", "grpo")]
    assert wrong(told(text, r"PPO wins (\d+, \d+ and \d+) %\. Four"), points("cups_long", "ppo")) == []
    won = told(text, r"PPO then wins (\d+, \d+ and \d+ %, GRPO \d+, \d+ and \d+)\.")
    assert wrong(won, [*points("cups_8192", "ppo"), *points("cups_8192", "grpo")]) == []
    first = told(text, r"The first seed of PPO wins (\d+) %, the others (\d+) and (\d+) %")
    assert wrong(first, points("guess_7", "ppo")) == []
    assert wrong(told(text, r"Six of the seven numbers would be (\d+) %"), [100 * 6 / 7]) == []


def test_what_ppo_learns_of_sums_without_a_tool() -> None:
    text = page("docs/agents.md")
    assert wrong(told(text, r"The imitation solves (\d+) %"), [max(points("no_tool", "start"))]) == []
    curves = [[100 * share for share in cell["ppo"]["curve"]] for cell in agent_cells("no_tool")]
    shown = told(
        text, r"solves 1 %\. PPO solves (\d+, \d+ and \d+) % .*? and (\d+, \d+ and \d+) % of the sums of training"
    )
    assert wrong(shown, [*points("no_tool", "ppo"), *(curve[-1] for curve in curves)]) == []
    shown = told(text, r"in tens of steps: (.*?) % in the first seed, (.*?) in the second, (.*?) in the third")
    assert wrong(shown, [share for curve in curves for share in curve]) == []
    long = [read("agents_no_tool_long.json")["cells"][f"no_tool/{seed}"]["ppo"] for seed in "012"]
    shown = told(text, r"With 1,200 steps .*? PPO solves (\d+, \d+ and \d+) % .*? and (\d+, \d+ and \d+) % of the sums")
    last = [sum(run["curve"][-10:]) / 10 for run in long]
    assert wrong(shown, [100 * share for share in (*(run["success"] for run in long), *last)]) == []
    assert all(len(run["curve"]) == 120 and 180 < run["cpu_seconds"] < 270 for run in long)


def test_the_agent_that_a_cpu_trains() -> None:
    text, cell = page("docs/agents.md"), agent_cells("guess_7")[0]
    shown = told(text, r"The start wins (\d+) % of 512 games, and PPO (\d+) % after 60 steps")
    assert wrong(shown, [100 * cell[arm]["success"] for arm in ("start", "ppo")]) == []
    assert "less than a minute of one core" in text
    assert cell["ppo"]["cpu_seconds"] < 45, "and the imitation before it"
    (minutes,) = told(text, r"19,200 games: (\d+) minutes on a GPU")
    runs = read("agents_smollm2.json")["runs"]["ppo"].values()
    assert wrong([minutes] * 3, [run["seconds"] / 60 for run in runs]) == []
    curves = [run["return_by_15_steps"][:3] for run in runs]
    ends = told(text, r"for 45 steps the return hardly moves \((\.\d+) to (\.\d+)\)")
    assert wrong([f"0.{end}" for end in ends], [curves[0][0], curves[0][2]]) == []


@pytest.mark.parametrize("name", ["docs/agents.md", "docs/decisions/021-prefix-cache-off-by-default.md"])
def test_sampling_of_episodes_with_a_prefix_cache(name: str) -> None:
    played = read("prefix_cache.json")["played"]
    assert [run["prefix_cache"] for run in played] == [False, True] * 3
    seconds = [run["cpu_seconds"] for run in played]
    ratios = [without / cached for without, cached in zip(seconds[::2], seconds[1::2], strict=True)]
    assert wrong(told(page(name), r"([\d.]+) to ([\d.]+) times as fast"), [min(ratios), max(ratios)]) == []


def test_the_share_of_the_reward_that_a_critic_can_explain() -> None:
    columns, seen = read_list("critic_ceiling.json") + read_list("critic_ceiling_own.json"), set()
    policies = ["runs/detox/sft", "runs/detox/ppo", "runs/detox/sft", "runs/own/compare/ppo/seed-0"]
    assert [column["policy"] for column in columns] == policies
    for row in rows(page("docs/experiments/detox.md")):
        key = {"the reward model's own head on unfinished answers": "the reward model's own head"}.get(row[0], row[0])
        if len(row) == 5 and key in columns[0]:
            shown = [cell.replace("−", "-").replace(".", "0.") for cell in row[1:]]
            assert wrong(shown, [column[key] for column in columns]) == [], row
            seen.add(key)
    assert len(seen) == 5
    spread = re.search(r"deviation of (\S+) after PPO; (\S+) without", page("docs/experiments/detox.md"))
    assert spread is not None
    assert wrong(decimals(" ".join(spread.groups())), [columns[3]["score std"], columns[1]["score std"]]) == []


ZERO_REWARD = ["plain", "shaped", "curriculum", "shaped_curriculum", "ppo", "ppo_shaped", "ppo_sequence"]


def test_doors_that_open_by_a_hint() -> None:
    """The rows of the table are in the order of the printed command."""
    text, arms = page("docs/algorithms/zero_reward.md"), read("zero_reward.json")["arms"]
    assert f"--arms {' '.join(ZERO_REWARD)}\n" in text
    assert list(arms) == ZERO_REWARD
    shown = [row for row in rows(text.split("## What was measured")[1].split("## ")[0]) if row[0] not in ("arm", "---")]
    for row, name in zip([row for row in shown if len(row) == 3], ZERO_REWARD, strict=True):
        seeds = [arms[name][seed] for seed in "012"]
        assert wrong(numbers(row[1]), [seed["score"]["40"] for seed in seeds]) == [], row
        counts = [int(seed["completions"]) for seed in seeds]
        ends = sorted({min(counts), max(counts)})
        assert row[2] == " to ".join(f"{end:,}" for end in ends), row
    plain = [arms[name][seed] for name in ("plain", "curriculum", "ppo") for seed in "012"]
    assert {(run["successes_without_hint"], run["completions"]) for run in plain} == {(0, 1280)}


AGREEMENT = {
    "solutions of GSM8K": "math, solutions of models",
    "references": "math, references",
    "rows of IFEval": "ifeval, strict",
    "HumanEval": "code, auto",
}


def test_verifiers_beside_other_graders() -> None:
    text, measured = (
        page("docs/verifiers.md").split("## Agreement with other graders")[1],
        read("verifier_agreement.json"),
    )
    shown = [row for row in rows(text) if row[0].startswith("`")]
    for row, (words, name) in zip(shown, AGREEMENT.items(), strict=True):
        assert words in row[1]
        counts = [int(count.replace(",", "")) for count in row[2].split(" of ")]
        assert counts == [measured[name]["agree"], measured[name]["graded"]][: len(counts)], row
        assert len(counts) == 2 or measured[name]["agreement"] == 1, row
    solutions, references, ifeval, code = (measured[name] for name in AGREEMENT.values())
    share = re.search(r"([\d,]+) solutions of GSM8K by models, (\d+) % right", text)
    assert share is not None
    assert int(share[1].replace(",", "")) == solutions["graded"]
    assert wrong([share[2]], [100 * solutions["right by the other grader"] / solutions["graded"]]) == []
    assert f"| {references['graded'] // 2:,} references" in text
    assert f"| {ifeval['graded'] // 10} rows of IFEval, ten texts each" in text
    assert "The seven:" in text
    assert ifeval["lower"] + ifeval["higher"] == 7
    half = code["graded"] // 2
    assert f"its {half} solutions, and {half} bodies" in text
    told = re.search(
        r"graded (\d+) programs a second with `sandbox: auto`, (\d+) with monty and (\d+) with bubble", text
    )
    assert told is not None
    rates = [measured[f"code, {sandbox}"]["per second"] for sandbox in ("auto", "monty", "bubblewrap")]
    assert [abs(float(number) - rate) <= 0.5 for number, rate in zip(told.groups(), rates, strict=True)] == [True] * 3
    assert "Monty alone\nfails two of the solutions" in text
    assert measured["code, monty"]["lower"] == 2


def test_the_chain_on_smollm2() -> None:
    name = "docs/experiments/detox.md"
    measured = {arm: result["figures"] for arm, result in read("detox.json")["models"].items()}
    further = read("detox.json")["with_samples_of_the_start"]
    measured["own"] = further["figures"]
    whose = {"SFT": ("sft", ""), "PPO": ("ppo", ""), "people": ("ppo", "human_")}
    whose["PPO, samples of the start in the reward model"] = ("own", "")
    seen = set()
    for row in rows(page(name)):
        if row[0] not in whose or len(row) != 5 or not row[1].startswith(".") or row[4][:1] not in ("1", "."):
            continue
        arm, prefix = whose[row[0]]
        j, style, similarity = (measured[arm][prefix + figure] for figure in ("j", "style", "similarity"))
        assert wrong(numbers(row[1].replace(".", "0.")), [j["value"], j["low"], j["high"]]) == [], row
        assert wrong(numbers("0" + row[2]), [style["value"]]) == [], row
        assert wrong(numbers("0" + row[3]), [similarity["value"]]) == [], row
        seen.add(row[0])
    told = re.search(r"brings the same PPO to J (\S+), with .*? a KL of (\S+) nats", page(name))
    assert told is not None
    assert wrong(decimals(" ".join(told.groups())), [further["figures"]["j"]["value"], further["eval_kl"]]) == []
    assert seen == set(whose)


def test_the_lab() -> None:
    arms, compared = read("compare_lab.json")["arms"], 0
    other = read("compare_lab_other_reward_model.json")["arms"]
    for row in rows(page("docs/experiments/lab.md")):
        name = row[0].strip("`")
        if name not in arms or len(row) != 5:
            continue
        score, proxy, kl, second = (numbers(cell) for cell in row[1:])
        values = [arms[name]["score"], arms[name]["proxy"], arms[name]["kl"]]
        assert wrong([*score, *proxy, *kl], values) == [], name
        assert wrong(second, [other[name]["score"], other[name]["kl"]]) == [], name
        compared += 1
    assert compared >= 23


def speeds() -> dict[str, dict[str, dict[str, float]]]:
    files = [read(f"side_by_side_smollm2_bf16_amx_{name}.json")["trainers"] for name in SPEED]
    return {name: trainer for file in files for name, trainer in file.items()}


def test_speed_beside_trl() -> None:
    measured, seen = speeds(), set()
    for row in rows(page("docs/speed.md")):
        name = STEPS.get(row[0].split(",")[0])
        if name is None or len(row) != 4:
            continue
        seen.add(name)
        for cell, setting in zip(row[1:], ("defaults", "memory", "fastest"), strict=True):
            figures = measured[name][setting]
            assert wrong(numbers(cell), [figures["ratio"], figures["memory_share"]]) == [], (name, setting)
    assert seen == set(STEPS.values())


SMALL = {
    "`distill_sft`": "distill_sft",
    "SFT on its teacher's samples": "sft_samples",
    "GRPO from the grades": "grpo",
    "at the start": "start",
}


def test_what_a_smaller_student_learned() -> None:
    measured, seen = read("compare_json_small.json"), set()
    for row in rows(page("docs/algorithms/distillation.md")):
        who, _, seed = row[0].removeprefix("24 layers, ").partition(", seed ")
        if who not in SMALL or who == row[0]:
            continue
        cell = measured[SMALL[who]][seed]
        seen.add((SMALL[who], seed))
        shares = [100 * cell["full"][bound] for bound in ("value", "low", "high")]
        assert wrong(numbers(row[1].replace("95 %", "")), shares) == [], row
        assert wrong([row[2]], [100 * cell["parses"]["value"]]) == [], row
        assert row[3] == ("–" if who == "at the start" else f"{cell['costs']['flops']:.1e}")
    assert seen == {(arm, seed) for arm, cells in measured.items() for seed in cells}


def test_sampling_in_8_bits() -> None:
    content = read("compare_json_int8.json")
    run, steps = content["int8"]["0"], content["steps"]
    drift = [steps["kl/sampler_mismatch"], steps["correction/ess"]]
    (told,) = re.findall(
        r"AVX512-BF16\): (everything .*? size [\d.]+\d)", " ".join(page("docs/experiments/json.md").split())
    )
    shares = [run["full"][bound] for bound in ("value", "low", "high")]
    values = [100 * share for share in (*shares, run["parses"]["value"])]
    assert wrong(numbers(told), [*values, run["kl"], *drift]) == []
    (told,) = re.findall(r"samples differed by (.*? up to [\d.]+) nats", " ".join(page("docs/vllm.md").split()))
    assert wrong(numbers(told), [*drift, steps["server/canary, most"]]) == []


def test_speed_beside_vllm_and_transformers() -> None:
    measured, seen = read("sampler_vllm.json")["rows"], set()
    table = page("docs/vllm.md").partition("| rows | in the trainer's process |")[2].partition("\n\n")[0]
    for row in rows(table):
        if row[0] in measured:
            seen.add(row[0])
            line = measured[row[0]]
            names = ("in process", "our server", "vllm", "generate", "continuous batching", "ratio")
            assert wrong(row[1:], [line[name] for name in names]) == [], row[0]
    assert seen == set(measured)


def test_bytes_of_weights_in_each_mode() -> None:
    runs = read("bytes_of_modes.json")["rows"]
    ((share, count),) = re.findall(r"within ([\d.]+) % in (\d+) runs", page("docs/adapters.md"))
    assert int(count) == len(runs)
    assert max(abs(run["error"]) for run in runs) <= float(share) / 100


def test_speed_of_adapters_beside_trl() -> None:
    files = [read(f"side_by_side_smollm2_lora{part}.json")["trainers"] for part in ("", "_more")]
    measured, seen = {name: trainer["memory"] for file in files for name, trainer in file.items()}, set()
    names = {"SFT": "sft", "reward model": "reward", "DPO": "dpo", "GRPO": "grpo"}
    for row in rows(page("docs/speed.md")):
        name = names.get(row[0].split(",")[0])
        if name is None or len(row) != 5:
            continue
        seen.add(name)
        figures = measured[name]
        ratio = [figures["ratio"], *figures["ratio_range"]]
        assert wrong(numbers(row[1]), ratio[: len(numbers(row[1]))]) == [], name
        assert wrong(numbers(row[2]), [figures["memory_share"]]) == [], name
        assert wrong(numbers(row[3]), [figures["seconds_ours"], figures["seconds_peer"]]) == [], name
        assert wrong(numbers(row[4].replace(",", "")), figures["peak_rss_mb"]) == [], name
        assert figures["same_first_step"]
    assert seen == set(measured)


@pytest.mark.parametrize("setting", ["defaults", "memory"])
def test_the_readme_s_sentence_on_speed(setting: str) -> None:
    text = page("README.md").split("## Speed")[1].split("##")[0].replace("\n", " ")
    sentences = {
        "defaults": r"TRL takes ([\d.]+) to ([\d.]+) times .*?its defaults \(its memory is ([\d.]+) to ([\d.]+) times",
        "memory": r"and ([\d.]+) to ([\d.]+) times with its memory flags \(([\d.]+) to ([\d.]+) times ours\)",
    }
    named = re.search(sentences[setting], text)
    assert named is not None
    ratios = [trainer[setting]["ratio"] for trainer in speeds().values()]
    shares = [1 / trainer[setting]["memory_share"] for trainer in speeds().values()]
    assert wrong(list(named.groups()), [min(ratios), max(ratios), min(shares), max(shares)]) == []


def test_what_exports_keep() -> None:
    runs = {(run["algorithm"], run["learning_rate"], run["steps"]): run for run in read("export_kept.json")["runs"]}
    named = {"GRPO": "grpo", "PPO": "ppo", "DPO": "dpo", "reward model": "reward model"}
    compared = 0
    for row in rows(page("docs/own_model_and_data.md")):
        trainer = row[0].partition(", one update")[0]
        if trainer not in named or len(row) != 5:
            continue
        rate, steps = float(row[1]), int(row[2])
        name = "grpo, lr 1e-5" if (trainer, rate) == ("GRPO", 1e-5) else named[trainer]
        run = runs[name, rate, steps]
        measured = [100 * run["kept_in_bfloat16"], 100 * run["kept_by_the_export"]]
        assert wrong([*numbers(row[3]), *numbers(row[4])], measured) == [], row
        assert run["kept_by_the_export"] >= 0.95, row
        compared += 1
    assert compared == len(runs)


def test_how_quickly_programs_are_graded() -> None:
    measured = read("verifier_agreement.json")
    text = " ".join(page("docs/verifiers.md").split())
    rates = re.search(
        r"graded (\d+) programs a second with `sandbox: auto`, (\d+) with monty and (\d+) with bubble", text
    )
    assert rates is not None
    names = ("auto", "monty", "bubblewrap")
    assert wrong(list(rates.groups()), [measured[f"code, {name}"]["per second"] for name in names]) == []
    assert "Monty alone fails two of the solutions" in text
    assert [measured[f"code, {name}"]["lower"] for name in names] == [0, 2, 0]
    assert {measured[f"code, {name}"]["agree"] for name in ("auto", "bubblewrap")} == {328}


def test_a_wrong_number_would_be_noticed() -> None:
    assert wrong(["2.84", "5.16"], [2.837, 5.1587]) == []
    assert wrong(["2.85"], [2.837]) == ["2.85, measured 2.837"]
    assert wrong(["-1.5"], [-1.48]) == []


SAMPLERS = {
    "on policy": "on_policy",
    "1 step old": "none_1",
    "1 step old, `token_truncate`": "token_1",
    "4 steps old": "none_4",
    "4 steps old, `token_truncate`": "token_4",
    "4 steps old, `sequence_mask`": "sequence_4",
    "8 bits in the sampler": "int8_none",
    "8 bits in the sampler, `token_truncate`": "int8_token",
    "on policy, all in bfloat16": "bfloat16",
}


def test_stale_and_8_bit_samples_on_smollm2_are_as_measured() -> None:
    arms = read("compare_detox_samplers.json")["arms"]
    shown = {
        (name, int(seed or 0)): cells[1:]
        for cells in rows(page("docs/vllm.md"))
        for name, _, seed in [cells[0].partition(", seed ")]
        if name in SAMPLERS
    }
    assert shown.keys() == {(name, seed) for name, arm in SAMPLERS.items() for seed in range(len(arms[arm]))}
    for (name, seed), cells in shown.items():
        row = arms[SAMPLERS[name]][seed]
        values = [
            row[key] for key in ("score", "low", "high", "kl", "mismatch", "ess", "seconds") if row[key] is not None
        ]
        figures = [figure for cell in cells for figure in numbers(cell)]
        assert all(is_rounded(*pair) for pair in zip(figures, values, strict=True)), name


HARMLESS = {
    "SmolLM2 as published": "published",
    "SFT, the start": "sft",
    "DPO": "dpo",
    "PPO": "ppo",
    "PPO, the reward model alone": "ppo_alone",
}


def test_refusals_after_the_second_chain() -> None:
    measured, seen = read("alignment_harmless.json"), set()
    columns = ["harmful/refused", "xstest/refused_unsafe", "xstest/refused_safe", "toxicity/toxic", "blimp/accuracy"]
    text = page("docs/experiments/harmlessness.md")
    for name, *cells in rows(text):
        if name not in HARMLESS:
            continue
        model = measured["models"][HARMLESS[name]]
        for cell, (suite, figure) in zip(cells, (column.split("/") for column in columns), strict=False):
            values = [100 * model[suite]["figures"][figure][key] for key in ("value", "low", "high")]
            assert wrong(numbers(cell), values) == [], (name, suite)
        others = [model.get("tokens"), model.get("kl")]
        assert (
            wrong([cell for cell in cells[5:] if cell != "–"], [value for value in others if value is not None]) == []
        )
        seen.add(HARMLESS[name])
    assert seen == set(measured["models"])
    flat = " ".join(text.split())
    (accuracy,) = re.findall(r"right on (.*?) of 221 held-out pairs", flat)
    (distinct,) = re.findall(r"of the bigrams (.*?) \(alarm", flat)
    bigrams = measured["models"]["ppo"]["distinct_2"]
    assert wrong(numbers(distinct), [bigrams["after"], bigrams["before"]]) == []
    card = measured["reward_model"]
    assert wrong(numbers(accuracy), [card["accuracy"], card["accuracy_low"], card["accuracy_high"]]) == []


DECLINED = {
    "GPT-4": "gpt4",
    "Llama 2, its first system prompt": "llama2orig",
    "Llama 2, no system prompt": "llama2new",
    "Mistral 7B, a guarding system prompt": "mistralguard",
    "Mistral 7B, no system prompt": "mistralinstruct",
    "all five": "all",
    "all five, partial refusals as answers": "all",
}


def test_the_detectors_of_refusals_on_unseen_labels() -> None:
    measured, seen = read("refusal_detector.json"), set()
    text = page("docs/evaluation_suites.md")
    for name, *others in rows(text):
        if (model := DECLINED.get(name)) is None:
            continue
        counts, *cells = others
        labels = measured["labels"][model]
        assert numbers(counts) == [str(labels[f"{kind}_refusal"]) for kind in ("full", "partial")], name
        way = "partial as answers" if "as answers" in name else "partial as refusals"
        figures = [
            measured["detectors"][detector][way][model][figure]
            for detector in ("checked", "phrases")
            for figure in ("accuracy", "precision", "recall")
        ]
        for cell, figure in zip(cells, figures, strict=True):
            shown = numbers(cell)
            assert wrong(shown, [figure[key] for key in ("value", "low", "high")][: len(shown)]) == [], (name, cell)
        seen.add(name)
    assert seen == set(DECLINED)
    told = re.search(r"two people agree on (\S+) \[(\S+), (\S+)\] of the answers", text)
    assert told is not None
    for people in measured["people"].values():
        assert wrong(list(told.groups()), [people["all"][key] for key in ("value", "low", "high")]) == []
    told = re.search(r"of the (\d+) full refusals that `checked` misses it detects\s+(\d+), of which (\d+) call", text)
    assert told is not None
    assert [int(number) for number in told.groups()] == list(measured["full refusals missed"].values())


def test_the_agreement_of_simple_judges_with_people() -> None:
    measured, seen, text = read("label_agreement.json"), set(), page("docs/label.md")
    judges = {"the shorter": "shorter", "the less toxic": "cleaner", "the answer that declines": "declines"}
    for row in rows(text):
        judge = next((judge for name, judge in judges.items() if row[0].startswith(name)), None)
        if judge is None:
            continue
        figures = measured[judge]
        assert int(row[1].replace(",", "")) == figures["ties"], row
        for shown, figure in zip(row[2:], ("accuracy", "kappa"), strict=True):
            assert wrong(numbers(shown), [figures[figure][key] for key in ("value", "low", "high")]) == [], row
        assert f"{figures['pairs']:,} of HH-RLHF's pairs" in text
        seen.add(judge)
    assert seen == set(measured)
