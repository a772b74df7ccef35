#!/usr/bin/env bash
# From nothing to a report: install, then lab -> SFT -> preference pairs -> reward model -> PPO -> report.
# Options go to `rlhf quickstart`; see `bash scripts/quickstart.sh --help`.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m rlhf quickstart "$@"
