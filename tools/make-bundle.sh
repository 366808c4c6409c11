#!/bin/sh
# Makes bundles for `install.sh --offline`: one per architecture, with wheels of edgeagent and of all it
# needs for Python 3.10 to 3.13. Needs a network, the box that it is for does not.
#
#   tools/make-bundle.sh [-o DIRECTORY] [-a "x86_64 aarch64"] [-p "3.10 3.11 3.12 3.13"] [-e EXTRAS]
set -eu
cd "$(dirname "$0")/.."

out=dist arches="x86_64 aarch64" pythons="3.10 3.11 3.12 3.13" extras=
while getopts o:a:p:e: option; do
    case $option in
        o) out=$OPTARG ;;
        a) arches=$OPTARG ;;
        p) pythons=$OPTARG ;;
        e) extras=$OPTARG ;;
        *) exit 64 ;;
    esac
done

python=${PYTHON:-.venv/bin/python}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' edgeagent/__init__.py)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

# Out of a copy, so that the checkout stays clean. The limiter's library is compiled here, for both
# architectures where ziglang is installed (it is a development dependency).
mkdir "$work/source"
cp -R edgeagent pyproject.toml setup.py README.md LICENSE "$work/source/"
"$python" -m edgeagent.isolation.limiter.build --out "$work/source/edgeagent/isolation/limiter" >/dev/null ||
    echo "make-bundle: without the limiter's library: no compiler was found" >&2
EDGEAGENT_LIMITER=prebuilt pip wheel --no-deps -w "$work/own" "$work/source"
wheel=$(echo "$work"/own/edgeagent-*.whl)

for arch in $arches; do
    name=edgeagent-$version-$arch
    tree=$work/$name
    mkdir -p "$tree/wheels"
    cp "$wheel" "$tree/wheels/"
    pip download --no-deps -d "$tree/wheels" pip # a box may have none
    for minor in $pythons; do
        # manylinux_2_28 is glibc 2.28: JetPack 5 and anything newer.
        pip download --only-binary :all: --implementation cp --python-version "$minor" \
            --platform "manylinux2014_$arch" --platform "manylinux_2_17_$arch" --platform "manylinux_2_24_$arch" \
            --platform "manylinux_2_26_$arch" --platform "manylinux_2_27_$arch" --platform "manylinux_2_28_$arch" \
            -d "$tree/wheels" "$wheel${extras:+[$extras]}"
    done
    cp -R install.sh configs systemd docs README.md LICENSE "$tree/"
    [ ! -d k3s-manifests ] || cp -R k3s-manifests "$tree/"
    printf 'version=%s\narch=%s\npythons=%s\n' "$version" "$arch" "$pythons" >"$tree/BUNDLE"
    (cd "$tree" && find . -type f | LC_ALL=C sort | xargs sha256sum) >"$work/sums"
    mv "$work/sums" "$tree/SHA256SUMS"
    # The same input gives the same bundle.
    tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime='2025-01-01 00:00Z' -cf - "$name" |
        gzip -9n >"$out/$name.tar.gz"
    echo "$out/$name.tar.gz $(du -m "$out/$name.tar.gz" | cut -f 1) MB"
done
