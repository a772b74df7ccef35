#!/bin/bash
# @@made_by
# Run it @@usage
# SIGTERM saves the run. Run it again, and it continues.
set -u
@@defaults
MASTER_PORT="${MASTER_PORT:-29500}"

@@node