"""Measure how often verifiers agree with the graders of others, on texts that these have graded.

    python benchmarks/verifier_agreement.py --solutions example_model_solutions.jsonl --gsm8k data/gsm8k/test.jsonl \
        --ifeval data/ifeval/input_data.jsonl --humaneval HumanEval.jsonl.gz \
        --json benchmarks/results/verifier_agreement.json

The math verifier against the grades of 5,276 solutions of GSM8K that models wrote (example_model_solutions.jsonl of
openai/grade-school-math), and on the references: each is right, and another row's reference is wrong unless it is the
same number.
The ifeval verifier against the package if-verifiable, an independent port of IFEval's program, on the rows of IFEval:
each row grades one of these solutions, plain and rewritten (in capitals, as a list, with a postscript ...).
The code verifier on HumanEval (data/HumanEval.jsonl.gz of openai/human-eval): the 164 solutions of the data set are
right, and a body that returns None is wrong. It needs pydantic-monty and bubblewrap.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from if_verifiable.common import evaluate_instructions
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

from rlhf.config.load import validate
from rlhf.verifiers.code import CodeGrader
from rlhf.verifiers.ifeval import IfevalGrader
from rlhf.verifiers.mathematics import MathGrader
from rlhf.verifiers.numeric_answers import expected_answer

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
NEEDS_DOWNLOADS = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}  # by the port
DRAWS = {"language:response_language"}  # langdetect draws random numbers

Pair = tuple[float | None, float]
"""Our grade of a text, and the other grader's."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file, which may be gzipped."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def tally(pairs: Iterable[Pair]) -> dict[str, float]:
    """Count pairs of our grade and the other grader's."""
    graded = [(ours, theirs) for ours, theirs in pairs]
    agree = sum(ours == theirs for ours, theirs in graded)
    return {
        "graded": len(graded),
        "right by the other grader": sum(theirs == 1 for _, theirs in graded),
        "agree": agree,
        "agreement": round(agree / len(graded), 6),
        "higher": sum(ours is not None and ours > theirs for ours, theirs in graded),
        "lower": sum(ours is None or ours < theirs for ours, theirs in graded),
    }


def graded_solutions(rows: list[dict[str, Any]]) -> Iterator[Pair]:
    """Yield our grade of each solution and the data set's."""
    grade = validate(MathGrader, {"type": "math", "symbolic": "off"}).start()
    for row in rows:
        answer = row["ground_truth"].rpartition("A:")[2].strip()
        for model in MODELS:
            yield grade(row[model]["solution"], {"answer": answer}), float(row[model]["is_correct"])


def references(rows: list[dict[str, Any]]) -> Iterator[Pair]:
    """Yield our grade of each reference by its own row and by the row before, and whether they have the same number."""
    grade = validate(MathGrader, {"type": "math", "symbolic": "off"}).start()
    golds = [row["answer"] for row in rows]
    for gold, other in zip(golds, golds[1:] + golds[:1], strict=True):
        yield grade(gold, {"answer": gold}), 1.0
        yield grade(other, {"answer": gold}), float(expected_answer(other) == expected_answer(gold))


def forms(text: str, prompt: str) -> Iterator[str]:
    """Yield a text unchanged, and rewritten to meet one kind of instruction or another."""
    sentences = text.split("\n")
    yield text
    yield text.upper()
    yield text.lower().replace(",", "")
    yield f'"{text}"'
    yield "\n".join(f"* {sentence}" for sentence in sentences[:3])
    yield f"<<A title>>\n\n{text}\n\nP.S. The end."
    yield "\n\n***\n\n".join(f"**{sentence}** [place] [name]" for sentence in sentences)
    yield f"{prompt}\n{text}\n******\n{text}"
    yield json.dumps({"answer": text})
    yield "\n\n".join(
        f"SECTION {number}\nMy answer is {word}." for number, word in enumerate(("yes", "no", "maybe"), 1)
    )


def instructions(rows: list[dict[str, Any]], texts: list[str]) -> tuple[list[Pair], list[Pair]]:
    """Return our share of followed instructions and the port's, strict and loose, for rows that the port can check."""
    ours = [validate(IfevalGrader, {"type": "ifeval", "loose": loose}).start() for loose in (False, True)]
    strict: list[Pair] = []
    loose: list[Pair] = []
    for number, row in enumerate(rows):
        kinds = row["instruction_id_list"]
        if (NEEDS_DOWNLOADS | DRAWS) & set(kinds):
            continue
        for text in forms(texts[number], row["prompt"]):
            _, scores = evaluate_instructions(text, kinds, row["kwargs"], row["prompt"], INSTRUCTION_DICT)
            strict.append((ours[0](text, row), scores.partial_strict))
            loose.append((ours[1](text, row), scores.partial_loose))
    return strict, loose


def programs(rows: list[dict[str, Any]], sandbox: str) -> Iterator[Pair]:
    """Yield our grade of each solution of HumanEval, and of a body that returns None, and whether it is right."""
    columns = {"tests": "test", "entry_point": "entry_point", "prefix": "prompt"}
    grade = validate(CodeGrader, {"type": "code", "sandbox": sandbox, **columns}).start()
    for row in rows:
        for body, right in ((row["canonical_solution"], 1.0), ("    return None\n", 0.0)):
            grades = grade(body, row)
            assert isinstance(grades, dict)
            yield grades["code"], right


def timed(pairs: Iterable[Pair]) -> dict[str, float]:
    """Count pairs as they are made, and their number per second."""
    started = time.perf_counter()
    counts = tally(pairs)
    return {**counts, "per second": round(counts["graded"] / (time.perf_counter() - started), 1)}


def main() -> None:
    """Compare, print the counts and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solutions", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--ifeval", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    solutions, rows = lines_of(arguments.solutions), lines_of(arguments.ifeval)
    texts = [row["175b_verification"]["solution"] for row in solutions]
    random.seed(0)  # the port draws a letter if a row gives none that is a letter
    strict, loose = instructions(rows, texts)
    tasks = lines_of(arguments.humaneval)
    results: dict[str, Any] = {
        "if-verifiable": version("if-verifiable"),
        "math, solutions of models": tally(graded_solutions(solutions)),
        "math, references": tally(references(lines_of(arguments.gsm8k))),
        "ifeval, strict": tally(strict),
        "ifeval, loose": tally(loose),
        **{f"code, {sandbox}": timed(programs(tasks, sandbox)) for sandbox in ("monty", "bubblewrap", "auto")},
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
