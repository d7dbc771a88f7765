"""The loads on which servers are compared: W1 chat, W2 agent, W3 streams, W3L with long prompts."""

from dataclasses import dataclass

from mesh.bench.prompts import Lengths, Vocabulary
from mesh.bench.run import ClosedLoop, Load
from mesh.bench.workloads import Workload, agent, chat, interference

W3_STREAMS = 4
DEFAULT_POINTS = ("W1:1", "W1:8", "W1:16", "W2:8", "W3", "W3L")


@dataclass(frozen=True)
class BenchPoint:
    """A workload at a concurrency."""

    workload: str
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> "BenchPoint":
        """Read W1:8, W2:8, W3 or W3L."""
        workload, _, number = text.partition(":")
        if workload in ("W3", "W3L") and not number:
            return cls(workload, W3_STREAMS)
        if workload not in ("W1", "W2") or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{text!r}: expected W1:N, W2:N, W3 or W3L")
        return cls(workload, int(number))

    @property
    def is_interference(self) -> bool:
        return self.workload in ("W3", "W3L")

    def __str__(self) -> str:
        return self.workload if self.is_interference else f"{self.workload}:{self.concurrency}"

    def load(self, vocabulary: Vocabulary) -> Load:
        """What to send: token ids, so that every server computes the same."""
        return Load(str(self), self._workload(vocabulary), ClosedLoop(self.concurrency))

    def _workload(self, vocabulary: Vocabulary) -> Workload:
        def exactly(num_tokens: int) -> Lengths:
            return Lengths(num_tokens, num_tokens)

        match self.workload:
            case "W1":
                return chat(vocabulary, "completions", exactly(64), exactly(128))
            case "W2":
                return agent(vocabulary, "completions", 1500, exactly(100), exactly(64))
        calm, disturbed = interference(
            vocabulary, "completions", exactly(64), exactly(256), exactly(4000)
        )
        return calm if self.workload == "W3" else disturbed
