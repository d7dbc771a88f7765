"""Where the prompts of one key stop sharing a prefix: in front of that, a cache can help."""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

MAX_KEYS = 64
# Of one key, the last ones.
MAX_PROMPTS = 32
# Nobody's template is longer, and a prompt costs four bytes a token.
MAX_TOKENS = 2048
# Fewer prompts than these show no habit.
MIN_PROMPTS = 4
_NUM_SHOWN = 3


@dataclass(frozen=True)
class Divergence:
    """How far most prompts of a key are the same."""

    key: str
    model: str
    num_prompts: int
    # Tokens of the prompt in the middle, by length.
    num_prompt_tokens: int
    # Tokens that more than half of the prompts share: the next one differs.
    num_shared_tokens: int
    # After that one, how many are the same again in all who shared, at their places.
    num_same_after: int
    # The last ones that are shared, and those that come next, the most frequent first.
    shared_token_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]


class PromptPrefixes:
    """The beginnings of the last prompts of each key, in bounded memory; they go nowhere else."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[str, str], deque[tuple[int, array[int]]]] = OrderedDict()

    def add(self, key: str, model: str, token_ids: Sequence[int]) -> None:
        """A prompt was asked under this key."""
        prompts = self._prompts.setdefault((key, model), deque(maxlen=MAX_PROMPTS))
        self._prompts.move_to_end((key, model))
        prompts.append((len(token_ids), array("I", token_ids[:MAX_TOKENS])))
        if len(self._prompts) > MAX_KEYS:
            self._prompts.popitem(last=False)

    def divergences(self) -> list[Divergence]:
        """One for each key that has asked often enough, the busiest last."""
        return [
            _divergence(key, model, prompts)
            for (key, model), prompts in self._prompts.items()
            if len(prompts) >= MIN_PROMPTS
        ]


def _divergence(key: str, model: str, prompts: Sequence[tuple[int, "array[int]"]]) -> Divergence:
    lengths = sorted(length for length, _ in prompts)
    group = [beginning for _, beginning in prompts]
    position = 0
    while True:
        counts = Counter(one[position] for one in group if len(one) > position)
        token_id, num_equal = counts.most_common(1)[0] if counts else (0, 0)
        if num_equal * 2 <= len(prompts):
            break
        group = [one for one in group if len(one) > position and one[position] == token_id]
        position += 1
    return Divergence(
        key=key,
        model=model,
        num_prompts=len(prompts),
        num_prompt_tokens=lengths[len(lengths) // 2],
        num_shared_tokens=position,
        num_same_after=_num_same(group, position + 1),
        shared_token_ids=tuple(group[0][max(0, position - _NUM_SHOWN) : position]),
        next_token_ids=tuple(one for one, _ in counts.most_common(_NUM_SHOWN)),
    )


def _num_same(prompts: Sequence["array[int]"], start: int) -> int:
    """Positions from `start` on where all prompts have the same token."""
    columns = zip(*(one[start:] for one in prompts), strict=False)
    return sum(len(set(column)) == 1 for column in columns)
