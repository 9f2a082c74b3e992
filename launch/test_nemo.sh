#!/usr/bin/env bash
# Runs the tests against the real nemo-automodel package, which needs another version of transformers than the rest.
# Makes .venv-nemo on the first run (or uses NEMO_VENV), on top of the environment of ./launch/test.sh where there is one;
# arguments go to pytest. Exit status: pytest's, which is an error when the tests were skipped instead of run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

unset PYTHONPATH PYTEST_ADDOPTS
venv="${NEMO_VENV:-.venv-nemo}"
pins=launch/constraints-nemo.txt
base="${VENV:-.venv-test}"
want="$base $(cksum <"$pins")"
if [[ "$(cat "$venv/.installed" 2>/dev/null)" != "$want" ]]; then
    echo "-- installing nemo-automodel into $venv (log: $venv/install.log)"
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    site='import site; print(site.getsitepackages()[0])'
    if [[ -x "$base/bin/python" ]]; then
        # Saves installing torch a second time. What is installed here comes first.
        "$base/bin/python" -c "$site" >"$("$venv/bin/python" -c "$site")/base.pth"
    fi
    pip=("$venv/bin/python" -m pip install --no-compile --constraint "$pins")
    if ! { "${pip[@]}" torch numpy safetensors pytest pytest-timeout transformers accelerate datasets pillow &&
        "${pip[@]}" --no-deps nemo-automodel; } >"$venv/install.log" 2>&1; then
        tail -n 30 "$venv/install.log" >&2
        echo "error: installation failed, see $venv/install.log" >&2
        exit 1
    fi
    echo "$want" >"$venv/.installed"
fi

"$venv/bin/python" -m pytest tests/interop "$@"
