"""The lint names the first token where the prompts of a key stop sharing a prefix."""

import json
from pathlib import Path

import httpx
import pytest

from gateway.dashboard.prefixes import MAX_KEYS, MAX_PROMPTS, MAX_TOKENS, PromptPrefixes
from mesh.diagnosis import diagnose_prefixes
from tests.gateway.fakes import FakeMesh
from tests.gateway.keyed import add_key, bearer
from tests.gateway.running import chat, run_gateway

TEMPLATE = list(range(100, 200))


def prefixes(prompts: list[list[int]], key: str = "key") -> PromptPrefixes:
    made = PromptPrefixes()
    for prompt in prompts:
        made.add(key, "m", prompt)
    return made


def test_the_token_is_named_where_a_time_in_the_template_ends_what_is_shared() -> None:
    prompts = [[*TEMPLATE[:12], 7000 + number, *TEMPLATE[12:], number] for number in range(8)]

    [found] = prefixes(prompts).divergences()

    assert (found.key, found.model, found.num_prompts) == ("key", "m", 8)
    assert found.num_shared_tokens == 12
    assert found.shared_token_ids == tuple(TEMPLATE[9:12])
    assert set(found.next_token_ids) <= {7000 + number for number in range(8)}
    # What a cache cannot find, because of one token before it.
    assert found.num_same_after == len(TEMPLATE) - 12
    assert found.num_prompt_tokens == len(TEMPLATE) + 2


def test_a_few_strangers_do_not_hide_what_most_prompts_share() -> None:
    prompts = [[*TEMPLATE, number] for number in range(9)] + [[1, 2, 3], [4]]

    [found] = prefixes(prompts).divergences()

    assert found.num_shared_tokens == len(TEMPLATE)
    assert found.num_same_after == 0


@pytest.mark.parametrize("prompts", [[TEMPLATE] * 6, [[1]] * 5, [[number] for number in range(6)]])
def test_equal_prompts_and_prompts_without_anything_in_common_have_an_end_too(
    prompts: list[list[int]],
) -> None:
    [found] = prefixes(prompts).divergences()

    is_equal = prompts[0] == prompts[1]
    assert found.num_shared_tokens == (len(prompts[0]) if is_equal else 0)
    assert bool(found.next_token_ids) != is_equal


def test_keys_prompts_and_tokens_that_are_kept_are_bounded() -> None:
    made = PromptPrefixes()
    for number in range(2 * MAX_KEYS):
        for _ in range(MAX_PROMPTS + 5):
            made.add(f"key {number}", "m", [5] * (MAX_TOKENS + 100))

    found = made.divergences()

    assert len(found) == MAX_KEYS
    assert {one.num_prompts for one in found} == {MAX_PROMPTS}
    assert found[0].num_shared_tokens == MAX_TOKENS
    assert found[0].num_prompt_tokens == MAX_TOKENS + 100


async def test_the_gateway_tells_the_token_by_its_text_to_whoever_has_the_key(
    tmp_path: Path,
) -> None:
    keys_path = tmp_path / "keys.yaml"
    callers = {name: add_key(keys_path, name) for name in ("ada", "guest")}
    admin = add_key(keys_path, "root", is_admin=True)
    async with (
        FakeMesh() as mesh,
        run_gateway(mesh, keys_path=keys_path) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        for number in range(5):
            said = f"now it is {number}, and the rest is always the same. secret {number}"
            await http.post("/v1/chat/completions", json=chat(said), headers=bearer(callers["ada"]))
        # Another key's prompts are no part of it.
        await http.post("/v1/chat/completions", json=chat(), headers=bearer(callers["guest"]))
        refused = await http.get("/dashboard/api/prefixes", headers=bearer(callers["ada"]))
        response = await http.get("/dashboard/api/prefixes", headers=bearer(admin))

    assert refused.status_code == 401
    [found] = response.json()["prefixes"]
    assert (found["key"], found["num_prompts"]) == ("ada", 5)
    assert found["num_shared_tokens"] == len("user: now it is ")
    assert found["shared_text"] == "is "
    assert sorted(found["next_texts"]) == ["0", "1", "2"]
    assert "secret" not in json.dumps(found)
    [finding] = diagnose_prefixes(response.json()["prefixes"])
    assert finding.stage == "cache"
    assert "token 17" in finding.what
    assert "'0'" in finding.what


@pytest.mark.parametrize(
    ("num_shared_tokens", "num_same_after", "is_told"),
    [(16, 200, True), (600, 8, False), (0, 0, False)],
)
def test_only_a_token_that_keeps_much_from_the_cache_is_a_finding(
    num_shared_tokens: int, num_same_after: int, is_told: bool
) -> None:
    prefix = {
        "key": "",
        "num_prompts": 9,
        "num_prompt_tokens": 700,
        "num_shared_tokens": num_shared_tokens,
        "num_same_after": num_same_after,
        "shared_text": "at ",
        "next_texts": ["10", "11"],
    }

    assert bool(diagnose_prefixes([prefix])) is is_told
