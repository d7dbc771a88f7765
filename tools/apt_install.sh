#!/bin/sh
# Installs distribution packages without questions: apt_install.sh PACKAGE...
set -eu

if ! command -v apt-get >/dev/null 2>&1; then
    echo "install $*: this system has no apt-get" >&2
    exit 1
fi
sudo=""
if [ "$(id -u)" -ne 0 ]; then
    sudo=sudo
fi
# The lists of a fresh image are empty or old.
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "$@"
