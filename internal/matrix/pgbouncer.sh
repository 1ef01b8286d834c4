#!/usr/bin/env bash
# Builds a PgBouncer that knows prepared statements from Debian's source package: internal/matrix/pgbouncer.sh FOLDER
#
# The program is then FOLDER/pgbouncer. apt verifies what it fetches, by the signature of the archive; the checksum pins it.
set -euo pipefail

suite=trixie
version=1.24.1
sha256=da72a3aba13072876d055a3e58dd4aba4a5de4ed6148e73033185245598fd3e0

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

folder=$1
other='Or set WEIR_PGBOUNCER to a PgBouncer of 1.21 or later.'
command -v apt-get >/dev/null || fail "PgBouncer $version is built from a package of Debian, and apt-get is missing." "$other"
missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v make >/dev/null || missing+=(make)
command -v pkg-config >/dev/null || missing+=(pkg-config)
[ ${#missing[@]} = 0 ] && pkg-config --exists libevent || missing+=(libevent-dev)
[ ${#missing[@]} = 0 ] && pkg-config --exists openssl || missing+=(libssl-dev)
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || fail "To build PgBouncer $version this is missing: apt-get install ${missing[*]}" "$other"
    apt-get update -q </dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt fetches as a user of its own
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/source"
# The same mirror, another release, and nothing of it in this machine's own lists.
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1)
[ -n "$mirror" ] || fail "apt knows no mirror of Debian: run apt-get update." "$other"
printf 'deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' "$mirror" "$suite" >"$work/sources.list"
apt=(apt-get -q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o APT::Get::List-Cleanup=0 -o APT::Sandbox::User=root)
"${apt[@]}" update </dev/null
(cd "$work" && "${apt[@]}" source --download-only "pgbouncer" </dev/null)
tarball=$work/pgbouncer_$version.orig.tar.gz
[ -e "$tarball" ] || fail "Debian's $suite has another PgBouncer than $version now: correct the version in ${BASH_SOURCE[0]}." "$other"
printf '%s  %s\n' "$sha256" "$tarball" | sha256sum --check --quiet
tar -xzf "$tarball" -C "$work/source" --strip-components 1
cd "$work/source"
./configure --quiet --without-cares
make -j "$(nproc)" pgbouncer
mkdir -p "$folder"
install -m 755 pgbouncer "$folder/pgbouncer.new"
mv "$folder/pgbouncer.new" "$folder/pgbouncer"
