#!/usr/bin/env bash
# Install the packages of the tests, then run them; options go to pytest, e.g.  bash scripts/test.sh -m slow tests/learning
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev
.venv/bin/python -m compileall -q rlhf reward_model # the tests start a hundred interpreters that import them

# No test downloads anything. One thread a process: two processes that both want both cores wait for each other.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# worksteal: a process that has nothing left takes tests from the other, so that neither ends minutes after the other.
exec .venv/bin/python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal "$@"
