"""The pages agree with the program: made pages are up to date, commands and settings exist, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from tiny_models import EOS, completions_of, tokenizer

import rlhf
from rlhf.algorithms.presets import PRESETS
from rlhf.cli import _VERBS, parse
from rlhf.config.compare import CompareConfig
from rlhf.config.load import (
    dump,
    expand_preset,
    load_any,
    load_compare,
    load_reward_model,
    load_train,
    train_config,
    unread_warnings,
)
from rlhf.config.sections import RewardModelConfig, TrainSections
from rlhf.errors import ConfigError, install_hint
from rlhf.plugins import load_plugins
from rlhf.rewards.function import FunctionReward
from rlhf.tracking.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALGORITHMS = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
MADE = {
    "metrics.md": "make_metrics_doc.py",
    "models.md": "make_support_matrix.py",
    "troubleshooting.md": "make_troubleshooting_doc.py",
    "hyperparameters.md": "make_hyperparameters_doc.py",
}

PLACEHOLDER = re.compile(r"…|<[^<>]*>")
FENCE = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^()\s]+)\)")
NAMED_FILE = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = ("py", "json", "jsonl", "yaml", "html", "md")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def offenders(problems: Callable[[Path], Iterable[str]], pages: Sequence[Path] = ()) -> list[str]:
    """Return the answer of `problems` for each page, after the page's name."""
    return [f"{named(page)}: {problem}" for page in pages or PAGES for problem in problems(page)]


def fences(page: Path, language: str) -> list[str]:
    return [
        body
        for _, fence_language, body in FENCE.findall(page.read_text(encoding="utf-8"))
        if fence_language == language
    ]


@pytest.fixture
def files_of_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_stays_registered: None) -> None:
    """Put the Python files that pages tell a reader to write into the current folder."""
    for page in PAGES:
        for name, body in NAMED_FILE.findall(page.read_text(encoding="utf-8")):
            (tmp_path / name).write_text(body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def spans(page: Path) -> list[str]:
    return SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", MADE)
def test_made_pages_are_up_to_date(name: str) -> None:
    script = ROOT / "scripts" / MADE[name]
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == runpy.run_path(str(script))["page"](), (
        f"docs/{name} is out of date: run python scripts/{MADE[name]}"
    )


def test_the_command_on_the_page_of_models_finds_what_it_imports() -> None:
    """In a process of its own: this one has the folder of the tests on its path."""
    script = ROOT / "scripts" / MADE["models.md"]
    code = f"import runpy; runpy.run_path({str(script)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Commands


def command_lines(text: str) -> Iterator[str]:
    """Every `rlhf …` in a code block, indented or fenced, or in a code span; `;` and `&&` part commands."""
    blocks = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.startswith(("    ", "\t"))]
    blocks += [line.strip() for _, _, body in FENCE.findall(text) for line in body.replace("\\\n", " ").splitlines()]
    for line in [*blocks, *SPAN.findall(FENCE.sub("", text))]:
        for part in re.split(r"\s(?:;|&&|\|)\s", line):
            command = re.sub(r"^(?:\$ |\.venv/bin/|python -m )+", "", part.split(" > ")[0].strip())
            if command.startswith("rlhf "):
                yield command


def filled(word: str) -> str:
    """A placeholder value stands for some text."""
    key, equals, value = word.partition("=")
    return f"{key}=something" if equals and PLACEHOLDER.search(value) else word


def check_command(command: str) -> None:
    """The parser takes it, and if its file is one of ours, the file and the overrides load."""
    words = [filled(word) for word in shlex.split(command, comments=True)[1:]]
    if PLACEHOLDER.search(words[0]) or words[0].startswith("-"):
        return
    assert words[0] in _VERBS, f"{command}: no such verb"
    if len(words) == 1 and words[0] != "quickstart":  # the verb is only spoken of
        return
    if "--help" in words:
        return
    try:
        parsed = parse(words)
    except SystemExit:
        raise AssertionError(f"{command}: the command line refuses it") from None
    loader = {"train": load_train, "reward": load_reward_model, "config": load_any, "compare": load_compare}.get(
        parsed.verb
    )
    target = getattr(parsed, "target", "")
    if loader is not None and not PLACEHOLDER.search(target) and not target.startswith("runs/"):
        loader(ROOT / target, parsed.overrides)


def wrong_commands(page: Path) -> Iterator[str]:
    for command in command_lines(page.read_text(encoding="utf-8")):
        try:
            check_command(command)
        except (ConfigError, AssertionError) as error:
            yield f"{command}: {error}"


@pytest.mark.usefixtures("files_of_pages")
def test_commands_are_understood() -> None:
    assert offenders(wrong_commands) == []


def test_there_are_commands() -> None:
    commands = [command for page in PAGES[1:] for command in command_lines(page.read_text(encoding="utf-8"))]
    assert {command.split()[1] for command in commands} >= {"train", "reward", "eval", "sample", "config"}


@pytest.mark.parametrize(
    "command",
    [
        "rlhf trian configs/ppo.yaml",
        "rlhf train configs/ppo.yaml --fast",
        "rlhf train configs/nowhere.yaml policy.lr=1e-6",
        "rlhf train configs/ppo.yaml policy.lrr=…",
        "rlhf train configs/ppo.yaml policy.lr=fast",
        "rlhf reward configs/reward_model.yaml policy.lr=1e-6",
        "rlhf sample runs/ppo",
    ],
)
def test_a_wrong_command_would_be_noticed(command: str) -> None:
    with pytest.raises((ConfigError, AssertionError)):
        check_command(command)


# Links


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, fragment = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists():
            yield f"{link} leads nowhere"
        elif fragment and fragment not in anchors(target):
            yield f"{link}: no such heading in {named(target)}"


def test_links_lead_somewhere() -> None:
    assert offenders(broken_links) == []


# Paths, modules and tests that pages name

OWN_FOLDERS = "rlhf|reward_model|tests|scripts|benchmarks|configs|examples|docs"
PATH = re.compile(rf"(?<![\w./-])(?:{OWN_FOLDERS})/[\w./*-]*\w/?")
DOTTED_NAME = re.compile(r"(?<![\w./-])(?:rlhf|reward_model)(?:\.[A-Za-z_]\w*)+(?::\w+)?")
PYTHON_FILE = re.compile(r"(?:[\w-]+/)*([\w-]+\.py)(?:::(\w+))?")
USERS_FILES = {
    "policy_extension.py",
    "my_rewards.py",
    "my_functions.py",
    "my_losses.py",
    "my_costs.py",
    "my_judge.py",
    "my_parts.py",
    "my_grader.py",
    "my_steps.py",
    "step_rows.py",
    "sum_steps.py",
}  # which the pages tell to write
TEST_NAME = re.compile(r"(?:::)?(test_\w+)(?:\[[\w-]+\])?")
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
CURRENT_PAGES = [page for page in ALL_PAGES if not re.match(r"\d{3}-", page.name)]
"""Pages that describe the present code: a decision of an earlier day keeps the names of its day."""

SOURCES = {path.name for name in OWN_FOLDERS.split("|") for path in (ROOT / name).rglob("*.py")}
TESTS = {
    name: path.name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def missing_names(text: str) -> list[str]:
    """Return the paths, modules, source files and tests that `text` names and that do not exist."""
    paths = [re.sub(r"^docs/decisions/\d{3}$", r"\g<0>-*", path) for path in PATH.findall(text)]
    places = (ROOT, ROOT / "docs")
    missing = [path for path in paths if not any(any(place.glob(path.rstrip("/"))) for place in places)]
    for name in DOTTED_NAME.findall(text):
        try:
            if name.rpartition(".")[2] not in FILES:
                pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    for span in SPAN.findall(FENCE.sub("", text)):
        if file := PYTHON_FILE.fullmatch(span):
            if (file[1] not in SOURCES and file[1] not in USERS_FILES) or (
                file[2] is not None and TESTS.get(file[2]) != file[1]
            ):
                missing.append(span)
        elif (test := TEST_NAME.fullmatch(span)) and test[1] not in TESTS:
            missing.append(span)
    return missing


def test_paths_modules_and_tests_that_are_named_exist() -> None:
    assert offenders(lambda page: missing_names(page.read_text(encoding="utf-8")), CURRENT_PAGES) == []


@pytest.mark.parametrize(
    "text",
    [
        "in `rlhf/trainers/online.py`",
        "see rlhf/training/onlin.py.",
        "`rlhf.training.online.trian`",
        "from rlhf.trainers.online import train",
        "`tests/test_docs.py::test_nothing_of_this_name`",
        "`tests/test_docs.py::test_commands_run`",
        "`test_nothing_of_this_name`",
        "`ranks.py`",
        "`tests/nowhere/*.py`",
        "docs/decisions/999",
    ],
)
def test_a_name_that_is_gone_would_be_noticed(text: str) -> None:
    assert missing_names(text)


@pytest.mark.parametrize(
    "text",
    [
        "`rlhf/training/online.py` and `rlhf/algo/`, [data](docs/data.md)",
        "`rlhf.training.online.train`, `rlhf.lab.gold:gold_reward` and reward_model.md",
        "`tests/test_docs.py::test_a_name_that_is_gone_would_be_noticed`, `test_docs.py`, `tests/mutants/*.py`",
        "`my_rewards.py`, `my_rewards.py:score`, runs/rm/model, decisions/001-one-loop.md, docs/decisions/012",
    ],
)
def test_a_name_that_exists_is_accepted(text: str) -> None:
    assert missing_names(text) == []


GLOSSARY_ROW = re.compile(r"^\| \*\*([^|]+)\*\* \|", re.MULTILINE)


def test_the_glossary_explains_each_term_once_and_in_order() -> None:
    terms = GLOSSARY_ROW.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert {"arm", "cell", "course", "experience", "gold", "optimizations", "proxy", "rollout"} <= set(terms)
    assert len(set(terms)) == len(terms)


# Names of settings and metrics


def known_settings() -> dict[str, list[object]]:
    """Key -> the defaults it has, one for each variant of its section."""
    defaults: dict[str, list[object]] = {}
    for setting in runpy.run_path(str(ROOT / "scripts" / "make_config_doc.py"))["settings"]():
        defaults.setdefault(setting.key, []).append(setting.default)
    return defaults


SETTINGS = known_settings()
TOP = {key for key in SETTINGS if "." not in key}
PREFIXES = {name.partition("/")[0] for name in METRICS}
PRICE = "cost/usd"  # for trackers alone: metrics.jsonl is the same at any price of a machine


def unknown_settings_and_metrics(page: Path) -> Iterator[str]:
    for span in spans(page):
        key = re.sub(r"[=:].*$", "", span)
        is_setting = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.split(".")[0] in TOP
        if is_setting and key.split(".")[-1] not in FILES and key not in SETTINGS:
            yield f"no setting {key}"
        is_metric = re.fullmatch(r"[a-z]+/[a-z_0-9]+", span) and span.split("/")[0] in PREFIXES and span != PRICE
        if is_metric and span not in METRICS:
            yield f"no metric {span}"


def test_settings_and_metrics_that_are_spoken_of_exist() -> None:
    assert offenders(unknown_settings_and_metrics) == []


def tables(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """(header, row) for each row of each table whose header begins with setting, default."""
    header: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if cells[:2] == ["setting", "default"]:
            header = cells
        elif not cells:
            header = []
        elif header and not line.startswith("|--"):
            yield header, cells


def at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def value_of(cell: str) -> object:
    value = yaml.safe_load(cell.strip("`"))
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def wrong_defaults(page: Path) -> Iterator[str]:
    """If key and default are code spans, the default is checked; a column named by a file, against the file's value."""
    for header, row in tables(page):
        key = row[0].strip("`")
        if row[0] != f"`{key}`" or not (row[1].startswith("`") and row[1].endswith("`")):
            continue
        if value_of(row[1]) not in SETTINGS.get(key, []):
            yield f"{key} is {SETTINGS.get(key)} by default"
        for name, cell in zip(header[2:], row[2:], strict=False):
            if name.startswith("`configs/"):
                value = at(dump(load_any(ROOT / name.strip("`"))), key)
                if value != value_of(cell):
                    yield f"{key} is {value} in {name}"


def test_defaults_in_tables_are_the_defaults() -> None:
    assert offenders(wrong_defaults) == []


# Examples in YAML and Python

WRITTEN_OUT = re.compile(r"# preset: (\w+), written out\n")


def wrong_yaml(page: Path) -> Iterator[str]:
    for body in fences(page, "yaml"):
        try:
            check_yaml(body)
        except (ConfigError, ValidationError, AssertionError) as error:
            yield f"{body[:200]}: {error}"


def check_yaml(text: str) -> None:
    """A complete file loads and all of it is read; of a part, each section is valid on its own."""
    tree = yaml.safe_load(text)
    if not isinstance(tree, Mapping) or not set(tree) <= TOP:
        return
    load_plugins(tree)
    if {"policy", "algorithm"} <= set(tree):
        assert unread_warnings(train_config(dict(tree))) == []
        return
    fields = {**CompareConfig.model_fields, **RewardModelConfig.model_fields, **TrainSections.model_fields}
    for name, section in expand_preset(dict(tree)).items():
        TypeAdapter(fields[name].annotation).validate_python(section)


@pytest.mark.usefixtures("files_of_pages")
def test_yaml_examples_are_valid() -> None:
    assert offenders(wrong_yaml) == []


def written_out() -> Iterator[tuple[str, str]]:
    for page in ALGORITHMS:
        for body in fences(page, "yaml"):
            if match := WRITTEN_OUT.match(body):
                yield match[1], body


@pytest.mark.parametrize("name, body", list(written_out()), ids=[name for name, _ in written_out()])
def test_presets_are_what_the_pages_say(name: str, body: str) -> None:
    stated = yaml.safe_load(body)["algorithm"]
    adapter = TypeAdapter(TrainSections.model_fields["algorithm"].annotation)
    preset = adapter.validate_python({**PRESETS[name]["algorithm"], "preset": name})
    assert adapter.validate_python(stated) == preset
    assert stated["preset"] == name
    optional = {key for key, value in dump(preset).items() if value in (None, False, 0.0)}
    assert set(dump(preset)) - optional <= set(stated), "every part that is not off is written out"


def test_every_preset_has_a_page() -> None:
    named = {span for page in ALGORITHMS for span in spans(page)}
    assert set(PRESETS) <= named, "name each preset in a page of docs/algorithms"


def wrong_python(page: Path) -> Iterator[str]:
    for body in fences(page, "python"):
        try:
            nodes = list(ast.walk(ast.parse(body)))
        except SyntaxError as error:
            yield str(error)
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("rlhf.", "reward_model.")):
                module = importlib.import_module(node.module)
                yield from (f"{node.module}: no {a.name}" for a in node.names if not hasattr(module, a.name))


def test_python_examples_are_python() -> None:
    assert offenders(wrong_python) == []


def test_the_python_in_the_readme_is_a_call_that_the_package_takes() -> None:
    (body,) = fences(ROOT / "README.md", "python")
    (call,) = [
        node
        for node in ast.walk(ast.parse(body))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "rlhf.train"
    ]
    inspect.signature(rlhf.train).bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
    assert isinstance(call.args[1], ast.Constant)
    assert call.args[1].value in PRESETS


def test_the_reward_in_the_page_works(tmp_path: Path) -> None:
    source = next(body for body in fences(ROOT / "docs" / "own_reward.md", "python") if "def score" in body)
    (tmp_path / "my_reward.py").write_text(source, encoding="utf-8")
    reward = FunctionReward(f"{tmp_path / 'my_reward.py'}:score", {"weight": 0.5}, tokenizer())
    completions = completions_of([[4], [4]], [[3, 14, EOS], [5, EOS]])
    scores = reward(replace(completions, references=({"answer": "t14"}, {"answer": "t14"})))
    assert scores.values.tolist() == pytest.approx([1.0 - 0.5 * 2 / 100, -0.5 * 1 / 100])
    assert scores.parts["right"].tolist() == [1.0, 0.0]


# Optional parts


def test_a_hint_names_an_extra_of_this_project_and_what_installs_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"`pip install '{project['name']}[track]'`" in install_hint("track")
    assert "`bash scripts/setup.sh track`" in install_hint("track")
    extras = project["optional-dependencies"]
    sources = [
        path.read_text(encoding="utf-8") for name in ("rlhf", "reward_model") for path in (ROOT / name).rglob("*.py")
    ]
    named = {extra for source in sources for extra in re.findall(r"install_hint\(['\"]([\w-]+)['\"]\)", source)}
    extra = {"deepspeed", "serve", "track", "mlflow", "eightbit", "gguf", "lm-eval", "ifeval", "detox", "math", "code"}
    assert named == extra <= set(extras)


OF_SOMEBODY_ELSE = re.compile(r"install ['\"]?rlhf(?!-trainer\b)")
"""On the package index `rlhf` is another project; this one is rlhf-trainer (docs/decisions/015)."""


def test_nothing_tells_a_user_to_install_the_index_s_project_rlhf() -> None:
    folders = ("rlhf", "reward_model", "scripts", "examples", "configs")
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    assert {path.relative_to(ROOT).parts[0] for path in files} == set(folders)
    wrong = [named(path) for path in [*PAGES, *files] if OF_SOMEBODY_ELSE.search(path.read_text(encoding="utf-8"))]
    assert wrong == []


@pytest.mark.parametrize("text", ["pip install rlhf", "pip install 'rlhf[track]'", 'pip install "rlhf[gguf]"'])
def test_such_advice_would_be_noticed(text: str) -> None:
    assert OF_SOMEBODY_ELSE.search(text)
    assert not OF_SOMEBODY_ELSE.search(text.replace("rlhf", "rlhf-trainer"))
