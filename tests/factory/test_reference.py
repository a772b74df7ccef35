"""The reference of an offline run: asked once, kept on disk, asked again if anything it depends on has changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_model, offline, offline_tree, pairs_file, trained_offline, weights

import rlhf.training.reference as built
from rlhf.config.files import merge
from rlhf.config.weights import LoraConfig
from rlhf.factory.context import RunContext
from rlhf.models.backbone import add_lora, load_causal_lm
from rlhf.models.export import weights_fingerprint
from rlhf.runtime import device
from rlhf.tracking import progress
from rlhf.training.offline import OfflineRun, completion_logprobs

UNJUDGED: dict[str, Any] = {"data": {"eval_prompts": None, "eval_preferences": None}, "eval": {"source": None}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many completions the reference was asked about, one entry a data set."""
    counts: list[int] = []

    def counted(rows: Any, say: Any, **how: Any) -> torch.Tensor:
        counts.append(len(rows))
        return completion_logprobs(rows, say, **how)

    monkeypatch.setattr(built, "completion_logprobs", counted)
    return counts


def tree_of(folder: Path, preset: str = "dpo", **changes: Any) -> dict[str, Any]:
    return merge(offline_tree(folder, preset, **UNJUDGED), changes)


def references(run: OfflineRun) -> torch.Tensor:
    return run.data(1).chosen_ref_logprobs  # type: ignore[attr-defined]


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "reference").glob("*"))


def notes(folder: Path) -> str:
    return (folder / "run" / "notes.jsonl").read_text()


def test_the_second_run_asks_nothing_and_reads_the_same(tmp_path: Path, asked: list[int]) -> None:
    first = references(offline(tree_of(tmp_path)))
    assert len(asked) == 1
    assert len(kept(tmp_path)) == 1
    second = references(offline(tree_of(tmp_path)))
    assert len(asked) == 1
    assert torch.equal(first, second)
    assert first.abs().min() > 0.1
    assert f"from {kept(tmp_path)[0]}" in notes(tmp_path)


@pytest.mark.parametrize("preset", ["ipo", "kto", "robust_dpo", "hinge"])
def test_losses_with_a_reference_share_what_is_kept(tmp_path: Path, asked: list[int], preset: str) -> None:
    every = {"steps": 16}  # all rows, of pairs and of single completions
    offline(tree_of(tmp_path, schedule=every))
    offline(tree_of(tmp_path, preset, schedule=every))
    assert len(asked) == 1


@pytest.mark.parametrize("preset", ["simpo", "orpo", "slic"])
def test_losses_without_a_reference_ask_and_keep_nothing(tmp_path: Path, asked: list[int], preset: str) -> None:
    run = offline(tree_of(tmp_path, preset))
    assert asked == []
    assert kept(tmp_path) == []
    assert references(run).abs().max() == 0.0


def test_adapters_share_what_is_kept_for_their_base(tmp_path: Path, asked: list[int]) -> None:
    offline(tree_of(tmp_path))
    offline(tree_of(tmp_path, policy={"lora": {"r": 2}}))
    assert len(asked) == 1


def test_a_damaged_file_is_computed_again_and_mended(tmp_path: Path, asked: list[int]) -> None:
    first = references(offline(tree_of(tmp_path)))
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert torch.equal(references(offline(tree_of(tmp_path))), first)
    assert len(asked) == 2
    assert "is damaged (its checksum does not match): recomputing" in notes(tmp_path)
    assert path.read_bytes() == whole


def test_a_changed_model_is_asked_itself(tmp_path: Path, asked: list[int]) -> None:
    """Also if it lies in the same folder."""
    first = references(offline(tree_of(tmp_path)))
    shutil.rmtree(tmp_path / "model")
    make_model(tmp_path / "model", seed=5)
    second = references(offline(tree_of(tmp_path)))
    assert len(asked) == 2
    assert (first - second).abs().max() > 0.1


def test_another_reference_is_asked_instead_of_the_policy(tmp_path: Path, asked: list[int]) -> None:
    own = references(offline(tree_of(tmp_path)))
    other = str(make_model(tmp_path / "other", seed=5))
    theirs = references(offline(tree_of(tmp_path, reference={"model": other})))
    assert len(asked) == 2
    assert (own - theirs).abs().max() > 0.1
    as_policy = references(offline(tree_of(tmp_path, policy={"model": other})))
    assert len(asked) == 2  # the same weights
    assert torch.equal(as_policy, theirs)


TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.mark.parametrize("what", ["data", "dtype", "template"])
def test_whatever_changes_the_numbers_is_another_entry(tmp_path: Path, asked: list[int], what: str) -> None:
    def row(text: str) -> dict[str, Any]:
        return {"role": "user" if text.startswith("red") else "assistant", "content": text}

    base = tree_of(tmp_path)
    if what == "template":
        rows = [{"chosen": [row("red one"), row("good")], "rejected": [row("red one"), row("bad")]}] * 8
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        (tmp_path / "a.jinja").write_text(TEMPLATE)
        (tmp_path / "b.jinja").write_text("one " + TEMPLATE)
        base = merge(base, {"data": {"preferences": {"path": str(file)}, "chat_template": str(tmp_path / "a.jinja")}})
    changes: dict[str, dict[str, Any]] = {
        "data": {"data": {"preferences": {"path": str(pairs_file(tmp_path, seed=4))}}},
        "dtype": {"policy": {"dtype": "float64"}},
        "template": {"data": {"chat_template": str(tmp_path / "b.jinja")}},
    }
    offline(base)
    offline(merge(base, changes[what]))
    assert len(asked) == 2
    assert len(kept(tmp_path)) == 2


def test_a_head_in_bfloat16_is_another_entry(tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_gains_by_bfloat16", lambda: True)
    exact, rounded = (
        references(offline(tree_of(tmp_path, policy={"dtype": "bfloat16", "head_dtype": head})))
        for head in ("float32", "model")
    )
    assert len(asked) == 2
    assert not torch.equal(exact, rounded)


def test_the_sampling_temperature_changes_no_loss_over_data(tmp_path: Path, asked: list[int]) -> None:
    """The loss is of completions that nobody drew from the policy: it is at temperature 1, reference included."""
    first = trained_offline(merge(tree_of(tmp_path), {"run": {"out_dir": str(tmp_path / "one")}}))
    second = merge(tree_of(tmp_path), {"run": {"out_dir": str(tmp_path / "half")}, "sampling": {"temperature": 0.5}})
    other = trained_offline(second)
    assert len(asked) == 1
    names = ("loss/preference", "preference/margin", "preference/chosen_logprob", "eval/preference_loss")
    for line, same in zip(*(run.session.recorder.folder.read_metrics() for run in (first, other)), strict=True):
        assert [line.get(name) for name in names] == [same.get(name) for name in names]


def test_a_resumed_run_asks_the_reference_not_the_trained_policy(tmp_path: Path, asked: list[int]) -> None:
    first = references(trained_offline(tree_of(tmp_path)))
    shutil.rmtree(tmp_path / "cache")
    resumed = offline(tree_of(tmp_path), "schedule.steps=6")
    assert resumed.session.resumed
    assert len(asked) == 2
    assert torch.equal(references(resumed), first)


def test_the_reference_leaves_memory_where_nothing_reads_it_later(tmp_path: Path) -> None:
    other = str(make_model(tmp_path / "other", seed=5))
    run = offline(tree_of(tmp_path, reference={"model": other}))
    assert run.loss.models.reference is None  # type: ignore[attr-defined]
    for_z0 = offline(tree_of(tmp_path, "kto", reference={"model": other}))
    assert for_z0.loss.models.reference is not None  # type: ignore[attr-defined]


def test_with_adapters_the_reference_is_the_policy_with_its_adapter_off(tmp_path: Path) -> None:
    start = offline(tree_of(tmp_path, "kto"))
    lora = trained_offline(tree_of(tmp_path, "kto", policy={"lora": {"r": 2}, "lr": 0.1}))
    models, base = lora.loss.models, start.loss.models  # type: ignore[attr-defined]
    assert models.reference is None
    batch = start.data(1)
    with torch.no_grad():
        reference, policy = models.reference_logprobs(batch), models.policy_tokens(batch).logprobs
        original = base.policy_tokens(batch).logprobs
    torch.testing.assert_close(reference, original)
    assert (policy - original).abs().max() > 0.05


def adapter_of(folder: Path) -> str:
    """Train an adapter on the pairs, far from its base; return its folder."""
    lora = {"lora": {"r": 2}, "export": "adapter", "lr": 0.1}
    trained_offline(tree_of(folder, policy=lora, run={"out_dir": str(folder / "first")})).export(folder / "adapter")
    return str(folder / "adapter")


@pytest.mark.parametrize("use", ["continued", "reference"])
@pytest.mark.parametrize("base_is_first", [True, False])
def test_an_adapter_that_is_the_reference_shares_nothing_with_its_base(
    tmp_path: Path, asked: list[int], use: str, base_is_first: bool
) -> None:
    adapter = adapter_of(tmp_path)
    shutil.rmtree(tmp_path / "cache")
    asked.clear()
    changes = {
        "continued": {"policy": {"model": adapter, "lora": {"start": "continue"}}},
        "reference": {"reference": {"model": adapter, "weights": "float32"}},
    }[use]
    order = slice(None, None, 1 if base_is_first else -1)
    trees = [tree_of(tmp_path), tree_of(tmp_path, **changes)][order]
    base, adapted = [references(offline(tree)) for tree in trees][order]
    assert len(asked) == 2
    assert (base - adapted).abs().max() > 0.05
    merged = references(offline(tree_of(tmp_path, reference={"model": adapter})))
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-4)


def test_a_fingerprint_is_of_the_adapter_unless_it_is_off(tmp_path: Path) -> None:
    base = weights_fingerprint(load_causal_lm(str(make_model(tmp_path / "model"))))

    def prints(**lora: Any) -> tuple[str, str]:
        torch.manual_seed(0)
        adapted = add_lora(load_causal_lm(str(tmp_path / "model")), LoraConfig(**lora))
        return weights_fingerprint(adapted, adapter_is_off=True), weights_fingerprint(adapted)

    off, one = prints(r=2, alpha=4.0)
    assert off == base != one
    assert prints(r=2, alpha=4.0) == (base, one)
    for other in ({"r": 2, "alpha": 8.0}, {"r": 2, "alpha": 4.0, "rslora": True}, {"r": 4, "alpha": 8.0}):
        assert prints(**other)[0] == base
        assert prints(**other)[1] != one


def test_a_fingerprint_is_of_the_weights(tmp_path: Path) -> None:
    policy = offline(tree_of(tmp_path)).trained.module
    before = weights_fingerprint(policy)
    name, value = next(iter(weights(policy).items()))
    with torch.no_grad():
        policy.get_parameter(name).flatten()[0] = value.flatten()[0] + 1e-6
    assert weights_fingerprint(policy) != before


def test_a_short_run_asks_only_about_the_rows_that_it_reads(tmp_path: Path, asked: list[int]) -> None:
    whole = offline(tree_of(tmp_path, run={"out_dir": str(tmp_path / "whole")}, schedule={"steps": 8}))
    short = offline(tree_of(tmp_path, schedule={"steps": 4}))
    assert 2 * 4 * 16 < asked[0] <= 2 * 8 * 16
    assert asked[1] == 2 * 4 * 16
    for step in range(1, 5):
        torch.testing.assert_close(short.data(step).chosen_ref_logprobs, whole.data(step).chosen_ref_logprobs)  # type: ignore[attr-defined]
        torch.testing.assert_close(short.data(step).rejected_ref_logprobs, whole.data(step).rejected_ref_logprobs)  # type: ignore[attr-defined]


def test_a_short_kto_run_asks_only_about_the_rows_that_it_reads(tmp_path: Path, asked: list[int]) -> None:
    run = offline(tree_of(tmp_path, "kto", schedule={"steps": 2}))
    assert asked == [2 * 16]
    assert all(run.data(step).ref_logprobs.isfinite().all() for step in (1, 2))  # type: ignore[attr-defined]


def test_a_long_computation_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []
    monkeypatch.setattr(RunContext, "announce", lambda context, text: announced.append(text))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_SHARES", 0.0)
    offline(tree_of(tmp_path))
    assert announced[0].startswith("reference log-probs of 128 completions: computed once, kept in ")
    assert [re.sub(r"\S+ left", "left", line) for line in announced[1:]] == [
        f"reference log-probs: {share}% computed, left" for share in (25, 50, 75)
    ]
