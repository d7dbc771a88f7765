#!/bin/sh
# Installs promtool, which comes with Prometheus, from the distribution (Debian, Ubuntu).
set -eu

if command -v promtool >/dev/null 2>&1; then
    exit 0
fi
exec "$(dirname "$0")/apt_install.sh" prometheus
