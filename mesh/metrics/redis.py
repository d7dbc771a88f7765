"""What everyone who uses Redis measures."""

from mesh.instruments import Counter, Values

REDIS_ERRORS = Counter(
    "pdmesh.redis.errors",
    "{command}",
    "Redis commands that failed; the mesh went on without them",
    {
        "kind": Values(
            "circuit_open",
            "connection",
            "loading",
            "moved",
            "noauth",
            "out_of_memory",
            "readonly",
            "timeout",
        )
    },
    service="scheduler, worker",
)
