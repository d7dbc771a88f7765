"""The real nginx with the files of deploy/openresty, for tests."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.rules.lua import compile_to_lua
from gateway.rules.model import RuleSet

DEPLOY = Path(__file__).parents[2] / "deploy" / "openresty"
MODULE = Path("/usr/lib/nginx/modules/ngx_http_lua_module.so")
_START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Nginx:
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        return (self.folder / "error.log").read_text(errors="replace")

    def reload(self, lua: str) -> None:
        """New rules; returns once the new workers have taken over."""
        (self.folder / "rules.lua").write_text(lua)
        self.process.send_signal(signal.SIGHUP)


@contextmanager
def run_nginx(
    folder: Path, rules: RuleSet, upstreams: Sequence[int], changes: dict[str, str] | None = None
) -> Iterator[Nginx]:
    """nginx before `upstreams`; `changes` maps texts of nginx.conf to what replaces them."""
    if shutil.which("nginx") is None or not MODULE.exists():
        pytest.fail("nginx with its Lua module is missing: run `make nginx`", pytrace=False)
    shutil.copytree(DEPLOY, folder, dirs_exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    servers = " ".join(f"server 127.0.0.1:{upstream} max_fails=0;" for upstream in upstreams)
    _rewrite(
        folder / "nginx.conf",
        {
            "listen 8080;": f"listen 127.0.0.1:{port};",
            "server 127.0.0.1:8000 max_fails=3 fail_timeout=5s;": servers,
            "worker_processes auto;": "worker_processes 1;\nuser root;"
            if folder.owner() == "root"
            else "worker_processes 1;",
            "/dev/stdout": f"{folder}/access.log",
            **(changes or {}),
        },
    )
    (folder / "rules.lua").write_text(compile_to_lua(rules, "test"))
    log = (folder / "error.log").open("wb")
    with (
        log,
        subprocess.Popen(
            ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"], stderr=log
        ) as process,
    ):
        nginx = Nginx(port, folder, process)
        try:
            _wait_until_listening(nginx)
            yield nginx
        finally:
            process.terminate()
            process.wait(timeout=10)


def _rewrite(conf: Path, changes: dict[str, str]) -> None:
    text = conf.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} should occur once in nginx.conf"
        text = text.replace(old, new)
    conf.write_text(text)


def _wait_until_listening(nginx: Nginx) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", nginx.port), timeout=1).close()
            return
        except OSError:
            assert nginx.process.poll() is None, nginx.log()
            assert time.monotonic() < deadline, nginx.log()
            time.sleep(0.02)
