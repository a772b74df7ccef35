#!/usr/bin/env bash
# Make .venv and install this project into it:  bash scripts/setup.sh [extra...]     e.g.  setup.sh dev track
#
# Versions come from constraints.txt. torch is installed first and pinned, so that nothing installed later replaces it.
# pip takes the torch its index offers: on Linux that is the CUDA build, which also runs without a GPU. To have another
# build (the smaller CPU one, say), install that torch version into .venv first; it is then left as it is:
#     python3 -m venv .venv && VIRTUAL_ENV=.venv uv pip install --torch-backend=cpu torch==VERSION
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/.installed"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || break # asked for by name: nothing else will do
    done
    local tried="${PYTHON:-python3}"
    die "Python 3.11 or newer is needed; $tried is $("$tried" --version 2>/dev/null || echo 'not there')." \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3.11 bash $0"
}

make_venv() {
    if [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    [ ! -e "$venv" ] || die "$venv has no working pip, or its Python is older than 3.11. Move it away, then run this again."
    local python
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make environments. Install its venv module (Debian, Ubuntu: apt-get install python3-venv)."
    say "making .venv with $("$python" --version)"
    "$python" -m venv "$venv"
}

# The inputs of an installation: the place, the requirements, the versions.
fingerprint() { { echo "$root"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | sha256sum | cut -d' ' -f1; }

# The stamp's first line is the fingerprint, the others the extras that are installed.
is_installed() {
    [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$(fingerprint)" ] || return 1
    local extra
    for extra in "$@"; do
        tail -n +2 "$stamp" | grep -qx -- "$extra" || return 1
    done
}

check_extras() {
    local extra known
    known="$(sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/p' "$root/pyproject.toml" | sed -nE 's/^([a-z-]+) = \[.*/\1/p')"
    for extra in "$@"; do
        grep -qx -- "$extra" <<<"$known" || die "no extra is called $extra; there are:" $known
    done
}

install() {
    local torch extras had=()
    torch="$(grep -E '^torch==' "$root/constraints.txt")"
    if [ -f "$stamp" ]; then
        mapfile -t had < <(tail -n +2 "$stamp")
    fi
    mapfile -t had < <(printf '%s\n' "${had[@]}" "$@" | sed '/^$/d' | sort -u)
    extras="$(IFS=,; echo "${had[*]}")"
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$root/constraints.txt")
    [ -t 2 ] || pip+=(--quiet)
    say "installing $torch, then the project${extras:+ with $extras}; the first time this takes minutes"
    rm -f "$stamp"
    "$venv/bin/python" -m pip uninstall -qq --yes rlhf >&2 # this project's name until 2026-11-22; the index's is another
    "${pip[@]}" "$torch" >&2
    "${pip[@]}" --editable "$root${extras:+[$extras]}" >&2
    { fingerprint; printf '%s\n' "${had[@]}"; } >"$stamp"
}

check_extras "$@"
make_venv
if ! is_installed "$@"; then
    install "$@"
fi
[ "${VIRTUAL_ENV:-}" = "$venv" ] || say "ready; next: source $venv/bin/activate"
