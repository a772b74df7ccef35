#!/usr/bin/env bash
# The gate: every change passes this, here and in CI. It stops at the first step that fails.
# Types, imports and the wheel, which use one core, run beside the tests; the tests' output waits and comes after theirs.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
extras=(gym textarena reasoning-gym math code)
if bash scripts/setup.sh "${extras[@]}"; then
    export RLHF_TEST_EXTRAS=required # no test of these extras is skipped
else
    echo "gate: could not install ${extras[*]}; the tests of what is missing are skipped" >&2
fi

step() { printf '\n== %s\n' "$*"; nice -n 5 "$@"; } # nice: the tests, which take longer, come first
bin=.venv/bin
step "$bin/python" -m ruff check .
step "$bin/python" -m ruff format --check .

exec 3< <(exec bash scripts/test.sh "$@" 2>&1)
tests=$!
trap 'kill "$tests" 2>/dev/null || true' EXIT
step "$bin/python" -m mypy
step "$bin/lint-imports"
step bash scripts/check_wheel.sh
printf '\n== bash scripts/test.sh %s\n' "$*"
cat <&3
trap - EXIT
wait "$tests"
