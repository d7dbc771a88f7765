"""Keys for the gateways of tests."""

from datetime import timedelta
from pathlib import Path

from gateway.keys.model import KeyBook, KeyGroup, Limits
from gateway.keys.stores import FileStore

NO_LIMITS = Limits()


def add_key(
    path: Path,
    name: str,
    group: str = "default",
    *,
    is_admin: bool = False,
    limits: Limits = NO_LIMITS,
    lifetime: timedelta | None = None,
) -> str:
    """A new key in the file at `path`."""
    secrets: list[str] = []

    def change(book: KeyBook) -> KeyBook:
        changed, secret = book.with_key(
            name, group, is_admin=is_admin, limits=limits, lifetime=lifetime
        )
        secrets.append(secret)
        return changed

    FileStore(path).change(change)
    return secrets[0]


def set_group(
    path: Path, name: str, limits: Limits = NO_LIMITS, models: tuple[str, ...] | None = None
) -> None:
    FileStore(path).change(
        lambda book: book.with_group(name, KeyGroup(limits=limits, models=models))
    )


def revoke(path: Path, name: str) -> None:
    FileStore(path).change(lambda book: book.without_key(name))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
