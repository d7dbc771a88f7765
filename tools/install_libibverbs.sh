#!/bin/sh
# Installs libibverbs, which Mooncake's Transfer Engine loads even for TCP; does nothing when it is there.
set -eu

if ldconfig -p 2>/dev/null | grep -q libibverbs.so.1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "install libibverbs: this system has no apt-get" >&2
    exit 1
fi
sudo=""
if [ "$(id -u)" -ne 0 ]; then
    sudo=sudo
fi
# The lists of a fresh image are empty or old.
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libibverbs1
