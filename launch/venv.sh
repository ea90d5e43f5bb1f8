# Sourced by the scripts in this folder: one virtual environment, .venv in the checkout, filled with
# the versions of constraints.txt. Expects the checkout as the current directory.
#
#   ensure_venv   make or update .venv if it is not what the files of this checkout ask for
#   run COMMAND   print the command; run it unless DRY_RUN=1
#
# PYTHON=/path/to/python3 picks the interpreter that a new .venv is made with. pip's own settings
# (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, …) are honoured, for example to take torch's smaller CPU
# build from another index.

VENV_STAMP=.venv/.installed

fail() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [[ ${DRY_RUN:-0} == 1 ]] || "$@"
}

# The first interpreter that is new enough. The pins are tested on 3.11, so it comes first.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        [[ $candidate != "${PYTHON:-}" ]] ||
            fail "PYTHON=$PYTHON is not a working Python 3.11 or newer; name another or unset it."
    done
    fail "no Python 3.11 or newer found; install it (Debian: apt-get install python3 python3-venv) or name it with PYTHON=/path/to/python3."
}

# What .venv was installed from. Anything that changes the result of the install belongs here.
venv_fingerprint() {
    { pwd && cat constraints.txt setup.py pyproject.toml megatron_rl/versions.py; } | sha256sum
}

ensure_venv() {
    local fingerprint python
    fingerprint=$(venv_fingerprint)
    if [[ -f $VENV_STAMP && $(<"$VENV_STAMP") == "$fingerprint" ]]; then
        return
    fi
    # An interrupted creation leaves an interpreter without pip; making it again repairs it.
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || exit 1
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python cannot make virtual environments; Debian: apt-get install python3-venv."
        run "$python" -m venv .venv
    fi
    printf 'Installing the tested versions into .venv; the first time this takes minutes.\n'
    run .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable '.[dev]' ||
        fail "pip could not install the packages (its message is above); check that the package registry is reachable, then run the same command again."
    # Last, so that an interrupted install is taken up again.
    [[ ${DRY_RUN:-0} == 1 ]] || printf '%s\n' "$fingerprint" >"$VENV_STAMP"
}
