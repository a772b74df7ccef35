#!/usr/bin/env bash
# Does a test notice a small change of one module?  mutmut makes the changes one at a time and runs the tests named:
#   bash scripts/mutate.sh rlhf/batching.py tests/test_types.py tests/algo/test_without_float64.py
# It prints each change that no test noticed ("survived") or ran ("no tests"). It takes minutes; the gate leaves it out.
# It needs the extra mutate, and works in a temporary copy. PYTHON=... names another interpreter.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[ $# -ge 2 ] || { echo "mutate: give a module and its tests, as in the head of $0" >&2; exit 2; }
"$python" -c 'import mutmut' 2>/dev/null || { echo "mutate: first run  bash scripts/setup.sh dev mutate" >&2; exit 2; }

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" - "$root" "$work" "$@" <<'PY'
import json
import sys
from pathlib import Path

root, work, module, *tests = sys.argv[1:]
sys.path.insert(0, f"{root}/tests/mutants")
from run import copy_repository

copy_repository(Path(root), Path(work))
project = Path(work, "pyproject.toml")
text = project.read_text(encoding="utf-8")
for key, value in (("only_mutate", [module]), ("pytest_add_cli_args_test_selection", tests)):
    empty = f"\n{key} = []\n"
    assert empty in text, f"pyproject.toml has no empty list {key}"
    text = text.replace(empty, f"\n{key} = {json.dumps(value)}\n")
project.write_text(text, encoding="utf-8")
PY

cd "$work"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$python" -m mutmut run --max-children "${TEST_PROCESSES:-2}" >run.log 2>&1 || { tail -n 40 run.log >&2; exit 1; }
"$python" -m mutmut results | tee results.txt
cut -d: -f1 results.txt | while read -r name; do
    "$python" -m mutmut show "$name" | grep -E '^([-+][^-+]|#)' || true
done
wc -l <results.txt | xargs printf '%s changes were not noticed\n'
