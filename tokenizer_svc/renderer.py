"""Renders chats in child processes, so that a template can harm only its own request."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from tokenizer_svc.chat_template import ChatPrompt, InvalidTemplate, TemplateSpec
from tokenizer_svc.messages import ChatError
from tokenizer_svc.render_child import OK, read_frame, write_frames, write_prompt

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may take, and how many run at once for a model."""

    num_processes: int = 2
    timeout_s: float = 5.0
    memory_bytes: int = 1 << 30


class ChildLost(Exception):
    """The child ended without an answer."""


class TemplateRenderer:
    """Owns the children of one model; a lost child is replaced when it is next needed.

    Each model has its own, so that a bad template does not keep another model waiting.
    """

    def __init__(self, spec: TemplateSpec, limits: RenderLimits) -> None:
        """Start the children.

        Raises:
            InvalidTemplate: the template cannot be compiled.
        """
        self._spec = spec
        self._limits = limits
        self._children: SimpleQueue[_Child | None] = SimpleQueue()
        # A thread waits for each busy child.
        self._threads = ThreadPoolExecutor(limits.num_processes, "render")
        started: list[_Child] = []
        try:
            for _ in range(limits.num_processes):
                started.append(_Child(spec, limits))
                self._children.put(started[-1])
            for child in started:
                child.wait_until_ready()
        except BaseException:
            self.close()
            raise

    async def render(self, prompt: ChatPrompt) -> bytes:
        """The prompt as UTF-8, its control tokens in their secret spelling.

        Cancelling discards the result; the child goes on and stays usable.

        Raises:
            ChatError: the chat is malformed, or the template refuses it or takes
                too long or too much memory.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, prompt)

    def close(self) -> None:
        """End the children; one that still renders ends within its time limit."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._children.empty():
            if (child := self._children.get()) is not None:
                child.close()

    def _call(self, prompt: ChatPrompt) -> bytes:
        child = self._children.get()
        try:
            if child is not None and child.has_ended:
                # Between two chats, so that neither is to blame.
                logger.warning("a template process was lost", extra={"cause": "ended idle"})
                child.close()
                child = None
            if child is None:
                child = _Child(self._spec, self._limits)
                child.wait_until_ready()
            return child.render(prompt)
        except ChildLost as error:
            logger.warning("a template process was lost", extra={"cause": str(error)})
            if child is not None:
                child.close()
            child = None
            raise ChatError(f"the chat template {error}", "messages") from error
        finally:
            self._children.put(child)


class _Child:
    """One `render_child` process."""

    def __init__(self, spec: TemplateSpec, limits: RenderLimits) -> None:
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tokenizer_svc.render_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._replies = self._process.stdout
        settings = {"timeout_s": limits.timeout_s, "memory_bytes": limits.memory_bytes}
        write_frames(self._requests, json.dumps(settings).encode(), spec.to_json())

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self) -> None:
        try:
            status, text = self._read_reply()
        except ChildLost as error:
            raise InvalidTemplate(f"compiling {error}") from error
        if status != OK:
            raise InvalidTemplate(text.decode())

    def render(self, prompt: ChatPrompt) -> bytes:
        try:
            write_prompt(self._requests, prompt)
        except BrokenPipeError as error:
            raise ChildLost(self._cause()) from error
        status, text = self._read_reply()
        if status != OK:
            refusal = json.loads(text)
            raise ChatError(refusal["message"], refusal["param"])
        return text

    def close(self) -> None:
        try:
            self._requests.close()
        except BrokenPipeError:
            # Lost with half a request in the pipe's buffer; nothing is left to flush.
            logger.debug("a template process was lost while it was written to")
        self._replies.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_reply(self) -> tuple[bytes, bytes]:
        try:
            return read_frame(self._replies), read_frame(self._replies)
        except EOFError as error:
            raise ChildLost(self._cause()) from error

    def _cause(self) -> str:
        exit_status = self._process.wait()
        if exit_status == -signal.SIGALRM:
            return f"took longer than {self._limits.timeout_s:g} s"
        return f"ended its process with status {exit_status}"
