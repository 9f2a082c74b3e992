#!/usr/bin/env bash
# Trains an EAGLE-3 draft head on one machine's CPUs: two ranks run the target, two train the draft.
# Sets up .venv on the first run (or uses VENV); further arguments go to train_draft.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
stamp="$venv/.demo-installed"
if [[ ! -f "$stamp" || pyproject.toml -nt "$stamp" || launch/constraints.txt -nt "$stamp" ]]; then
    [[ -x "$venv/bin/python" ]] || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --constraint launch/constraints.txt torch==2.13.0
    "$venv/bin/python" -m pip install --quiet --constraint launch/constraints.txt --editable '.[demo,hf]'
    touch "$stamp"
fi

out="out"
mkdir -p "$out"
# One thread per rank: four ranks on two cores have no use for more, and more would fight over them.
OMP_NUM_THREADS=1 "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
    launch/train_draft.py --num-targets 2 --device cpu --threads 1 --out "$out" "$@"
