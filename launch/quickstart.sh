#!/usr/bin/env bash
# PPO on a real language model, from nothing: makes .venv, fetches SmolLM2-135M-Instruct, writes the
# task (sums of two numbers) and trains. A second run reuses all of it.
#
#   bash launch/quickstart.sh [--dry-run] [--steps N] [-- section.key=value …]
#
#   --dry-run   print the commands without running them
#   --steps N   optimisation steps (default: configs/quickstart.yaml)
#   --          what follows goes to train_ppo.py
#
# MEGATRON_RL_CACHE=DIR keeps the model and the data there instead of in .cache.
# Two ranks on a CPU or on two GPUs, one rank on one GPU.
set -euo pipefail
# shellcheck source=launch/example_run.sh
source "$(dirname "${BASH_SOURCE[0]}")/example_run.sh"
begin "$@"

cache=()
if [[ -n ${MEGATRON_RL_CACHE:-} ]]; then
    cache+=("model.actor.path=$MEGATRON_RL_CACHE/smollm2-135m-instruct"
        "data.train=$MEGATRON_RL_CACHE/sums/train.jsonl"
        "data.eval=$MEGATRON_RL_CACHE/sums/heldout.jsonl")
fi

ensure_venv
run .venv/bin/python -m launch.fetch_smollm2
run .venv/bin/python -m launch.make_sums
train configs/quickstart.yaml ${cache[@]+"${cache[@]}"}
