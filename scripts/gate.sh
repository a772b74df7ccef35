#!/usr/bin/env bash
# The gate: every change passes this, here and in CI. It stops at the first step that fails.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev

step() { printf '\n== %s\n' "$*"; "$@"; }
bin=.venv/bin
step "$bin/python" -m ruff check .
step "$bin/python" -m ruff format --check .
step "$bin/python" -m mypy
step "$bin/lint-imports"
step bash scripts/check_wheel.sh
step bash scripts/test.sh "$@"
