"""API keys as text: `pdm_ID_SECRET`, of which only a digest is ever stored."""

import hashlib
import re
import secrets
import string

_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 10
# 62^43 > 2^256.
_SECRET_CHARS = 43
_FORM = re.compile(rf"pdm_([A-Za-z0-9]{{{_ID_CHARS}}})_[A-Za-z0-9]{{{_SECRET_CHARS}}}")


def make_key() -> tuple[str, str]:
    """A new id, and the key that holds it."""
    key_id = _random(_ID_CHARS)
    return key_id, f"pdm_{key_id}_{_random(_SECRET_CHARS)}"


def id_in(key: str) -> str | None:
    """The id that a key holds, which is no secret; None for what has not the form of a key."""
    form = _FORM.fullmatch(key)
    return None if form is None else form[1]


def digest(key: str) -> bytes:
    """What is stored. A fast hash will do: nobody can try out 256 random bits."""
    return hashlib.sha256(key.encode()).digest()


def _random(num_chars: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(num_chars))
