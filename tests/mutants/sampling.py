"""Bugs seeded in the fast sampler: shared prompts, slots that change hands, the draw."""

from __future__ import annotations

from mutant import Mutant

FAST = "tests/sampling/test_fast.py"

SAMPLING = [
    Mutant(
        name="slot-keeps-the-last-rows-columns",
        file="rlhf/sampling/fast/kv_cache.py",
        before="        self.bias[slots, self.prompt :] = -torch.inf\n        if self.positions",
        after="        if self.positions",
        why="a row that takes a slot reads the completion of the row that left it",
        tests=(f"{FAST}::test_any_length",),
    ),
    Mutant(
        name="own-column-masked",
        file="rlhf/sampling/fast/kv_cache.py",
        before="self.bias[: self.live, self.prompt :].index_fill_(1, self._column, 0.0)",
        after="self.bias[: self.live, self.prompt :].index_fill_(1, (self._column - 1).clamp(min=0), 0.0)",
        why="a token does not see itself",
        tests=(f"{FAST}::test_any_length",),
    ),
    Mutant(
        name="moved-row-leaves-its-mask",
        file="rlhf/sampling/fast/kv_cache.py",
        before="            self.bias[target] = self.bias[source]\n",
        after="",
        why="a row that moves up reads by the mask of the one that left",
        tests=(f"{FAST}::test_any_length",),
    ),
    Mutant(
        name="lanes-not-renamed",
        file="rlhf/sampling/fast/kv_cache.py",
        before="new_lanes[index] = torch.arange(len(index))",
        after="new_lanes[index] = index",
        why="rows read another prompt once prompts have moved up",
        tests=(f"{FAST}::test_any_length",),
    ),
    Mutant(
        name="window-one-too-wide",
        file="rlhf/sampling/fast/kv_cache.py",
        before="in_window = positions > self._step_positions[:, None] - window",
        after="in_window = positions >= self._step_positions[:, None] - window",
        why="a sliding window of one token more than the model has",
        tests=(f"{FAST}::test_the_completions_are_the_plain_samplers",),
    ),
    Mutant(
        name="prompt-padding-seen",
        file="rlhf/sampling/fast/kv_cache.py",
        before="self.lane_bias[first:last, self.prompt - width :].masked_fill_(mask, 0.0)",
        after="self.lane_bias[first:last, self.prompt - width :] = 0.0",
        why="left padding is read as a prompt",
        tests=(f"{FAST}::test_the_completions_are_the_plain_samplers",),
    ),
    Mutant(
        name="first-token-at-the-prompts-last-position",
        file="rlhf/sampling/fast/engine.py",
        before="row, row, (lengths - 1).to(self.device)",
        after="row, row, (lengths - 2).to(self.device)",
        why="positions of the completion are one off",
        tests=(f"{FAST}::test_the_completions_are_the_plain_samplers",),
    ),
    Mutant(
        name="draw-by-slot",
        file="rlhf/sampling/fast/engine.py",
        before="self.uniforms[running.row.to(place), running.drawn.to(place)]",
        after="self.uniforms[torch.arange(len(running.row)), running.drawn.to(place)]",
        why="the numbers belong to the slot, not to the row: other slots, other completions",
        tests=(f"{FAST}::test_the_completions_are_the_plain_samplers",),
    ),
    Mutant(
        name="half-read-group-reads-the-next-prompt",
        file="rlhf/sampling/fast/engine.py",
        before="self.last_logits, self.lane = table[-1:], {int(needed[-1]): lanes[-1]}",
        after="self.last_logits, self.lane = table[:1], {int(needed[-1]): lanes[-1]}",
        why="the rest of a group starts from the logits of another prompt",
        tests=(f"{FAST}::test_the_completions_are_the_plain_samplers",),
    ),
    Mutant(
        name="finished-rows-stay",
        file="rlhf/sampling/fast/engine.py",
        before="if count == 0 or (count < len(done) and count * SLACK < len(done)):",
        after="if count < len(done):",
        why="every row is decoded until the longest is finished, and slots stand empty while others wait",
        tests=(f"{FAST}::test_each_prompt_is_read_once_and_finished_rows_are_not_decoded",),
    ),
    Mutant(
        name="block-sum-includes-its-own",
        file="rlhf/sampling/fast/decoder.py",
        before="before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)",
        after="before = torch.where(block > 0, cumulative.gather(1, block), 0.0)",
        why="the draw inside a block starts from the sum after it: always its first token",
        tests=(f"{FAST}::test_invert_draws_what_draw_draws",),
    ),
    Mutant(
        name="adapter-not-merged-into-the-copies",
        file="rlhf/sampling/fast/decoder.py",
        before="weight = weight + module.get_delta_weight(name).detach()",
        after="weight = weight + 0.0 * module.get_delta_weight(name).detach()",
        why="LoRA trains, the rollouts come from the base model",
        tests=(f"{FAST}::test_an_adapter_is_sampled_from",),
    ),
    Mutant(
        name="cache-cast-at-every-step",
        file="rlhf/sampling/fast/decoder.py",
        before="with torch.autocast(tokens.device.type, enabled=False):",
        after="with torch.autocast(tokens.device.type, enabled=torch.is_autocast_enabled(tokens.device.type)):",
        why="in bfloat16 each step copies the whole cache into another dtype",
        tests=("tests/sampling/test_fast.py::test_bf16_arithmetic_does_not_cast_the_cache_at_every_step",),
    ),
    Mutant(
        name="answers-in-the-order-of-length",
        file="rlhf/suites/subject.py",
        before="return concat(drawn).rows((position[:, None] * count + torch.arange(count)).flatten())",
        after="return concat(drawn)",
        why="a suite checks answers against the questions of other rows",
        tests=("tests/suites/test_subject.py",),
    ),
]
