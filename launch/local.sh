#!/usr/bin/env bash
# A run on this machine: check it, start one rank per GPU, resume from the newest checkpoint.
#   bash launch/local.sh [--ranks N] [--max-restarts N] --config FILE [section.key=value ...]
# Without --ranks: one per GPU, or one on a machine without GPUs. Ctrl-C or SIGTERM saves a
# checkpoint; the same command goes on from there.
# Exit codes: 0 done · 75 stopped with a checkpoint saved · 2 wrong input · other: the failed rank's.
set -uo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$REPO/.venv/bin/python}
TRAIN_SCRIPT=${TRAIN_SCRIPT:-train_ppo.py}
ranks='' max_restarts=0 config=''

usage() {
    printf 'local.sh: %s\n' "$1" >&2
    sed -n '3s/^# */usage: /p' "$REPO/launch/local.sh" >&2
    exit 2
}

while (($#)); do
    case $1 in
    --ranks | --max-restarts | --config)
        (($# > 1)) || usage "$1 needs a value"
        case $1 in
        --ranks) ranks=$2 ;;
        --max-restarts) max_restarts=$2 ;;
        --config) config=$2 ;;
        esac
        shift 2
        ;;
    -*) usage "unknown option $1" ;;
    *) break ;;
    esac
done
[[ -n $config ]] || usage '--config FILE is missing'
[[ -f $config ]] || usage "--config $config does not exist"
[[ -x $PYTHON ]] || usage "there is no Python at $PYTHON; run launch/quickstart.sh once, or set PYTHON"
for number in "${ranks:-1}" "$max_restarts"; do
    [[ $number =~ ^[0-9]+$ ]] || usage "$number is not a number"
done
if [[ -z $ranks ]]; then
    ranks=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
    ((ranks > 0)) || ranks=1
fi
((ranks > 0)) || usage '--ranks must be at least 1'

config=$(realpath "$config")
ATTEMPT_DIR=$(mktemp -d "${TMPDIR:-/tmp}/megatron-rl-logs.XXXXXX") || exit 1
export ATTEMPT_DIR PYTHON
cd "$REPO" || exit 1
# shellcheck source=launch/env.sh
source launch/env.sh

# torchrun's own process ignores the signals and the ranks, each in a session of its own, get them
# from here: torchrun would kill a rank that takes more than 30 seconds to save.
# shellcheck disable=SC2317  # called by the trap
pass_on() {
    touch "$ATTEMPT_DIR/stop"
    local rank
    for rank in "$ATTEMPT_DIR"/pid/*; do
        [[ -e $rank ]] && kill -TERM -- "-$(<"$rank")" 2>/dev/null
    done
}
trap pass_on TERM INT USR1

(
    trap '' TERM INT USR1
    export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGQUIT
    exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$ranks" \
        --max-restarts="$max_restarts" --no-python "$REPO/launch/worker.sh" \
        "$PYTHON" "$TRAIN_SCRIPT" --config "$config" "$@"
) &
launcher=$!
wait "$launcher"
code=$?
while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher"
    code=$?
done

# The ranks' own codes say more than torchrun's 1.
# shellcheck source=launch/outcome.sh
source launch/outcome.sh
failure=$(first_failure "$ATTEMPT_DIR")
if [[ -n $failure ]]; then
    read -r code _ name <<<"$failure"
    ((code == 2)) || {
        printf '%s failed first, exit code %s. The end of its log:\n' "$name" "$code"
        show_end "$ATTEMPT_DIR" "$name"
        printf 'all logs: %s\n' "$ATTEMPT_DIR"
    } >&2
    exit "$code"
fi
if stopped "$ATTEMPT_DIR"; then
    printf 'stopped with a checkpoint saved; the same command goes on from there\n'
    exit 75
fi
((code != 0)) || rm -r "$ATTEMPT_DIR"
exit "$code"
