# Sourced by the launchers: makes or reuses a virtual environment with the pinned versions.

TEST_EXTRAS=test,lint,trainers,demo # one environment serves all checks

# ensure_venv DIR EXTRAS: after it, DIR/bin/python has the package (editable) with EXTRAS. Installs only when DIR is
# new, or pyproject.toml, the pins, the extras, the native sources or the compilers on the PATH have changed since. Call
# from the repository's root.
ensure_venv() {
    local venv="$1" extras="$2" python="${PYTHON:-python3}" want log
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: Python 3.10 or newer is needed, $python is $("$python" --version 2>&1); set PYTHON" >&2
        return 1
    }
    if [[ ! -x "$venv/bin/python" ]]; then
        echo "-- making a virtual environment in $venv"
        "$python" -m venv "$venv" || {
            echo "error: $python cannot make virtual environments (on Debian: install python3-venv)" >&2
            return 1
        }
    fi
    want="$extras $(
        {
            cat pyproject.toml launch/constraints.txt CMakeLists.txt
            find csrc -type f | LC_ALL=C sort | xargs cat
            echo "${CC:-} ${CXX:-} ${CUDACXX:-}" "$(type -P c++ g++ clang++ nvcc || true)"
        } | cksum
    )"
    log="$venv/install.log"
    if [[ "$(cat "$venv/.installed" 2>/dev/null)" == "$want" ]]; then
        echo "-- $venv is up to date"
        return 0
    fi
    echo "-- installing into $venv: torch and nccl-stream[$extras] (minutes the first time; log: $log)"
    # torch first, from whichever index pip is configured for, so that the choice of build is the machine's. What builds
    # the package is installed by a pip of its own, to which only the environment speaks: older ones look at the first
    # variable, newer ones at the second.
    local pins=launch/constraints.txt
    if ! "$venv/bin/python" -m pip install --constraint "$pins" torch==2.13.0 >"$log" 2>&1 ||
        ! PIP_CONSTRAINT="${PIP_CONSTRAINT:-} $pins" PIP_BUILD_CONSTRAINT="${PIP_BUILD_CONSTRAINT:-} $pins" \
            "$venv/bin/python" -m pip install --constraint "$pins" --editable ".[$extras]" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        echo "error: installation failed, see $log" >&2
        return 1
    fi
    echo "$want" >"$venv/.installed"
}
