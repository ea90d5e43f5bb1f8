#!/usr/bin/env bash
# One rank: run a command, keep its output in a file of its own, and note its exit code.
#   ATTEMPT_DIR=DIR worker.sh python train_ppo.py --config FILE
# torchrun knows only success and failure and restarts what failed. So the exit code is noted in
# ATTEMPT_DIR/exit/rank-NNNN together with the host, and a stop with a saved checkpoint (75) is a
# success for torchrun.
set -uo pipefail

rank=${RANK:-${SLURM_PROCID:-0}}
name=$(printf 'rank-%04d' "$rank")
log=$ATTEMPT_DIR/$name.log
note=$ATTEMPT_DIR/exit/$name
mkdir -p "$ATTEMPT_DIR/exit" "$ATTEMPT_DIR/pid"

finish() {
    printf '%s %s\n' "$1" "${SLURMD_NODENAME:-$(hostname)}" >"$note"
    [[ $1 == 75 ]] && exit 0
    exit "$1"
}

# A restart is for a crash. After a stop, and with input that was refused, it would be in vain.
[[ -e $ATTEMPT_DIR/stop ]] && finish 75
read -r earlier _ 2>/dev/null <"$note"
[[ ${earlier:-} == 2 ]] && finish 2
rm -f "$note"
[[ ${TORCHELASTIC_RESTART_COUNT:-0} == 0 ]] ||
    printf -- '--- restart %s\n' "$TORCHELASTIC_RESTART_COUNT" >>"$log"

# torchrun and Slurm start a rank as the leader of a group; local.sh signals it by this number.
printf '%s\n' "$$" >"$ATTEMPT_DIR/pid/$name"

# Signals go to the whole process group or job step, so the command gets them without being handed
# them; this shell only has to survive. The command must start with their default meaning, which a
# shell that ignores them cannot give it: until its handlers are installed a signal ends it.
trap '' TERM USR1
default_signals='import os, signal, sys
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])'
command=("${PYTHON:-python3}" -c "$default_signals" "$@")
if ((rank == 0)); then
    "${command[@]}" > >(tee -a "$log") 2> >(tee -a "$log" >&2)
else
    "${command[@]}" >>"$log" 2>&1
fi
code=$?
# Ended by SIGUSR1 before there were handlers: nothing was done that a checkpoint could hold.
((code == 128 + 10)) && code=75
finish "$code"
