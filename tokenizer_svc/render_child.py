"""A process that renders one model's chat template; its parent may lose it at any time.

A template is code from the internet. In a process of its own it can neither take
the service's memory nor, since the kernel ends it at the time limit, its time.
"""

import json
import resource
import signal
import struct
import sys
from functools import partial
from typing import IO

from tokenizer_svc.chat_template import ChatPrompt, ChatTemplate, InvalidTemplate, TemplateSpec
from tokenizer_svc.messages import ChatError

OK = b"\0"
REFUSED = b"\1"

_LENGTH = struct.Struct("<I")


def write_frames(pipe: IO[bytes], *frames: bytes) -> None:
    """Write frames, each with its length before it, at once."""
    pipe.write(b"".join(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame)))
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes:
    """Read one frame; EOFError when the other end is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(pipe, _LENGTH.size))
    return _read_exactly(pipe, length)


def _read_exactly(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) != length:
        raise EOFError
    return data


def write_prompt(pipe: IO[bytes], prompt: ChatPrompt) -> None:
    """Send a chat to render."""
    options = [prompt.add_generation_prompt, prompt.continue_final_message]
    write_frames(
        pipe,
        prompt.messages_json.encode(),
        prompt.tools_json.encode(),
        prompt.template_kwargs_json.encode(),
        json.dumps(options).encode(),
    )


def _read_prompt(pipe: IO[bytes]) -> ChatPrompt:
    messages, tools, kwargs, options = (read_frame(pipe) for _ in range(4))
    return ChatPrompt(messages.decode(), tools.decode(), kwargs.decode(), *json.loads(options))


def main(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer the parent's spec, then each of its chats, until it closes the pipe."""
    # Ctrl-C reaches the whole terminal; when to end is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits = json.loads(read_frame(requests))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
    # The signal is not handled: it ends the process, also inside a long call of C code.
    start_timer = partial(signal.setitimer, signal.ITIMER_REAL, limits["timeout_s"])
    stop_timer = partial(signal.setitimer, signal.ITIMER_REAL, 0)
    spec = TemplateSpec.from_json(read_frame(requests))
    start_timer()
    try:
        # Jinja computes constant expressions now, however large.
        template = ChatTemplate(spec)
    except InvalidTemplate as error:
        write_frames(replies, REFUSED, str(error).encode())
        return
    stop_timer()
    write_frames(replies, OK, b"")
    while True:
        try:
            prompt = _read_prompt(requests)
        except EOFError:
            return
        start_timer()
        try:
            reply = (OK, template.render(prompt).encode())
        except ChatError as error:
            refusal = json.dumps({"message": str(error), "param": error.param})
            reply = (REFUSED, refusal.encode())
        stop_timer()
        write_frames(replies, *reply)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
