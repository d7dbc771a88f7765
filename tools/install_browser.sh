#!/bin/sh
# Installs Chromium and its driver from the distribution (Debian); does nothing when they are there.
set -eu

if command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; then
    exit 0
fi
exec "$(dirname "$0")/apt_install.sh" chromium chromium-driver
