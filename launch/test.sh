#!/usr/bin/env bash
# Run the test suite on this machine; makes .venv on the first run.
#
#   bash launch/test.sh                     everything but slow, gpu, slurm and browser tests
#   bash launch/test.sh tests/engine -x     arguments go to pytest
#   bash launch/test.sh -m slow             a marker of your own replaces the selection
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh

ensure_venv
# Tests start several ranks: one thread each, or they fight for the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -m "not slow and not gpu and not slurm and not browser" "$@"
