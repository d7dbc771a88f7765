"""Where the KV of prompts came from: computed here, cached here, or from elsewhere."""

from dataclasses import dataclass

from engine.request import Request


@dataclass
class PromptSources:
    """Counts tokens. A prompt is counted once, when its first token is sampled here, so that its
    three parts add up to its length whatever was preempted or failed on the way."""

    num_computed: int = 0
    num_cached: int = 0
    num_external: int = 0
    num_external_queries: int = 0
    num_external_hits: int = 0

    def came_from_elsewhere(self, request: Request, num_tokens: int) -> None:
        """KV that another worker or a colder tier had is in the request's blocks."""
        request.num_external_tokens += num_tokens
        self.num_external_hits += num_tokens

    def count(self, request: Request) -> None:
        """The whole prompt is computed."""
        num_prompt = request.num_prompt_tokens
        # To a caller what a colder tier has is cached too.
        from_tiers = request.num_external_tokens if request.tiered_kv else 0
        num_cached = max(0, (request.num_cached_tokens or 0) - from_tiers)
        num_external = min(request.num_external_tokens, num_prompt - num_cached)
        self.num_cached += num_cached
        self.num_external += num_external
        self.num_computed += num_prompt - num_cached - num_external
