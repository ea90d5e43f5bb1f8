# shellcheck shell=bash
# The body of the sbatch files in this folder: check the nodes, train, decide what Slurm does next.
# Expects the settings that those files give, and:
#
#   run_job    never returns; exits 0 done · 75 stopped with a checkpoint, requeued · 2 wrong input
#              · 1 a node failed the preflight · other: code of the rank that failed first
#
# Files of an attempt, in LOG_DIR/<job>/attempt-<n>/: rank-NNNN.log, exit/rank-NNNN (code and host),
# preflight/<node>.json, and `stop` once a stop was asked for.

say() {
    printf '[%(%F %T)T job %s attempt %s] %s\n' -1 "$SLURM_JOB_ID" "$ATTEMPT" "$*"
}

run_job() {
    prepare
    trap on_stop_signal USR1
    trap on_terminate TERM
    check_nodes
    train
    decide
}

prepare() {
    ATTEMPT=${SLURM_RESTART_COUNT:-0}
    ATTEMPT_DIR=$LOG_DIR/$SLURM_JOB_ID/attempt-$ATTEMPT
    mkdir -p "$ATTEMPT_DIR/exit"
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # The address Slurm itself reaches the node at: its name need not resolve.
    MASTER_HOST=$(scontrol show node "${NODES[0]}" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
    # From the job id, so that two jobs on one node do not meet; below the ephemeral range (32768).
    MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    STOP=none
    STEP_PID=
    TRAIN_CODE=0
    export ATTEMPT_DIR PYTHON
    # Since Slurm 22.05 a step no longer inherits the job's --cpus-per-task: one core for all.
    [[ -n ${SLURM_CPUS_PER_TASK:-} ]] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # shellcheck disable=SC1091
    source "$REPO/launch/env.sh"
    # shellcheck disable=SC1091
    source "$REPO/launch/outcome.sh"
    cd "$REPO" || exit 1
    CONTAINER=()
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        CONTAINER=(--container-image="$CONTAINER_IMAGE" --container-workdir="$REPO"
            --container-mounts="$REPO:$REPO,$LOG_DIR:$LOG_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    say "${#NODES[@]} nodes ($SLURM_JOB_NODELIST), $RANKS_PER_NODE ranks each, logs in $ATTEMPT_DIR"
}

# Time limit ahead (or an operator's scancel --batch --signal=USR1): pass it on, then requeue.
on_stop_signal() {
    STOP=requeue
    touch "$ATTEMPT_DIR/stop"
    say "stop asked for: ${GRACE_TIME} s to save a checkpoint"
    [[ -n $STEP_PID ]] && kill -USR1 "$STEP_PID" 2>/dev/null
    # A rank that hangs must not cost the requeue: Slurm would end this script with the time limit.
    ((GRACE_TIME > 0)) && { sleep "$GRACE_TIME" && kill -KILL "$STEP_PID"; } 2>/dev/null &
}

# scancel and preemption: Slurm has signalled every process of the job already, and decides itself.
on_terminate() {
    STOP=terminated
    touch "$ATTEMPT_DIR/stop"
    say "terminated by Slurm (scancel or preemption): waiting for the checkpoint"
}

# Run a job step in the background, where traps are served while it runs. Sets STEP_CODE.
run_step() {
    # A failing rank must not cut off the others, which save or report; two minutes after the first
    # task has ended, one that is left hangs.
    srun --kill-on-bad-exit=0 --wait=120 ${CONTAINER[@]+"${CONTAINER[@]}"} "$@" &
    STEP_PID=$!
    wait "$STEP_PID"
    STEP_CODE=$?
    # A trap interrupts `wait`; the step goes on.
    while kill -0 "$STEP_PID" 2>/dev/null; do
        wait "$STEP_PID"
        STEP_CODE=$?
    done
    STEP_PID=
}

check_nodes() {
    [[ $PREFLIGHT == off ]] && return
    local folder=$ATTEMPT_DIR/preflight nodes code collect=()
    mkdir -p "$folder"
    nodes=$(IFS=, && printf '%s' "${NODES[*]}")
    run_step --ntasks="${#NODES[@]}" --ntasks-per-node=1 \
        env "LOCAL_WORLD_SIZE=$RANKS_PER_NODE" "$PYTHON" -m megatron_rl.preflight \
        --config "$CONFIG" --report-dir "$folder" --no-links ${OVERRIDES[@]+"${OVERRIDES[@]}"} \
        >"$folder/output.log" 2>&1
    if ((STEP_CODE == 2)); then
        # The same message from every node; one is enough.
        grep -m1 '^preflight:' "$folder/output.log" || cat "$folder/output.log"
        exit 2
    fi
    ((${#CONTAINER[@]})) && collect=(srun --nodes=1 --ntasks=1 "${CONTAINER[@]}")
    ${collect[@]+"${collect[@]}"} "$PYTHON" -m megatron_rl.preflight --collect "$folder" --nodes "$nodes"
    code=$?
    if ((code == 0)) && [[ ${PREFLIGHT_LINKS:-0} == 1 ]]; then
        say "measuring the links"
        run_step --ntasks="${#NODES[@]}" --ntasks-per-node=1 \
            "$PYTHON" -m torch.distributed.run --nnodes="${#NODES[@]}" \
            --nproc-per-node="$RANKS_PER_NODE" --rdzv-backend=c10d \
            --rdzv-id="$SLURM_JOB_ID-links" --rdzv-endpoint="$MASTER_HOST:$MASTER_PORT" \
            -m megatron_rl.preflight --config "$CONFIG" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
        code=$STEP_CODE
    fi
    ((code == 0)) && return
    [[ $STOP == none ]] || decide
    if [[ $PREFLIGHT == fail ]]; then
        say "the preflight failed; PREFLIGHT=warn would start anyway"
        exit 1
    fi
    say "the preflight failed; starting anyway (PREFLIGHT=warn)"
}

train() {
    [[ $STOP == none ]] || return
    local command=("$PYTHON" "$TRAIN_SCRIPT" --config "$CONFIG" ${OVERRIDES[@]+"${OVERRIDES[@]}"})
    if [[ $LAUNCHER == srun ]]; then
        # One task per rank: rank, world size and master address come from Slurm's variables.
        export MASTER_ADDR=$MASTER_HOST MASTER_PORT
        run_step --ntasks=$((${#NODES[@]} * RANKS_PER_NODE)) --ntasks-per-node="$RANKS_PER_NODE" \
            "$REPO/launch/worker.sh" "${command[@]}"
    else
        # torchrun's own process ignores the signals: the ranks get them from Slurm and end in
        # their own time, where torchrun would kill them after 30 seconds.
        # shellcheck disable=SC2016
        TORCHELASTIC_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT run_step \
            --ntasks="${#NODES[@]}" --ntasks-per-node=1 bash -c 'trap "" TERM USR1; exec "$@"' _ \
            "$PYTHON" -m torch.distributed.run --nnodes="${#NODES[@]}" \
            --nproc-per-node="$RANKS_PER_NODE" --max-restarts="$MAX_RESTARTS" \
            --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
            --rdzv-endpoint="$MASTER_HOST:$MASTER_PORT" \
            --no-python "$REPO/launch/worker.sh" "${command[@]}"
    fi
    TRAIN_CODE=$STEP_CODE
}

decide() {
    local failure code host name
    failure=$(first_failure "$ATTEMPT_DIR")
    if [[ -n $failure ]]; then
        read -r code host name <<<"$failure"
        say "$name on $host failed first, exit code $code. The end of its log:"
        show_end "$ATTEMPT_DIR" "$name"
        ((code == 2)) || say "if the node is at fault: sbatch --exclude=$host …"
        exit "$code"
    fi
    if [[ $STOP == terminated ]]; then
        say "stopped; left to Slurm"
        exit 75
    fi
    if stopped "$ATTEMPT_DIR"; then
        requeue
    fi
    if ((TRAIN_CODE != 0)); then
        say "the job step failed with code $TRAIN_CODE before a rank could say why"
        exit "$TRAIN_CODE"
    fi
    say "done"
    exit 0
}

requeue() {
    if ((ATTEMPT >= MAX_REQUEUES)); then
        say "not requeued: this is attempt $ATTEMPT and MAX_REQUEUES is $MAX_REQUEUES"
        exit 75
    fi
    say "requeueing; the next attempt resumes from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || say "requeue was refused; submit the job again to go on"
    exit 75
}
