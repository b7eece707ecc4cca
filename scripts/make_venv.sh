#!/usr/bin/env bash
# Make the virtual environment in $1 and install this project with its test tools, from any state: none, half-finished,
# outdated, complete. $PYTHON chooses the interpreter. A complete environment costs a fraction of a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?usage: make_venv.sh VENV}
owned=$venv/.oasis-owned          # we made this environment, so we may delete it
complete=$venv/.oasis-complete    # holds the key of what was installed last
log=$venv/install.log

fail() {
    printf 'make venv: %s\n' "$*" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON does not run, or is older than Python 3.11."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3; do
        # Run it instead of looking for it: a version manager's shim exists even where its Python does not.
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed, and neither python3.11 nor python3 is one." \
        "Install it (Debian 12: apt-get install python3-venv), or name it: make venv PYTHON=/path/to/python3.11"
}

# The path is part of the key: the editable install points to this checkout.
key=$(printf '%s\n' "$PWD" | cat - pyproject.toml | sha256sum | cut -d' ' -f1)
is_complete() { [[ $(cat "$complete" 2>/dev/null) == "$key" ]] && is_new_enough "$venv/bin/python"; }

is_complete && exit 0

mkdir -p "$venv"
if command -v flock >/dev/null; then
    exec 9>"$venv/.oasis-lock"
    flock 9
    is_complete && exit 0 # another make finished it meanwhile
fi
python=$(find_python)
scripts/debian_packages.sh "$python"

# pip takes a half-unpacked package for an installed one, so an install that ended while unpacking is begun anew. One
# that ended while downloading left nothing behind, and simply goes on.
installing=$venv/.oasis-installing
was_unpacking() { [[ -e $installing ]] && grep -q '^Installing collected packages' "$log" 2>/dev/null; }
works() { is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }
if ! works || { [[ -e $owned ]] && was_unpacking; }; then
    foreign=$(find "$venv" -mindepth 1 -maxdepth 1 ! -name '.oasis-*' -print -quit)
    [[ -z $foreign || -e $owned ]] || fail "$venv holds no working Python 3.11 environment, and was not made here." \
        "Remove it, or choose another place: make venv VENV=/path"
    [[ -z $foreign ]] || echo "Repairing $venv, which was left half-finished"
    touch "$owned"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name '.oasis-owned' ! -name '.oasis-lock' -exec rm -rf {} +
    "$python" -m venv "$venv" || fail "'$python -m venv' failed (Debian: apt-get install python3-venv)."
fi

echo "Installing SGLang and the test tools into $venv (about 11 GB the first time, several minutes; log: $log)"
rm -f "$complete"
touch "$installing"
# Only the large downloads are shown; the log has everything.
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off -e '.[test]' \
    </dev/null 2>&1 | tee "$log" |
    sed -unE 's/^ *(Downloading|Using cached) ([^ ]+) (\(([0-9.]+ GB|[0-9]{3,}[0-9.]* MB)\)).*/  \2 \3/p
              s/^Installing collected packages.*/  unpacking/p'; then
    grep -E '^ *ERROR' "$log" | tail -n 5 >&2 || tail -n 5 "$log" >&2
    fail "pip could not install the packages; see $log. Run make again to continue."
fi
echo "$key" >"$complete"
rm -f "$installing"
