"""Whole prompts through an engine, with what is needed to compare runs bit for bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.request import RemoteKvWanted, Request, RequestFailed, TokenOutput
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
    num_logprobs: int | None = 0,
) -> dict[str, Continuation]:
    """Run all prompts, at most `at_once` of them at the same time.

    Without log-probabilities the engine may guess tokens.
    """
    waiting = list(prompts)
    running: set[str] = set()
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running.add(name)
            engine.add_request(_request(name, prompts, params, num_logprobs))
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, TokenOutput):
                outputs[event.request_id].append(event)
                if event.is_last:
                    running.remove(event.request_id)
    return {name: _continuation(each) for name, each in outputs.items()}


def hand_over(
    prefill: Engine,
    decode: Engine,
    prompts: Mapping[str, Sequence[int]],
    params: Callable[[str], SamplingParams],
) -> dict[str, Continuation]:
    """Compute prompts and first tokens in one engine, and all others in another.

    The second gets the first one's blocks, byte for byte, as a pull gives them to it. All prompts
    run at the same time.
    """
    outputs: dict[str, list[TokenOutput]] = {}
    for name in prompts:
        prefill.add_request(_request(name, prompts, params, hold_blocks=True))
    while len(outputs) < len(prompts):
        for event in prefill.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, TokenOutput):
                outputs[event.request_id] = [event]
    for name, [first] in outputs.items():
        request = _request(name, prompts, params, remote_kv=True)
        request.output_token_ids.append(first.token_id)
        decode.add_request(request)
    source, target = (_memory(engine) for engine in (prefill, decode))
    num_running = len(prompts)
    while num_running:
        for event in decode.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, RemoteKvWanted):
                held = outputs[event.request_id][0].held_block_ids[event.first_block_index :]
                target[list(event.block_ids)] = source[list(held)]
                assert decode.remote_kv_done(event.request_id)
                prefill.release_hold(event.request_id)
            if isinstance(event, TokenOutput):
                outputs[event.request_id].append(event)
                num_running -= event.is_last
    return {name: _continuation(outputs[name]) for name in prompts}


def token_ids(continuations: Mapping[str, Continuation]) -> dict[str, tuple[int, ...]]:
    return {name: each.token_ids for name, each in continuations.items()}


def _request(
    name: str,
    prompts: Mapping[str, Sequence[int]],
    params: Callable[[str], SamplingParams],
    num_logprobs: int | None = 0,
    **values: bool,
) -> Request:
    sampling = replace(params(name), num_logprobs=num_logprobs, ignore_eos=True)
    return Request(name, list(prompts[name]), sampling, **values)  # type: ignore[arg-type]


def _memory(engine: Engine) -> npt.NDArray[np.uint8]:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return runner._kv_cache.memory


def _continuation(outputs: Sequence[TokenOutput]) -> Continuation:
    logprobs = [output.logprobs for output in outputs]
    return Continuation(
        tuple(output.token_id for output in outputs),
        tuple(each.logprob for each in logprobs if each is not None),
        outputs[-1].num_cached_tokens,
    )
