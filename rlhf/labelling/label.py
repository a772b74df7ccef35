"""Label completions by a judge, write the result, and compare the judge with people.

Every labelled group is written to OUT.labels.jsonl at once: the same command goes on from there after an interruption,
and OUT is made of it at the end.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from rlhf.algo.agreement import Agreement, agreement
from rlhf.config.data import Count, DatasetConfig
from rlhf.errors import DataError
from rlhf.labelling.data import FEWEST, LabelGroup, read_groups, read_human_pairs
from rlhf.labelling.judges import Judge, Verdict
from rlhf.rewards.chat import ChatConfig
from rlhf.rewards.source import Source
from rlhf.section import Needed, NonNegative, OneOf, Section, walk
from rlhf.user_code import source_of

HOW_ASKED = ("timeout_s", "retries", "concurrency", "cache_dir")
"""Settings of a judge that change no answer: an interrupted call may go on with others. A verifier's deadline does."""
NEEDED = Needed("set judge, e.g. --judge runs/reward_model, or --judge http://127.0.0.1:8000/v1 judge.chat.model=NAME")


class LabelConfig(Section):
    """Completions, their judge, and the file to write."""

    completions: DatasetConfig
    """The completions: rows with a prompt and `completions`, or with a prompt and one completion, or pairs."""
    judge: Annotated[Judge, OneOf(), NEEDED]
    """The judge: scores of each completion, or comparisons of two."""
    out: str = "pairs.jsonl"
    """The file to write."""
    write: Literal["pairs", "best_and_worst", "rankings"] = "pairs"
    """pairs: every pair with a preference; best_and_worst: at most one pair for each prompt; rankings: each prompt with
    its completions, the best first, and their ranks."""
    min_gap: NonNegative = 0.0
    """Pairs whose scores differ by less are ties, and in a ranking completions this little below the best of a rank
    share it (judge.type=scores)."""
    compare_with: DatasetConfig | None = None
    """Pairs that people have labelled, for the agreement with them; the judge is asked about each. null: none."""
    batch: Count = 64
    """Prompts judged together; a run that is interrupted loses at most these."""
    plugins: list[str] = []
    """Your own files and modules that define judges or reward sources."""


@dataclass(frozen=True, kw_only=True)
class LabelResult:
    """The result of labelling: the file, counts, and the agreement with people."""

    out: Path
    judge: str
    prompts: int
    completions: int
    written: int  # rows of the file
    unscored: int  # completions, of people's pairs too, that the judge gives no score
    compared: int  # pairs of completions
    ties: int  # of them, without a preference
    answers: int  # of a language model
    unreadable: int  # of them
    inconsistent: float | None  # share of pairs that a language model judges differently in the other order
    first_shown: float | None  # share of its decided answers for the side shown first; 1/2 is no bias
    agreement: Agreement | None

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        lines = [
            f"{self.judge}: {self.completions:,} completions of {self.prompts:,} prompts, {self.compared:,} pairs, "
            f"{self.ties:,} of them ties"
        ]
        if self.unscored:
            lines.append(f"{self.unscored:,} completions without a score: in no pair, and not compared with people")
        if self.answers:
            lines.append(f"{self.unreadable:,} of {self.answers:,} answers could not be read")
        if self.inconsistent is not None and self.first_shown is not None:
            lines.append(
                f"{self.inconsistent:.1%} of the pairs judged differently when swapped (ties); "
                f"{self.first_shown:.1%} of the decided answers favor the side shown first"
            )
        if self.agreement is not None:
            value, kappa = (_interval(figure) for figure in (self.agreement.accuracy, self.agreement.kappa))
            lines.append(
                f"agreement with people on {self.agreement.pairs:,} pairs: accuracy {value}, Cohen's kappa {kappa}, "
                f"{self.agreement.ties:,} ties (95 % intervals)"
            )
        if not self.compared:
            lines.append("no two completions of a prompt have scores, so that there is nothing to train on")
        elif self.ties == self.compared:
            lines.append(
                "every pair is a tie, so that there is nothing to train on: take another judge or lower min_gap"
            )
        return [*lines, f"{self.written:,} rows written to {self.out}"]


def _interval(figure: tuple[float, float, float]) -> str:
    value, low, high = figure
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def label(config: LabelConfig, *, note: Callable[[str], None] = lambda _: None, resume: bool = True) -> LabelResult:
    """Label the completions, write the file, and compare the judge with people if asked.

    Args:
        config: what to label, and how.
        note: receives messages for the user.
        resume: go on from the labels of an earlier call; False asks again.

    Raises:
        DataError: a file cannot be read, `out` would overwrite a file that no earlier call wrote, or the labels beside
            `out` come from another judge.
        RewardError: the judge fails.
    """
    _check_out(config)
    groups, counts = read_groups(config.completions)
    note(counts.summary())
    people: list[LabelGroup] = []
    if config.compare_with is not None:
        people, counts = read_human_pairs(config.compare_with)
        note(counts.summary())
    labels = Labels(labels_of(config.out), config, resume=resume)
    waiting = labels.missing([*groups, *people])
    if len(waiting) < len({labels.key(group) for group in (*groups, *people)}):
        note(f"going on from {labels.path}: {len(waiting):,} prompts are left")
    for model in [] if resume else _chat_models(config.judge):
        note(
            f"{model.model}: answers in the cache (cache_dir) are not asked for again: delete that folder if the "
            "server has another model under this name"
        )
    if waiting:
        ask = config.judge.build(note)
        for start in range(0, len(waiting), config.batch):
            batch = waiting[start : start + config.batch]
            labels.add(batch, ask(batch))
            note(f"{start + len(batch):,} of {len(waiting):,} prompts judged")
    verdicts = [labels.of(group) for group in groups]
    rows = [row for pair in zip(groups, verdicts, strict=True) for row in rows_of(*pair, config)]
    _write(Path(config.out), rows)
    return _result(config, groups, verdicts, len(rows), people, labels)


def _chat_models(judge: Judge) -> list[ChatConfig]:
    return [section for _, section in walk(judge) if isinstance(section, ChatConfig)]


def labels_of(out: str) -> Path:
    """Return the path of the labels beside the file `out`."""
    return Path(f"{out}.labels.jsonl")


def _check_out(config: LabelConfig) -> None:
    """Check that writing `out` loses no file of the user's.

    Raises:
        DataError: it is one of the inputs, or there is a file of that name without labels of an earlier call.
    """
    out, inputs = Path(config.out), [config.completions, *filter(None, [config.compare_with])]
    if any(out.resolve() == Path(section.path).resolve() for section in inputs):
        raise DataError(f"out is {out}, which is read: name another file to write, such as --out judged.jsonl")
    if out.exists() and not labels_of(config.out).exists():
        raise DataError(
            f"{out} is there already, and no earlier rlhf label wrote it: name another file to write, "
            "such as --out judged.jsonl"
        )


class Labels:
    """The verdicts so far, one line for each group, in the file beside the result."""

    def __init__(self, path: Path, config: LabelConfig, *, resume: bool) -> None:
        """Read the verdicts of an earlier call; a line that was cut off is dropped.

        Raises:
            DataError: another judge gave them, or this judge with other code, other weights or another template, or a
                line is damaged.
        """
        self.path = path
        self.judge = _identity(config.judge.model_dump(mode="json"))
        self.made_of = _made_of(config.judge)
        self.reads_columns = config.judge.reads_columns
        self.verdicts: dict[str, Verdict] = {}
        self._mode = "a" if resume else "w"  # the labels of an earlier call stay until there are new ones
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if resume and path.is_file() else []
        complete = [line for line in lines if line.endswith("\n")]
        for number, line in enumerate(complete, start=1):
            try:
                self._read(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: no label of an earlier call: remove this line, and its prompt is judged again"
                ) from error
        if len(complete) < len(lines):
            path.write_text("".join(complete), encoding="utf-8")

    def _read(self, row: Mapping[str, Any]) -> None:
        if _identity(json.loads(row["judge"])) != self.judge:
            raise DataError(
                f"{self.path} has labels of another judge, {row['judge']}: name another out, or ask again "
                "(--again; in Python resume=False)"
            )
        if row.get("made_of", self.made_of) != self.made_of:
            raise DataError(
                f"{self.path} has labels that this judge gave with other code or other weights, or with another "
                "template: name another out, or ask again (--again; in Python resume=False)"
            )
        fields = {**row["verdict"], "scores": tuple(row["verdict"]["scores"])}
        fields["wins"] = tuple(map(tuple, row["verdict"]["wins"]))
        self.verdicts[row["group"]] = Verdict(**fields)

    def key(self, group: LabelGroup) -> str:
        """Return a digest of what the judge reads of a group, by which a labelled one is known again."""
        return group.digest(columns=self.reads_columns)

    def missing(self, groups: Sequence[LabelGroup]) -> list[LabelGroup]:
        """Return the groups without a verdict, each once."""
        return list({key: group for group in groups if (key := self.key(group)) not in self.verdicts}.values())

    def add(self, groups: Sequence[LabelGroup], verdicts: Sequence[Verdict]) -> None:
        """Append the verdicts of groups to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mode, self._mode = self._mode, "a"
        with self.path.open(mode, encoding="utf-8") as file:
            for group, verdict in zip(groups, verdicts, strict=True):
                key = self.key(group)
                self.verdicts[key] = verdict
                row = {"group": key, "judge": self.judge, "made_of": self.made_of, "verdict": asdict(verdict)}
                file.write(json.dumps(row) + "\n")

    def of(self, group: LabelGroup) -> Verdict:
        """Return the verdict of a group."""
        return self.verdicts[self.key(group)]


def _identity(judge: Mapping[str, Any]) -> str:
    """Return the settings of a judge that its answers depend on, as text."""

    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        left_out = () if value.get("type") == "verifier" else HOW_ASKED
        rest = {key: entry for key, entry in value.items() if key not in left_out}
        return {key: entry if key == "kwargs" else kept(entry) for key, entry in rest.items()}

    return json.dumps(kept(judge), sort_keys=True)


def _made_of(judge: Judge) -> str:
    """Return a digest of the code, the weights and the template that the judge's answers depend on."""
    from rlhf.models.folders import digest_of_calibration, digest_of_model
    from rlhf.tracking.fingerprint import combine_digests, content_digest

    digests: list[str] = []
    for _, section in walk(judge):
        if isinstance(section, ChatConfig | Source):
            digests += [content_digest(file) for file in section.code_files().values()]
        if isinstance(section, Source):
            digests += [digest_of_model(path) or "" for path in section.model_paths().values()]
            calibrations = map(digest_of_calibration, section.model_paths().values())
            digests += [calibration for calibration in calibrations if calibration is not None]
            digests += [hashlib.sha256((source_of(str(getattr(section, "target", ""))) or "").encode()).hexdigest()]
    return combine_digests(digests)


def preferred(verdict: Verdict, i: int, j: int, *, min_gap: float) -> float:
    """Return 1 if completion i is preferred to j, 0 if j is preferred, 1/2 if they tie."""
    if verdict.is_scored and abs(verdict.scores[i] - verdict.scores[j]) < min_gap:
        return 0.5
    return verdict.wins[i][j]


def rows_of(group: LabelGroup, verdict: Verdict, config: LabelConfig) -> list[dict[str, Any]]:
    """Return the rows of a group in the result, in the format that `rlhf reward` and DPO read, or as a ranking.

    Completions without a score, such as those that no verifier applies to, are left out.
    """
    order = sorted(_scored(verdict), key=lambda i: -verdict.scores[i])  # stable: as in the file
    if len(order) < FEWEST:
        return []
    if config.write == "rankings":
        scores = [verdict.scores[i] for i in order]
        ranks = ranks_of(scores, min_gap=config.min_gap if verdict.is_scored else 0.0)
        texts = [group.completions[i] for i in order]
        return [{"prompt": group.prompt, "completions": texts, "ranks": ranks, "scores": scores}]

    def beats(i: int, j: int) -> bool:
        return preferred(verdict, i, j, min_gap=config.min_gap) == 1

    if config.write == "best_and_worst":
        best, worst = order[0], order[-1]
        clear = verdict.scores[best] > verdict.scores[worst] and beats(best, worst)  # no circle
        return [_pair_row(group, verdict, best, worst)] if clear else []
    ordered = [(i, j) if beats(i, j) else (j, i) for i, j in combinations(order, 2)]
    return [_pair_row(group, verdict, better, worse) for better, worse in ordered if beats(better, worse)]


def _scored(verdict: Verdict) -> list[int]:
    return [i for i, score in enumerate(verdict.scores) if not math.isnan(score)]


def ranks_of(scores: Sequence[float], *, min_gap: float) -> list[int]:
    """Return the ranks of falling scores from 1: scores less than `min_gap` below the best one of a rank share it."""
    ranks: list[int] = []
    for place, score in enumerate(scores, 1):
        best = scores[ranks[-1] - 1] if ranks else math.inf
        ranks.append(place if not ranks or (score < best and best - score >= min_gap) else ranks[-1])
    return ranks


def _pair_row(group: LabelGroup, verdict: Verdict, better: int, worse: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": group.prompt,
        "chosen": _side(group, better),
        "rejected": _side(group, worse),
    }
    if verdict.is_scored:
        row |= {"score_chosen": verdict.scores[better], "score_rejected": verdict.scores[worse]}
    return row


def _side(group: LabelGroup, number: int) -> object:
    """Return a completion in the form of its prompt: text, or an assistant's message."""
    text = group.completions[number]
    return text if isinstance(group.prompt, str) else [{"role": "assistant", "content": text}]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from rlhf.tracking.run_folder import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _result(
    config: LabelConfig,
    groups: Sequence[LabelGroup],
    verdicts: Sequence[Verdict],
    written: int,
    people: Sequence[LabelGroup],
    labels: Labels,
) -> LabelResult:
    outcomes = [
        preferred(verdict, i, j, min_gap=config.min_gap)
        for verdict in verdicts
        for i, j in combinations(_scored(verdict), 2)
    ]
    judged = [verdict for verdict in map(labels.of, people) if len(_scored(verdict)) == FEWEST]
    asked = [*verdicts, *(labels.of(group) for group in people)]
    compared, decided = sum(v.compared for v in asked), sum(v.decided for v in asked)
    return LabelResult(
        out=Path(config.out),
        judge=config.judge.describe(),
        prompts=len(groups),
        completions=sum(len(group.completions) for group in groups),
        written=written,
        compared=len(outcomes),
        ties=outcomes.count(0.5),
        answers=sum(v.answers for v in asked),
        unreadable=sum(v.unreadable for v in asked),
        inconsistent=sum(v.inconsistent for v in asked) / compared if compared else None,
        first_shown=sum(v.first_shown for v in asked) / decided if decided else None,
        unscored=sum(len(v.scores) - len(_scored(v)) for v in asked),
        agreement=_agreement(judged, config.min_gap) if judged else None,
    )


def _agreement(verdicts: Sequence[Verdict], min_gap: float) -> Agreement:
    """Compare the verdicts with people's, who prefer the first of each pair."""
    import torch

    from rlhf.evaluation.win_rate import resamples

    outcomes = torch.tensor([preferred(v, 0, 1, min_gap=min_gap) for v in verdicts], dtype=torch.float64)
    return agreement(outcomes, resamples(len(outcomes), key="agreement"))
