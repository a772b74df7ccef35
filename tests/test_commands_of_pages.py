"""Every fenced command and Python block of README and docs runs, in order, in an empty folder with a fresh HOME.

It has the files that the pages name: a small chat model in models/smollm2-135m-instruct, prompts.jsonl, pairs.jsonl,
demonstrations.jsonl, and the runs that other pages make. A Python block below a line with the name of a file, such as
`my_rewards.py`:, is that file, for every page. Training commands get the overrides of SHORT, which cut them to one
step; nothing else is changed. A block after `<!-- not run: reason -->` is not run: of its commands the files, options
and settings are checked. README is in the gate, the pages of docs/ are beside it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stored_templates import chat_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.cli import main, parse
from rlhf.comparison.plan import plan_cells
from rlhf.config.compare import CompareConfig
from rlhf.config.files import locate_config
from rlhf.config.load import load_any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<kind>bash|python)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRAINING = ("train", "reward")
SHORT = (
    "schedule={steps: 1, epochs: null, warmup_steps: 0, decay: constant}",
    "batch.prompts_per_step=8",
    "batch.micro_batch_size=8",
    "eval.every=0",
)
SHORT_SAMPLING = ("sampling.max_new_tokens=6",)
SHORT_COMPARISON = (
    "seeds=[0]",
    "budget.completions=16",
    "evaluations=1",
    "shared.batch={prompts_per_step: 8, epochs: 1, minibatches: 1, micro_batch_size: 4}",
    "shared.schedule={warmup_steps: 0, decay: constant}",
    "shared.sampling={max_new_tokens: 4}",
    "shared.data.prompts.limit=24",
    "arms.grpo={sampling: {completions_per_prompt: 2}, batch: {prompts_per_step: 2}}",
    "arms.rloo={sampling: {completions_per_prompt: 2}, batch: {prompts_per_step: 2}}",
    "arms.best_of_n={n: 2, samples: 2}",
)
ROWS = 60
CHATML = chat_template("chatml")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `reason` says why it is not run by itself."""

    kind: str
    body: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    files = {body: f"it is {name}, which the other blocks use" for name, body in FILE.findall(text)}
    return [
        Block(match["kind"], match["body"], match["reason"] or files.get(match["body"]))
        for match in BLOCK.finditer(text)
    ]


RUNNABLE = [page for page in PAGES if any(block.reason is None for block in blocks(page))]
GATE = [ROOT / "README.md"]


def write_model(folder: Path) -> None:
    """A random Llama in bfloat16 with a byte-level tokenizer and a chat template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["Name a color."], trainers.BpeTrainer(vocab_size=270, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    fast.save_pretrained(folder)


def write_rows(folder: Path) -> None:
    prompts = [f"Name a thing with {number} letters." for number in range(ROWS)]
    files = {
        "prompts": [{"prompt": prompt, "answer": str(number)} for number, prompt in enumerate(prompts)],
        "pairs": [{"prompt": p, "chosen": f"It is {n}.", "rejected": f"No {n % 7}"} for n, p in enumerate(prompts)],
        "demonstrations": [{"prompt": p, "completion": f"It is {n}."} for n, p in enumerate(prompts)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for page in PAGES:
        for name, body in FILE.findall(page.read_text(encoding="utf-8")):
            assert not (folder / name).exists(), f"{name} is in two pages"
            (folder / name).write_text(body, encoding="utf-8")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages name."""
    folder = tmp_path_factory.mktemp("prepared")
    write_model(folder / "models" / "smollm2-135m-instruct")
    write_rows(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model = "policy.model=models/smollm2-135m-instruct"
        for command in (
            f"rlhf train configs/sft.yaml {model} data.sft.path=demonstrations.jsonl",
            "rlhf reward configs/reward_model.yaml data.preferences.path=pairs.jsonl",
            "rlhf reward configs/reward_model.yaml data.preferences.path=pairs.jsonl run.out_dir=runs/judge run.seed=1",
            "rlhf train configs/ppo.yaml data.prompts.path=prompts.jsonl",
            "rlhf train configs/dpo.yaml data.preferences.path=pairs.jsonl",
        ):
            assert run_command(command, set()) == 0, command
    return folder


@pytest.fixture
def stranger(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of that folder, in which the commands are run, and a HOME of its own."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name, module in sys.modules.items() if str(folder) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def commands(body: str) -> Iterator[str]:
    """The lines of a block, with continued ones joined, and without comments."""
    for line in body.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def run_command(command: str, written: set[str]) -> int:
    """Run one `rlhf` command unchanged, training cut short; `written` collects the folders that it made."""
    words = shlex.split(command, comments=True)
    assert words[0] == "rlhf", f"only rlhf commands are run: mark the block, or write it otherwise: {command}"
    if ">" in words:
        words = words[: words.index(">")]
    words = [*words[1:], *cut_short(words[1], words[2:])]
    if words[0] in (*TRAINING, "compare"):
        config = load_any(words[1], [word for word in words[2:] if "=" in word])
        out_dir = config.out_dir if isinstance(config, CompareConfig) else config.run.out_dir
        if out_dir not in written:
            shutil.rmtree(out_dir, ignore_errors=True)  # a run that the folder was prepared with
        written.add(out_dir)
    return main(words)


def cut_short(verb: str, words: list[str]) -> tuple[str, ...]:
    if verb == "compare":
        return SHORT_COMPARISON
    if verb not in TRAINING:
        return ()
    return SHORT + SHORT_SAMPLING if verb == "train" and not is_supervised(words[0]) else SHORT


def is_supervised(file: str) -> bool:
    return any(name in file for name in ("sft", "dpo"))


@pytest.mark.usefixtures("nothing_stays_registered", "warm_start")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page in GATE else pytest.mark.beside) for page in RUNNABLE],
    ids=[str(page.relative_to(ROOT)) for page in RUNNABLE],
)
def test_the_commands_of_a_page_run_in_order(page: Path, stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written: set[str] = set()
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.kind == "python":
            exec(compile(block.body, str(page), "exec"), {"__name__": "page"})
            continue
        for command in commands(block.body):
            try:
                code = run_command(command, written)
            except SystemExit as exit_:
                code = int(exit_.code or 0)
            output = capsys.readouterr()
            assert code == 0, f"{command}\n{output.out[-2000:]}\n{output.err[-2000:]}"


MARKED = [
    (page, command)
    for page in PAGES
    for block in blocks(page)
    if block.reason is not None and block.kind == "bash"
    for command in commands(block.body)
]


@pytest.mark.parametrize(
    ("page", "command"), MARKED, ids=[f"{page.relative_to(ROOT)}-{number}" for number, (page, _) in enumerate(MARKED)]
)
def test_a_command_that_is_not_run_is_one_that_could_be(
    page: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are there, the program takes its words, and its settings are valid."""
    monkeypatch.chdir(ROOT)
    for part in re.split(r"&&|\|", command):
        words = shlex.split(part, comments=True)
        if words[:1] == ["rlhf"]:
            check_words(words[1:])
        elif len(words) > 1 and words[0].rpartition("/")[2] in ("python", "bash") and words[1].endswith((".py", ".sh")):
            shared = (ROOT / words[1]).parent.glob("*/*.py")  # sizes of a step are options too: a field is `rows: int`
            source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / words[1], *shared))
            options = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
            known = [word for word in options if f'"{word}"' in source or f"    {field_of(word)}: int" in source]
            assert [option for option in options if option not in known] == [], f"{page.name}: {command}"


def field_of(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def check_words(words: list[str]) -> None:
    parsed = parse(words)
    if words[0] in (*TRAINING, "compare", "config", "lint"):
        config = load_any(parsed.target, parsed.overrides)
        if isinstance(config, CompareConfig):
            plan_cells(config, beside=locate_config(parsed.target).parent, lab_files=False)


def test_most_blocks_are_run() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    run = [block for block in every if block.reason is None]
    assert len(run) >= 30, f"{len(every)} blocks, {len(run)} run"
    assert all(block.reason for block in every if block not in run)


def test_the_files_of_pages_are_used() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, _ in FILE.findall(text):
            assert any(name.removesuffix(".py") in block.body for block in blocks(page) if block.reason is None), name


def test_no_command_stands_outside_a_fence() -> None:
    """A command in an indented block would not be run."""
    indented = re.compile(r"^(?: {4}|\t)(?:\$ )?(?:rlhf|bash|python|torchrun) ", re.MULTILINE)
    shown = [page for page in PAGES if "decisions" not in page.parts and page.name not in ("gpu_first_run.md",)]
    assert [str(page.relative_to(ROOT)) for page in shown if indented.search(page.read_text(encoding="utf-8"))] == []
