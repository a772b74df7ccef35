"""Runs that learn from a teacher: a model, a server, a file; the same with any passes, and refusals."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from quick import quick
from runs import (
    WORDS,
    largest_difference,
    make_model,
    offline,
    offline_tree,
    online,
    ppo_tree,
    trained,
    trained_offline,
    weights,
    write_rows,
    written,
)
from safetensors.torch import load_file, save_file
from tiny_models import ragged, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf.algo.divergence import TeacherTokens
from rlhf.algo.kl import kl_of_distributions
from rlhf.algorithms.distill import DistillLoss
from rlhf.cli import main
from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.config.sections import OfflineConfig
from rlhf.config.weights import LoraConfig
from rlhf.data.pairs import demonstration_pipeline
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import CheckpointError, ConfigError, DataError, RewardError, UserError
from rlhf.factory.teacher import store_answers
from rlhf.guard.lint import lint
from rlhf.models.backbone import CausalLM, add_lora
from rlhf.models.policy_models import Models
from rlhf.models.teacher import LocalTeacher
from rlhf.teachers.listed import ListedTokens
from rlhf.teachers.server import AskedTeacher, ServerTeacher
from rlhf.teachers.teacher import Teacher, TeacherContext
from rlhf.tracking.trackers import read_jsonl
from rlhf.training.offline import train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun

CPU = torch.device("cpu")
ONE = {"epochs": 1, "minibatches": 1}
EOS = WORDS.index("<eos>")


def with_teacher(folder: Path, preset: str = "distill", **changes: Any) -> dict[str, Any]:
    """A small online run with a teacher of other weights."""
    if not (folder / "teacher").is_dir():
        make_model(folder / "teacher", seed=3)
    tree = ppo_tree(folder, batch=ONE, teacher={"model": str(folder / "teacher")}, policy={"lr": 3e-2})
    tree.pop("critic")
    tree["algorithm"] = {"preset": preset}
    return merge(tree, changes)


def sft_with_teacher(folder: Path, **changes: Any) -> dict[str, Any]:
    """A small offline run with a teacher of other weights."""
    if not (folder / "teacher").is_dir():
        make_model(folder / "teacher", seed=3)
    tree = offline_tree(folder, "distill_sft", policy={"lr": 3e-2})
    rows = write_rows(folder / "sft.jsonl", [{"prompt": p, "completion": c} for p, c in written(5, 40)])
    tree["data"] = {"sft": {"path": str(rows)}, "eval_sft": {"path": str(rows), "limit": 8}}
    tree["teacher"] = {"model": str(folder / "teacher")}
    del tree["eval"]["source"]
    return merge(tree, changes)


def column(tree: dict[str, Any], name: str) -> list[float]:
    rows = read_jsonl(Path(tree["run"]["out_dir"]) / "metrics.jsonl")
    return [row[name] for row in rows if name in row]


# The passes


def student_gradient(
    family: str, loss: DistillLoss, *, log_probs: str, packing: str, lora: bool = False
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The columns of a batch, the gradient of their divergence, and log-probabilities."""
    policy = tiny(family)
    teacher = tiny(family, num_hidden_layers=1) if family != "gpt2" else tiny(family, n_layer=1)
    if lora:
        policy = add_lora(policy, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    settings: dict[str, Any] = {"log_probs": log_probs, "packing": packing}
    answers = LocalTeacher(model=teacher, dtype="float64", device=CPU, temperature=0.7, **settings)
    models = Models(policy=policy, temperature=0.7, dtype="float64", device=CPU, teacher=answers, **settings)
    batch = ragged()
    outputs = models.outputs(batch, compare=models.comparison(loss, batch))
    assert outputs.teacher is not None
    outputs.teacher[0].sum().backward()
    gradient = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return outputs.teacher.detach(), gradient, outputs.logprobs.detach()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"divergence": "reverse"},
        {"divergence": "forward", "top_k": 3},
        {"divergence": "jsd", "beta": 0.2},
        {"divergence": "jsd", "top_k": 5, "tail": False},
    ],
)
def test_every_way_gives_the_same_divergence_and_gradient(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.models.logprobs.CHUNK_TOKENS", {"cpu": 3})  # several chunks, the last of another size
    loss = DistillLoss(**settings)
    columns, gradient, logprobs = student_gradient(family, loss, log_probs="naive", packing="off")
    assert columns[0].abs().max() > 0.01
    for packing in ("off", "auto"):
        others = student_gradient(family, loss, log_probs="auto", packing=packing)
        torch.testing.assert_close(others[0], columns, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(others[2], logprobs, rtol=1e-12, atol=1e-12)
        assert gradient.keys() == others[1].keys()
        for name, slope in gradient.items():
            torch.testing.assert_close(others[1][name], slope, rtol=1e-11, atol=1e-12)


def test_a_head_with_an_adapter_is_compared_too() -> None:
    loss = DistillLoss()
    naive = student_gradient("llama", loss, log_probs="naive", packing="off", lora=True)
    chunked = student_gradient("llama", loss, log_probs="chunked", packing="auto", lora=True)
    torch.testing.assert_close(chunked[0], naive[0], rtol=1e-12, atol=1e-12)
    assert naive[1].keys() == chunked[1].keys()
    for name, slope in naive[1].items():
        torch.testing.assert_close(chunked[1][name], slope, rtol=1e-10, atol=1e-12)


def test_the_temperature_divides_the_teachers_logits_too() -> None:
    model = tiny()
    teacher = LocalTeacher(model=model, dtype="float64", device=CPU, temperature=0.7)
    models = Models(policy=tiny(), temperature=0.7, dtype="float64", device=CPU, teacher=teacher)
    batch = ragged()
    columns = models.outputs(batch, compare=models.comparison(DistillLoss(), batch)).teacher
    assert columns is not None
    torch.testing.assert_close(columns[0], torch.zeros_like(columns[0]), rtol=0, atol=1e-12)  # the same model
    assert columns[2][batch.completion_mask].all()  # which agrees with itself


# Runs


def states_of_two_tokens(run: OnlineRun) -> list[Tensor]:
    """The first prompts of the run, each followed by every token of the vocabulary `[V, L + 1]`."""
    prompts = run.prompts(1)
    starts = {tuple(ids[mask].tolist()) for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)}
    return [torch.tensor([[*start, token] for token in range(len(WORDS))]) for start in sorted(starts)]


@torch.no_grad()
def exact_kl(policy: CausalLM, teacher: CausalLM, states: list[Tensor]) -> float:
    """KL(policy || teacher) of the first two tokens of a completion, by enumeration: no draw is in it."""
    total = 0.0
    for ids in states:
        ours, theirs = (model(input_ids=ids).logits[:, -2:].double().log_softmax(-1) for model in (policy, teacher))
        first, second = kl_of_distributions(ours, theirs).unbind(dim=1)
        chances = ours[0, 0].exp().index_fill(0, torch.tensor([EOS]), 0.0)  # nothing follows the end
        total += float(first[0] + (chances * second).sum())
    return total / len(states)


@pytest.mark.parametrize("preset", quick(["distill", "opd", "minillm"], ["opd"]))
def test_the_kl_to_the_teacher_falls(tmp_path: Path, preset: str) -> None:
    """By enumeration, since the logged KL is of 48 completions: with `minillm` its last three steps over its first
    three were .33 to .59 in eight seeds, and other rounding draws again. The exact one ends at .16 (`distill`), .27
    to .32 (`opd`) and .30 to .51 (`minillm`) of its start.
    """
    tree = with_teacher(tmp_path, preset, schedule={"steps": 12}, batch={"prompts_per_step": 48})
    tree.pop("reward")  # the preset's reward is 0
    start, teacher = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        for name in ("model", "teacher")
    )
    run = trained(tree, "eval.every=0")
    states = states_of_two_tokens(run)
    assert exact_kl(run.models.policy, teacher, states) < 0.65 * exact_kl(start, teacher, states)
    assert column(tree, "kl/teacher_sequence")[0] > column(tree, "kl/teacher")[0]
    assert set(column(tree, "score/mean")) == {0.0}
    if preset == "distill":
        agreement = column(tree, "teacher/agreement")
        assert sum(agreement[-3:]) > sum(agreement[:3])


def test_a_reward_beside_the_teacher_moves_the_policy(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path, "minillm", schedule={"steps": 2}, data={"eval_prompts": None})
    both = weights(trained(tree).models.policy)
    shutil.rmtree(tmp_path / "run")
    tree.pop("reward")
    alone = weights(trained(tree).models.policy)
    assert largest_difference(both, alone) > 1e-4


def test_the_micro_batch_size_does_not_change_a_step(tmp_path: Path) -> None:
    make_model(tmp_path / "model", dtype=torch.float64)
    exact: dict[str, Any] = {
        "data": {"eval_prompts": None},
        "policy": {"dtype": "float64", "optimizer": "sgd"},
        "schedule": {"steps": 2},
        "batch": {"minibatches": 3},
    }
    after = []
    for size in (64, 3, 1):
        tree = with_teacher(tmp_path, "distill", **merge(exact, {"batch": {"micro_batch_size": size}}))
        after.append(weights(trained(tree, "algorithm.policy_loss.divergence=forward").models.policy))
        shutil.rmtree(tmp_path / "run")
    assert largest_difference(after[0], after[1]) < 1e-12
    assert largest_difference(after[0], after[2]) < 1e-12


@pytest.mark.parametrize("preset", ["distill", "opd"])
def test_a_resumed_run_is_the_uninterrupted_run_bitwise(tmp_path: Path, preset: str) -> None:
    tree = with_teacher(tmp_path, preset)
    files = lambda: [(tmp_path / "run" / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")]  # noqa: E731
    whole, expected = trained(tree), files()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    resumed = trained(tree)
    assert resumed.session.resumed
    assert largest_difference(weights(whole.models.policy), weights(resumed.models.policy)) == 0.0
    assert files() == expected


def test_another_teacher_is_another_run(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path)
    trained(tree, "schedule.steps=2")
    shutil.rmtree(tmp_path / "teacher")
    make_model(tmp_path / "teacher", seed=4)
    with pytest.raises(CheckpointError, match=r"teacher\.model"):
        trained(tree)


def test_the_teacher_has_its_own_dtype(tmp_path: Path) -> None:
    run = online(with_teacher(tmp_path, teacher={"dtype": "float64"}))
    assert isinstance(run.models.teacher, LocalTeacher)
    assert next(run.models.teacher.model.parameters()).dtype == torch.float64
    assert next(run.models.policy.parameters()).dtype == torch.float32
    assert not any(p.requires_grad for p in run.models.teacher.model.parameters())


def test_offline_distillation_and_its_held_out_kl(tmp_path: Path) -> None:
    tree = sft_with_teacher(tmp_path, schedule={"steps": 10})
    trained_offline(tree)
    kl = column(tree, "kl/teacher")
    assert kl[-1] < 0.5 * kl[0]
    held_out = column(tree, "eval/kl_teacher")
    assert held_out[-1] < 0.5 * held_out[0]


# Stored log-probabilities


def stored(tree: dict[str, Any], out: Path, *words: str) -> dict[str, Any]:
    """The file of `rlhf teach`, and the tree that trains on it."""
    config = out.with_suffix(".yaml")
    config.write_text(json.dumps(tree))
    assert main(["teach", str(config), "--out", str(out), *words]) == 0
    return {**tree, "teacher": {"type": "stored", "path": str(out)}}


def test_all_stored_tokens_are_the_model_itself(tmp_path: Path) -> None:
    tree = sft_with_teacher(tmp_path, schedule={"steps": 3})
    by_model = weights(trained_offline(tree).trained.module)
    shutil.rmtree(tmp_path / "run")
    by_file = weights(trained_offline(stored(tree, tmp_path / "all.safetensors", "--top-k", "10")).trained.module)
    assert largest_difference(by_model, by_file) < 1e-4  # of steps of 3e-2


def test_stored_answers_replace_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, out = sft_with_teacher(tmp_path, schedule={"steps": 1}), tmp_path / "model.safetensors"
    save_file({"weights": torch.ones(3)}, out)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(tree))
    assert main(["teach", str(config), "--out", str(out)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"{out} is there already, and this command did not write it: name another file with --out" in message
    assert torch.equal(load_file(out)["weights"], torch.ones(3))
    out.unlink()
    for _ in range(2):
        stored(tree, out, "--top-k", "4")


def test_the_top_k_of_a_file_is_the_top_k_of_the_model(tmp_path: Path) -> None:
    tree = sft_with_teacher(tmp_path, schedule={"steps": 3})
    tree["algorithm"] = {"preset": "distill_sft", "loss": {"divergence": "forward", "top_k": 4}}
    by_model = weights(trained_offline(tree).trained.module)
    error = column(tree, "teacher/tail_error")
    shutil.rmtree(tmp_path / "run")
    top = stored(tree, tmp_path / "top.safetensors", "--top-k", "4")
    by_file = weights(trained_offline(top).trained.module)
    assert largest_difference(by_model, by_file) < 1e-4
    bound = column(tree, "teacher/tail_error")
    assert all(b >= e - 1e-6 for b, e in zip(bound, error, strict=True))
    assert min(bound) > 0


def test_a_file_of_other_data_or_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tree = sft_with_teacher(tmp_path)
    top = stored(tree, tmp_path / "top.safetensors", "--top-k", "3")
    write_rows(tmp_path / "sft.jsonl", [{"prompt": "red one", "completion": " bad good"}] * 20)
    with pytest.raises(DataError, match=r"rlhf teach.*data\.sft\.learn, data\.sft\.max_tokens, data\.system"):
        trained_offline(top)
    with pytest.raises(ConfigError, match="no file"):
        offline(merge(top, {"teacher": {"path": str(tmp_path / "none")}, "run": {"out_dir": str(tmp_path / "b")}}))
    rename_word(tmp_path / "model", "two", "three")
    with pytest.raises(ConfigError, match="vocabulary"):
        offline(merge(top, {"run": {"out_dir": str(tmp_path / "c")}}))


def test_a_loss_of_more_tokens_than_the_teacher_gives_is_refused(tmp_path: Path) -> None:
    tree = sft_with_teacher(tmp_path)
    few = stored(tree, tmp_path / "top.safetensors", "--top-k", "3")
    few["algorithm"] = {"preset": "distill_sft", "loss": {"top_k": 4}}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.top_k is 4.* has the 3 likeliest .*rlhf teach --top-k 4"):
        offline(few)
    offline(merge(few, {"algorithm": {"loss": {"top_k": 3}}}))
    asked = {**few, "teacher": {"type": "server", "url": "http://127.0.0.1:9", "model": "t", "top_k": 2}}
    with pytest.raises(ConfigError, match=r"compares the 4 likeliest tokens .* teacher\.top_k asks the server for 2"):
        offline(asked)


def test_the_share_of_the_listed_tokens_is_of_what_is_learned(tmp_path: Path) -> None:
    """Of a conversation the file has the user's turns too, and the loss does not read them."""
    tree = sft_with_teacher(tmp_path)
    turns = [("user", "red one"), ("assistant", "good good"), ("user", "two two"), ("assistant", "bad")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    write_rows(tmp_path / "talk.jsonl", [row] * 4)
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    tree["data"] = {"sft": {"path": str(tmp_path / "talk.jsonl")}, "chat_template": str(template)}
    config = train_config(tree)
    assert isinstance(config, OfflineConfig)
    out = tmp_path / "talk.safetensors"
    done = store_answers(config, out, top_k=2, warn=print)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    rows = demonstration_pipeline(config.sft_data, tokenizer, chat_template=config.data.chat_format).load()
    batch = rows.collate(range(len(rows)))
    learned = batch.loss_mask[batch.completion_mask]
    assert 0 < learned.sum() < len(learned) == done.tokens
    share = load_file(out)["logprobs"].exp().sum(dim=1)
    assert done.listed == pytest.approx(float(share[learned].mean()))
    assert done.listed != pytest.approx(float(share.mean()))


def test_what_no_file_can_be_is_refused_before_the_teacher_is_asked(tmp_path: Path) -> None:
    config = train_config(sft_with_teacher(tmp_path))
    assert isinstance(config, OfflineConfig)
    with pytest.raises(ConfigError, match="--top-k is 0"):
        store_answers(config, tmp_path / "a.safetensors", top_k=0, warn=print)
    with pytest.raises(ConfigError, match="--out is the folder"):
        store_answers(config, tmp_path, top_k=3, warn=print)


def test_a_file_has_no_ids_that_only_the_teacher_has(tmp_path: Path) -> None:
    """As of Qwen2.5 7B and 0.5B: one tokenizer, and more rows of padding in the larger model's head."""
    tree = sft_with_teacher(tmp_path, schedule={"steps": 3})
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    teacher.resize_token_embeddings(len(WORDS) + 6)
    teacher.save_pretrained(tmp_path / "teacher")
    by_model = weights(trained_offline(tree).trained.module)
    shutil.rmtree(tmp_path / "run")
    by_file = weights(trained_offline(stored(tree, tmp_path / "all.safetensors", "--top-k", "10")).trained.module)
    assert largest_difference(by_model, by_file) < 1e-4


# A server


class TeacherServer:
    """vLLM's route for the log-probabilities of a prompt, answered by a model in this process."""

    def __init__(self, folder: Path, *, wrong_text: bool = False) -> None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        outer = self
        self.asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                with torch.no_grad():
                    logs = model(torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
                entries: list[Any] = [None]
                for place, given in enumerate(body["prompt"][1:]):
                    ids = [*logs[place].topk(body["prompt_logprobs"]).indices.tolist(), given]
                    entries.append(
                        {
                            str(i): {
                                "logprob": float(logs[place, i]),
                                "rank": n + 1,
                                "decoded_token": "nonsense" if wrong_text else tokenizer.decode([i]),
                            }
                            for n, i in enumerate(dict.fromkeys(ids))
                        }
                    )
                answer = json.dumps({"choices": [{"text": "", "prompt_logprobs": entries}]}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


@contextmanager
def teacher_server(folder: Path, **how: Any) -> Iterator[TeacherServer]:
    server = TeacherServer(folder, **how)
    try:
        yield server
    finally:
        server.http.shutdown()
        server.thread.join()
        server.http.server_close()


def test_a_server_is_the_top_k_of_the_model(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path, schedule={"steps": 2}, algorithm={"policy_loss": {"top_k": 4}})
    by_model = weights(trained(tree, "eval.every=0").models.policy)
    shutil.rmtree(tmp_path / "run")
    with teacher_server(tmp_path / "teacher") as server:
        tree["teacher"] = {"type": "server", "url": server.url, "model": "teacher", "top_k": 4, "retries": 0}
        by_server = weights(trained(tree, "eval.every=0").models.policy)
        assert server.asked[0]["prompt_logprobs"] == 4
    assert largest_difference(by_model, by_server) < 1e-4  # of steps of 3e-2
    assert column(tree, "teacher/tail")[0] > 0


def test_a_server_whose_ids_mean_other_texts_is_refused(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path)
    with teacher_server(tmp_path / "teacher", wrong_text=True) as server:
        tree["teacher"] = {"type": "server", "url": server.url, "model": "teacher", "top_k": 2, "retries": 0}
        run = online(tree, "eval.every=0")
        assert run.models.teacher is not None
        with pytest.raises(RewardError, match="another vocabulary"):
            run.models.teacher(run.sampler.sample(run.prompts(1), key=1, group_size=1))


def test_a_token_of_some_bytes_of_a_character_may_have_any_text_at_the_server() -> None:
    """vLLM writes the character that it completes with the tokens before, and nothing if it completes none."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    bytewise = Tokenizer(models.BPE(vocabulary, []))
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    config = ServerTeacher(url="http://localhost:1/v1", model="teacher")
    asked = AskedTeacher(config, tokenizer, CPU)
    part, whole = (vocabulary[letter] for letter in "©a")  # the byte A9, the last of é, and the letter a
    for text in ("é", "\ufffd", "", None):
        asked._check_texts([part, whole], [text, "a"])
    with pytest.raises(RewardError, match="another vocabulary"):
        asked._check_texts([part, whole], ["é", "b"])


def test_listed_tokens_keep_the_order_of_the_rows() -> None:
    ids = torch.arange(6).view(3, 2)
    rows = ListedTokens(ids, torch.tensor([[0.5, 0.25]] * 3).log())
    part = rows.part(slice(1, 3))
    assert part.ids is not None
    assert part.ids.tolist() == [[2, 3], [4, 5]]
    assert part.rest is not None
    torch.testing.assert_close(part.rest.exp(), torch.tensor([0.25, 0.25]))


# A teacher of the user's


class UniformTeacher(Teacher):
    """Says that every token is as likely as any other."""

    type: Literal["uniform"] = "uniform"
    vocabulary: ClassVar[int] = 10

    def build(self, context: TeacherContext) -> UniformTeacher:
        """Return itself: it has nothing to load."""
        return self

    @property
    def parameters(self) -> int:
        """Return 0."""
        return 0

    def __call__(self, batch: Any) -> UniformTeacher:
        """Read nothing."""
        return self

    def part(self, tokens: slice) -> TeacherTokens:
        """Return the same for every token."""
        count, size = tokens.stop - tokens.start, self.vocabulary
        return TeacherTokens(logprobs=torch.full((count, size), -math.log(size)))


def test_a_teacher_of_the_users_own_is_a_teacher_everywhere(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path, schedule={"steps": 8}, policy={"lr": 0.1})
    tree["teacher"] = {"type": "uniform"}
    trained(tree, "eval.every=0")
    kl, entropy = column(tree, "kl/teacher"), column(tree, "policy/entropy")
    for divergence, nats in zip(kl, entropy, strict=True):
        assert divergence == pytest.approx(math.log(10) - nats, abs=1e-5)  # KL(π ‖ uniform) = log V - H(π)
    assert kl[-1] < 0.5 * kl[0]


class AbsentTeacher(UniformTeacher):
    """Does not answer once it was asked a number of times."""

    type: Literal["absent"] = "absent"  # type: ignore[assignment]
    answers: ClassVar[int] = 1000

    def __call__(self, batch: Any) -> UniformTeacher:
        """Count down to 0 answers."""
        type(self).answers -= 1
        if type(self).answers < 0:
            raise RewardError("the teacher's server gave no answer")
        return self


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_a_run_whose_teacher_does_not_answer_is_saved_and_continues(tmp_path: Path, kind: str) -> None:
    """In the third step, which has one optimizer step: nothing of it is in the saved state, nor in running scores."""
    changes: dict[str, Any] = {"schedule": {"steps": 4}, "checkpoint": {"every": 0}, "eval": {"every": 0}}
    if kind == "online":
        tree = with_teacher(tmp_path, **changes, reward={"shaping": {"normalize": "standardize"}})
    else:
        tree = sft_with_teacher(tmp_path, **changes)
        del tree["data"]["eval_sft"]
    tree["teacher"] = {"type": "absent"}
    is_online = kind == "online"
    to_its_end: Any = trained if is_online else trained_offline
    AbsentTeacher.answers = 1000
    whole = to_its_end(merge(tree, {"run": {"out_dir": str(tmp_path / "whole")}}))
    AbsentTeacher.answers = (1000 - AbsentTeacher.answers) // 4 * 2
    run: Any = online(tree) if is_online else offline(tree)
    go_on: Any = train if is_online else train_offline
    with pytest.raises(RewardError, match=r"no answer\. The run is saved at step 2: .* continue"):
        go_on(run)
    run.session.recorder.close()
    AbsentTeacher.answers = 1000
    again = to_its_end(tree)
    assert again.session.resumed
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    if is_online:
        assert again.session.state.score_moments == whole.session.state.score_moments
        assert again.session.state.score_moments


def test_a_teacher_that_fails_after_a_change_of_weights_is_not_saved(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path, schedule={"steps": 3}, batch={"minibatches": 2}, eval={"every": 0})
    tree["teacher"] = {"type": "absent"}
    tree["checkpoint"] = {"every": 1}
    AbsentTeacher.answers = 1000
    trained(tree, f"run.out_dir={tmp_path / 'whole'}")
    AbsentTeacher.answers = (1000 - AbsentTeacher.answers) // 6 * 5
    run = online(tree)
    with pytest.raises(RewardError, match=r"no answer; .* continues from the newest checkpoint"):
        train(run)
    run.session.recorder.close()
    AbsentTeacher.answers = 1000
    assert trained(tree).session.resumed
    assert (tmp_path / "whole" / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()


def test_a_teacher_s_own_tokenizer_is_read_also_in_place_of_the_reference(tmp_path: Path) -> None:
    for preset in ("distill", "opd"):
        tree = with_teacher(tmp_path, preset, run={"out_dir": str(tmp_path / preset)})
        for file in (tmp_path / "teacher").glob("tokenizer*"):
            file.unlink()
        with pytest.raises(UserError):
            online(tree)
        run = online(merge(tree, {"teacher": {"tokenizer": str(tmp_path / "model")}}))
        run.session.recorder.close()


def test_a_teacher_in_place_of_a_reference_that_is_not_measured(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path, "opd", schedule={"steps": 1}, reference={"measure": False})
    trained(merge(tree, {"algorithm": {"kl": {"coef": 0.0}}}), "eval.every=0")
    assert not column(tree, "kl/teacher")


def test_eval_measures_to_the_teacher_that_the_run_measured_to(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path, "opd", schedule={"steps": 1})
    trained(tree)
    run = Path(tree["run"]["out_dir"])
    assert main(["eval", str(run), "--against", str(tmp_path / "teacher")]) == 0
    [file] = run.glob("eval-*.json")
    results = json.loads(file.read_text())
    assert results["reference"]["eval/kl"] == pytest.approx(0.0, abs=1e-6)
    assert results["run"]["eval/kl_exact"] == pytest.approx(column(tree, "eval/kl_exact")[-1], rel=1e-4)
    assert main(["eval", str(run)]) == 0
    start = json.loads((run / "eval.json").read_text())["reference"]
    assert start["eval/kl_exact"] == pytest.approx(column(tree, "eval/kl_exact")[0], rel=1e-4)
    assert start["eval/kl_exact"] > 0.01


# Refusals


def rename_word(folder: Path, old: str, new: str) -> None:
    """Give a tokenizer another word at an id."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))


def test_another_vocabulary_is_refused_with_the_first_id(tmp_path: Path) -> None:
    for preset in ("distill", "opd"):
        tree = with_teacher(tmp_path, preset)
        rename_word(tmp_path / "teacher", "red", "green")
        with pytest.raises(ConfigError, match="id 6 is 'red' for the policy and 'green' for the teacher"):
            online(tree)


@pytest.mark.parametrize("preset", ["distill", "opd"])
def test_another_end_of_answers_is_refused(tmp_path: Path, preset: str) -> None:
    tree = with_teacher(tmp_path, preset)
    path = tmp_path / "teacher" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 5]}))
    with pytest.raises(ConfigError, match=r"5 \('bad'\) ends one of the teacher"):
        online(tree)


def test_another_chat_template_is_refused_with_the_first_id(tmp_path: Path) -> None:
    tree = with_teacher(tmp_path)
    template = (
        "{% for m in messages %}red {{ m.content }} <eos>{% endfor %}{% if add_generation_prompt %}red {% endif %}"
    )
    for name, text in (("model", template), ("teacher", template.replace("red", "blue"))):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.chat_template = text
        tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(ConfigError, match="token 0 of a conversation is id 6 for the policy and id 7 for the teacher"):
        online(tree)
    with pytest.raises(ConfigError, match="this run has none"):
        online(tree, "data.chat_template=none")


REFUSED = {
    "teacher is missing": ("distill", {"teacher": None}),
    "reads none": ("grpo", {"sampling": {"completions_per_prompt": 2}}),
    "given completions only": ("distill", {"teacher": {"type": "stored", "path": "x", "model": None}}),
    "leave reference.model out": ("opd", {"reference": {"model": "gpt2"}}),
    "does not give": ("opd", {"teacher": {"type": "server", "url": "http://x", "model": "m"}}),
    "reads no reward": ("distill", {"algorithm": {"kl": {"placement": "reward", "coef": 0.1}}}),
    "beta is the mixture of jsd": ("distill", {"algorithm": {"policy_loss": {"beta": 0.2}}}),
    "whole LM heads": ("distill", {"sharding": {"mode": "zero3"}}),
    "without a critic": ("distill", {"algorithm": {"advantage": {"type": "gae"}, "value_loss": {}}}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(tmp_path: Path, message: str) -> None:
    preset, changes = REFUSED[message]
    tree = with_teacher(tmp_path, preset)
    for section, value in changes.items():
        tree[section] = value if section == "teacher" else merge(tree.get(section, {}), value)
    if isinstance(tree["teacher"], dict) and tree["teacher"].get("model", "") is None:
        del tree["teacher"]["model"]
    with pytest.raises(ConfigError, match=message):
        train_config(tree)


def rules(tree: dict[str, Any]) -> set[str]:
    return {violation.rule.name for violation in lint(train_config(tree))}


def test_lint_names_a_teacher_that_teaches_nothing(tmp_path: Path) -> None:
    assert not rules(with_teacher(tmp_path)) & {"teacher-is-start", "teacher-template", "top-k-reverse-without-tail"}
    assert "teacher-is-start" in rules(with_teacher(tmp_path, teacher={"model": str(tmp_path / "model")}))
    assert "teacher-template" in rules(with_teacher(tmp_path, data={"chat_template": "none"}))
    without = {"policy_loss": {"top_k": 2, "tail": False}}
    assert "top-k-reverse-without-tail" in rules(with_teacher(tmp_path, algorithm=without))
    forward = {"policy_loss": {"top_k": 2, "tail": False, "divergence": "forward"}}
    assert "top-k-reverse-without-tail" not in rules(with_teacher(tmp_path, algorithm=forward))
