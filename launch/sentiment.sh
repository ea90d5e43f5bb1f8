#!/usr/bin/env bash
# PPO with a learned reward, from nothing: makes .venv, fetches SmolLM2-135M-Instruct and rated movie
# sentences, fits a reward model on them, and trains the language model to continue the beginnings
# of other sentences kindly. A second run reuses all of it. See docs/sentiment.md.
#
#   bash launch/sentiment.sh [--dry-run] [--steps N] [-- section.key=value …]
#
#   --dry-run   print the commands without running them
#   --steps N   optimisation steps (default: configs/sentiment_ppo.yaml)
#   --          what follows goes to train_ppo.py
#
# MEGATRON_RL_CACHE=DIR keeps the models and the data there instead of in .cache.
# Two ranks on a CPU or on two GPUs, one rank on one GPU.
set -euo pipefail
# shellcheck source=launch/example_run.sh
source "$(dirname "${BASH_SOURCE[0]}")/example_run.sh"
begin "$@"

cache=${MEGATRON_RL_CACHE:-.cache}
paths=()
if [[ -n ${MEGATRON_RL_CACHE:-} ]]; then
    paths+=("model.actor.path=$cache/smollm2-135m-instruct"
        "model.reward.path=$cache/movies/reward"
        "data.train=$cache/movies/prompts_train.jsonl"
        "data.eval=$cache/movies/prompts_heldout.jsonl")
fi

ensure_venv
run .venv/bin/python -m launch.fetch_smollm2
run .venv/bin/python -m launch.fetch_movies
[[ -d $cache/movies/reward ]] ||
    run .venv/bin/python -m megatron_rl.rewards.fit --model "$cache/smollm2-135m-instruct" \
        --train "$cache/movies/rated_train.jsonl" --heldout "$cache/movies/rated_heldout.jsonl" \
        --to "$cache/movies/reward" --layers 16 --examples 2000 --heldout-examples 1000
train configs/sentiment_ppo.yaml ${paths[@]+"${paths[@]}"}
