"""schemathesis: asks what the document allows and what it forbids."""

import asyncio
import sys
from pathlib import Path

# A body may be right by the schema and still ask for something that is not there: a longer
# prompt than fits, an id outside the vocabulary. So refusals are no failures.
_CHECKS = ",".join(
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


def rules_that_name(model: str) -> str:
    """A rules file with which any name is the one that is served, but for one that is no name;
    answers stay short, however long the window is."""
    named = 'not: {path: model, equals: ""}'
    return (
        f'rules: [{{when: {{body: {{{named}}}}}, rewrite_model: {{"*": {model}}}}},'
        " {default: {max_tokens: 8},"
        " clamp: {max_tokens: {max: 8}, max_completion_tokens: {max: 8}}}]"
    )


async def attack(url: str, folder: Path, *, max_examples: int) -> None:
    """Send so many requests to each operation; raise unless every answer is as described."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", _CHECKS, "--phases", "fuzzing", "--max-examples", str(max_examples)),
        *("--seed", "1", "--no-shrink", "--generation-database", "none", "--no-color"),
        *("--continue-on-failure", "--warnings", "off"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
