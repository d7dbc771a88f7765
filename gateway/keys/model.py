"""Who may call: keys, their groups, and what each of them is allowed."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from gateway.keys.secret import digest, make_key
from gateway.rules.paths import Glob

DEFAULT_GROUP = "default"

# Names stand in logs, in headers of rules files and in the keys of Redis.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class KeyBookError(ValueError):
    """A change that the keys do not allow, or keys that nobody can read."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Model):
    """None is no limit."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrency: Annotated[int, Field(ge=1)] | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in self.model_dump().values())


class KeyGroup(_Model):
    """What the keys of a group share: limits for all together, and the models they may use."""

    limits: Limits = Limits()
    # Names or globs; None is all.
    models: tuple[str, ...] | None = None


class ApiKey(_Model):
    """One key without its secret. Revoked ones stay, so that logs can be understood."""

    id: str
    name: Name
    group: Name = DEFAULT_GROUP
    # May see what concerns the whole mesh: the dashboard and /metrics.
    is_admin: bool = False
    limits: Limits = Limits()
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: datetime
    # From then on nobody is let in with it; None is never.
    expires_at: datetime | None = None
    revoked_at: datetime | None = None

    def is_in_force(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyBook(_Model):
    """All keys and groups: one document, wherever it is kept."""

    version: Literal[1] = 1
    # Grows with every change.
    revision: int = 0
    keys: tuple[ApiKey, ...] = ()
    groups: dict[Name, KeyGroup] = Field(default_factory=dict)

    def with_key(
        self,
        name: str,
        group: str,
        *,
        is_admin: bool,
        limits: Limits,
        lifetime: timedelta | None = None,
    ) -> tuple[Self, str]:
        """A new key; its secret is in the second value and nowhere else."""
        now = _now()
        if any(key.name == name and key.is_in_force(now) for key in self.keys):
            raise KeyBookError(f"there is a key {name!r} already")
        key_id, secret = make_key()
        key = ApiKey(
            id=key_id,
            name=name,
            group=group,
            is_admin=is_admin,
            limits=limits,
            sha256=digest(secret).hex(),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        return self._changed(keys=(*self.keys, key)), secret

    def without_key(self, name_or_id: str) -> Self:
        """The key is revoked; of several with a name the last, for the others have expired."""
        found = next(
            (
                key
                for key in reversed(self.keys)
                if name_or_id in (key.name, key.id) and key.revoked_at is None
            ),
            None,
        )
        if found is None:
            raise KeyBookError(f"there is no key {name_or_id!r}")
        revoked = found.model_copy(update={"revoked_at": _now()})
        return self._changed(keys=tuple(revoked if key is found else key for key in self.keys))

    def with_group(self, name: str, group: KeyGroup) -> Self:
        """The group is made, or changed."""
        return self._changed(groups={**self.groups, name: group})

    def callers(self) -> "dict[str, tuple[bytes, Caller]]":
        """By id: the digest of each key that counts, and who has it."""
        return {
            key.id: (bytes.fromhex(key.sha256), self._caller(key))
            for key in self.keys
            if key.revoked_at is None
        }

    def _caller(self, key: ApiKey) -> "Caller":
        group = self.groups.get(key.group, KeyGroup())
        models = None if group.models is None else tuple(map(Glob.parse, group.models))
        return Caller(
            key_id=key.id,
            key=key.name,
            group=key.group,
            is_admin=key.is_admin,
            expires_at=key.expires_at,
            models=models,
            key_limits=key.limits,
            group_limits=group.limits,
        )

    def _changed(self, **values: object) -> Self:
        # Anew rather than `model_copy`, which does not validate.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **values, "revision": self.revision + 1})


@dataclass(frozen=True)
class Caller:
    """Who sent a request, and what they may do."""

    key_id: str = ""
    # The key's name; empty for a gateway without keys.
    key: str = ""
    group: str = ""
    is_admin: bool = False
    expires_at: datetime | None = None
    models: tuple[Glob, ...] | None = None
    key_limits: Limits = field(default_factory=Limits)
    group_limits: Limits = field(default_factory=Limits)

    def may_use(self, model: str) -> bool:
        return self.models is None or any(glob.matches(model) for glob in self.models)


ANYONE = Caller()


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
