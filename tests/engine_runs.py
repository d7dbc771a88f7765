"""Whole prompts through an engine, with what is needed to compare runs bit for bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig
from engine.engine import Engine, build_engine
from engine.request import Request, RequestFailed, TokenOutput
from engine.sampling import SamplingParams
from mesh.block_keys import BlockKeys, layout_fingerprint


@dataclass(frozen=True)
class Continuation:
    """What an engine made of a prompt. Equal ones come from equal logits, to the last bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int = field(compare=False)


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[Engine]:
    engine = build_engine(config, lambda fields: BlockKeys(layout_fingerprint(fields)))
    try:
        yield engine
    finally:
        engine.close()


def run(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    params: Callable[[str], SamplingParams],
    at_once: int = 16,
) -> dict[str, Continuation]:
    """Run all prompts, at most `at_once` of them at the same time."""
    waiting = list(prompts)
    running: set[str] = set()
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running.add(name)
            sampling = replace(params(name), num_logprobs=0, ignore_eos=True)
            engine.add_request(Request(name, list(prompts[name]), sampling))
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, TokenOutput):
                outputs[event.request_id].append(event)
                if event.is_last:
                    running.remove(event.request_id)
    return {name: _continuation(each) for name, each in outputs.items()}


def token_ids(continuations: Mapping[str, Continuation]) -> dict[str, tuple[int, ...]]:
    return {name: each.token_ids for name, each in continuations.items()}


def _continuation(outputs: Sequence[TokenOutput]) -> Continuation:
    logprobs = [output.logprobs for output in outputs]
    return Continuation(
        tuple(output.token_id for output in outputs),
        tuple(each.logprob for each in logprobs if each is not None),
        outputs[-1].num_cached_tokens,
    )
