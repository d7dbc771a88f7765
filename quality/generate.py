"""Token ids that an engine makes of prompts, many at a time."""

from collections.abc import Mapping, Sequence

from engine.engine import Engine
from engine.request import Request, RequestFailed, TokenOutput
from engine.sampling import SamplingParams


class GenerationFailed(Exception):
    """The engine gave a request up."""


def generate(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    params: SamplingParams,
    *,
    at_once: int = 16,
) -> dict[str, list[int]]:
    """Run all prompts, at most `at_once` of them at the same time.

    Raises:
        GenerationFailed: a request has no answer.
    """
    waiting = list(prompts)
    running: set[str] = set()
    produced: dict[str, list[int]] = {name: [] for name in prompts}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            engine.add_request(Request(name, list(prompts[name]), params))
            running.add(name)
        for event in engine.step():
            match event:
                case TokenOutput():
                    produced[event.request_id].append(event.token_id)
                    if event.is_last:
                        running.remove(event.request_id)
                case RequestFailed(name, error):
                    raise GenerationFailed(f"{name}: {error}") from error
    return produced
