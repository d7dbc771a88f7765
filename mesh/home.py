"""Where a mesh on one machine keeps its files, and the record of what runs."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class HomeInUse(Exception):
    """Another supervisor runs in this home."""


@dataclass(frozen=True)
class ServiceRecord:
    """One supervised process, as written to the state file."""

    name: str
    role: str
    worker_id: str
    pid: int | None
    # Start time of `pid` since boot, so that a reused pid is not mistaken for it.
    pid_created_at: float | None
    address: str
    # "starting", "running", "restarting", "draining" or "stopped".
    state: str
    restarts: int
    metrics_address: str | None = None


@dataclass(frozen=True)
class MeshState:
    """What a supervisor runs; readable while it is alive and after its death."""

    pid: int
    pid_created_at: float
    ready: bool
    url: str
    grpc_address: str
    model: str
    services: tuple[ServiceRecord, ...]
    # Where the supervisor takes orders.
    control_address: str = ""
    # Within which it ends when it is told to, services and all.
    stop_timeout_s: float = 60.0


@dataclass(frozen=True)
class Home:
    """The folder `$PDMESH_HOME` and what lies in it."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def state_file(self) -> Path:
        return self.run / "state.json"

    @property
    def topology_file(self) -> Path:
        return self.run / "topology.yaml"

    @property
    def keys_file(self) -> Path:
        """API keys of the gateway, without their secrets."""
        return self.path / "keys.json"

    @property
    def kv(self) -> Path:
        """KV blocks that outlive the mesh."""
        return self.path / "kv"

    @property
    def segment_prefix(self) -> str:
        """Begins the name of every shared-memory file of this home, and of no other."""
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        return f"pdmesh-{digest}-"

    def segments(self) -> list[Path]:
        """Shared-memory files that processes of this home have left or use."""
        return sorted(SHARED_MEMORY.glob(f"{self.segment_prefix}*"))

    def read_state(self) -> MeshState | None:
        """None where there is none, or one that a machine lost with its power, or that another
        version of pdmesh wrote."""
        try:
            data = json.loads(self.state_file.read_text(errors="replace"))
            services = tuple(ServiceRecord(**service) for service in data.pop("services"))
            return MeshState(**data, services=services)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("unreadable state file", extra={"error": repr(error)})
            return None

    def write_state(self, state: MeshState) -> None:
        """Replace the state file in one step, so that no reader sees half of it."""
        partial = self.state_file.with_suffix(".tmp")
        partial.write_text(json.dumps(asdict(state), indent=2))
        partial.replace(self.state_file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one supervisor of this home.

        Raises:
            HomeInUse: another process holds the lock; the kernel frees it when
                that process ends, however it ends.
        """
        self.run.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomeInUse(
                    f"a mesh already runs in {self.path}; stop it with `pdmesh down`"
                ) from None
            yield
        finally:
            os.close(descriptor)
