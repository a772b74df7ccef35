#!/usr/bin/env bash
# Build sdist and wheel, install the wheel into a new environment outside the checkout, and run the program there.
#   bash scripts/check_wheel.sh            help, configurations, SFT and a comparison of two steps each
#   bash scripts/check_wheel.sh --full     also the quickstart and the tests of the Python interface; minutes
# Dependencies are borrowed from .venv (PYTHON=... names another interpreter that has the extra dev's), so that
# only this project's wheel is checked, and nothing is downloaded.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
full=false
case "${1:-}" in
    --full) full=true ;;
    "") ;;
    *) echo "check_wheel: unknown option $1; the only one is --full" >&2; exit 2 ;;
esac

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
step() { printf 'check_wheel: %s\n' "$*" >&2; }

step "building"
# From the sdist, like `python -m build`: a file that the sdist lacks is then missed here too.
"$python" -m build --no-isolation --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }

step "installing $(basename "$work"/dist/*.whl)"
"$python" -m venv --without-pip "$work/venv"  # the borrowed pip will do, and is there at once
rlhf="$work/venv/bin/rlhf"
new="$work/venv/bin/python"
"$python" -m pip --python "$new" install --quiet --disable-pip-version-check --no-deps "$work"/dist/*.whl
# Folders named in a .pth file come last, and their own .pth files are not read: the checkout is not on the path.
"$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$("$new" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"

mkdir "$work/outside" && cd "$work/outside"
unset PYTHONPATH
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false XDG_CACHE_HOME="$work/cache"
"$new" - "$work/venv" <<'PY'
import importlib.metadata
import sys

import reward_model
import rlhf
from rlhf.errors import DISTRIBUTION

for package in (rlhf, reward_model):
    assert package.__file__.startswith(sys.argv[1]), f"{package.__name__} comes from {package.__file__}, not from the wheel"
print(DISTRIBUTION, importlib.metadata.version(DISTRIBUTION))
PY

step "help and configurations"
"$rlhf" --help >/dev/null
"$rlhf" quickstart --help >/dev/null
"$rlhf" config configs/ppo.yaml policy.lr=2e-6 >ppo.yaml
grep -q 'lr: 2.0e-06' ppo.yaml
(cd "$root" && find configs -name '*.yaml') | "$new" -c '
import sys
from rlhf.config.load import load_any
from rlhf.config.files import locate_config
for name in sys.stdin.read().split():
    load_any(name)
    assert locate_config(name).is_absolute(), name
'

step "SFT, two steps"
few=(schedule.steps=2 schedule.warmup_steps=1 data.eval_prompts.limit=4 data.eval_sft.limit=8)
"$rlhf" train configs/lab/sft.yaml run.out_dir=runs/sft "${few[@]}" batch.prompts_per_step=8 >train.log || { cat train.log >&2; exit 1; }
test -s runs/sft/report.html

step "a comparison, two steps an arm"
cat >lengths.py <<'PY'
def score(prompts, completions, references):
    return [len(completion) / 100 for completion in completions]
PY
cat >small.yaml <<'YAML'
base: configs/lab/ppo.yaml
out_dir: runs/compare
start: runs/sft
reward_source: {type: function, target: "lengths.py:score"}
budget: {completions: 16}
evaluations: 1
seeds: [0]
shared:
  data: {eval_prompts: {path: "lab:eval_prompts.jsonl", limit: 4}}
  critic: {init: policy}
  sampling: {max_new_tokens: 8}
  eval: {samples: 1}
  logging: {samples: 0}
arms:
  grpo:
    algorithm: {preset: grpo}
    sampling: {completions_per_prompt: 4}
    batch: {prompts_per_step: 2, epochs: 1, minibatches: 1}
    schedule: {warmup_steps: 1}
  best_of_n: {type: best_of_n, n: 2, samples: 2}
YAML
"$rlhf" compare small.yaml >compare.log || { cat compare.log >&2; exit 1; }
test -s runs/compare/report.html
"$new" -c '
import json
arms = json.load(open("runs/compare/results.json", encoding="utf-8"))["arms"]
statuses = {name: arm["status"] for name, arm in arms.items()}
assert statuses == {"grpo": "done", "best_of_n": "done"}, statuses
'

if $full; then
    step "quickstart"
    "$rlhf" quickstart --out runs/quickstart
    test -s runs/quickstart/result.json
    step "the tests of the Python interface"
    cp -r "$root/tests" "$root/pyproject.toml" .
    mapfile -t tests < <(find tests -path 'tests/api*' -name 'test_*.py' -o -name 'test_api*.py' | sort)
    [ "${#tests[@]}" -gt 0 ] || { echo "check_wheel: no tests/api and no test_api*.py" >&2; exit 1; }
    "$new" -m pytest -q "${tests[@]}"
fi
step "done"
