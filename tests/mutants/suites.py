"""Bugs seeded in the alignment evaluations: answers misread, sides swapped, intervals that are none."""

from __future__ import annotations

from mutant import Mutant

ANSWERS = ("tests/suites/test_numeric_answers.py",)
ESTIMATES = ("tests/suites/test_suite_figures.py",)
PERSONA = ("tests/suites/test_persona.py",)
GSM8K = ("tests/suites/test_gsm8k.py",)
HH = ("tests/suites/test_hh.py",)
IFEVAL = ("tests/suites/test_ifeval.py",)
CHECKS = ("tests/constraints/test_checks.py",)
REWARD = ("tests/constraints/test_reward.py",)

SUITES = [
    Mutant(
        name="one-instruction-is-enough",
        file="rlhf/suites/ifeval.py",
        before='share_estimate("prompt_strict", [float(all(row)) for row in strict], by_prompt)',
        after='share_estimate("prompt_strict", [float(any(row)) for row in strict], by_prompt)',
        why="a prompt counts as followed where one of its instructions is",
        tests=IFEVAL,
    ),
    Mutant(
        name="loose-is-strict",
        file="rlhf/constraints/reward.py",
        before="return any(self.is_met(variant) for variant in loose_variants(response))",
        after="return self.is_met(response)",
        why="the loose measure forgives nothing",
        tests=(*IFEVAL, *REWARD),
    ),
    Mutant(
        name="silence-keeps-all-prohibitions",
        file="rlhf/constraints/reward.py",
        before="return bool(response.strip()) and CHECKS[self.kind](response, **self.arguments)",
        after="return CHECKS[self.kind](response, **self.arguments)",
        why="an empty answer has no comma, so it earns the reward",
        tests=REWARD,
    ),
    Mutant(
        name="best-of-n-picks-across-prompts",
        file="rlhf/suites/questions.py",
        before="return scores.argmax(dim=1) + torch.arange(len(scores)) * count",
        after="return scores.argmax(dim=1) + torch.arange(len(scores))",
        why="answers of other prompts are graded",
        tests=IFEVAL,
    ),
    Mutant(
        name="at-most-for-less-than",
        file="rlhf/constraints/checks.py",
        before="return count < bound if relation == LESS else count >= bound",
        after="return count <= bound if relation == LESS else count >= bound",
        why="less than 20 sentences admits 20",
        tests=CHECKS,
    ),
    Mutant(
        name="pass-at-k-is-biased",
        file="rlhf/suites/metrics/pass_at_k.py",
        before="return 1 - math.comb(samples - correct, k) / math.comb(samples, k)",
        after="return 1 - (1 - correct / samples) ** k",
        why="the plug-in estimate of pass@k is too low (Chen et al. 2021, section 2.1)",
        tests=ESTIMATES,
    ),
    Mutant(
        name="wilson-without-its-shift",
        file="rlhf/suites/metrics/accuracy.py",
        before="center = share + z2 / (2 * total)",
        after="center = share",
        why="shares near 0 and 1 have intervals on the wrong side of the middle",
        tests=ESTIMATES,
    ),
    Mutant(
        name="ties-lose",
        file="rlhf/suites/metrics/win_rate.py",
        before="1.0 if x > y else 0.5 if x == y else 0.0",
        after="1.0 if x > y else 0.0",
        why="a model that answers as the other does loses to it",
        tests=ESTIMATES,
    ),
    Mutant(
        name="first-announcement-counts",
        file="rlhf/suites/numeric_answers.py",
        before="for match in reversed(list(_ANSWER.finditer(text))):",
        after="for match in list(_ANSWER.finditer(text)):",
        why="a solution that corrects itself is graded on what it took back",
        tests=ANSWERS,
    ),
    Mutant(
        name="headings-are-answers",
        file="rlhf/suites/numeric_answers.py",
        before="if _BEGINS.match(strip_markup(line)) and not _LISTED.match(line):",
        after="if line:",
        why="#### Step 2 is read as the answer 2",
        tests=ANSWERS,
    ),
    Mutant(
        name="left-of-the-equation",
        file="rlhf/suites/numeric_answers.py",
        before="for side in (*results, sides[-1], part) for number",
        after="for side in (part,) for number",
        why="The answer is 3 + 4 = 7 is read as 3",
        tests=ANSWERS,
    ),
    Mutant(
        name="right-of-the-equation-even-if-it-is-a-calculation",
        file="rlhf/suites/numeric_answers.py",
        before="reversed(sides) if not _is_calculation(side)]",
        after="reversed(sides)]",
        why="The answer is 12 = 3 * 4 is read as 3",
        tests=ANSWERS,
    ),
    Mutant(
        name="a-share-without-its-rows",
        file="rlhf/suites/questions.py",
        before='result["high"], len(values), "wilson", meaning, tuple(values)',
        after='result["high"], len(values), "wilson", meaning',
        why="rlhf compare shows no paired gain of a suite's shares",
        tests=("tests/suites/test_gsm8k.py::test_gains_are_paired_by_problem",),
    ),
    Mutant(
        name="an-asterisk-alone-is-no-bullet",
        file="rlhf/constraints/checks.py",
        before=r'r"^\s*\*[^\*].*$"',
        after=r'r"^\s*\*[^\*\n].*$"',
        why="IFEval's bullets are counted otherwise than by the published expression",
        tests=("tests/constraints/test_checks.py",),
    ),
    Mutant(
        name="sampling-beyond-the-context",
        file="rlhf/factory/sampler.py",
        before="if context and tokens + new > context]",
        after="if context and tokens > context]",
        why="rlhf sample goes beyond the model's context without a word",
        tests=("tests/cli/test_cli_chat.py::test_a_prompt_that_does_not_fit_the_context_is_not_sampled",),
    ),
    Mutant(
        name="a-difference-is-negative",
        file="rlhf/suites/numeric_answers.py",
        before=r"(?P<minus>(?<![\w.)\]])-",
        after=r"(?P<minus>-",
        why="10-3 ends in minus three",
        tests=ANSWERS,
    ),
    Mutant(
        name="mixed-numbers-lose-their-whole",
        file="rlhf/suites/numeric_answers.py",
        before='value += _to_fraction(groups["whole"])',
        after="value += 0",
        why="2 1/2 cups are half a cup",
        tests=ANSWERS,
    ),
    Mutant(
        name="persona-one-order-decides",
        file="rlhf/suites/persona.py",
        before="return sum(self.log_odds) / len(self.log_odds)",
        after="return self.log_odds[0]",
        why="what is offered first is taken for what the model says",
        tests=PERSONA,
    ),
    Mutant(
        name="persona-scores-the-eos-too",
        file="rlhf/suites/persona.py",
        before="subject.encoder.completions([rendered], which)[0][:-1]",
        after="subject.encoder.completions([rendered], which)[0]",
        why="how readily the model stops after Yes counts as how readily it says Yes",
        tests=PERSONA,
    ),
    Mutant(
        name="persona-orders-the-same",
        file="rlhf/suites/persona.py",
        before="ORDERS = ((YES, NO), (NO, YES))",
        after="ORDERS = ((YES, NO), (YES, NO))",
        why="the position check asks the same twice and never finds anything",
        tests=PERSONA,
    ),
    Mutant(
        name="implicit-reward-without-its-reference",
        file="rlhf/suites/hh.py",
        before="return beta * (logprobs - ref_logprobs)",
        after="return beta * logprobs",
        why="the accuracy is the likelihood's: what the start model knew counts as learned",
        tests=HH,
    ),
    Mutant(
        name="examples-are-asked",
        file="rlhf/suites/gsm8k.py",
        before="repeated if item.value.question in shown_already else None",
        after="None",
        why="problems whose solution stands in the prompt are counted",
        tests=GSM8K,
    ),
    Mutant(
        name="calculator-marks-are-shown",
        file="rlhf/suites/gsm8k.py",
        before="_MARKS.sub('', p.solution).strip()",
        after="p.solution.strip()",
        why="the examples teach the model to write marks that nothing computes",
        tests=GSM8K,
    ),
]
