#!/bin/sh
# Installs edgeagent on a K3s node: from the checkout or the unpacked bundle this file lies in, or from
# the bundle named with --offline. Run again at any time: it does only what is missing, and picks up
# after an interruption. See docs/install.md.
set -eu
# In one block, so that a script replaced under a running shell (git pull) is not read half and half.
{
PREFIX=/opt/edgeagent
CONFIG_DIR=/etc/edgeagent
CONFIG=$CONFIG_DIR/agent.yaml
STATE_DIR=/var/lib/edgeagent
UNIT=/etc/systemd/system/edgeagent.service
LINK=/usr/local/bin/edgeagent
RECORD=$PREFIX/installed
RESTART_MARK=$PREFIX/restart-needed
NEED_MIB=250
EX_NOT_YET=3

usage() {
    cat <<'END'
usage: sudo ./install.sh [options]

  --offline BUNDLE     install from a bundle made with `make bundle`; needs no network
  --broker URL         report to this MQTT broker (mqtt://, mqtts://, ws://, wss://)
  --site NAME          site of this node in the fleet
  --config FILE        use this configuration (first installation only)
  --upgrade            put this version in the place of the installed one
  --extras LIST        optional parts: top, fleet, jetson (separated by commas)
  --python PATH        Python 3.10 or newer to use; default: the first that is found
  --configure-k3s      write what K3s needs to find NVIDIA's container runtime, where it needs something
  --restart-k3s        restart K3s if it has to be; never done unasked
  --no-start           do not start the service (when an image is prepared)
  --wait SECONDS       how long to wait until the node shows the resources (default 90)
  --dry-run            say every step, change nothing
  --uninstall          remove the agent; configuration and state stay
  --purge              with --uninstall: remove those too

Exit status: 0 the node shares its GPUs; 3 installed, and what is still missing has been said; 1 not done.
END
}

# --- saying and doing ---------------------------------------------------------------------------------

say() { printf '%s\n' "$*"; }
note() { printf '  %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() { printf 'install.sh: %s\n' "$*" >&2; FAILED=1; exit 1; }
step() { CURRENT=$1; say "==> $1"; }

act() { # COMMAND…: runs it; with --dry-run says so
    if [ -n "$DRY" ]; then
        note "would run: $*"
    else
        "$@" 9>&- # the lock is not for what is started
    fi
}

put() { # FILE MODE: standard input becomes FILE where it differs; PUT_CHANGED tells
    PUT_CHANGED=
    cat >"$WORK/put"
    if [ -f "$1" ] && cmp -s "$WORK/put" "$1"; then
        return 0
    fi
    PUT_CHANGED=1
    if [ -n "$DRY" ]; then
        note "would write $1"
        return 0
    fi
    note "writing $1"
    # Renamed into place: a reader, or a power cut, finds the old file or the new one.
    cp "$WORK/put" "$1.new"
    chmod "$2" "$1.new"
    sync "$1.new" 2>/dev/null || sync
    mv -f "$1.new" "$1"
}

needs_restart() { [ -n "$DRY" ] || : >"$RESTART_MARK"; }

recorded() { # KEY: what the last installation wrote down
    [ ! -f "$RECORD" ] || sed -n "s/^$1=//p" "$RECORD"
}

record() { # KEY VALUE
    [ -z "$DRY" ] || return 0
    [ "$(recorded "$1")" != "$2" ] || return 0
    { [ ! -f "$RECORD" ] || grep -v "^$1=" "$RECORD" || true; printf '%s=%s\n' "$1" "$2"; } |
        LC_ALL=C sort >"$RECORD.new"
    mv -f "$RECORD.new" "$RECORD"
}

# shellcheck disable=SC2329 # by the trap in main
on_exit() {
    status=$?
    [ -z "${WORK:-}" ] || rm -rf "$WORK"
    if [ "$status" != 0 ] && [ -z "$FAILED" ]; then
        printf 'install.sh: stopped while: %s; run it again to go on\n' "$CURRENT" >&2
    fi
}

# --- options --------------------------------------------------------------------------------------------

DRY='' OFFLINE='' BROKER='' SITE='' GIVEN_CONFIG='' UPGRADE='' EXTRAS='' PYTHON='' CONFIGURE_K3S=''
RESTART_K3S='' NO_START='' WAIT_S=90 UNINSTALL='' PURGE='' FAILED='' WORK='' CURRENT='starting'

options() {
    while [ $# -gt 0 ]; do
        case $1 in
            --*=*) option=${1%%=*} value=${1#*=}; shift; set -- "$option" "$value" "$@" ;;
        esac
        case $1 in
            --offline | --broker | --site | --config | --extras | --python | --wait)
                [ $# -ge 2 ] || die "$1 needs a value (see --help)" ;;
        esac
        case $1 in
            --offline) OFFLINE=$2; shift ;;
            --broker) BROKER=$2; shift ;;
            --site) SITE=$2; shift ;;
            --config) GIVEN_CONFIG=$2; shift ;;
            --extras) EXTRAS=$2; shift ;;
            --python) PYTHON=$2; shift ;;
            --wait) WAIT_S=$2; shift ;;
            --upgrade) UPGRADE=1 ;;
            --configure-k3s) CONFIGURE_K3S=1 ;;
            --restart-k3s) RESTART_K3S=1 ;;
            --no-start) NO_START=1 ;;
            --dry-run) DRY=1 ;;
            --uninstall) UNINSTALL=1 ;;
            --purge) PURGE=1 ;;
            -h | --help) usage; exit 0 ;;
            *) die "unknown option $1 (see --help)" ;;
        esac
        shift
    done
    case $WAIT_S in '' | *[!0-9]*) die "--wait $WAIT_S: not a number of seconds" ;; esac
    case $BROKER in
        '' | mqtt://?* | mqtts://?* | ws://?* | wss://?*) ;;
        *) die "--broker $BROKER: not mqtt://HOST[:PORT], mqtts://, ws:// or wss://" ;;
    esac
    case $BROKER in *[\"\ \\]*) die "--broker $BROKER: not a URL" ;; esac
    case $SITE in *[!a-z0-9-]* | -* | *-) die "--site $SITE: must be of [a-z0-9-], not starting or ending in '-'" ;; esac
    case $EXTRAS in *[!a-z,]*) die "--extras $EXTRAS: top, fleet, jetson" ;; esac
    [ -z "$PURGE" ] || [ -n "$UNINSTALL" ] || die "--purge goes with --uninstall"
    [ -z "$GIVEN_CONFIG" ] || [ -z "$BROKER$SITE" ] || die "--config says it all: without --broker and --site"
    [ -z "$GIVEN_CONFIG" ] || [ -r "$GIVEN_CONFIG" ] || die "--config $GIVEN_CONFIG: cannot read it"
}

# --- checks: nothing is changed before all of them have passed ------------------------------------------

check_host() {
    [ "$(uname -s)" = Linux ] || die "edgeagent runs on Linux only"
    ARCH=$(uname -m)
    case $ARCH in
        x86_64 | aarch64) ;;
        arm64) ARCH=aarch64 ;;
        *) die "edgeagent runs on x86_64 and aarch64, not on $ARCH" ;;
    esac
    [ "$(id -u)" = 0 ] || die "run this as root: sudo ./install.sh"
    if [ -z "$NO_START" ] && [ ! -d /run/systemd/system ]; then
        die "systemd does not run here; use --no-start to prepare an image, or k3s-manifests/ to run in a pod"
    fi
    # Two installers at once would pull files from under each other.
    if command -v flock >/dev/null && [ -z "$DRY" ]; then
        exec 9>/run/edgeagent-install.lock
        flock -n 9 || die "another install.sh is running"
    fi
}

open_source() { # sets SOURCE, KIND (checkout or bundle), VERSION, SOURCE_ID
    here=$(cd "$(dirname "$0")" && pwd)
    SOURCE=$here KIND=checkout
    if [ -n "$OFFLINE" ]; then
        if [ -d "$OFFLINE" ]; then
            SOURCE=$OFFLINE
        else
            [ -r "$OFFLINE" ] || die "--offline $OFFLINE: cannot read it"
            mkdir "$WORK/bundle"
            tar -xzf "$OFFLINE" -C "$WORK/bundle" 2>/dev/null ||
                die "--offline $OFFLINE: damaged or not a bundle (made with: make bundle)"
            SOURCE=$(echo "$WORK"/bundle/edgeagent-*)
        fi
        [ -f "$SOURCE/SHA256SUMS" ] || die "--offline $OFFLINE: not a bundle (made with: make bundle)"
    fi
    if [ -f "$SOURCE/SHA256SUMS" ]; then
        KIND=bundle
        (cd "$SOURCE" && sha256sum --quiet -c SHA256SUMS >/dev/null 2>&1) ||
            die "the bundle is damaged: its checksums do not match; copy it again"
        bundle_arch=$(sed -n 's/^arch=//p' "$SOURCE/BUNDLE")
        [ "$bundle_arch" = "$ARCH" ] || die "this bundle is for $bundle_arch and this machine is $ARCH"
        VERSION=$(sed -n 's/^version=//p' "$SOURCE/BUNDLE")
        SOURCE_ID=$(sha256sum <"$SOURCE/SHA256SUMS" | cut -c1-12)
        IMPORT_FROM=$(echo "$SOURCE"/wheels/edgeagent-*.whl)
    else
        [ -f "$SOURCE/edgeagent/__init__.py" ] || die "neither a checkout nor a bundle lies beside this script"
        VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$SOURCE/edgeagent/__init__.py")
        SOURCE_ID=$(cd "$SOURCE" && find edgeagent pyproject.toml setup.py -type f ! -name '*.pyc' |
            LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12)
        IMPORT_FROM=$SOURCE
    fi
}

find_python() { # sets PY (path) and PY_VERSION
    old=''
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $found in
            3.[0-9]) old="${old:+$old, }$candidate is $found"; continue ;;
            3.*) ;;
            *) old="${old:+$old, }$candidate is $found"; continue ;;
        esac
        if [ "$KIND" = bundle ]; then
            case " $(sed -n 's/^pythons=//p' "$SOURCE/BUNDLE") " in
                *" $found "*) ;;
                *) old="${old:+$old, }$candidate is $found, not in this bundle"; continue ;;
            esac
        fi
        PY=$(command -v "$candidate") PY_VERSION=$found
        return
    done
    die "Python 3.10 or newer is needed (${old:-no python3 found}): install one beside it, for example" \
        "apt-get install python3.10, and name it with --python"
}

find_pip() { # sets PIP: a pip wheel, run from where it lies; the system's pip is never used
    PIP=$(find "$SOURCE/wheels" -name 'pip-*.whl' 2>/dev/null | head -n 1)
    [ -z "$PIP" ] || return 0
    bundled=$("$PY" -c 'import ensurepip, os; print(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled"))' \
        2>/dev/null) || bundled=
    PIP=$(find ${bundled:+"$bundled"} /usr/share/python-wheels -maxdepth 1 -name 'pip-*.whl' 2>/dev/null | head -n 1)
    [ -n "$PIP" ] || die "$PY has no ensurepip: apt-get install python3-venv, or use --offline BUNDLE," \
        "which needs neither"
}

writable() { # DIRECTORY: whether it, or where it will be made, takes a file
    existing=$1
    while [ ! -d "$existing" ]; do existing=$(dirname "$existing"); done
    probe=$(mktemp "$existing/.edgeagent-probe-XXXXXX" 2>/dev/null) || return 1
    echo x >"$probe" 2>/dev/null || { rm -f "$probe"; return 1; }
    rm -f "$probe"
}

check_places() {
    [ -z "$DRY" ] || return 0 # a dry run changes nothing, not even for a moment
    for place in "$PREFIX" "$CONFIG_DIR" "$STATE_DIR" "$(dirname "$UNIT")"; do
        writable "$place" || die "cannot write to $place: read-only file system?" \
            "Nothing was changed. On read-only systems run the agent in a pod: k3s-manifests/"
    done
    place=$PREFIX
    while [ ! -d "$place" ]; do place=$(dirname "$place"); done
    probe=$(mktemp "$place/.edgeagent-probe-XXXXXX")
    printf '#!/bin/sh\nexit 0\n' >"$probe"
    chmod 755 "$probe"
    "$probe" 2>/dev/null || { rm -f "$probe"; die "$place is mounted noexec: nothing was changed"; }
    rm -f "$probe"
    free_mib=$(df -Pm "$place" | awk 'NR == 2 {print $4}')
    [ -f "$PREFIX/venv/.complete" ] || [ "$free_mib" -ge "$NEED_MIB" ] ||
        die "$place has $free_mib MiB free, $NEED_MIB are needed: nothing was changed"
}

look_at_host() { # sets K3S_ROLE and the rest: see edgeagent/doctor/install_facts.py
    PYTHONPATH=$IMPORT_FROM PYTHONDONTWRITEBYTECODE=1 "$PY" -m edgeagent.doctor.install_facts >"$WORK/facts" ||
        die "cannot look at this host (see above)"
    # shellcheck disable=SC1091 # written by the line above, every value quoted
    . "$WORK/facts"
    if [ -n "$K3S_ROLE" ]; then
        note "K3s ${K3S_VERSION:-of unknown version}, $K3S_ROLE"
    else
        note "K3s was not found: the agent will register when it is there"
    fi
    note "CDI: $CDI_REASON"
}

# --- the program --------------------------------------------------------------------------------------

choose_program() { # sets ENV_DIR (to be in use), and INSTALL where it has to be made
    EXTRAS=${EXTRAS:-$(recorded extras)}
    # An update of the script itself is no new program, a new Python is.
    ENV_ID=$(printf '%s %s %s\n' "$SOURCE_ID" "$PY_VERSION" "$EXTRAS" | sha256sum | cut -c1-12)
    ENV_DIR=$PREFIX/venv-$VERSION-$ENV_ID
    OLD_DIR=
    if [ -L "$PREFIX/venv" ] && [ -f "$PREFIX/venv/.complete" ]; then
        OLD_DIR=$(readlink -f "$PREFIX/venv")
    fi
    if [ "$OLD_DIR" = "$ENV_DIR" ]; then
        if "$ENV_DIR/bin/python" -c '' 2>/dev/null; then
            INSTALL=
            return 0
        fi
        warn "$ENV_DIR no longer works (was Python upgraded?): making it anew"
        [ -n "$DRY" ] || rm -rf "$ENV_DIR"
    elif [ -n "$OLD_DIR" ] && [ -z "$UPGRADE" ]; then
        same_extras=; [ "$EXTRAS" = "$(recorded extras)" ] && same_extras=1
        if [ -n "$same_extras" ] && "$OLD_DIR/bin/python" -c '' 2>/dev/null; then
            note "edgeagent $(recorded version) stays; what is here ($VERSION) is not the same: --upgrade puts it in place"
            ENV_DIR=$OLD_DIR INSTALL=
            VERSION=$(recorded version)
            return 0
        fi
    fi
    INSTALL=1
}

make_program() {
    if [ -f "$ENV_DIR/.complete" ] && "$ENV_DIR/bin/python" -c '' 2>/dev/null; then
        return 0 # made earlier, and not put in place then
    fi
    note "making $ENV_DIR with Python $PY_VERSION"
    if [ -n "$DRY" ]; then
        note "would run: $PY -m venv --without-pip $ENV_DIR"
        note "would install edgeagent $VERSION${EXTRAS:+ with $EXTRAS} there from the $KIND $SOURCE"
        note "would point $PREFIX/venv there"
        return 0
    fi
    rm -rf "$ENV_DIR"
    mkdir -p "$PREFIX"
    chmod 755 "$PREFIX"
    if ! "$PY" -m venv --without-pip "$ENV_DIR" 2>/dev/null; then
        # Debian splits the venv module off; what it makes is three links and a file (PEP 405).
        rm -rf "$ENV_DIR"
        base=$("$PY" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))')
        mkdir -p "$ENV_DIR/bin" "$ENV_DIR/lib/python$PY_VERSION/site-packages"
        ln -s "$base" "$ENV_DIR/bin/python"
        printf 'home = %s\ninclude-system-site-packages = false\n' "$(dirname "$base")" >"$ENV_DIR/pyvenv.cfg"
    fi
    if [ "$KIND" = bundle ]; then
        wheel=$(echo "$SOURCE"/wheels/edgeagent-*.whl)
        set -- --no-index --find-links "$SOURCE/wheels"
    else
        make_wheel
        wheel=$(echo "$WORK"/wheel/edgeagent-*.whl)
        set --
    fi
    if ! "$ENV_DIR/bin/python" "$PIP/pip" install --disable-pip-version-check --no-input --quiet --no-compile \
        --no-cache-dir --only-binary :all: "$@" "$wheel${EXTRAS:+[$EXTRAS]}" >"$WORK/pip.log" 2>&1; then
        missing=$(sed -n 's/.*No matching distribution found for \([^ ;]*\).*/\1/p' "$WORK/pip.log" | head -n 1)
        [ -z "$missing" ] || die "there is no ready-made wheel of $missing for Python $PY_VERSION on $ARCH" \
            "(nothing is compiled here): try another Python with --python, or --offline BUNDLE"
        tail -n 5 "$WORK/pip.log" >&2
        die "pip could not install edgeagent (see above); without a network use --offline BUNDLE"
    fi
    # All cores at once; without it each start of the agent would compile, in 10 MB more of memory.
    "$ENV_DIR/bin/python" -m compileall -q -j 0 "$ENV_DIR/lib" >/dev/null || true
    cp "$SOURCE/configs/agent.yaml" "$SOURCE/systemd/edgeagent.service" "$ENV_DIR/"
    : >"$ENV_DIR/.complete"
}

make_wheel() { # out of a copy: the checkout may be read-only, and stays clean
    mkdir "$WORK/source"
    for part in edgeagent pyproject.toml setup.py README.md LICENSE; do
        [ ! -e "$SOURCE/$part" ] || cp -R "$SOURCE/$part" "$WORK/source/"
    done
    # The limiter's library is shipped where it lies prebuilt; it is not compiled here.
    if ! EDGEAGENT_LIMITER=prebuilt "$ENV_DIR/bin/python" "$PIP/pip" wheel --disable-pip-version-check --no-input \
        --quiet --no-cache-dir --no-deps -w "$WORK/wheel" "$WORK/source" >"$WORK/pip.log" 2>&1; then
        tail -n 5 "$WORK/pip.log" >&2
        die "pip could not make edgeagent's wheel (see above); without a network use --offline BUNDLE"
    fi
}

install_program() {
    if [ -z "$INSTALL" ]; then
        note "edgeagent $VERSION is in place"
    else
        make_program
        if [ -f "$CONFIG" ] && [ -z "$DRY" ] &&
            ! "$ENV_DIR/bin/edgeagent" check-config "$CONFIG" >/dev/null 2>"$WORK/problems"; then
            cat "$WORK/problems" >&2
            die "edgeagent $VERSION does not take $CONFIG (see above): correct it first; the program was not changed"
        fi
        [ -z "$OLD_DIR" ] || [ -n "$DRY" ] || report_new_keys
        if [ -z "$DRY" ]; then
            needs_restart
            use_program "$ENV_DIR"
        fi
    fi
    record version "$VERSION"
    record extras "$EXTRAS"
    if [ "$(readlink "$LINK" 2>/dev/null)" != "$PREFIX/venv/bin/edgeagent" ]; then
        if [ -n "$DRY" ]; then
            note "would link $LINK"
        elif ! { mkdir -p "$(dirname "$LINK")" && ln -sfn "$PREFIX/venv/bin/edgeagent" "$LINK"; } 2>/dev/null; then
            note "$LINK cannot be made (read-only): use $PREFIX/venv/bin/edgeagent"
        fi
    fi
}

use_program() { # DIRECTORY: the link is replaced in one step
    ln -sfn "$1" "$PREFIX/venv.new"
    mv -fT "$PREFIX/venv.new" "$PREFIX/venv"
}

report_new_keys() {
    "$OLD_DIR/bin/edgeagent" check-config --keys >"$WORK/old-keys" 2>/dev/null || return 0
    "$ENV_DIR/bin/edgeagent" check-config --keys >"$WORK/new-keys" 2>/dev/null || return 0
    cut -d ' ' -f 1 "$WORK/old-keys" | LC_ALL=C sort >"$WORK/old-names"
    cut -d ' ' -f 1 "$WORK/new-keys" | LC_ALL=C sort | LC_ALL=C comm -13 "$WORK/old-names" - >"$WORK/added"
    [ ! -s "$WORK/added" ] || { note "new configuration keys (docs/configuration.md):"; sed 's/^/    /' "$WORK/added"; }
    cut -d ' ' -f 1 "$WORK/new-keys" | LC_ALL=C sort | LC_ALL=C comm -23 "$WORK/old-names" - >"$WORK/gone"
    [ ! -s "$WORK/gone" ] || { note "keys that are gone:"; sed 's/^/    /' "$WORK/gone"; }
}

# --- configuration ------------------------------------------------------------------------------------

tls_file() { # NAME…: the first that is in the configuration's directory
    for name in "$@"; do
        [ ! -f "$CONFIG_DIR/$name" ] || { printf '%s' "$CONFIG_DIR/$name"; return 0; }
    done
}

first_config() { # the shipped one with what this host and the options say
    if [ -n "$GIVEN_CONFIG" ]; then
        cat "$GIVEN_CONFIG"
        return
    fi
    template=$ENV_DIR/agent.yaml
    [ -f "$template" ] || template=$SOURCE/configs/agent.yaml
    : >"$WORK/fleet"
    if [ -n "$BROKER" ]; then
        ca=$(tls_file ca.pem ca.crt) cert=$(tls_file device.pem device.crt) key=$(tls_file device.key)
        [ -n "$key" ] || cert=
        tls="${ca:+caFile: $ca}${cert:+${ca:+, }certFile: $cert, keyFile: $key}"
        printf 'fleet:\n  enabled: true\n  brokers: ["%s"]\n' "$BROKER" >"$WORK/fleet"
        [ -z "$tls" ] || printf '  tls: {%s}\n' "$tls" >>"$WORK/fleet"
    fi
    awk -v unit="$MEMORY_UNIT" -v site="${SITE:-default}" -v fleet="$WORK/fleet" -v broker="$BROKER" '
        /^  memoryUnitMiB:/ { print "  memoryUnitMiB: " unit; next }
        /^  site:/ { print "  site: " site; next }
        /^fleet:/ && broker != "" { while ((getline line < fleet) > 0) print line; skip = 1; next }
        /^$/ { skip = 0 }
        !skip' "$template"
}

install_config() {
    [ -d "$CONFIG_DIR" ] || act mkdir -p "$CONFIG_DIR"
    ours=$(recorded config_sha256)
    if [ -f "$CONFIG" ]; then
        if [ -z "$BROKER$SITE" ]; then
            note "$CONFIG stays as it is"
            return 0
        fi
        if [ -z "$ours" ] || [ "$(sha256sum <"$CONFIG" | cut -c1-64)" != "$ours" ]; then
            if ! configured; then
                warn "$CONFIG was edited by hand and stays as it is; to have what you asked for, put in:"
                [ -z "$SITE" ] || printf 'node:\n  site: %s\n' "$SITE"
                [ -z "$BROKER" ] || printf 'fleet:\n  enabled: true\n  brokers: ["%s"]\n' "$BROKER"
                say "and then: edgeagent reload, or systemctl restart edgeagent"
            fi
            return 0
        fi
        # As this script wrote it: the options of then are read back out of it.
        MEMORY_UNIT=$(sed -n 's/^  memoryUnitMiB: //p' "$CONFIG")
        SITE=${SITE:-$(sed -n 's/^  site: //p' "$CONFIG")}
        BROKER=${BROKER:-$(sed -n 's/^  brokers: \["\(.*\)"\]$/\1/p' "$CONFIG")}
    fi
    first_config >"$WORK/agent.yaml"
    if [ -z "$DRY" ] && ! "$PREFIX/venv/bin/edgeagent" check-config "$WORK/agent.yaml" >/dev/null 2>"$WORK/problems"; then
        sed "s|$WORK/agent.yaml|configuration|" "$WORK/problems" >&2
        die "the configuration would not be valid (see above)"
    fi
    put "$CONFIG" 640 <"$WORK/agent.yaml"
    if [ -n "$PUT_CHANGED" ]; then
        [ -n "$GIVEN_CONFIG" ] || note "memoryUnitMiB: $MEMORY_UNIT (for Kubernetes ${K3S_VERSION:-of unknown version})"
        needs_restart
    fi
    [ -n "$GIVEN_CONFIG" ] || record config_sha256 "$(sha256sum <"$WORK/agent.yaml" | cut -c1-64)"
}

configured() { # whether the file already says what the options ask for
    { [ -z "$SITE" ] || grep -q "^  site: *[\"']*${SITE}[\"']* *\$" "$CONFIG"; } &&
        { [ -z "$BROKER" ] || grep -qF "$BROKER" "$CONFIG"; }
}

# --- K3s ------------------------------------------------------------------------------------------------

install_k3s_parts() {
    K3S_RESTART=
    if [ "$K3S_ROLE" = server ]; then
        install_policies
    elif [ "$K3S_ROLE" = agent ]; then
        note "admission policies belong on a server of this cluster: edgeagent admission-policies | kubectl apply -f -"
    fi
    [ "$CDI" = no ] || { [ -z "$CONFIGURE_K3S" ] || note "nothing to configure in K3s: CDI devices need no runtime"; return 0; }
    # containerd 1.x: shares need NVIDIA's runtime and `runtimeClassName: nvidia`.
    [ -n "$RUNTIME_ADVICE" ] || return 0
    if [ -n "$TEMPLATE_TEXT" ] && [ -n "$CONFIGURE_K3S" ]; then
        if [ -f "$K3S_TEMPLATE" ]; then
            if ! printf '%s\n' "$TEMPLATE_TEXT" | cmp -s - "$K3S_TEMPLATE"; then
                warn "$K3S_TEMPLATE is yours and stays as it is; put in:"
                printf '%s\n' "$TEMPLATE_TEXT" | sed '1,/^# Written/d'
            fi
        else
            printf '%s\n' "$TEMPLATE_TEXT" | put "$K3S_TEMPLATE" 644
        fi
        K3S_RESTART=1
    else
        warn "$RUNTIME_ADVICE"
        case $RUNTIME_ADVICE in *"has not seen it"*) K3S_RESTART=1 ;; esac
    fi
    [ -n "$K3S_RESTART" ] || return 0
    service=k3s; [ "$K3S_ROLE" = server ] || service=k3s-agent
    if [ -n "$RESTART_K3S" ]; then
        act systemctl restart "$service"
    else
        note "K3s has to be restarted for this (pods keep running): systemctl restart $service, or --restart-k3s"
    fi
}

install_policies() {
    target=$K3S_MANIFESTS/edgeagent-admission.yaml
    if [ -z "$POLICIES" ]; then
        note "admission policies need Kubernetes 1.30, this is $K3S_VERSION: left out"
        return 0
    fi
    if [ -n "$DRY" ] && [ ! -x "$PREFIX/venv/bin/edgeagent" ]; then
        note "would write $target"
        return 0
    fi
    set -- -c "$CONFIG"
    [ -f "$CONFIG" ] || set --
    "$PREFIX/venv/bin/edgeagent" admission-policies "$@" ${K3S_VERSION:+--kubernetes "$K3S_VERSION"} >"$WORK/policies" ||
        die "cannot make the admission policies (see above)"
    [ -d "$K3S_MANIFESTS" ] || act mkdir -p "$K3S_MANIFESTS"
    put "$target" 600 <"$WORK/policies"
}

# --- service ------------------------------------------------------------------------------------------

install_service() {
    unit=$SOURCE/systemd/edgeagent.service
    [ -n "$INSTALL" ] || [ ! -f "$ENV_DIR/edgeagent.service" ] || unit=$ENV_DIR/edgeagent.service
    put "$UNIT" 644 <"$unit"
    [ -z "$PUT_CHANGED" ] || needs_restart
    # Enabling without --no-reload would reload systemd, which takes GPUs away from running containers.
    if ! systemctl is-enabled --quiet edgeagent.service 2>/dev/null; then
        act systemctl --no-reload enable edgeagent.service
    fi
    [ -z "$NO_START" ] || return 0
    if [ "$(systemctl show -p NeedDaemonReload --value edgeagent.service 2>/dev/null)" = yes ] ||
        [ "$(systemctl show -p LoadState --value edgeagent.service 2>/dev/null)" = not-found ]; then
        if [ -n "$PODS_ON_GPU" ]; then
            warn "pods use a GPU now: containers of NVIDIA's runtime without CDI can lose it when systemd is" \
                "reloaded ('Failed to initialize NVML: Unknown Error'); such pods have to be started again"
        fi
        act systemctl daemon-reload
    fi
    if [ -f "$RESTART_MARK" ] || ! systemctl is-active --quiet edgeagent.service; then
        act systemctl restart edgeagent.service || true # what went wrong is said at the end
        [ -n "$DRY" ] || rm -f "$RESTART_MARK"
    fi
}

tidy() { # one earlier version stays, for going back
    [ -z "$DRY" ] || return 0
    current=$(readlink -f "$PREFIX/venv")
    for dir in "$PREFIX"/venv-*; do
        [ "$dir" = "$current" ] || [ "$dir" = "$OLD_DIR" ] || [ "$dir" = "$(recorded previous)" ] || rm -rf "$dir"
    done
}

finish() {
    if [ -n "$DRY" ]; then
        note "would wait until the node shows the resources"
        return 0
    fi
    if [ -n "$NO_START" ]; then
        say "edgeagent $VERSION is installed and starts at boot."
        return 0
    fi
    if "$PREFIX/venv/bin/edgeagent" doctor ready -c "$CONFIG" --wait "$WAIT_S" >"$WORK/ready" 2>&1; then
        [ -z "$OLD_DIR" ] || [ "$OLD_DIR" = "$ENV_DIR" ] || record previous "$OLD_DIR"
        tidy
        cat "$WORK/ready"
        say "edgeagent $VERSION is ready: edgeagent status, edgeagent doctor; a pod to try: docs/pod-authors.md"
        return 0
    fi
    if [ -n "$INSTALL" ] && [ -n "$OLD_DIR" ] && [ "$OLD_DIR" != "$ENV_DIR" ] && went_well_before; then
        use_program "$OLD_DIR"
        record version "$(recorded previous_version)"
        systemctl restart edgeagent.service || true
        cat "$WORK/ready" >&2
        die "edgeagent $VERSION did not become ready (see above): the earlier version is back in place"
    fi
    record previous "$OLD_DIR"
    FAILED=1
    say "edgeagent $VERSION is installed, but the node does not share its GPUs yet: $(cat "$WORK/ready")" >&2
    exit "$EX_NOT_YET"
}

went_well_before() { [ -n "$WAS_READY" ]; }

remember_before() { # whether the version in place works, before it is replaced
    WAS_READY=
    [ -n "$INSTALL" ] && [ -n "$OLD_DIR" ] && [ -z "$DRY$NO_START" ] || return 0
    if "$OLD_DIR/bin/edgeagent" doctor ready -c "$CONFIG" --wait 0 >/dev/null 2>&1; then
        WAS_READY=1
    fi
    record previous_version "$(recorded version)"
}

# --- uninstalling ---------------------------------------------------------------------------------------

uninstall() {
    step "removing the service"
    if [ -f "$UNIT" ]; then
        act systemctl --no-reload disable edgeagent.service 2>/dev/null || true
        act systemctl stop edgeagent.service || true
        act rm -f "$UNIT"
    fi
    step "removing the admission policies"
    data_dir=$(sed -n "s/^ *[\"']\{0,1\}data-dir[\"']\{0,1\} *: *[\"']\{0,1\}\([^\"' #]*\).*/\1/p" \
        /etc/rancher/k3s/config.yaml 2>/dev/null | head -n 1)
    policies=${data_dir:-/var/lib/rancher/k3s}/server/manifests/edgeagent-admission.yaml
    if [ -f "$policies" ]; then
        # K3s does not take back what was in a file that goes.
        act k3s kubectl delete --ignore-not-found -f "$policies" ||
            warn "the policies could not be deleted from the cluster: k3s kubectl delete -f $policies, when it runs"
        act rm -f "$policies"
    fi
    step "removing the program"
    for spec in /var/run/cdi/edgeagent.io-*.json; do
        [ ! -e "$spec" ] || act rm -f "$spec"
    done
    [ ! -L "$LINK" ] || act rm -f "$LINK"
    [ ! -d "$PREFIX" ] || act rm -rf "$PREFIX"
    if [ -n "$PURGE" ]; then
        act rm -rf "$CONFIG_DIR" "$STATE_DIR" /run/edgeagent
        say "edgeagent is gone. Running pods keep their GPU; pods that ask for shares will wait."
    else
        say "edgeagent is gone; $CONFIG_DIR and $STATE_DIR stay (--purge removes them)."
    fi
}

# --- all of it --------------------------------------------------------------------------------------------

main() {
    trap on_exit EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    umask 022
    # What would lead Python or pip elsewhere.
    unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_BREAK_SYSTEM_PACKAGES
    options "$@"
    if [ -n "$UNINSTALL" ]; then
        [ "$(id -u)" = 0 ] || die "run this as root: sudo ./install.sh --uninstall"
        uninstall
        return 0
    fi
    WORK=$(mktemp -d "${TMPDIR:-/tmp}/edgeagent-install-XXXXXX")
    step "checking this host"
    check_host
    open_source
    find_python
    find_pip
    check_places
    look_at_host
    step "program"
    choose_program
    remember_before
    install_program
    step "configuration"
    install_config
    step "K3s"
    install_k3s_parts
    step "service"
    install_service
    step "waiting until the node shows the resources"
    finish
}

main "$@"
exit
}
