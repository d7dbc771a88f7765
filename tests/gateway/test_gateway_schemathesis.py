"""schemathesis asks what the document allows and what it forbids; answers must be true to it."""

import asyncio
import sys
from pathlib import Path

from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import run_gateway

# Any name is the one that is served, but for one that is no name.
NAMED = 'not: {path: model, equals: ""}'
RULES = f'[{{when: {{body: {{{NAMED}}}}}, rewrite_model: {{"*": {MODEL}}}}}]'

# A body may be right by the schema and still ask for something that is not there: a longer
# prompt than fits, an id outside the vocabulary. So refusals are no failures.
CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
        "allow_header_conformance",
    )
)


async def test_no_request_fails_and_every_answer_is_as_described(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"rules: {RULES}")
    async with run_gateway(mesh, rules_path=rules) as gateway:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json"),
            *("--checks", CHECKS, "--phases", "fuzzing", "--max-examples", "60"),
            *("--seed", "1", "--no-shrink", "--generation-database", "none", "--no-color"),
            *("--continue-on-failure", "--warnings", "off"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()

    assert process.returncode == 0, output.decode()
