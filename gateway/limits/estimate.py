"""How many tokens a request will use, before anyone has counted them."""

from gateway.generation import ChatPrompt, GenerationRequest, Prompt, TextPrompt

# English text in common vocabularies; too little for other scripts, which is settled later.
_BYTES_PER_TOKEN = 4


def estimate_tokens(request: GenerationRequest, default_output_tokens: int) -> int:
    """Prompts by their length, answers by the limit that the client set."""
    output = request.max_tokens or request.default_max_tokens or default_output_tokens
    num_prompt = sum(map(_prompt_tokens, request.prompts))
    return num_prompt + output * request.n * len(request.prompts)


def _prompt_tokens(prompt: Prompt) -> int:
    if isinstance(prompt, TextPrompt):
        return _of_text(prompt.text)
    if isinstance(prompt, ChatPrompt):
        return _of_text(prompt.chat.messages_json) + _of_text(prompt.chat.tools_json)
    return len(prompt.token_ids)


def _of_text(text: str) -> int:
    # Characters rather than bytes would be half of it for Cyrillic, a third for Chinese.
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    return -(-num_bytes // _BYTES_PER_TOKEN)
