#!/usr/bin/env bash
# Checks everything: style, types, import boundaries, tests. Needs Python >= 3.10 and a C++ compiler.
# Makes .venv-test on the first run (or uses VENV); arguments go to pytest, for example: ./launch/test.sh -k queue
# Exit status: 0 when every check passed, 1 otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/_venv.sh

# A package path or options from outside would test something else than this checkout.
unset PYTHONPATH PYTEST_ADDOPTS
venv="${VENV:-.venv-test}"
ensure_venv "$venv" "$TEST_EXTRAS"
bin="$PWD/$venv/bin"
[[ "$venv" == /* ]] && bin="$venv/bin"

failed=()
check() {
    local name="$1" started=$SECONDS
    shift
    echo "== $name"
    if "$@"; then
        echo "-- $name: ok ($((SECONDS - started)) s)"
    else
        echo "-- $name: FAILED with status $? ($((SECONDS - started)) s)"
        failed+=("$name")
    fi
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "lint-imports" "$bin/lint-imports" --no-logo
# Two at a time: most tests wait for other processes.
check "pytest" "$bin/python" -m pytest --numprocesses 2 --dist worksteal --durations 15 "$@"

if ((${#failed[@]})); then
    printf '== %d of 5 checks failed:' "${#failed[@]}"
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
echo "== all checks passed"
