#!/usr/bin/env bash
# Trains an EAGLE-3 draft head on one machine's CPUs: two ranks run the target, two train the draft. Needs Python >= 3.10.
# Makes .venv on the first run (or uses VENV); arguments go to train_draft.py, for example: ./launch/demo.sh --steps 50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/_venv.sh

# A package path from outside would run something else than this checkout.
unset PYTHONPATH
venv="${VENV:-.venv}"
ensure_venv "$venv" demo,hf

# One thread per rank: four ranks on two cores have no use for more, and more would fight over them.
export OMP_NUM_THREADS=1
exec "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
    launch/train_draft.py --num-targets 2 --device cpu --threads 1 --out out "$@"
