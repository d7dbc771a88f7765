"""Whatever schemathesis asks, nothing fails, and answers are true to the document."""

from pathlib import Path

from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import run_gateway
from tests.schemathesis_run import attack, rules_that_name


async def test_no_request_fails_and_every_answer_is_as_described(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(rules_that_name(MODEL))
    async with run_gateway(mesh, rules_path=rules) as gateway:
        await attack(gateway.url, tmp_path, max_examples=40)
