"""The bytes of a two-layer model worked by hand, and figures that may only grow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.files import merge
from rlhf.config.load import reward_model_config, train_config
from rlhf.models import logprobs
from rlhf.planning import arithmetic, layout
from rlhf.planning.arithmetic import (
    CACHE_COLUMNS,
    Arithmetic,
    PassRows,
    activations,
    head,
    key_value_cache,
    layer_activations,
)
from rlhf.planning.cures import CURES
from rlhf.planning.layout import Lengths
from rlhf.planning.memory import least_memory
from rlhf.planning.plan import Machine, Plan, make_plan
from rlhf.planning.seconds import operations
from rlhf.planning.shapes import PUBLISHED, Shape, published_shape
from rlhf.rewards.model import ModelSource
from rlhf.sampling.fast.recorded import COLUMN_MULTIPLE
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER

TWO_LAYERS = Shape(
    family="llama",
    hidden=4,
    layers=2,
    heads=2,
    groups=1,
    head_dim=2,
    intermediate=8,
    vocabulary=16,
    tied=True,
)
ROW = PassRows(rows=1, prompts=1, prompt=1, completion=3)
CPU, GPU = Machine(device="cpu"), Machine(device="cuda")
QWEN = "Qwen/Qwen2.5-1.5B-Instruct"


def settings(algorithm: str, model: str = QWEN, **more: Any) -> dict[str, Any]:
    """The settings of a run, as a tree."""
    tree: dict[str, Any] = {
        "algorithm": {"preset": algorithm},
        "policy": {"model": model, "dtype": "float32"},
        "data": {},
        "batch": {"prompts_per_step": 16, "micro_batch_size": 4},
        "schedule": {"steps": 10},
    }
    if algorithm == "sft":
        tree["data"] = {"sft": {"path": "texts.jsonl", "max_tokens": 512}}
    elif algorithm == "dpo":
        tree["data"] = {"preferences": {"path": "pairs.jsonl", "max_tokens": 512}}
    else:
        tree["data"] = {"prompts": {"path": "prompts.jsonl", "max_prompt_tokens": 256}}
        tree["sampling"] = {"max_new_tokens": 256, "completions_per_prompt": 4}
        tree["reward"] = {"source": {"type": "function", "target": "a:b"}}
    for key, value in more.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return tree


def planned(algorithm: str, machine: Machine = CPU, model: str = QWEN, **more: Any) -> Plan:
    return make_plan(train_config(settings(algorithm, model, **more)), machine)


def test_the_bytes_of_a_layer_and_of_the_head_are_those_worked_by_hand() -> None:
    assert TWO_LAYERS.linear == 2 * (16 + 8 + 8 + 16 + 3 * 32) == 288
    assert TWO_LAYERS.parameters == 288 + (2 * 2 * 4 + 4) + 64 == 372
    # x and the residual in the middle, two inverse norms, gate and up, q k v and the output, one log-sum for each head
    full = 4 * (2 * 4 * 4 + 2 * 4 + 2 * 8 * 4 + (2 * 4 + 2 * 2) * 4 + 2 * 4)
    assert layer_activations(TWO_LAYERS, ROW, Arithmetic()) == full == 640
    last = full - (4 - 3) * (4 * 4 + 2 * 8 * 4)  # the feed-forward half of the last layer sees three tokens
    assert activations(TWO_LAYERS, ROW, Arithmetic()) == full + last == 1200
    assert activations(TWO_LAYERS, ROW, Arithmetic(), checkpointed=True) == 2 * 4 * 4 * 4  # the inputs
    logits = head(TWO_LAYERS, ROW, Arithmetic(), trained=True)
    assert logits.kept == 3 * 4 * 8 + 3 * 16 * 4  # hidden states twice, and all probabilities
    assert logits.forward == 3 * 16 * 4
    assert logits.backward == 3 * 16 * 4 + 3 * 4 * 4 + 64 * 4  # one chunk, the states' gradient, the head's
    long = head(TWO_LAYERS, replace(ROW, completion=700), Arithmetic(), trained=False)
    assert long.backward == 2 * 256 * 16 * 4 + 700 * 4 * 4  # two chunks of 256 tokens
    assert key_value_cache(TWO_LAYERS, 10, 4) == 10 * 2 * 1 * 2 * 2 * 4


def test_the_peak_of_sft_of_two_layers_is_the_one_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: TWO_LAYERS)
    config = train_config(settings("sft", batch__prompts_per_step=1))
    plan = make_plan(config, CPU, Lengths(prompt=1, completion=3))
    resting = 372 * (4 + 8)
    start = resting + 1200 + (96 + 192) + 496  # all activations, the head's kept tensors, the head's backward pass
    working = 4 * (4 * 8 * 4 + 4 * 4 * 4) + 4 * 3 * 4 * 8
    end = resting + 372 * 4 + 1200 / 2 + working  # all gradients, the activations of a layer, its backward pass
    assert (start, end) == (6448, 7704)
    assert plan.peak == end
    assert plan.memory.peak_phase == "update"
    assert plan.memory.of("load") == 372 * 4
    assert least_memory(plan.layout) == 372 * 16
    by_kind = {item.kind: item.bytes for item in plan.memory.items if item.phase == "update"}
    assert by_kind["weights"] == by_kind["gradients"] == 372 * 4
    assert by_kind["moments"] == 372 * 8


def test_a_layer_is_computed_again_once_the_logits_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TWO_LAYERS, vocabulary=400)  # 1,908 parameters
    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: shape)
    config = train_config(settings("sft", batch__prompts_per_step=1, policy__gradient_checkpointing=True))
    memory = make_plan(config, CPU, Lengths(prompt=1, completion=3)).memory
    inputs, states, probabilities = 2 * 4 * 4 * 4, 3 * 4 * 8, 3 * 400 * 4
    backward = 3 * 400 * 4 + 3 * 4 * 4 + 1600 * 4
    assert memory.of("update") == 1908 * 12 + inputs + states + probabilities + backward

    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: TWO_LAYERS)
    memory = make_plan(config, CPU, Lengths(prompt=1, completion=3)).memory
    working = 4 * (4 * 8 * 4 + 4 * 4 * 4) + 4 * 3 * 4 * 8
    assert memory.of("update") == 372 * 16 + inputs / 2 + 640 + working  # a layer, and its backward pass


def test_an_8_bit_step_on_a_cpu_widens_what_a_matrix_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: replace(TWO_LAYERS, vocabulary=400))
    config = train_config(settings("sft", batch__prompts_per_step=1, policy__optimizer="adamw_8bit"))
    memory = make_plan(config, CPU, Lengths(prompt=1, completion=3)).memory
    assert memory.of("update") == 1908 * (8 + 2 * (1 + 4 / 256)) + 5 * 1600 * 4
    assert make_plan(config, GPU, Lengths(prompt=1, completion=3)).memory.of("update") - 3 * 2**25 < memory.of("update")


def test_a_reward_model_s_gradients_are_all_there_at_the_end_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: replace(TWO_LAYERS, vocabulary=400))
    tree = {"model": {"model": "m"}, "data": {"preferences": {"path": "p"}}, "batch": {"prompts_per_step": 1}}
    plan = make_plan(reward_model_config(tree), CPU, Lengths(prompt=1, completion=3))
    trained = plan.layout.trained[0].trained
    assert plan.memory.of("update") > trained * 16 + 1600 * 4  # and the embedding's gradient, before it is added


def test_prompts_are_shared_where_it_saves_a_tenth_of_the_tokens() -> None:
    rows = PassRows(rows=8, prompts=2, prompt=10, completion=20)
    assert rows.is_shared
    assert rows.tokens == 2 * 10 + 8 * 20
    assert PassRows(rows=8, prompts=8, prompt=10, completion=20).tokens == 8 * 30
    assert PassRows(rows=2, prompts=1, prompt=10, completion=100).tokens == 2 * 110  # 10 of 220 would be saved


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
def test_more_rows_longer_rows_and_larger_models_take_more(algorithm: str, machine: Machine) -> None:
    models = ["Qwen/Qwen2.5-0.5B", QWEN, "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B"]
    sizes = [planned(algorithm, machine, model).peak for model in models]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    rows = [planned(algorithm, machine, batch__micro_batch_size=size).peak for size in (1, 2, 4, 8)]
    assert rows == sorted(rows)
    config = train_config(settings(algorithm))
    lengths = [make_plan(config, machine, Lengths(prompt=64, completion=n)).peak for n in (64, 128, 256)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
def test_each_way_to_save_memory_saves_some(algorithm: str) -> None:
    full = planned(algorithm, GPU)
    lora = planned(algorithm, GPU, policy__lora={"r": 16})
    nf4 = planned(algorithm, GPU, policy__lora={"r": 16}, policy__weights="nf4")
    assert full.peak > lora.peak > nf4.peak
    assert full.peak > planned(algorithm, GPU, policy__optimizer="adamw_8bit").peak
    checkpointed = planned(algorithm, GPU, policy__gradient_checkpointing=True, critic__gradient_checkpointing=True)
    assert full.peak > checkpointed.peak


def test_ppo_holds_four_models_and_grpo_two_and_dpo_one() -> None:
    reward = {"type": "model", "path": QWEN}
    ppo = planned("ppo", reward__source=reward, critic__init="policy")
    assert [role.name for role in ppo.layout.roles] == ["policy", "critic", "reference", "reward model"]
    assert [role.name for role in planned("grpo").layout.roles] == ["policy", "reference"]
    assert [role.name for role in planned("dpo").layout.roles] == ["policy"]  # the reference is read before step 1
    lora = planned("grpo", policy__lora={"r": 16})
    assert [role.name for role in lora.layout.roles] == ["policy"]


def test_a_teacher_is_held_as_itself_or_as_the_reference() -> None:
    small = "Qwen/Qwen2.5-0.5B-Instruct"
    parameters = planned("grpo", model=small).layout.roles[0].shape.parameters
    for algorithm, name in (("distill", "teacher"), ("opd", "reference")):
        for lora in (None, {"r": 16}):
            policy, other = planned(algorithm, teacher__model=small, policy__lora=lora).layout.roles
            assert (policy.name, other.name, other.shape.parameters) == ("policy", name, parameters)
    less = planned("distill", teacher__type="server", teacher__url="http://x", teacher__model="m")
    more = planned("distill", teacher__model=small)
    assert [role.name for role in less.layout.roles] == ["policy"]
    assert operations(less.layout)["update"] < operations(more.layout)["update"]
    assert less.memory.peak < more.memory.peak


def test_zero_divides_moments_then_gradients_then_weights() -> None:
    machine = Machine(device="cuda", processes=4)
    parameters = PUBLISHED["Qwen/Qwen2.5-1.5B"].parameters
    kinds = {}
    for mode in ("ddp", "zero1", "zero2", "zero3"):
        plan = planned("sft", machine, sharding__mode=mode)
        kinds[mode] = {item.kind: item.bytes for item in plan.memory.items if item.phase == "update"}
    assert kinds["ddp"]["moments"] == 8 * parameters
    assert kinds["zero1"]["moments"] == 2 * parameters
    assert kinds["zero1"]["gradients"] == 4 * parameters
    assert kinds["zero2"]["gradients"] == parameters
    assert kinds["zero2"]["weights"] == 4 * parameters
    assert kinds["zero3"]["weights"] == parameters
    assert "moments" not in {item.kind for item in planned("sft", machine, sharding__mode="zero2_offload").memory.items}


@pytest.mark.parametrize("weights", ["nf4", "auto"])
def test_roles_with_adapters_on_one_base_hold_it_once(weights: str) -> None:
    adapters = {"lora": {"r": 16}, "weights": weights}
    more = {f"policy__{name}": value for name, value in adapters.items()}
    grpo = planned("grpo", GPU, **more)
    more |= {f"critic__{name}": value for name, value in adapters.items()}
    ppo = planned("ppo", GPU, critic__init="policy", **more)
    bases = [role.weights for role in ppo.layout.roles]
    assert bases[0] > 0
    assert bases[1:] == [0.0]
    assert ppo.memory.of("load") < 1.1 * grpo.memory.of("load")
    others = planned("ppo", GPU, critic__init="policy", **{**more, "critic__weights": "bfloat16"})
    assert all(role.weights > 0 for role in others.layout.roles)


def write_adapter(folder: Path, task: str = "CAUSAL_LM") -> str:
    settings = {"base_model_name_or_path": QWEN, "task_type": task, "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_a_continued_adapter_is_planned_with_its_own_rank_and_modules(tmp_path: Path) -> None:
    """A scalar head continues a reward model's adapter only; others are merged below a new one."""
    shape = published_shape(QWEN)
    assert shape is not None
    new, own = shape.adapters(16, "all-linear"), shape.adapters(4, ["q_proj"])
    path = write_adapter(tmp_path)
    for start, numbers in (("merge", new), ("continue", own)):
        lora = {"r": 16, "start": start}
        assert planned("dpo", model=path, policy__lora=lora).layout.roles[0].adapters == numbers
        for task in ("SEQ_CLS", "CAUSAL_LM"):
            tree = settings("dpo", write_adapter(tmp_path, task))
            tree["model"] = tree.pop("policy") | {"lora": lora}
            del tree["algorithm"]
            scalar = make_plan(reward_model_config(tree), CPU).layout.roles[0].adapters
            assert scalar == (numbers if task == "SEQ_CLS" else new) + shape.hidden


def test_a_merged_adapter_shares_no_base_and_is_not_to_be_exported_as_an_adapter(tmp_path: Path) -> None:
    path = write_adapter(tmp_path)
    for start, bases, is_whole in (("merge", 2, False), ("continue", 1, True)):
        kept = {"lora": {"start": start}, "weights": "nf4"}
        tree = settings("grpo", path)
        tree["policy"] |= kept
        tree["reward"] = {"source": {"type": "model", "path": path, "weights": "nf4"}}
        plan = make_plan(train_config(tree), Machine(device="cuda", memory=1e8))
        assert sum(role.weights > 0 for role in plan.layout.roles) == bases
        cure = next(cure for cure in CURES if cure.name == "export the adapter alone")
        assert cure.settings(plan.config) == ({"policy.export": "adapter"} if is_whole else {})


def test_under_zero3_each_model_has_its_own_part_of_a_base() -> None:
    adapters = {"policy__lora": {"r": 16}, "critic__lora": {"r": 16}, "critic__init": "policy"}
    split = planned("ppo", GPU, sharding__mode="zero3", **adapters)
    assert all(role.weights > 0 for role in split.layout.roles)


def test_a_reward_model_reads_one_token_of_a_row_and_has_no_logits() -> None:
    tree = settings("dpo")
    tree["model"] = tree.pop("policy")
    del tree["algorithm"]
    tree["schedule"] = {"epochs": None, "steps": 10}
    plan = make_plan(reward_model_config(tree), CPU)
    assert {item.kind for item in plan.memory.items} == {"weights", "gradients", "moments", "activations"}
    assert plan.peak < planned("dpo").peak


def test_operations_are_six_for_each_weight_and_token() -> None:
    plan = planned("sft")
    shape, tokens = plan.layout.roles[0].shape, 16 * 512
    counted = operations(plan.layout)["update"]
    assert counted == pytest.approx(6 * (shape.linear + shape.embedding) * tokens, rel=0.05)
    assert set(operations(planned("ppo").layout)) == {"rollout", "annotate", "update"}
    lora = operations(planned("sft", policy__lora={"r": 8}).layout)["update"]
    assert lora == pytest.approx(counted * 2 / 3)


def kinds_by_phase(plan: Plan, role: str, kind: str) -> list[str]:
    return [item.phase for item in plan.memory.items if (item.role, item.kind) == (role, kind)]


def test_what_leaves_the_gpu_is_planned_where_it_is_read() -> None:
    reward = {"type": "model", "path": QWEN}
    more = {"reward__source": reward, "critic__init": "policy"}
    plain, phases = planned("ppo", GPU, **more), ["load", "rollout", "annotate", "update", "export"]
    assert kinds_by_phase(plain, "reference", "weights") == phases
    moved = planned("ppo", GPU, **more, offload__frozen_models=True, offload__optimizer=True, offload__sampler=True)
    for role in ("reference", "reward model"):
        assert kinds_by_phase(moved, role, "weights") == ["load", "annotate", "export"]
    for role in ("policy", "critic"):
        assert kinds_by_phase(moved, role, "moments") == ["update"]
        assert kinds_by_phase(moved, role, "weights") == phases
    assert kinds_by_phase(plain, "policy", "sampler's copy") == phases[1:]
    assert kinds_by_phase(moved, "policy", "sampler's copy") == ["rollout"]
    assert kinds_by_phase(moved, "policy", "KV cache") == ["rollout"]
    by_cpu = [planned("ppo", CPU, **more, **change).peak for change in ({}, {"offload__frozen_models": True})]
    assert by_cpu[0] == by_cpu[1]  # there is nothing to move


def test_a_sampler_without_a_copy_needs_its_cache_during_rollouts_alone() -> None:
    copied, live = planned("grpo", GPU), planned("grpo", GPU, sampling__copy_weights=False)
    assert kinds_by_phase(live, "policy", "sampler's copy") == []
    assert kinds_by_phase(live, "policy", "KV cache") == ["rollout"]
    assert live.memory.of("rollout") < copied.memory.of("rollout")


def test_the_cache_of_recorded_steps_has_whole_columns() -> None:
    """It has 64 more for a prompt of 65 tokens; a CPU's has a column for each token."""
    assert CACHE_COLUMNS == COLUMN_MULTIPLE
    shape = published_shape(QWEN)
    for prompt, completion, columns in ((64, 64, 128), (65, 66, 256), (74, 96, 256)):
        prompts = {"path": "prompts.jsonl", "max_prompt_tokens": prompt}
        plan = planned("grpo", GPU, data__prompts=prompts, sampling__max_new_tokens=completion)
        items = plan.memory.items
        (cache,) = {item.bytes for item in items if item.kind == "KV cache"}
        assert cache == key_value_cache(shape, 64 * columns, 4)


def test_prompts_that_a_group_shares_and_that_are_longer_than_completions_are_not_recorded() -> None:
    """The sampler then has its copy during rollouts alone, unless evaluations, of prompts without a group, record."""
    prompts = {"path": "prompts.jsonl", "max_prompt_tokens": 200}
    more: dict[str, Any] = {"data__prompts": prompts, "sampling__max_new_tokens": 40}
    phases = ["rollout", "annotate", "update", "export"]
    shared, single = (planned("grpo", GPU, **more), planned("ppo", GPU, **more, sampling__completions_per_prompt=1))
    assert kinds_by_phase(shared, "policy", "sampler's copy") == phases[:1]
    assert kinds_by_phase(single, "policy", "sampler's copy") == phases
    evaluated = planned("grpo", GPU, **more, data__eval_prompts={"path": "held_out.jsonl", "limit": 16})
    assert kinds_by_phase(evaluated, "policy", "sampler's copy") == phases
    copies = [
        sum(i.bytes for i in plan.memory.items if (i.phase, i.kind) == ("rollout", "sampler's copy"))
        for plan in (shared, evaluated)
    ]
    assert copies[1] == 2 * copies[0]  # the evaluations' stays meanwhile
    offline = planned("sft", GPU, data__eval_prompts={"path": "held_out.jsonl", "limit": 16})
    assert kinds_by_phase(offline, "policy", "sampler's copy") == ["update", "export"]


def test_a_sampler_without_a_copy_has_its_cache_in_the_width_of_the_residual_stream() -> None:
    """And on the way there a second one, of the prompts as the model's own modules read them."""
    more: dict[str, Any] = {"policy__lora": {"r": 16}, "policy__weights": "nf4", "policy__dtype": "bfloat16"}
    plan = planned("grpo", GPU, **more, sampling__copy_weights=False)
    items = {item.kind: item.bytes for item in plan.memory.items if item.phase == "rollout"}
    rows, shape = plan.layout.rollout, published_shape(QWEN)
    assert rows is not None
    tokens = rows.rows * (rows.completion - 1) + rows.prompts * rows.prompt
    assert plan.layout.roles[0].how.low == 2
    assert items["KV cache"] == key_value_cache(shape, tokens, 4)
    assert items["activations"] >= key_value_cache(shape, rows.prompts * rows.prompt, 4)


def test_what_libraries_keep_on_a_gpu_is_planned_where_it_is_measured() -> None:
    for algorithm, count in (("sft", 3), ("grpo", 6)):
        plan = planned(algorithm, GPU)
        sizes = {item.bytes for item in plan.memory.items if item.kind == "workspaces"}
        assert sizes == {count * 2**25}
        assert "load" not in kinds_by_phase(plan, "policy", "workspaces")
    assert kinds_by_phase(planned("sft", CPU), "policy", "workspaces") == []


def test_several_steps_ahead_keep_the_weights_of_every_draw() -> None:
    one, two = (planned("grpo", CPU, overlap__ahead=True, overlap__ahead_steps=steps) for steps in (1, 2))
    assert (one.layout.ahead, two.layout.ahead) == (1, 4)


def test_prompts_that_are_kept_between_turns_need_a_cache_of_their_own() -> None:
    tree = settings("grpo", environment__target="guess_number.py:GuessNumber")
    del tree["reward"]
    plain, keeping = (
        make_plan(train_config(merge(tree, {"environment": {"prefix_cache": keeps}})), CPU) for keeps in (False, True)
    )
    cache = key_value_cache(published_shape(QWEN), 64 * 256, 4)
    assert keeping.memory.of("rollout") - plain.memory.of("rollout") == cache


def test_an_episode_is_planned_with_the_actions_of_all_its_turns() -> None:
    tree = settings("grpo", environment__target="guess_number.py:GuessNumber", environment__max_turns=5)
    del tree["reward"]
    tree["sampling"]["max_new_tokens"] = 8
    plan = make_plan(train_config(tree), CPU)
    assert plan.layout.step.completion == 40
    assert any("environment writes are not known" in note for note in plan.layout.notes)
    limited = make_plan(train_config(merge(tree, {"environment": {"max_tokens": 100}})), CPU)
    assert limited.layout.step.completion == 100
    assert not limited.layout.notes


def test_ppo_of_8_billion_weights_on_one_nf4_base_is_planned_within_16_gb(tmp_path: Path) -> None:
    """Policy, critic and reward model are adapters on one base; rows of 512 + 512 tokens."""
    name = "meta-llama/Llama-3.1-8B"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    kept = {"lora": {"r": 16}, "weights": "nf4", "gradient_checkpointing": True}
    tree = settings("ppo", name)
    tree["policy"] = {"model": name, **kept}
    tree["critic"] = {"init": "policy", **kept}
    tree["reward"] = {"source": {"type": "model", "path": str(tmp_path), "weights": "nf4", "micro_batch_size": 4}}
    tree["sampling"] = {"max_new_tokens": 512, "completions_per_prompt": 4, "batch_size": 16, "copy_weights": False}
    tree["batch"]["micro_batch_size"] = 1
    plan = make_plan(train_config(tree), Machine(device="cuda", memory=16e9), Lengths(prompt=512, completion=512))
    assert [role.weights > 0 for role in plan.layout.roles] == [True, False, False]
    assert plan.fits
    assert plan.needed < 16e9
    linear, others = 6_979_321_856, 2 * 128_256 * 4096
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    assert plan.layout.roles[0].weights == pytest.approx(linear * bits / 8 + 2 * others, rel=1e-3)
    assert not make_plan(train_config(merge(tree, {"sampling": {"copy_weights": True}})), plan.machine).fits


@pytest.mark.parametrize("preset", ["grpo", "dpo", "sft"])
def test_a_plan_in_bfloat16_on_a_cpu_says_that_some_cpus_compute_in_float32(preset: str) -> None:
    plans = [
        planned(preset, machine, policy__dtype=dtype)
        for machine, dtype in ((CPU, "bfloat16"), (CPU, "float32"), (GPU, "bfloat16"))
    ]
    assert [any("computes in float32" in note for note in plan.layout.notes) for plan in plans] == [True, False, False]


def test_passes_without_gradient_are_halved_on_one_gpu_until_they_fit() -> None:
    more = {"policy__lora": {"r": 16}, "policy__weights": "nf4", "batch__prompts_per_step": 256}
    whole = planned("grpo", GPU, **more)
    assert whole.layout.annotate is not None
    assert whole.layout.annotate.rows == 1024
    size = whole.memory.of("annotate") * 0.8
    small = planned("grpo", Machine(device="cuda", memory=size), **more)
    assert small.layout.annotate is not None
    assert small.layout.annotate.rows in (512, 256)
    assert any("halves its passes" in note for note in small.layout.notes)
    two = planned("grpo", Machine(device="cuda", memory=size, processes=2), **more)
    assert not any("halves" in note for note in two.layout.notes)


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_the_models_of_judges_are_planned(algorithm: str) -> None:
    held_out, judge = {"path": "held_out.jsonl"}, {"type": "model", "path": QWEN}
    process = {"reward__process": {"type": "model", "path": QWEN}} if algorithm == "grpo" else {}
    plain = planned(algorithm, CPU, data__eval_prompts=held_out)
    judged = planned(algorithm, CPU, data__eval_prompts=held_out, eval__source=judge, **process)
    more = [role for role in judged.layout.roles if role.name == "reward model"]
    assert len(more) == 1 + len(process)
    read = sum(role.weights for role in judged.layout.roles) - sum(role.weights for role in plain.layout.roles)
    assert judged.memory.of("update") - plain.memory.of("update") == pytest.approx(read, rel=1e-6)
    assert read >= len(more) * published_shape(QWEN).backbone * 2


def test_a_plan_says_that_a_search_needs_more() -> None:
    assert any("vectors of the search" in note for note in planned("trpo", CPU).layout.notes)
    assert not any("vectors of the search" in note for note in planned("grpo", CPU).layout.notes)


def test_a_pass_without_gradient_needs_a_layer_s_numbers_or_the_head_s(monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"batch__prompts_per_step": 1, "sampling__completions_per_prompt": 2}
    for vocabulary, kinds in ((1, {"activations"}), (4000, {"activations", "logits"})):
        shape = replace(TWO_LAYERS, vocabulary=vocabulary)
        monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False, shape=shape: shape)
        plan = make_plan(train_config(settings("rloo", **few)), CPU, Lengths(prompt=2, completion=300))
        items = {item.kind: item.bytes for item in plan.memory.items if item.phase == "annotate"}
        assert items.keys() - {"weights", "moments"} == kinds
    assert items["activations"] == 2 * 300 * 4 * 8  # the hidden states, twice
    assert items["logits"] == 3 * 256 * 4000 * 4


def logits_of(plan: Plan, phase: str) -> float:
    return sum(item.bytes for item in plan.memory.items if item.phase == phase and item.kind == "logits")


def test_a_cpu_widens_an_lm_head_in_16_bits_for_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TWO_LAYERS, vocabulary=4000)
    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: shape)
    for phase in ("annotate", "update"):
        wide, narrow = (
            planned("grpo", policy__lora={"r": 2}, policy__weights=kept, batch__micro_batch_size=1)
            for kept in ("float32", "nf4")
        )
        assert logits_of(narrow, phase) - logits_of(wide, phase) == 4000 * 4 * 4


def test_the_sampler_copies_the_lm_head_through_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TWO_LAYERS, vocabulary=400_000, hidden=64)
    monkeypatch.setattr(layout, "read_shape", lambda path, may_make=False: shape)
    few: dict[str, Any] = {"batch__prompts_per_step": 1, "sampling__completions_per_prompt": 2}
    head_size, logits = 64 * 400_000 * 4, 4 * 2 * 400_000 * 4

    def rollout(machine: Machine, **more: Any) -> dict[str, float]:
        plan = planned("rloo", machine, policy__lora={"r": 2}, **few, **more)
        return {item.kind: item.bytes for item in plan.memory.items if item.phase == "rollout"}

    kinds = rollout(CPU)
    assert kinds["sampler's copy"] == shape.linear * 4 + head_size
    assert kinds["logits"] == head_size
    assert "KV cache" not in kinds  # it is made afterwards
    kinds = rollout(CPU, sampling__copy_weights=False, policy__weights="nf4")
    assert "sampler's copy" not in kinds
    assert kinds["logits"] == logits + head_size  # of two rows, and the widened head
    kinds = rollout(GPU, policy__dtype="bfloat16", policy__weights="nf4")
    assert kinds["logits"] == head_size * 1.5  # in float32, and the new copy in 16 bits before it takes its place
    assert "KV cache" in kinds


def test_an_adapter_that_is_exported_alone_needs_no_merged_copy() -> None:
    lora: dict[str, Any] = {"r": 8}
    merged = planned("dpo", policy__lora=lora)
    alone = planned("dpo", policy__lora=lora, policy__export="adapter")
    policy = merged.layout.roles[0]
    stored = 2.0 * policy.shape.parameters  # the files are in bfloat16
    assert merged.memory.of("export") - alone.memory.of("export") == 4.0 * policy.shape.parameters + stored
    assert alone.memory.of("update") == merged.memory.of("update")


def test_a_4_bit_base_is_never_loaded_in_more_bits() -> None:
    quantized = planned("dpo", policy__lora={"r": 8}, policy__weights="nf4")
    policy = quantized.layout.roles[0]
    assert policy.loaded == policy.weights < policy.shape.parameters * 2.0
    assert quantized.memory.of("load") < quantized.memory.of("update")


def test_the_plan_counts_with_the_sizes_that_a_run_has() -> None:
    sizes = (arithmetic.CHUNK_TOKENS, arithmetic.CHUNK_LOGITS, arithmetic.KEPT_PROBABILITIES)
    assert sizes == (logprobs.CHUNK_TOKENS, logprobs.MAX_CHUNK_LOGITS, logprobs.MAX_SAVED_PROBS)
    assert layout.NO_GRAD_PASSES == NO_GRAD_BATCH_MULTIPLIER
    assert ModelSource.model_fields["micro_batch_size"].default == layout.SCORED_ROWS


@pytest.mark.parametrize(("algorithm", "most"), [("grpo", 256 + 256), ("sft", 512), ("dpo", 512)])
def test_rows_are_planned_no_longer_than_the_context_of_the_model(tmp_path: Path, algorithm: str, most: int) -> None:
    shape = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**shape, "intermediate_size": 8, "vocab_size": 16}
    for context, expected in ((None, most), (2048, most), (320, 320)):
        folder = tmp_path / str(context)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        step = planned(algorithm, model=str(folder)).layout.step
        assert step.prompt + step.completion == expected
