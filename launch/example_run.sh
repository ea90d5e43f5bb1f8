# Sourced by the example runs in this folder (quickstart.sh, sentiment.sh), with venv.sh: their
# common arguments, and how they fit the machine.
#
#   begin ARGUMENT …   goes to the checkout; sets DRY_RUN and overrides from the script's arguments
#   train CONFIG …     torchrun with the layout of this machine; the rest are overrides

overrides=()

# Of a script in launch/, whose head is its help text.
begin() {
    if [[ -n ${MEGATRON_RL_CACHE:-} ]]; then # relative to where the user is
        MEGATRON_RL_CACHE=$(realpath -m -- "$MEGATRON_RL_CACHE")
        export MEGATRON_RL_CACHE
    fi
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
    # shellcheck source=launch/venv.sh
    source launch/venv.sh
    read_arguments "launch/${0##*/}" "$@"
}

usage() {
    # The comment at the head of the script, without its first line.
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$1"
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

read_arguments() {
    local script=$1
    shift
    export DRY_RUN=0
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
                usage "$script"
                exit 0
                ;;
            *)
                usage "$script" >&2
                fail "unknown argument '$1'; settings go after --, as in -- training.steps=3." 2
                ;;
        esac
        shift
    done
}

train() {
    local config=$1 gpus ranks=2 threads
    local layout=()
    shift
    gpus=$(gpu_count)
    if ((gpus == 1)); then
        ranks=1
        layout+=(parallel.tp=1)
    fi
    # nproc would repeat an OMP_NUM_THREADS that is set; the cores of this process are meant.
    threads=$(($(env -u OMP_NUM_THREADS nproc) / ranks))
    run env "OMP_NUM_THREADS=$((threads > 0 ? threads : 1))" \
        .venv/bin/torchrun --standalone "--nproc_per_node=$ranks" train_ppo.py --config "$config" \
        ${layout[@]+"${layout[@]}"} "$@" ${overrides[@]+"${overrides[@]}"}
}
