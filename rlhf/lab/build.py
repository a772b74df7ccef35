"""The lab on disk: tokenizer, untrained model, texts and prompts, made from one seed and cached by content.

torch and transformers are imported only when files are made, so that a mistake in a configuration is reported at once.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.errors import ConfigError
from rlhf.lab.world import Request, prompts, sft_rows
from rlhf.section import Section, cache_folder

if TYPE_CHECKING:
    from rlhf.lab.model import Size

C = TypeVar("C", bound=Section)

PREFIX = "lab:"
SOURCES = Path(__file__).parent
MADE_BY = ("gold", "lexicon", "model", "world", "build")  # the modules that determine the content of the lab
NAMES = {
    "base": "the untrained model with its tokenizer",
    "sft.jsonl": "reviews of mixed quality to imitate",
    "eval_sft.jsonl": "held-out reviews",
    "prompts.jsonl": "prompts to train on",
    "eval_prompts.jsonl": "held-out prompts",
}


@dataclass(frozen=True)
class LabSpec:
    """Seed and sizes of a lab; each spec has its own folder."""

    seed: int = 0
    size: Size = "tiny"
    sft: int = 32000
    eval_sft: int = 256
    prompts: int = 2048
    eval_prompts: int = 256


def lab_folder(spec: LabSpec) -> Path:
    """Return the folder of the lab's files, making them if they are missing.

    Concurrent callers are safe: the files are written to a temporary folder, which is then renamed.
    """
    folder = cache_folder(None, os.environ) / "lab" / lab_key(spec)
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write(spec, temporary)
    try:
        temporary.rename(folder)
    except OSError:  # another process was first, and made the same files
        shutil.rmtree(temporary)
    return folder


def resolve_lab_paths(config: C) -> C:
    """Return the configuration with every `lab:name` replaced by the path of that file.

    Without any such name the configuration is returned unchanged, and no lab is made.

    Raises:
        ConfigError: the lab has no file of that name.
    """
    tree = config.model_dump(mode="json", exclude_unset=True)
    names = [text for text in _strings(tree) if text.startswith(PREFIX)]
    if not names:
        return config
    _check_names(names)
    folder = lab_folder(LabSpec())
    replaced: C = type(config).model_validate(_with_paths(tree, folder))
    return replaced


def lab_config(name: str) -> Path:
    """Return the path of a configuration of the lab, in the repository or in the installed package.

    Raises:
        ConfigError: it is in neither.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "configs" / "lab", package / "lab" / "configs"):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ConfigError(f"the lab's configuration {name}.yaml is not where it was installed; reinstall the package")


def lab_key(spec: LabSpec) -> str:
    """Return the name of a lab's folder, which contains a hash of the spec and of the code that makes the lab.

    Comments, docstrings and layout of the code do not count.
    """
    digest = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode())
    for module in MADE_BY:
        digest.update(_dump_code((SOURCES / f"{module}.py").read_text(encoding="utf-8")).encode())
    return f"{spec.size}-seed{spec.seed}-{digest.hexdigest()[:12]}"


class _RemoveDocstrings(ast.NodeTransformer):
    """Removes statements that are a string alone: docstrings of modules, classes, functions and constants."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Return None, which removes the statement, if it is a string."""
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _dump_code(source: str) -> str:
    """Return the syntax tree of a module as text, without docstrings and positions."""
    return ast.dump(_RemoveDocstrings().visit(ast.parse(source)))


def _write(spec: LabSpec, folder: Path) -> None:
    from rlhf.lab.model import lab_model_config, train_tokenizer, untrained_model

    rows = sft_rows(spec.seed, spec.sft)
    _write_jsonl(folder / "sft.jsonl", rows)
    _write_jsonl(folder / "eval_sft.jsonl", sft_rows(spec.seed + 1, spec.eval_sft))
    _write_jsonl(folder / "prompts.jsonl", map(_prompt_row, prompts(spec.seed, "train", spec.prompts)))
    _write_jsonl(folder / "eval_prompts.jsonl", map(_prompt_row, prompts(spec.seed, "eval", spec.eval_prompts)))
    tokenizer = train_tokenizer(row["prompt"] + row["completion"] for row in rows)
    model_config = lab_model_config(
        len(tokenizer),
        pad_token_id=int(tokenizer.pad_token_id),
        bos_token_id=int(tokenizer.bos_token_id),
        eos_token_id=int(tokenizer.eos_token_id),
        size=spec.size,
    )
    untrained_model(model_config, spec.seed).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


def _prompt_row(request: Request) -> dict[str, object]:
    return {
        "prompt": request.text,
        "topic": request.topic,
        "aspect": request.aspect,
    }


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _strings(tree: Any) -> Iterable[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _strings(value)


def _with_paths(tree: Any, folder: Path) -> Any:
    if isinstance(tree, dict):
        return {key: _with_paths(value, folder) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_paths(value, folder) for value in tree]
    if isinstance(tree, str) and tree.startswith(PREFIX):
        return str(folder / tree.removeprefix(PREFIX))
    return tree


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name.removeprefix(PREFIX) not in NAMES:
            known = "; ".join(f"lab:{key} ({meaning})" for key, meaning in NAMES.items())
            raise ConfigError(f"{name!r}: the lab has no {name.removeprefix(PREFIX)!r}; it has {known}")
