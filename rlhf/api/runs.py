"""A run from Python and its result: sft, train, reward_model, compare. Trained models: evaluate, sample."""

from __future__ import annotations

import html
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack

import pandas as pd
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.api.checks import SampleOptions, check_sampling, suite_settings
from rlhf.api.comparing import check_owners, run_compare
from rlhf.api.inputs import Inputs, Reward, Rows, nested, new_folder, with_plugins
from rlhf.api.keywords import CompareKeywords, RewardModelKeywords, SftKeywords, TrainKeywords
from rlhf.api.training import OnStep, run_reward_model, run_train
from rlhf.comparison.plan import plan_cells
from rlhf.comparison.terminal import ComparisonTerminal
from rlhf.config.compare import CompareConfig
from rlhf.config.data import DataConfig
from rlhf.config.files import Tree, format_yaml, merge, merge_overrides
from rlhf.config.load import (
    check_kind,
    compare_config,
    load_chat_format,
    load_run,
    read_yaml,
    reward_model_config,
    train_config,
)
from rlhf.config.presets import get_setting, release_held_out
from rlhf.config.run import ALGORITHM
from rlhf.config.sections import OfflineConfig, RewardModelConfig
from rlhf.data.paths import check_files, check_targets, resolve_best
from rlhf.errors import ConfigError, called_from_python
from rlhf.factory.evaluation import START, PolicyComparison, compare_models, evaluate_suite, load_model_for_suite
from rlhf.factory.exported import rounded_models
from rlhf.factory.reward_card import compute_report_card
from rlhf.factory.sampler import NO_TEMPLATE, Completer
from rlhf.lab.build import resolve_lab_paths
from rlhf.model_files import ADAPTER
from rlhf.models.folders import MODEL, member_folders
from rlhf.models.scalar_adapters import merged_classifier
from rlhf.models.scalar_head import load_reward_heads
from rlhf.plugins import as_settings, sections_in
from rlhf.report.terminal import Terminal
from rlhf.runtime.distributed import is_main_process
from rlhf.runtime.seeding import derive_seed
from rlhf.section import Section
from rlhf.suites.questions import SuiteResult
from rlhf.tracking.metrics import format_fixed, shown_in
from rlhf.tracking.run_folder import FolderLock, RunFolder, write_atomically
from rlhf.tracking.same_run import MEMBERS, check_same_run
from rlhf.user_code import OBJECT, target_of

Resume = bool | Literal["always"]
"""Whether to continue the run in a folder; see `train`."""


@dataclass(frozen=True)
class RunResult:
    """The results of a run. Models and metrics are read from its folder when they are first asked for."""

    folder: Path
    """The run folder: configuration, metrics, samples, checkpoints, model and report."""
    complete: bool
    """Whether the run reached its end; False if it was interrupted (and saved: `resume=True` goes on)."""

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Return the metrics, one row for each logged step."""
        rows = RunFolder(self.folder).read_metrics()
        return pd.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    @cached_property
    def model(self) -> PreTrainedModel:
        """Return the trained model, as transformers loads it: a causal LM, or a reward model's classifier."""
        config = RunFolder(self.folder).read_config()
        kind: Any = AutoModelForCausalLM
        if "policy" not in config:
            if (self.model_folder / ADAPTER).is_file():
                return merged_classifier(load_reward_heads(str(self.model_folder), self.tokenizer))
            grades_steps = config.get("process") is not None
            kind = AutoModelForTokenClassification if grades_steps else AutoModelForSequenceClassification
        model: PreTrainedModel = kind.from_pretrained(self.model_folder)
        return model

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.model_folder)
        return tokenizer

    @property
    def model_folder(self) -> Path:
        """Return the folder of the trained model.

        Raises:
            ConfigError: the run was interrupted, so there is none yet.
        """
        if not self.complete:
            raise ConfigError(f"the run in {self.folder} was interrupted: continue it with resume=True")
        if members := member_folders(str(self.folder)):
            raise ConfigError(f"{self.folder} is an ensemble: its models are in {members[0]} and the folders beside it")
        return self.folder / MODEL

    @property
    def report(self) -> Path:
        """Return the path of the report: one HTML page."""
        return self.folder / "report.html"

    @cached_property
    def report_card(self) -> dict[str, Any]:
        """Return a reward model's report card; empty for other runs, and without held-out pairs."""
        return RunFolder(self.folder).read_report_card()

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the first and last value of the main metrics, and the report's place."""
        shown = {info.name: info for view in ("headline", "summary") for info, _ in shown_in(view)}
        lines = [
            f"<tr><td>{html.escape(info.name)}</td><td>{format_fixed(values[0])}</td>"
            f"<td>{format_fixed(values[-1])}</td><td>{html.escape(info.unit)}</td></tr>"
            for info in shown.values()
            if info.name in self.metrics and len(values := self.metrics[info.name].dropna().tolist())
        ]
        state = "" if self.complete else "<p>interrupted; <code>resume=True</code> goes on</p>"
        return (
            f"{state}<table><tr><th>metric</th><th>first</th><th>last</th><th>unit</th></tr>{''.join(lines)}</table>"
            f"<p>report: <code>{html.escape(str(self.report))}</code></p>"
        )


def train(
    model: Any = None,
    preset: str | Mapping[str, Any] | None = None,
    *,
    algorithm: str | Mapping[str, Any] | None = None,
    prompts: Rows | None = None,
    reward: Reward | None = None,
    preferences: Rows | None = None,
    eval_prompts: Rows | None = None,
    eval_preferences: Rows | None = None,
    judge: Reward | None = None,
    costs: Reward | None = None,
    environment: Any = None,
    tokenizer: Any = None,
    advantage: Callable[..., Any] | Section | None = None,
    loss: Callable[..., Any] | Section | None = None,
    config: str | Path | None = None,
    folder: str | Path | None = None,
    resume: Resume = False,
    on_step: OnStep | None = None,
    quiet: bool = False,
    **settings: Unpack[TrainKeywords],
) -> RunResult:
    """Train a policy: PPO, GRPO, DPO or any other algorithm of `rlhf train`.

        result = rlhf.train("models/smollm2", "grpo", prompts=["Tell a joke."], reward=lambda completions: [...])

    Args:
        model: a path, a hub id, or a loaded causal LM (then with `tokenizer`).
        preset: the algorithm, such as "ppo", "grpo" or "dpo"; or the section `algorithm` of a configuration.
        algorithm: settings of the section `algorithm` over the preset's, such as {"kl": {"coef": 0.1}}; or the
            name of the preset.
        prompts: the prompts to complete (online algorithms).
        reward: where scores come from (online algorithms); a function is called with `prompts`, `completions` and
            `references`, each a list, if it has these arguments, and returns a list of numbers. A reward function
            for TRL works as it is (rlhf.rewards.function.FunctionReward).
        preferences: pairs (offline algorithms such as DPO): rows with prompt, chosen and rejected, or another format of
            docs/data.md.
        eval_prompts: held-out prompts.
        eval_preferences: held-out pairs.
        judge: scores the completions of held-out prompts, in place of the training reward (eval.source).
        costs: the costs of completions, in the forms of `reward` (reward.cost); the preset "ppo_lag", or the setting
            algorithm={"lagrange": {...}} of another algorithm, holds its mean at a limit.
        environment: a class with reset and step, or a class of tools, that answers the policy over several turns and
            gives the reward; or its target, such as "gym:ID"; or the section `environment` (docs/agents.md).
        tokenizer: a tokenizer, or the path of one; None: the model's.
        advantage: an advantage of your own: a function (rlhf.algo.functions.AdvantageFunction), or an instance of a
            subclass of Advantage; see `rlhf.check`.
        loss: a policy loss of your own: a function per token (rlhf.algo.functions.LossFunction), or an instance of a
            subclass of TokenLoss; see `rlhf.check`.
        config: a configuration file, over which the arguments go.
        folder: the run folder (default: runs/<algorithm>). If it is taken, a new run goes to folder-2, folder-3, ...
        resume: True continues the run in `folder` instead of starting a new one; it has to be the same run, except for
            settings that may change (docs/run_folder.md). "always" continues its weights after any other change too.
        on_step: called with the step and its metrics.
        quiet: print nothing.
        **settings: further settings, by section (`policy={"lr": 1e-5}`) or by key (`**{"policy.lr": 1e-5}`); see
            docs/configuration/index.md. Also lr, steps, epochs, seed, temperature and max_new_tokens, for the keys that
            have these names.

    Raises:
        UserError: a setting, a model, the data or the reward is wrong; the message says what to do.
    """
    given = [preset, algorithm, reward, judge, costs, advantage, loss]
    algorithm = as_settings(_merged(preset, algorithm))
    draft = Draft.begin(train, algorithm, settings, config=config, folder=folder, resume=resume)
    inputs, sections = draft.inputs, draft.sections
    if model is not None:
        sections["policy"] = inputs.model(model, tokenizer)
    algorithm_section = _algorithm(algorithm, advantage, loss)
    if algorithm_section:
        sections["algorithm"] = algorithm_section
    sections["data"] = inputs.data("prompt", prompts=prompts, eval_prompts=eval_prompts)
    sections["data"] |= inputs.data(None, preferences=preferences, eval_preferences=eval_preferences)
    if reward is not None:
        sections["reward"] = {"source": inputs.reward(reward)}
    if costs is not None:
        sections["reward"] = {**sections.get("reward", {}), "cost": {"source": inputs.reward(costs, "costs")}}
    if judge is not None:
        sections["eval"] = {"source": inputs.reward(judge, "judge")}
    if environment is not None:
        sections["environment"] = inputs.environment(environment)
    tree = with_plugins(draft.tree(), given)
    if tree.get("algorithm") is None:
        raise ConfigError('preset is missing: give the name of an algorithm, such as "ppo", "grpo" or "dpo"')
    config_of_run = train_config(tree, parameters=inputs.parameters)
    return _run(config_of_run, inputs, run_train, on_step=on_step, quiet=quiet)


def sft(
    model: Any = None,
    rows: Rows | None = None,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    tokenizer: Any = None,
    config: str | Path | None = None,
    folder: str | Path | None = None,
    resume: Resume = False,
    on_step: OnStep | None = None,
    quiet: bool = False,
    **settings: Unpack[SftKeywords],
) -> RunResult:
    """Train a model on texts, instructions or conversations (supervised fine-tuning).

    Args:
        model: a path, a hub id, or a loaded causal LM (then with `tokenizer`).
        rows: texts, or dictionaries in a format of docs/data.md, such as {"messages": [...]}.
        data: settings of the section data, such as {"holdout": 0.1}; or the rows, in place of `rows`.
        eval_data: held-out rows.
        tokenizer: as in `train`; so are config, resume, on_step, quiet and settings.
        folder: the run folder (default: runs/sft).

    Raises:
        UserError: as `train`.
    """
    keywords: Tree = dict(settings)
    if rows is None and not (isinstance(data, Mapping) and data.keys() <= DataConfig.model_fields.keys()):
        rows = data
    elif data is not None:
        keywords["data"] = data
    draft = Draft.begin(sft, "sft", keywords, config=config, folder=folder, resume=resume)
    if "algorithm" not in draft.base:
        draft.sections["algorithm"] = {"preset": "sft"}
    if model is not None:
        draft.sections["policy"] = draft.inputs.model(model, tokenizer)
    draft.sections["data"] = draft.inputs.data("text", sft=rows, eval_sft=eval_data)
    config_of_run = train_config(draft.tree())
    if not isinstance(config_of_run, OfflineConfig) or config_of_run.algorithm.loss.data != "demonstrations":
        raise ConfigError(
            f"{config or 'algorithm'} describes {config_of_run.algorithm.name}, which learns from other data than "
            "texts: call rlhf.train, or give another configuration"
        )
    return _run(config_of_run, draft.inputs, run_train, on_step=on_step, quiet=quiet)


def reward_model(
    model: Any = None,
    preferences: Rows | None = None,
    *,
    eval_preferences: Rows | None = None,
    tokenizer: Any = None,
    config: str | Path | None = None,
    folder: str | Path | None = None,
    resume: Resume = False,
    on_step: OnStep | None = None,
    quiet: bool = False,
    **settings: Unpack[RewardModelKeywords],
) -> RunResult:
    """Train a reward model on preference pairs, and compute its report card if there are held-out pairs.

        result = rlhf.reward_model("models/smollm2", "pairs.jsonl", **{"model.lr": 1e-5})

    The configuration's section `model` has the name of the first argument, so its keys are given one by one, as above.

    Args:
        model: a path, a hub id, or a loaded causal LM (then with `tokenizer`) that the reward model starts from.
        preferences: the pairs, as in `train`.
        eval_preferences: held-out pairs.
        tokenizer: as in `train`; so are config, resume, on_step, quiet and settings.
        folder: the run folder (default: runs/reward_model).

    Raises:
        UserError: as `train`.
    """
    draft = Draft.begin(reward_model, "reward_model", settings, config=config, folder=folder, resume=resume)
    draft.sections["data"] = draft.inputs.data(None, preferences=preferences, eval_preferences=eval_preferences)
    if model is not None:
        draft.sections["model"] = draft.inputs.model(model, tokenizer)
    run_config = reward_model_config(draft.tree())
    return _run(run_config, draft.inputs, run_reward_model, on_step=on_step, quiet=quiet)


@dataclass(frozen=True)
class Draft:
    """The configuration of a run while the arguments of a call fill it."""

    base: Tree  # the content of the configuration file
    inputs: Inputs
    settings: Tree  # the other keywords of the call, over everything else
    section: str  # of the model that it trains
    sections: Tree = field(default_factory=dict)  # from the arguments, over `base`

    @classmethod
    def begin(
        cls,
        call: Callable[..., RunResult],
        algorithm: object,
        settings: Mapping[str, Any],
        *,
        config: str | Path | None,
        folder: str | Path | None,
        resume: Resume,
    ) -> Draft:
        """Read the configuration file and choose the run folder, which is named after the algorithm."""
        base = read_yaml(config) if config is not None else {}
        if config is not None:
            with called_from_python():
                check_kind("reward" if call is reward_model else "train", config, base)
        section = "model" if call is reward_model else "policy"
        keywords = nested(settings, call, section)
        wanted = _wanted_folder(folder, keywords, base, algorithm)
        return cls(base, Inputs(_run_folder(wanted, resume=bool(resume)), resume), keywords, section)

    def tree(self) -> Tree:
        """Return the whole configuration.

        Raises:
            ConfigError: it names no model.
        """
        folder: Tree = {"run": {"out_dir": str(self.inputs.folder)}}
        if self.inputs.resume:
            folder["checkpoint"] = {"resume": "always" if self.inputs.resume == "always" else "auto"}
        tree = merge_overrides(self.base, merge(merge(self.sections, self.settings), folder))
        if get_setting(tree, f"{self.section}.model") is None:
            raise ConfigError("model is missing: give a path, a hub id, or a loaded causal LM with its tokenizer")
        return tree


def _run(config: Any, inputs: Inputs, run: Callable[..., bool], *, on_step: Any, quiet: bool) -> RunResult:
    """Check the folder, write the inputs, check the files, run, and return the result.

    A call that fails before a step is taken leaves no folder behind.

    Raises:
        ConfigError: on_step is no function.
    """
    if on_step is not None and not callable(on_step):
        raise ConfigError(f"on_step is a {type(on_step).__name__}: give a function of the step and its metrics")
    config = resolve_lab_paths(config)
    folder = Path(config.run.out_dir)
    with called_from_python(), inputs.removed_on_error():
        check_same_run(config)
        inputs.write()
        check_files(config)
        check_targets(config)
        console = Console(quiet=quiet or not is_main_process())
        complete = run(config, Terminal(console), on_step=on_step)
    return RunResult(folder, complete)


def _wanted_folder(folder: str | Path | None, keywords: Tree, base: Tree, algorithm: object) -> Path:
    """Return the folder that a call asks for: by `folder`, by run.out_dir, or by the name of the algorithm.

    Raises:
        ConfigError: both folder and run.out_dir are given.
    """
    out_dir = get_setting(keywords, "run.out_dir")
    if folder is not None and out_dir is not None:
        raise ConfigError(f"folder={str(folder)!r} and run.out_dir={str(out_dir)!r} say the same: give one of them")
    wanted = str(folder or out_dir or get_setting(base, "run.out_dir") or f"runs/{ALGORITHM}")
    return Path(wanted.replace(ALGORITHM, _name_of(algorithm, keywords, base))).expanduser()


def _name_of(algorithm: object, keywords: Tree, base: Tree) -> str:
    """Return the name of the algorithm of a call: a preset, or the type of its loss or advantage."""
    if isinstance(algorithm, str):
        return algorithm
    sections = [algorithm, keywords.get("algorithm"), base.get("algorithm")]
    for key in ("preset", "loss.type", "advantage.type"):
        names = [get_setting(section, key) for section in sections if isinstance(section, Mapping)]
        if name := next(filter(None, names), None):
            return str(name)
    return "train"


def _run_folder(wanted: Path, *, resume: bool) -> Path:
    """Choose the run folder: a new one, or the folder of the run to continue.

    Raises:
        ConfigError: a run should continue, and there is none.
    """
    if not resume:
        return new_folder(wanted)
    if not (wanted / "config.yaml").is_file() and not (wanted / MEMBERS).is_dir():
        raise ConfigError(f"resume=True, but {wanted} holds no run: give the folder of the run to continue")
    return wanted


def _merged(
    preset: str | Mapping[str, Any] | None, algorithm: str | Mapping[str, Any] | None
) -> str | Mapping[str, Any] | None:
    """Return the algorithm that the two arguments describe.

    Raises:
        ConfigError: each of them names a preset.
    """
    if preset is None or algorithm is None:
        return preset if algorithm is None else algorithm
    if not isinstance(preset, str):
        raise ConfigError("the section of the algorithm is given twice: leave one of preset and algorithm out")
    named = algorithm if isinstance(algorithm, str) else algorithm.get("preset", preset)
    if named != preset:
        raise ConfigError(f"preset={preset!r} and algorithm={named!r} name two algorithms: give one of them")
    return preset if isinstance(algorithm, str) else {"preset": preset, **algorithm}


def _algorithm(
    algorithm: str | Mapping[str, Any] | None,
    advantage: Any,
    loss: Any,
) -> Tree:
    """Return the section `algorithm`; own functions without an algorithm are used in place of GRPO's.

    Raises:
        ConfigError: the advantage or the loss is neither a function nor a section.
    """
    if algorithm is None and (advantage is not None or loss is not None):
        algorithm = "grpo"
    section: Tree = {"preset": algorithm} if isinstance(algorithm, str) else dict(algorithm or {})
    for key, own in {"advantage": advantage, "policy_loss": loss}.items():
        if isinstance(own, Section):
            section[key] = as_settings(own)
        elif own is not None and not callable(own):
            raise ConfigError(
                f"{key.removeprefix('policy_')} is a {type(own).__name__}: give a function, or an instance of a class; "
                f'one of ours by its name: algorithm={{"{key}": {{"type": ...}}}}'
            )
        elif own is not None:
            section[key] = {"type": "function", "target": target_of(own)}
    return section


def sample(
    model: str | Path | RunResult,
    prompts: str | Sequence[str],
    *,
    count: int = 1,
    seed: int = 0,
    greedy: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    raw: bool = False,
) -> list[list[str]]:
    """Complete prompts, with the sampler that training uses; return `count` texts for each.

    Args:
        model: a run, a model folder or a hub id.
        prompts: one prompt or several: user messages if the model has a chat template.
        count: completions of each prompt.
        seed: another seed gives other completions.
        greedy: take the most likely token each time.
        max_new_tokens: the longest completion; None: as in the run.
        temperature: divides the logits; None: as in the run.
        raw: give the prompt as it is, without the chat template.

    Raises:
        UserError: an option or a prompt is wrong, a prompt is too long, or the model cannot be loaded.
    """
    path = _path(model)
    options = SampleOptions(count=count, seed=seed, greedy=greedy, raw=raw)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    _warn_of_rounding(path)
    sampling = check_sampling(path, texts, options, max_new_tokens=max_new_tokens, temperature=temperature)
    completer = Completer(path, sampling, chat=NO_TEMPLATE if raw else load_chat_format(path))
    return completer.complete(texts, count=count, key=derive_seed(seed, "sample"), greedy=greedy)


def evaluate(
    model: str | Path | RunResult,
    suite: str | None = None,
    *,
    against: str | Path | RunResult = START,
    data: str | Path | None = None,
    limit: int | None = None,
    settings: Sequence[str] = (),
) -> PolicyComparison | SuiteResult | dict[str, Any]:
    """Evaluate a run, like `rlhf eval`.

    Args:
        model: a run; with a suite, also a model folder or a hub id.
        suite: a suite, such as "ifeval" or "xstest"; None compares the run with another model on its held-out prompts.
        against: the other model: a run or a model folder; the default is the model that the run started from.
        data: the data of the suite.
        limit: the number of rows of the suite to use.
        settings: `key=value` settings over the run's.

    Returns:
        The comparison of the two models; or the figures of the suite; or, of a reward model's run, its report card.

    Raises:
        UserError: there is nothing to evaluate on, or a model cannot be loaded.
    """
    path, other = _path(model), _path(against, "against")
    if suite is None and (data is not None or limit is not None):
        raise ConfigError("data and limit are a suite's: name one, as in suite='persona'")
    if suite is not None:
        source = None if data is None else str(data)
        checked, task = suite_settings(suite, path, data=source, limit=limit, against=other, overrides=settings)
        return evaluate_suite(checked, load_model_for_suite(checked, path), task)
    config = load_run(path, settings)
    if isinstance(config, RewardModelConfig):
        if other != START:
            raise ConfigError(f"{path} is a reward model's run: it writes nothing that could be compared with {other}")
        _warn_of_rounding(path)
        return compute_report_card(config, path)
    return compare_models(config, path, other)


def _warn_of_rounding(path: str) -> None:
    for text in rounded_models(path):
        warnings.warn(text, stacklevel=3)


def _path(model: Any, argument: str = "model") -> str:
    if not isinstance(model, str | Path | RunResult):
        raise ConfigError(f"{argument} is a {type(model).__name__}: give a run, a model folder or a hub id")
    return resolve_best(os.path.expanduser(model.folder if isinstance(model, RunResult) else model))


@dataclass(frozen=True)
class CompareResult:
    """The results of a comparison."""

    folder: Path
    """The folder: results, report, and one run for each arm and seed."""
    complete: bool
    """Whether every arm was run; False if the comparison was stopped (`resume=True` goes on)."""

    @cached_property
    def results(self) -> dict[str, Any]:
        """Return the content of results.json: docs/compare.md describes it."""
        content: dict[str, Any] = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
        return content

    @cached_property
    def table(self) -> pd.DataFrame:
        """Return one row for each held-out prompt, arm and seed: the scores, KL and lengths."""
        return pd.read_parquet(self.folder / "results.parquet")

    @property
    def report(self) -> Path:
        """Return the path of the report: one HTML page."""
        return self.folder / "report.html"


def compare(
    model: Any,
    arms: Iterable[str] | Mapping[str, str | Mapping[str, Any]],
    *,
    completions: int | None = None,
    budget: Mapping[str, float] | None = None,
    prompts: Rows | None = None,
    eval_prompts: Rows | None = None,
    preferences: Rows | None = None,
    demonstrations: Rows | None = None,
    reward: Reward | None = None,
    judge: Reward | None = None,
    tokenizer: Any = None,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    tune: int | Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: Unpack[CompareKeywords],
) -> CompareResult:
    """Train several algorithms from one model on one budget, and judge them alike.

        rlhf.compare(model, ["ppo", "grpo", "dpo"], completions=1024, prompts=..., preferences=..., reward=...)

    Args:
        model: as in `train`.
        arms: presets; or names with a preset or settings each, such as {"best_of_n": {"type": "best_of_n", "n": 4}}.
        completions: the budget of each arm: completions sampled, or read from data.
        budget: another budget instead, such as {"tokens": 100_000}.
        prompts: the prompts of online arms.
        eval_prompts: held-out prompts, on which all arms are judged.
        preferences: pairs for the arms that learn from pairs.
        demonstrations: rows for arms that run SFT.
        reward: the training reward, as in `train`. Arms run in processes of their own: a function has to be in a module
            or a .py file.
        judge: the reward that decides; None: the training reward.
        tokenizer: as in `train`.
        seeds: each arm is run once for each.
        jobs: arms that run at a time.
        tune: the trials that each arm is tuned with, or the settings of `tune` in a file; None: arms run as written.
        config: a base configuration of `rlhf train`, over which the arguments go.
        folder: the comparison's folder (default: runs/compare); taken ones as in `train`.
        resume: continue the comparison in `folder`.
        quiet: print nothing.
        **settings: settings of `rlhf train` for all arms.

    Raises:
        UserError: a setting, a model, the data or a reward is wrong. An arm that fails is not an error.
    """
    if reward is None and judge is None:
        raise ConfigError("a comparison needs a reward or a judge: the score that decides")
    if completions is not None and budget is not None:
        raise ConfigError("completions and budget both limit the arms: give one of them")
    if budget is not None and not isinstance(budget, Mapping):
        raise ConfigError(
            f'budget is a {type(budget).__name__}: give {{"completions": {budget}}}, or completions={budget}'
        )
    if not isinstance(resume, bool):
        raise ConfigError(
            f"resume is {resume!r}: a comparison continues with the rows and settings that it began with, resume=True; "
            "for others leave resume out"
        )
    named = _arms(arms)
    given = [settings, arms, reward, judge]
    _check_importable(given)
    wanted = Path(folder or "runs/compare").expanduser()
    inputs = Inputs(wanted if resume else new_folder(wanted), resume, of="comparison")
    sections = {
        "prompts": (prompts, "prompt"),
        "eval_prompts": (eval_prompts, "prompt"),
        "preferences": (preferences, None),
        "sft": (demonstrations, "text"),
    }
    data = {
        name: inputs.rows(name, rows, text=text)  # type: ignore[arg-type]
        for name, (rows, text) in sections.items()
        if rows is not None
    }
    file = read_yaml(config) if config is not None else {}
    base: Tree = {"policy": inputs.model(model, tokenizer), "data": data}
    if "algorithm" not in file:
        base["algorithm"] = {"preset": "grpo"}
    given_sources = {"reward": reward, "judge": judge}
    sources = {name: inputs.reward(source, name) for name, source in given_sources.items() if source is not None}
    if "reward" in sources:
        base["reward"] = {"source": _importable(sources["reward"])}
    base = merge(merge(release_held_out(file, base), base), nested(settings, compare))
    comparison = compare_config(
        with_plugins(
            {
                "base": str(inputs.folder / "base.yaml"),
                "out_dir": str(inputs.folder),
                "judge": _importable(sources.get("judge", sources.get("reward", {}))),
                "budget": dict(budget) if budget is not None else {"completions": completions},
                "seeds": list(seeds),
                "jobs": jobs,
                "tune": dict(tune) if isinstance(tune, Mapping) else tune,
                "arms": named,
            },
            given,
        )
    )
    # Nobody is in a new folder; its lock would keep it from being removed on an error.
    with called_from_python(), FolderLock(inputs.folder) if resume else nullcontext():
        _check_plan(comparison, base)
        with inputs.removed_on_error():
            inputs.folder.mkdir(parents=True, exist_ok=True)
            inputs.write()
            write_atomically(inputs.folder / "base.yaml", format_yaml(base))
        view = ComparisonTerminal(Console(quiet=quiet))
        complete = run_compare(comparison, beside=inputs.folder, view=view)
    return CompareResult(inputs.folder, complete)


def _check_plan(comparison: CompareConfig, base: Tree) -> None:
    """Check the cells of a comparison, and that its folder has no others, before its base is written.

    Raises:
        ConfigError: a cell is invalid, or the comparison was begun with other settings.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "base.yaml"
        file.write_text(format_yaml(base), encoding="utf-8")
        check_owners(plan_cells(comparison.model_copy(update={"base": str(file)}), beside=file.parent), file.parent)


def _arms(arms: Any) -> Tree:
    if isinstance(arms, str) or not isinstance(arms, Iterable):
        raise ConfigError(f'arms is a {type(arms).__name__}: give presets, as in ["ppo", "grpo"]')
    named = arms if isinstance(arms, Mapping) else {name: name for name in arms}
    return {name: _arm(arm) if isinstance(arm, str) else dict(as_settings(arm)) for name, arm in named.items()}


def _arm(preset: str) -> Tree:
    return {"type": "best_of_n"} if preset == "best_of_n" else {"algorithm": {"preset": preset}}


def _check_importable(given: object) -> None:
    """Check that another process can import the classes of the sections among the arguments.

    Raises:
        ConfigError: one is defined in a script or a notebook.
    """
    for section in sections_in(given):
        if type(section).__module__ == "__main__":
            raise ConfigError(
                f"rlhf.compare runs each arm in a process of its own, which cannot have the class "
                f"{type(section).__name__} of a script or a notebook: put it into a .py file and import it from there"
            )


def _importable(source: Tree) -> Tree:
    """Check that another process can import the functions of a source.

    Raises:
        ConfigError: one is a lambda, or defined in a notebook.
    """
    for member in [source, *source.get("sources", [])]:
        if str(member.get("target", "")).startswith(OBJECT):
            raise ConfigError(
                "rlhf.compare runs each arm in a process of its own, which cannot have a lambda or a function of a "
                "notebook: put the function into a .py file and give its path, reward='my_reward.py:score'"
            )
    return source
