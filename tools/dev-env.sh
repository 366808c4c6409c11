#!/bin/sh
# Makes .venv with all that development and tests need, from a bare Debian 12 (or anything newer with
# Python 3.10+) upwards. Run again at any time: it does only what is missing.
#
#   tools/dev-env.sh            the virtual environment, and mosquitto
#   tools/dev-env.sh browser    also Debian's chromium, for the browser tests
#
# As root, missing Debian packages are installed; otherwise mosquitto is unpacked below .cache/.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'dev-env: %s\n' "$*"; }
die() { printf 'dev-env: %s\n' "$*" >&2; exit 1; }

apt_install() { # PACKAGE…
    command -v apt-get >/dev/null || die "please install: $*"
    [ "$(id -u)" = 0 ] || die "please install as root: apt-get install $*"
    say "installing $*"
    [ -n "${APT_UPDATED:-}" ] || { apt-get update -qq; APT_UPDATED=1; }
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

unpack() { # PACKAGE COMMAND: without root, below .cache/debian, with a wrapper in .cache/bin
    command -v apt-get >/dev/null || return 1
    mkdir -p .cache/debs .cache/debian .cache/bin
    (cd .cache/debs && apt-get install -s "$1" 2>/dev/null | awk '/^Inst/{print $2}' |
        xargs -r apt-get download -q >/dev/null 2>&1) || return 1
    for deb in .cache/debs/*.deb; do
        [ -e "$deb" ] || return 1
        dpkg -x "$deb" .cache/debian
    done
    for dir in usr/sbin usr/bin; do
        [ -x ".cache/debian/$dir/$2" ] || continue
        libs="$PWD/.cache/debian/usr/lib/$(uname -m)-linux-gnu:$PWD/.cache/debian/usr/lib"
        printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libs" "$PWD/.cache/debian/$dir/$2" >".cache/bin/$2"
        chmod +x ".cache/bin/$2"
        return 0
    done
    return 1
}

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.10 or newer is needed"
}

make_venv() {
    python=$(find_python)
    say "making .venv with $("$python" -V)"
    rm -rf .venv
    if "$python" -c 'import ensurepip' 2>/dev/null && "$python" -m venv .venv; then
        return
    fi
    # Debian splits ensurepip off into python3-venv.
    if [ "$(id -u)" = 0 ]; then
        apt_install python3-venv
        rm -rf .venv
        "$python" -m venv .venv
        return
    fi
    mkdir -p .cache/debs .cache/pip-wheel
    (cd .cache/debs && apt-get download -q python3-pip-whl >/dev/null 2>&1) || die "please install as root: python3-venv"
    dpkg -x .cache/debs/python3-pip-whl_*.deb .cache/pip-wheel
    rm -rf .venv
    "$python" -m venv --without-pip .venv
    .venv/bin/python "$(echo .cache/pip-wheel/usr/share/python-wheels/pip-*.whl)/pip" install -q --no-index \
        --find-links .cache/pip-wheel/usr/share/python-wheels pip
}

.venv/bin/python -c 'import pip' 2>/dev/null || make_venv
if ! cmp -s pyproject.toml .venv/installed-for 2>/dev/null; then
    say "installing the Python packages (once; about 250 MB)"
    .venv/bin/python -m pip install -q --disable-pip-version-check -e '.[dev]'
    cp pyproject.toml .venv/installed-for
fi
# An editable install builds nothing; the limiter's library is wanted by the agent under test.
if [ ! -e "edgeagent/isolation/limiter/libedgeagent-limiter-$(uname -m).so" ]; then
    say "building the limiter's library"
    .venv/bin/python -m edgeagent.isolation.limiter.build >/dev/null ||
        say "the limiter's library was not built: its tests will say not_built"
fi

PATH="$PWD/.cache/bin:$PATH:/usr/sbin"
if ! command -v mosquitto >/dev/null; then
    if [ "$(id -u)" = 0 ]; then
        # Debian's package starts a broker of its own on port 1883; nothing here wants it.
        apt_install mosquitto
        command -v service >/dev/null && service mosquitto stop >/dev/null 2>&1 || true
    elif ! unpack mosquitto mosquitto; then
        say "mosquitto is missing: its tests will fail, the demo uses the embedded broker"
    fi
fi
if [ "${1:-}" = browser ] && ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; then
    if [ "$(id -u)" = 0 ]; then
        apt_install chromium
    else
        say "chromium is missing: the browser tests will be skipped (apt-get install chromium)"
    fi
fi
