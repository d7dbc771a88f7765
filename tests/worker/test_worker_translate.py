"""Protobuf to engine and back."""

from collections.abc import Iterator

import engine.loop  # noqa: F401  every module that might define an EngineError
from engine.reports import EngineStats
from engine.request import EngineError, EngineStopped, InvalidParameter
from mesh.errors import InternalError
from mesh.v1 import types_pb2
from worker.translate import _MESH_ERRORS, to_engine_load, to_mesh_error, to_sampling_params


def subclasses(kind: type[EngineError]) -> Iterator[type[EngineError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_every_engine_error_has_a_meaning_for_the_mesh() -> None:
    own = {one for one in subclasses(EngineError) if one.__module__.startswith("engine.")}

    assert own == {*_MESH_ERRORS, EngineStopped}


def test_unknown_engine_error_is_a_bug_and_says_so() -> None:
    assert type(to_mesh_error(EngineError("new"))) is InternalError


def test_parameter_is_named() -> None:
    assert to_mesh_error(InvalidParameter("top_p", "out of range")).param == "top_p"


def test_every_field_of_the_engines_load_is_carried() -> None:
    load = to_engine_load(EngineStats(*range(1, 13)))

    assert {field.name: value for field, value in load.ListFields()} == dict(
        zip(types_pb2.EngineLoad.DESCRIPTOR.fields_by_name, range(1, 12), strict=True)
    )


def test_every_sampling_field_reaches_the_engine() -> None:
    given = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": -(2**63),
        "min_tokens": 2,
        "ignore_eos": True,
        "num_logprobs": 3,
        "num_prompt_logprobs": 0,
    }
    message = types_pb2.SamplingParams(**given)  # type: ignore[arg-type]
    missing = {"stop_token_ids", "logit_bias", "bad_words"}

    params = to_sampling_params(message)

    assert {name: getattr(params, name) for name in given} == given
    assert set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == set(given) | missing
