#!/usr/bin/env bash
# Checks the native core: its C++ tests under the address, undefined-behaviour and thread sanitizers and under valgrind,
# the compiled module (with the CUDA part, where there is a CUDA compiler), and the installation without a compiler.
# Uses the environment of ./launch/test.sh (VENV). What is missing on the machine is named and skipped.
# Exit status: 0 when everything that ran passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/_venv.sh

unset PYTHONPATH
venv="${VENV:-.venv-test}"
ensure_venv "$venv" "$TEST_EXTRAS"
python="$PWD/$venv/bin/python"
[[ "$venv" == /* ]] && python="$venv/bin/python"
build="$PWD/build/native"
mkdir -p "$build"

tools=()
for tool in cmake ninja; do
    type -P "$tool" >/dev/null || tools+=("$tool")
done
if ((${#tools[@]})); then
    "$python" -m pip install --quiet --constraint launch/constraints.txt "${tools[@]}"
    PATH="$(dirname "$python"):$PATH"
fi

failed=()
check() {
    local name="$1" started=$SECONDS log
    shift
    echo "== $name"
    log="$build/check.log"
    if "$@" >"$log" 2>&1; then
        grep -E "tests passed|passed, 0 failed|^  " "$log" || true
        echo "-- $name: ok ($((SECONDS - started)) s)"
    else
        tail -n 40 "$log"
        echo "-- $name: FAILED ($((SECONDS - started)) s)"
        failed+=("$name")
    fi
}

# build_tests DIR SANITIZERS
build_tests() {
    cmake -G Ninja -S . -B "$1" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNCCL_STREAM_PYTHON=OFF -DNCCL_STREAM_CUDA=OFF \
        -DNCCL_STREAM_TESTS=ON -DNCCL_STREAM_SANITIZE="$2" && ninja -C "$1"
}

run_tests() {
    build_tests "$@" && (cd "$1" && ctest --output-on-failure)
}

# Whether this compiler has these sanitizers and this kernel runs what they make.
sanitizers_work() {
    echo 'int main() { return 0; }' >"$build/probe.cpp"
    "${CXX:-c++}" -fsanitize="$1" "$build/probe.cpp" -o "$build/probe" 2>/dev/null && "$build/probe" 2>/dev/null
}

run_under_valgrind() {
    local test
    build_tests "$1" "" || return 1
    for test in "$1"/tests/native/cpp/test_*; do
        [[ -x "$test" && -f "$test" ]] || continue
        NCCL_STREAM_TEST_THREADS=64 valgrind --quiet --error-exitcode=9 \
            --leak-check=full --errors-for-leak-kinds=definite "$test" || return 1
    done
}

check_module() {
    "$python" - "$(type -P nvcc || true)" <<'EOF'
import sys
from nccl_stream import _core, staging
core = _core.core()
print(f"  compiled: {staging.is_compiled()}, with CUDA: {staging.cuda_compiled()} (CUDA compiler: {sys.argv[1] or 'none'})")
print(f"  copies: {core.copy_kind()}, checksum: {core.crc32c_kind()}")
sys.exit(not staging.is_compiled() or (bool(sys.argv[1]) and not staging.cuda_compiled()))
EOF
}

# The package, from an environment in which no compiler can be found.
check_without_compiler() {
    local dir="$build/without" site='import site; print(site.getsitepackages()[0])'
    rm -rf "$dir"
    "$python" -m venv "$dir"
    # For torch; without the .pth files that lie there, so without this checkout.
    "$python" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
        >"$("$dir/bin/python" -c "$site")/base.pth"
    env CC=/nowhere/cc CXX=/nowhere/c++ CUDACXX=/nowhere/nvcc PATH="$dir/bin" \
        "$dir/bin/python" -m pip install --quiet --no-deps --force-reinstall . || return 1
    (cd "$dir" && bin/python -c '
import sys
import nccl_stream
from nccl_stream import staging
print("  from", nccl_stream.__file__)
assert nccl_stream.__file__.startswith(sys.prefix), "not the package that was just installed"
assert not staging.is_compiled()
assert staging.crc32c(b"123456789") == 0xE3069283')
}

if type -P "${CXX:-c++}" >/dev/null; then
    check "module" check_module
    for kind in address,undefined thread; do
        if sanitizers_work "$kind"; then
            check "C++ tests, $kind sanitizer" run_tests "$build/$kind" "$kind"
        else
            echo "== skipped: the $kind sanitizer does not work here"
        fi
    done
    if type -P valgrind >/dev/null; then
        check "C++ tests, valgrind" run_under_valgrind "$build/plain"
    else
        echo "== skipped: valgrind is not installed"
    fi
    type -P nvcc >/dev/null || echo "== skipped: the CUDA part, there is no CUDA compiler (nvcc)"
else
    echo "== skipped: there is no C++ compiler; only the installation without one is checked"
fi
check "installation without a compiler" check_without_compiler

if ((${#failed[@]})); then
    printf '== native: %d checks failed:' "${#failed[@]}"
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
echo "== native: all checks passed"
