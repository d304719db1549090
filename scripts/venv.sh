# Sourced by run_tests.sh and quickstart.sh, in the repository root.
#
#   find_python        sets PYTHON to an interpreter that is 3.11 or 3.12 and really runs
#   ensure_venv EXTRA  makes .venv if needed and installs this package with EXTRA under constraints.txt

VENV=.venv

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_supported() {
    # Version managers leave stubs on PATH that exist and fail: only an interpreter that runs counts.
    "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

# Whether .venv is whole; one whose making was interrupted can be an interpreter outside any environment.
venv_is_whole() {
    "$VENV/bin/python" -c 'import sys; raise SystemExit(sys.prefix == sys.base_prefix)' >/dev/null 2>&1 &&
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

find_python() {
    local candidate path
    if is_supported "$VENV/bin/python"; then
        # Some tools make environments without pip.
        venv_is_whole || [ ! -f "$VENV/pyvenv.cfg" ] || "$VENV/bin/python" -m ensurepip >/dev/null 2>&1 || true
        if venv_is_whole; then
            PYTHON=$VENV/bin/python
            return
        fi
    fi
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3 python; do
        while read -r path; do
            if is_supported "$path"; then
                PYTHON=$path
                return
            fi
        done < <(type -ap "$candidate")
    done
    die "no Python 3.11 or 3.12 found (tried python3.12, python3.11, python3, python on PATH);" \
        "install one, or name it: PYTHON=/path/to/python3.12 bash $0"
}

have_headers() {
    "$PYTHON" -c 'import os, sysconfig
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

# DeepSpeed compiles its CPU communication op with the system's C++ compiler and Python's headers.
ensure_system_packages() {
    local -a packages=()
    local version
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    command -v g++ >/dev/null && command -v make >/dev/null || packages+=(build-essential)
    have_headers || packages+=("python$version-dev")
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || packages+=("python$version-venv")
    [ ${#packages[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "a C++ compiler, make, Python's headers and its venv module are needed;" \
            "on Debian or Ubuntu: sudo apt-get install ${packages[*]}"
    fi
    say "installing system packages: ${packages[*]}"
    apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >&2 ||
        die "apt-get could not install ${packages[*]}"
}

ensure_venv() {
    local extra=$1 stamp state
    find_python
    stamp=$VENV/.installed-$extra
    if [ -x "$VENV/bin/python" ] && ! is_supported "$VENV/bin/python"; then
        die "$VENV does not hold a working Python 3.11 or 3.12: move it away and start again"
    fi
    # The folder is part of the state: an editable install points at it.
    state=$({ cat pyproject.toml constraints.txt; pwd; } | sha256sum | cut -d' ' -f1)
    # The test extra holds all of the plot extra.
    if ! grep -qsxF "$state" "$stamp" "$VENV/.installed-test"; then
        ensure_system_packages
        if ! venv_is_whole; then
            say "making $VENV with $("$PYTHON" --version 2>&1) ($PYTHON)"
            "$PYTHON" -m venv --clear "$VENV" || die "could not make $VENV"
        fi
        say "installing megatron-acco[$extra] into $VENV (the first time this downloads PyTorch; it takes a few minutes)"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extra]" ||
            die "the installation failed; a second start continues it"
        printf '%s\n' "$state" >"$stamp"
    fi
    PATH=$PWD/$VENV/bin:$PATH
    export PATH VIRTUAL_ENV=$PWD/$VENV
}
