"""Events are the same however they are cut into reads, and carry the read's time."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.bench.sse import SseDecoder, SseEvent

STREAM = (
    b": hello\n\n"
    b"data: one\n\n"
    b"event: x\r\ndata:two\r\ndata: three\r\n\r\n"
    b"data: four\r\rid: 7\n\n"
    b"data\n\n"
    b"data: \xc3\xa9\n\n"
)
EVENTS = [b"one", b"two\nthree", b"four", "é".encode()]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_into_reads_gives_the_same_events(cuts: list[int]) -> None:
    decoder = SseDecoder()
    ends = [*sorted(cuts), len(STREAM)]

    events: list[SseEvent] = []
    start = 0
    for number, end in enumerate(ends):
        events += decoder.feed(STREAM[start:end], float(number))
        start = end

    assert [event.data for event in events] == EVENTS


def test_events_of_one_read_share_its_time() -> None:
    decoder = SseDecoder()

    first = decoder.feed(b"data: a\n\ndata: b\n\ndata: c", 1.0)
    second = decoder.feed(b"\n\n", 2.0)

    assert first == [SseEvent(b"a", 1.0), SseEvent(b"b", 1.0)]
    assert second == [SseEvent(b"c", 2.0)]


def test_an_unfinished_event_is_no_event() -> None:
    assert SseDecoder().feed(b"data: a\n", 1.0) == []


def test_a_crlf_split_between_two_reads_ends_one_line() -> None:
    decoder = SseDecoder()

    decoder.feed(b"data: a\r", 1.0)
    events = decoder.feed(b"\ndata: b\r\n\r\n", 2.0)

    assert [event.data for event in events] == [b"a\nb"]
