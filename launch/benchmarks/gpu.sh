#!/usr/bin/env bash
# Everything that needs a GPU, on one GPU, within five minutes: the GPU tests, compute-sanitizer over the kernels where
# it is installed, and the measurements. Writes report.md and report.csv to out/gpu (or OUT).
#
#   ./launch/benchmarks/gpu.sh            with .venv-gpu, made on the first run (its time is not counted)
#   VENV=/path/to/venv ./launch/benchmarks/gpu.sh
#   PYTHON=python3 NO_VENV=1 ./launch/benchmarks/gpu.sh     with a Python that has torch and this package already
#
# Exit status: 0 all passed and every bar reached; 1 something failed, see the report; 77 there is no GPU here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/_venv.sh
out="${OUT:-out/gpu}"
mkdir -p "$out"

no_gpu() {
    echo "gpu.sh: no GPU here: $1. Nothing was checked or measured." >&2
    exit 77
}

# Before anything is installed: a machine without a driver needs no environment.
[[ -e /dev/nvidiactl || -e /dev/dxg ]] || command -v nvidia-smi >/dev/null || no_gpu "neither a device nor nvidia-smi"
if [[ -n "${NO_VENV:-}" ]]; then
    python="${PYTHON:-python3}"
else
    venv="${VENV:-.venv-gpu}"
    ensure_venv "$venv" test
    python="$venv/bin/python"
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || no_gpu "torch sees none"
"$python" -c 'import sys; from nccl_stream.device_staging import is_available; sys.exit(not is_available())' || {
    echo "gpu.sh: the compiled core has no CUDA part (put nvcc on the PATH and install again), or its CUDA runtime finds" \
        "no GPU (it is that of nvcc: is nvcc newer than the driver?)" >&2
    exit 1
}

started=$SECONDS
failed=0
lines=()
run() { # run NAME SECONDS COMMAND...: one check, its output in a log of its own
    local name="$1" limit="$2" begin=$SECONDS status=0
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    tail -n 3 "$out/$name.log"
    local verdict=ok
    if ((status)); then
        verdict="FAILED (status $status)"
        failed=1
    fi
    echo "-- $name: $verdict ($((SECONDS - begin)) s)"
    lines+=("| $name | $verdict | $((SECONDS - begin)) s |")
}

run tests 100 "$python" -m pytest -q -p no:cacheprovider --timeout 60 tests/gpu tests/unit/test_device_staging.py
sanitizer="$(command -v compute-sanitizer || true)"
if [[ -z "$sanitizer" && -x /usr/local/cuda/bin/compute-sanitizer ]]; then
    sanitizer=/usr/local/cuda/bin/compute-sanitizer
fi
if [[ -n "$sanitizer" ]]; then
    # Small inputs: the sanitizer slows kernels down a hundredfold. torch's allocator would hide accesses out of bounds.
    sanitize() { # sanitize TOOL TESTS
        run "sanitizer-$1" 50 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$1" --error-exitcode 9 --report-api-errors no \
            "$python" -m pytest -q -p no:cacheprovider --timeout 0 tests/gpu/test_staging.py -k "$2"
    }
    sums="checksum_on_the_device and not 104857601"
    sanitize memcheck "packing_kernel or ($sums) or (copies_down_and_up and not 67108867)"
    sanitize racecheck "$sums" # the only kernel of ours with shared memory
else
    lines+=("| sanitizer | not installed | |")
fi
run measurements 80 "$python" launch/benchmarks/gpu.py --csv "$out/report.csv" --markdown "$out/measured.md"

{
    echo "# GPU checks"
    echo
    "$python" -c 'import torch; p = torch.cuda.get_device_properties(0)
print(f"{p.name}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit", end=" ")'
    git describe --always --dirty 2>/dev/null || echo unknown
    echo
    echo "| check | result | time |"
    echo "| --- | --- | --- |"
    printf '%s\n' "${lines[@]}"
    echo
    [[ ! -e "$out/measured.md" ]] || cat "$out/measured.md"
} >"$out/report.md"
rm -f "$out/measured.md"
cat "$out/report.md"
echo "gpu.sh: finished with status $failed after $((SECONDS - started)) s"
exit "$failed"
