# shellcheck shell=bash
# What the exit codes that worker.sh noted mean for the run. Sourced by local.sh and slurm/job.sh.

# The rank that failed first, as "code host rank": its failure explains the others. A rank killed by
# SIGTERM or SIGKILL, or that ended because of another rank (76), was cleaned up after a failure
# elsewhere, so it counts only if no other failed and no stop was asked for. Nothing is printed when no rank failed.
#   first_failure ATTEMPT_DIR
first_failure() {
    local file name code host killed=
    while read -r file; do
        name=${file##*/}
        read -r code host <"$file"
        case $code in
        0 | 75) ;;
        76 | 137 | 143) killed=${killed:-$code $host $name} ;;
        *)
            printf '%s %s %s\n' "$code" "$host" "$name"
            return
            ;;
        esac
    done < <(find "$1/exit" -type f -printf '%T@ %p\n' | sort -n | cut -d' ' -f2-)
    [[ -z $killed || -e $1/stop ]] || printf '%s\n' "$killed"
}

# Whether the run was stopped: a rank says so, or a stop was asked for and no rank came to its end.
#   stopped ATTEMPT_DIR
stopped() {
    grep -qs '^75 ' "$1"/exit/* || { [[ -e $1/stop ]] && ! grep -qs '^0 ' "$1"/exit/*; }
}

# The end of a failed rank's log, marked with its name.
#   show_end ATTEMPT_DIR RANK
show_end() {
    tail -n 30 "$1/$2.log" 2>/dev/null | sed "s/^/[$2] /"
}
