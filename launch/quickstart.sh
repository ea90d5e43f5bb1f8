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
if [[ -n ${MEGATRON_RL_CACHE:-} ]]; then # relative to where the user is, not to the checkout
    MEGATRON_RL_CACHE=$(realpath -m -- "$MEGATRON_RL_CACHE")
    export MEGATRON_RL_CACHE
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/venv.sh
source launch/venv.sh

usage() {
    # The comment at the head of this file, without the first line.
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' launch/quickstart.sh
}

# GPUs that a process started here would see.
gpu_count() {
    local present
    present=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true)
    if ((present > 0)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -vc -e '^-1$' -e '^[[:space:]]*$' || true
    else
        printf '%s\n' "$present"
    fi
}

DRY_RUN=0
overrides=()
while (($#)); do
    case $1 in
        --dry-run) DRY_RUN=1 ;;
        --steps)
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] ||
                fail "--steps needs a whole number of at least 1, not '${2:-}'." 2
            overrides+=("training.steps=$2")
            shift
            ;;
        --)
            shift
            overrides+=("$@")
            break
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            fail "unknown argument '$1'; settings go after --, as in -- training.steps=3." 2
            ;;
    esac
    shift
done

gpus=$(gpu_count)
ranks=2
layout=()
if ((gpus == 1)); then
    ranks=1
    layout+=(parallel.tp=1)
fi
cache=()
if [[ -n ${MEGATRON_RL_CACHE:-} ]]; then
    cache+=("model.actor.path=$MEGATRON_RL_CACHE/smollm2-135m-instruct"
        "data.train=$MEGATRON_RL_CACHE/sums/train.jsonl"
        "data.eval=$MEGATRON_RL_CACHE/sums/heldout.jsonl")
fi
# nproc would repeat an OMP_NUM_THREADS that is set; the cores of this process are meant.
threads=$(($(env -u OMP_NUM_THREADS nproc) / ranks))

ensure_venv
run .venv/bin/python -m launch.fetch_smollm2
run .venv/bin/python -m launch.make_sums
run env "OMP_NUM_THREADS=$((threads > 0 ? threads : 1))" \
    .venv/bin/torchrun --standalone "--nproc_per_node=$ranks" \
    train_ppo.py --config configs/quickstart.yaml \
    ${layout[@]+"${layout[@]}"} ${cache[@]+"${cache[@]}"} ${overrides[@]+"${overrides[@]}"}
