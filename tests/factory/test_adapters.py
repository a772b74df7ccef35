"""Adapters of every role over one base in memory: trained, resumed bit for bit, exported, and read again."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig as Settings
from peft import PeftModel, get_peft_model
from quick import quick
from runs import (
    brief_tree,
    make_model,
    merge,
    offline_tree,
    online,
    pairs_file,
    ppo_tree,
    trained,
    trained_offline,
    weights,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.cli import main
from rlhf.config.weights import LoraConfig
from rlhf.models.backbone import add_lora, body_of, load_causal_lm, save_model
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.quantized import QuantizedLinear
from rlhf.models.lora import quiet_peft
from rlhf.models.scalar_head import load_reward_heads
from rlhf.sampling.generate import HFSampler
from rlhf.tracking.run_folder import RunFolder

LORA = {"r": 2}
NF4 = {"lora": LORA, "weights": "nf4"}
pytest.importorskip("bitsandbytes")


def rm_tree(folder: Path, **model: Any) -> dict[str, Any]:
    start = folder / "model"
    if not start.is_dir():
        make_model(start)
    return {
        "run": {"out_dir": str(folder / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": str(pairs_file(folder, count=48))}},
        "model": {"model": str(start), "lr": 1e-2, **model},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 4},
        "checkpoint": {"every": 2},
    }


def train_reward_model(tree: dict[str, Any], folder: Path, *overrides: str) -> Path:
    file = folder / "rm.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["rm", str(file), *overrides]) == 0
    return Path(tree["run"]["out_dir"])


def states(model: Any, folder: Path) -> torch.Tensor:
    """The hidden states below the scores of a few texts, as transformers computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = [tokenizer(text, return_tensors="pt") for text in ("red one good", "blue bad", "two good good")]
    with torch.no_grad():
        return torch.stack([model.base_model(input_ids=one["input_ids"]).last_hidden_state[0, -1] for one in batch])


def scores(model: Any, folder: Path) -> torch.Tensor:
    """Raw scores of a few texts, as transformers reads them."""
    with torch.no_grad():
        return torch.cat([model.score(row) for row in states(model, folder)])


@pytest.mark.parametrize("kind", ["auto", "nf4"])
def test_a_reward_model_s_adapter_is_resumed_exported_and_read_by_plain_peft(kind: str, tmp_path: Path) -> None:
    tree = rm_tree(tmp_path, lora=LORA, weights=kind, export="both")
    run = train_reward_model(tree, tmp_path)
    adapter = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    merged = (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-000004")
    shutil.rmtree(run / "model")
    train_reward_model(tree, tmp_path)
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    assert (run / "model" / "model.safetensors").read_bytes() == merged

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    ours = load_reward_heads(str(run / "adapter"), AutoTokenizer.from_pretrained(run / "adapter")).classifier
    with quiet_peft():
        theirs = PeftModel.from_pretrained(plain, str(run / "adapter")).merge_and_unload()
    assert torch.allclose(scores(ours, run / "model"), scores(theirs, run / "model"), atol=1e-6)
    whole = load_reward_heads(str(run / "model"), AutoTokenizer.from_pretrained(run / "model"))
    assert (
        whole.calibration
        == load_reward_heads(str(run / "adapter"), AutoTokenizer.from_pretrained(run / "model")).calibration
    )
    if kind == "auto":  # the merged model is adapter plus base, and the base is the published one
        assert torch.allclose(scores(whole.classifier, run / "model"), scores(theirs, run / "model"), atol=1e-5)


def test_ppo_holds_one_base_for_all_roles_and_resumes_bitwise(tmp_path: Path) -> None:
    reward = train_reward_model(rm_tree(tmp_path, **NF4, export="adapter"), tmp_path)
    tree = brief_tree(
        tmp_path,
        policy=NF4,
        critic={**NF4, "init": "reward", "lora": {**LORA, "start": "continue"}},
    )
    tree["reward"] = {"source": {"type": "model", "path": str(reward), "weights": "nf4"}}
    run = trained(tree)
    models: Any = run.models
    source: Any = run.reward.source  # type: ignore[attr-defined]
    scorer = source.source.model.classifier
    roles = models.policy, models.critic.classifier, scorer
    codes = [
        {layer.codes.data_ptr() for layer in role.modules() if isinstance(layer, QuantizedLinear)} for role in roles
    ]
    assert codes[0] == codes[1] == codes[2] != set()
    embeddings = {role.get_input_embeddings().weight.data_ptr() for role in roles}
    assert len(embeddings) == 1
    assert models.reference is None
    assert all(supports_fused(body) for body in models.bodies)
    assert not isinstance(run.sampler, HFSampler)
    expected = [weights(models.policy), weights(models.critic)]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    again = trained(tree)
    assert again.session.resumed
    for before, model in zip(expected, (again.models.policy, again.models.critic), strict=True):
        assert model is not None
        after = weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["auto", "bfloat16", "int8", "nf4"])
def test_adapters_are_trained_in_float32_whatever_the_base_is_kept_in(kind: str, tmp_path: Path) -> None:
    role = {"lora": LORA, "weights": kind}
    run = online(ppo_tree(tmp_path, policy=role, critic={**role, "init": "policy"}))
    for model in (run.models.policy, run.models.critic):
        assert model is not None
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_the_first_ratio_is_1_with_weights_in_fewer_bits(tmp_path: Path) -> None:
    for number, change in enumerate(({"policy": NF4}, {"policy": {"weights": "bfloat16"}})):
        folder = tmp_path / str(number)
        run = trained(brief_tree(folder, **change, schedule={"steps": 1}))
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        first = next(line for line in lines if "policy/first_ratio_deviation" in line)
        assert first["policy/first_ratio_deviation"] < 1e-5
        del run


CASES = list(product(["sft", "dpo"], ["nf4", "int8", "bfloat16"]))


@pytest.mark.parametrize(("preset", "kind"), quick(CASES, [("dpo", "nf4"), ("sft", "int8"), ("dpo", "bfloat16")]))
def test_offline_losses_train_adapters_over_a_stored_base(preset: str, kind: str, tmp_path: Path) -> None:
    tree = offline_tree(tmp_path, "dpo", policy={"lora": LORA, "weights": kind, "export": "adapter"})
    if preset == "sft":
        tree = merge(tree, {"algorithm": {"preset": "sft"}})
        tree["data"] = {"sft": {"path": tree["data"]["preferences"]["path"], "columns": {"completion": "chosen"}}}
        tree["eval"] = {"every": 0}
    run = trained_offline(tree)
    policy: Any = run.loss.models.policy  # type: ignore[attr-defined]
    before = dict(policy.named_parameters())
    assert any(float(p.detach().abs().max()) > 0 for name, p in before.items() if "lora_B" in name)
    assert supports_fused(body_of(policy))


@pytest.mark.parametrize("preset", ["grpo"])
def test_grpo_trains_adapters_over_nf4(preset: str, tmp_path: Path) -> None:
    tree = brief_tree(
        tmp_path,
        policy=NF4,
        algorithm={"preset": preset},
        sampling={"completions_per_prompt": 2},
        schedule={"steps": 2},
    )
    run = trained(tree)
    assert run.models.policy is not None


def test_trained_bfloat16_weights_resume_bitwise(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path, policy={"weights": "bfloat16"}, critic={"weights": "bfloat16"})
    whole = trained(tree)
    expected = [weights(whole.models.policy), weights(whole.models.critic)]  # type: ignore[arg-type]
    assert whole.models.policy.model.embed_tokens.weight.dtype == torch.bfloat16
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    again = trained(tree)
    assert again.session.resumed
    for before, model in zip(expected, (again.models.policy, again.models.critic), strict=True):
        after = weights(model)  # type: ignore[arg-type]
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_dropout_and_dora_resume_bitwise(tmp_path: Path) -> None:
    lora = {**LORA, "dropout": 0.3, "dora": True}
    tree = offline_tree(tmp_path, "dpo", policy={"lora": lora}, eval={"every": 0})
    whole = trained_offline(tree)
    expected = weights(whole.loss.models.policy)  # type: ignore[attr-defined]
    assert not supports_fused(body_of(whole.loss.models.policy))  # type: ignore[attr-defined]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    again = trained_offline(tree)
    assert again.session.resumed
    after = weights(again.loss.models.policy)  # type: ignore[attr-defined]
    assert all(torch.equal(expected[name], after[name]) for name in expected)


def test_an_adapter_is_continued_with_itself_as_reference(tmp_path: Path) -> None:
    """SFT exports an adapter; DPO trains it further and is compared with its start, over one base."""
    first = offline_tree(tmp_path, "dpo", policy={"lora": LORA, "export": "adapter"}, eval={"every": 0})
    first["run"]["out_dir"] = str(tmp_path / "first")
    assert_exported(first, tmp_path)
    start = tmp_path / "first" / "model"
    tree = ppo_tree(tmp_path, policy={"model": str(start), "lora": {**LORA, "start": "continue"}, "weights": "nf4"})
    run = online(tree)
    models: Any = run.models
    assert models.reference is not None
    frozen = {p.data_ptr() for name, p in models.policy.named_parameters() if "lora_" not in name}
    assert frozen == {p.data_ptr() for name, p in models.reference.named_parameters() if "lora_" not in name}
    mine, theirs = (dict(model.named_parameters()) for model in (models.policy, models.reference))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert any(p.requires_grad for p in mine.values())
    assert not any(p.requires_grad for p in theirs.values())


def assert_exported(tree: dict[str, Any], folder: Path) -> None:
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["train", str(file)]) == 0
    adapter = Path(tree["run"]["out_dir"]) / "model"
    with quiet_peft():
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), str(adapter))
    ours = load_causal_lm(str(adapter))
    ids = torch.tensor([[1, 4, 6, 8]])
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, ours(ids).logits, atol=1e-5)


FIRST = {
    "lora": {},
    "rslora": {"rslora": True, "alpha": 3.0},
    "dora": {"dora": True},
    "modules_to_save": {"modules_to_save": ["o_proj"], "target_modules": ["q_proj", "down_proj"]},
}


def by_peft(adapter: Path) -> Any:
    """A reward model's adapter as plain peft loads it: onto the base that its configuration names."""
    base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    with quiet_peft():
        return PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()


def policy_adapter(folder: Path) -> Path:
    """An adapter over the model in `folder`, in a folder of its own."""
    adapted = add_lora(load_causal_lm(str(folder / "model")), LoraConfig(r=2))
    save_model(adapted, AutoTokenizer.from_pretrained(folder / "model"), folder / "policy_adapter")
    return folder / "policy_adapter"


def by_us(folder: Path) -> Any:
    return load_reward_heads(str(folder), AutoTokenizer.from_pretrained(folder)).classifier


@pytest.mark.parametrize("kind", FIRST)
def test_untrained_steps_from_a_reward_model_s_adapter_export_what_it_computes(kind: str, tmp_path: Path) -> None:
    """A merged adapter gets a new head; one that is continued has its own."""
    tree = rm_tree(tmp_path, lora={**LORA, **FIRST[kind]}, export="adapter")
    first = train_reward_model(tree, tmp_path) / "model"
    for start, export, computed in (("merge", "merged", states), ("continue", "both", scores)):
        expected = computed(by_peft(first), first)
        model = {"model": str(first), "lr": 0.0, "lora": {"start": start}, "export": export, "export_dtype": "float32"}
        run = train_reward_model(merge(tree, {"run": {"out_dir": str(tmp_path / start)}, "model": model}), tmp_path)
        loaded = [(by_us, run / "checkpoints" / "step-000004" / "model"), (by_us, run / "model")]
        loaded += [(AutoModelForSequenceClassification.from_pretrained, run / "model")]
        loaded += [(by_us, run / "adapter"), (by_peft, run / "adapter")] if export == "both" else []
        for load, folder in loaded:
            assert torch.allclose(computed(load(folder), folder), expected, atol=1e-5), (load, folder)


@pytest.mark.parametrize(("targets", "fits"), [("all-linear", True), (["q_proj"], True), (r"model\..*\.q_proj", False)])
def test_a_reward_model_s_adapter_by_plain_peft_is_continued(
    targets: Any, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peft names all linear layers by their paths in the classifier."""
    tree = rm_tree(tmp_path, lora={"start": "continue"}, export="both", export_dtype="float32", lr=0.0)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    settings = Settings(r=2, init_lora_weights=False, target_modules=targets, task_type="SEQ_CLS")
    with quiet_peft():
        get_peft_model(base, settings).save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "start")
    tree["model"]["model"] = str(tmp_path / "start")
    if not fits:
        (tmp_path / "rm.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        assert main(["reward", str(tmp_path / "rm.yaml")]) == 2
        assert "Set lora.start=merge" in " ".join(capsys.readouterr().err.split())
        return
    run = train_reward_model(tree, tmp_path)
    expected = scores(by_peft(tmp_path / "start").eval(), run / "model")
    assert torch.allclose(scores(by_peft(run / "adapter"), run / "model"), expected, atol=1e-5)
    assert torch.allclose(scores(by_us(run / "model"), run / "model"), expected, atol=1e-5)


def test_a_reward_model_tells_of_the_settings_that_its_continued_adapter_overrules(tmp_path: Path) -> None:
    tree = rm_tree(
        tmp_path, lora={"r": 2, "modules_to_save": ["o_proj"], "target_modules": ["q_proj"]}, export="adapter"
    )
    first = train_reward_model(tree, tmp_path) / "model"
    for number, (change, told) in enumerate([({}, []), ({"r": 3}, ["lora.r=3 has no effect (it has 2)"])]):
        run = tmp_path / f"again{number}"
        model = {"model": str(first), "lora": {"start": "continue", **change}}
        train_reward_model(merge(tree, {"run": {"out_dir": str(run)}, "model": model}), tmp_path)
        notes = [str(note["text"]) for note in RunFolder(run).read_notes()]
        start = f"warning: model.lora.start=continue trains the adapter {first} as it is: "
        assert [text.removeprefix(start) for text in notes if "start=continue" in text] == told


def test_a_critic_tells_of_the_settings_that_its_continued_adapter_overrules(tmp_path: Path) -> None:
    reward = train_reward_model(rm_tree(tmp_path, lora=LORA, export="adapter"), tmp_path) / "model"
    start = str(policy_adapter(tmp_path))
    told = {
        str(reward): f"trains the adapter {reward} as it is: lora.r=3 has no effect (it has 2)",
        "policy": f"has no effect: {start} is the adapter of a causal LM, so that it is merged into its base and a new "
        "adapter is trained",
    }
    for init, text in told.items():
        critic = {"init": init, "lora": {"r": 3, "start": "continue"}}
        tree = brief_tree(tmp_path, policy={"model": start}, critic=critic, schedule={"steps": 1})
        tree["run"]["out_dir"] = str(tmp_path / Path(init).name)
        trained(tree)
        notes = [str(note["text"]) for note in RunFolder(tree["run"]["out_dir"]).read_notes()]
        assert [note for note in notes if "start=continue" in note] == [f"warning: critic.lora.start=continue {text}"]


def test_a_reward_model_s_adapter_over_a_merged_adapter_is_not_exported_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only an adapter of a reward model can be continued, and not the adapter of a policy."""
    tree = rm_tree(tmp_path, lora=LORA, export="adapter")
    first = train_reward_model(tree, tmp_path) / "model"
    advice = "set model.export=merged, or model.lora.start=continue to"
    for start, can_continue in ((first, True), (policy_adapter(tmp_path), False)):
        again = merge(tree, {"run": {"out_dir": str(tmp_path / "again")}, "model": {"model": str(start)}})
        file = tmp_path / "again.yaml"
        file.write_text(yaml.safe_dump(again), encoding="utf-8")
        assert main(["reward", str(file)]) == 2
        text = " ".join(capsys.readouterr().err.split())
        assert "set model.export=merged" in text
        assert (advice in text) == can_continue
        assert not (tmp_path / "again").exists()
        run = train_reward_model(again, tmp_path, "model.export=merged", "model.export_dtype=float32")
        kept = run / "checkpoints" / "step-000004" / "model"
        assert torch.allclose(scores(by_us(kept), kept), scores(by_us(run / "model"), kept), atol=1e-5)
        shutil.rmtree(run)
