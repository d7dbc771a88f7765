#!/bin/sh
# Starts a tracing UI, Arize Phoenix, and a mesh that sends it every span; Ctrl-C ends both.
# Phoenix has a virtual environment of its own. UI_ONLY=1 leaves the mesh out: give the one
# that runs already `--otlp-endpoint http://127.0.0.1:$UI_OTLP_PORT`.
set -eu

cd "$(dirname "$0")/.."
venv=${UI_VENV:-.venv-trace-ui}
port=${UI_PORT:-6006}
otlp_port=${UI_OTLP_PORT:-4317}
version=20.26.1

if [ ! -x "$venv/bin/phoenix" ]; then
    echo "installing Phoenix into $venv (0.9 GB), once"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "arize-phoenix==$version"
fi

mkdir -p build/trace-ui
# Neither usage statistics nor anything else leaves the machine.
env PHOENIX_HOST=127.0.0.1 PHOENIX_PORT="$port" PHOENIX_GRPC_PORT="$otlp_port" \
    PHOENIX_TELEMETRY_ENABLED=false PHOENIX_WORKING_DIR="$PWD/build/trace-ui" \
    "$venv/bin/phoenix" serve >build/trace-ui/phoenix.log 2>&1 &
phoenix=$!
trap 'kill "$phoenix" 2>/dev/null || true; wait "$phoenix" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

tries=0
until "$venv/bin/python" -c "import socket; socket.create_connection(('127.0.0.1', $otlp_port), 1)" \
    2>/dev/null; do
    tries=$((tries + 1))
    if [ "$tries" -gt 120 ] || ! kill -0 "$phoenix" 2>/dev/null; then
        tail -n 20 build/trace-ui/phoenix.log >&2
        exit 1
    fi
    sleep 0.5
done
echo "traces: http://127.0.0.1:$port (project \"default\")"

if [ -n "${UI_ONLY:-}" ]; then
    wait "$phoenix"
else
    .venv/bin/pdmesh up --otlp-endpoint "http://127.0.0.1:$otlp_port" "$@"
fi
