"""The direction of imports, and their limits; the rows themselves are in pyproject.toml, for import-linter."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import PRODUCT, ROOT, nodes_in, nodes_of

LINTER = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]

# The modules that may import these; no others. The upper half of rlhf meets a reward model as a RewardSource only.
IMPORTERS = {
    "reward_model": {"rlhf.factory", "rlhf.lab.build", "rlhf.cli", "reward_model"},
    "transformers": {
        "rlhf.models",
        "rlhf.data",
        "rlhf.sampling",
        "rlhf.lab",
        "rlhf.factory",
        "reward_model",
        "rlhf.api",
        "rlhf.suites.detox",  # its judge of similarity is a model of transformers
        "rlhf.rewards.source",  # for annotations only
        "rlhf.rewards.pair_judge",  # for annotations only
        "rlhf.teachers",  # for annotations only
        "rlhf.planning.shapes",  # makes a model of an unknown family on the meta device
    },
    "deepspeed": {"rlhf.runtime.deepspeed"},
    "fastapi": {"reward_model.server"},
    "uvicorn": {"rlhf.factory.reward_service"},
    "huggingface_hub": {"rlhf.models.weight_files", "rlhf.commands.push", "rlhf.data.paths", "rlhf.planning.shapes"},
    "vllm": {"rlhf.serving.nccl"},
    "trl": set(),
}
TRAINERS = {f"transformers.{prefix}{name}" for prefix in ("", "Seq2Seq") for name in ("Trainer", "TrainingArguments")}

# All that these may import; nothing else.
MATHEMATICS = {"__future__", "collections", "dataclasses", "jaxtyping", "math", "torch", "typing"}
MATHEMATICS |= {"rlhf.algo", "rlhf.batching", "rlhf.types"}

# Of the lab, these may use the trainers; the rest is a world that knows nothing of training.
HIGH_LAB = {"rlhf.lab.build", "rlhf.lab.preferences"}
WORLD_OF_OURS = {"rlhf.errors", "rlhf.types"}


def inside(name: str, roots: set[str]) -> bool:
    """Whether `name` is one of `roots` or something in one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def imports(nodes: Iterable[ast.AST], module: str, *, package: bool = False) -> Iterator[str]:
    """The dotted names that `module`, of these nodes, imports: `from a.b import c` is `a.b.c`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if package else -1]
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith("import_module"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def called(node: ast.Call) -> str:
    """The last name of the called function."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def trainers_read(nodes: Iterable[ast.AST]) -> set[str]:
    """The dotted names of TRAINERS that are read among them."""
    last = {name.rpartition(".")[2] for name in TRAINERS}
    read = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr in last)
    return TRAINERS & {ast.unparse(node) for node in read}


def modules() -> dict[str, Path]:
    """Every module of both packages, by dotted name."""
    paths = {}
    for path in PRODUCT:
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


@cache
def imported() -> dict[str, set[str]]:
    """The imports of every module."""
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    return {name: set(imports(nodes_of(path), name, package=name in packages)) for name, path in MODULES.items()}


def rows() -> set[str]:
    """The modules named in import-linter's rows."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name.strip().strip("()") for layer in layers for name in layer.replace(":", "|").split("|")}


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import torch.nn as nn
from rlhf import factory
from . import kl
from . import masked
from ..types import Rollout

def late():
    import deepspeed
    return importlib.import_module("vllm")
"""
    assert set(imports(nodes_in(source), "rlhf.algo.objective")) == {
        "torch.nn",
        "rlhf.factory",
        "rlhf.algo.kl",
        "rlhf.algo.masked",
        "rlhf.types.Rollout",
        "deepspeed",
        "vllm",
    }
    assert set(imports(nodes_in("from .kl import k1"), "rlhf.algo", package=True)) == {"rlhf.algo.kl.k1"}
    assert trainers_read(nodes_in("trainer = transformers.Trainer(model)")) == {"transformers.Trainer"}


def test_both_packages_are_read() -> None:
    assert {"rlhf.types", "rlhf.config.sections", "reward_model"} <= set(MODULES)
    assert "rlhf.section.Section" in imported()["rlhf.config.sections"]


def test_every_module_has_a_row() -> None:
    named = rows()
    homeless = {name for name in MODULES if not inside(name, named)}
    # The two roofs stand above and below the rows at once: one names its exports (importing them on use), no more.
    assert homeless <= {"rlhf", "rlhf.lab"}, "give these a row in pyproject.toml's [tool.importlinter]"
    exported = {name for name in imported()["rlhf"] if name.startswith(("rlhf.api", "rlhf.exact"))}
    light = {"__future__.annotations", "importlib", "typing.TYPE_CHECKING", "typing.Any"}
    light |= {"importlib.metadata.PackageNotFoundError", "importlib.metadata.version"}
    assert [name for name in homeless if imported()[name] - light - (exported if name == "rlhf" else set())] == []


def test_imports_point_down() -> None:
    done = subprocess.run(LINTER, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module, line, kept",
    [
        ("rlhf/algo/kl.py", "from rlhf.types import Rollout", True),
        ("rlhf/algo/kl.py", "from rlhf.runtime import engine", False),
        ("rlhf/types.py", "import rlhf.algo.kl", False),
        ("rlhf/runtime/engine.py", "import reward_model", False),
        ("rlhf/runtime/engine.py", "import trl", False),
    ],
)
def test_the_linter_bites(tmp_path: Path, module: str, line: str, kept: bool) -> None:
    for name in ("rlhf/algo/kl.py", "rlhf/types.py", "rlhf/batching.py", "rlhf/errors.py", "rlhf/runtime/engine.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line if name == module else "")
        (path.parent / "__init__.py").touch()
    (tmp_path / "reward_model").mkdir()
    (tmp_path / "reward_model" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    done = subprocess.run(LINTER, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is kept, done.stdout + done.stderr
    assert ("BROKEN" in done.stdout) is not kept


@pytest.mark.parametrize("library", sorted(IMPORTERS))
def test_only_some_import(library: str) -> None:
    allowed = IMPORTERS[library]
    wrong = [
        f"{m} imports {i}" for m in MODULES for i in imported()[m] if inside(i, {library}) and not inside(m, allowed)
    ]
    assert wrong == []


def test_no_trainer_but_ours() -> None:
    wrong = [m for m, path in MODULES.items() if TRAINERS & imported()[m] or trainers_read(nodes_of(path))]
    assert wrong == []


def test_the_mathematics_imports_no_machinery() -> None:
    algo = [name for name in MODULES if inside(name, {"rlhf.algo"})]
    assert len(algo) > 1
    assert [f"{m} imports {i}" for m in algo for i in imported()[m] if not inside(i, MATHEMATICS)] == []


def test_the_lab_world_knows_nothing_of_training() -> None:
    world = {name for name in MODULES if inside(name, {"rlhf.lab"}) and not inside(name, HIGH_LAB)}
    allowed = (world - {"rlhf.lab"}) | WORLD_OF_OURS
    ours = {"rlhf", "reward_model"}
    wrong = [f"{m} imports {i}" for m in world for i in imported()[m] if inside(i, ours) and not inside(i, allowed)]
    assert wrong == []


def passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether it ends with a bare `raise`, and nothing in it can leave before."""
    last = handler.body[-1]
    leaves = (ast.Return, ast.Continue, ast.Break)
    return (
        isinstance(last, ast.Raise) and last.exc is None and not any(isinstance(n, leaves) for n in ast.walk(handler))
    )


def test_errors_are_caught_by_name() -> None:
    """But a handler that passes on its error (to tell other processes first) may catch anything.

    So may those around the calls of a tracker and of the hub: their HTTP clients have no class of errors in common. So
    may those around an environment and a tool: their error is an answer, counted and told. A child that grades
    answers with any error of a grader; reading pushed weights, which a server that fails half way answers for. The
    thread of a transfer hands any error of vLLM's over to the one that waits. The check of a reward skips and tells a
    row of which a verifier makes no right answer, by any error. Tasks of reasoning-gym fail on an answer by any error.
    Any error of a program goes to its tests, in another process. The package tokenizers raises Exception itself.
    """
    wrong = []
    for name, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and node.type is not None and not passes_on(node):
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if {ast.unparse(kind) for kind in caught} & {"Exception", "BaseException"}:
                    wrong.append(name)
    environments = [f"rlhf.environments.{name}" for name in ("host", "reasoning", "tools", "worker")]
    assert sorted(wrong) == [
        "rlhf.api.reward_checking",
        "rlhf.data.paths",
        "rlhf.data.tokenizer",
        *environments,
        "rlhf.sampling.push",
        "rlhf.sampling.service",
        "rlhf.serving.nccl",
        "rlhf.tracking.trackers",
        *["rlhf.verifiers.child"] * 2,
        *["rlhf.verifiers.crossing.peer"] * 3,
        "rlhf.verifiers.reasoning_gym",
    ]
