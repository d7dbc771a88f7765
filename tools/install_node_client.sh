#!/bin/sh
# Installs Node.js where it is missing, and the npm client that tests drive, by its lock file.
set -eu

here=$(dirname "$0")
folder=$here/../tests/clients
if ! command -v npm >/dev/null 2>&1; then
    "$here/apt_install.sh" nodejs npm
fi
# npm writes this file last.
installed=$folder/node_modules/.package-lock.json
if [ -e "$installed" ] && [ "$installed" -nt "$folder/package-lock.json" ]; then
    exit 0
fi
npm ci --prefix "$folder" --no-audit --no-fund --silent
