"""Text arrives as the whole would be decoded, cut at characters only, and without any part of a stop string."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.detokenizer import ByteDecoder, Detokenizer, StopFilter, WindowDecoder

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def cut(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Return pieces of 0..size, some perhaps empty."""
    borders = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    return list(zip([0, *borders], [*borders, size], strict=True))


@st.composite
def bytes_in_pieces(draw: st.DrawFn) -> tuple[bytes, list[list[int]]]:
    data = draw(st.one_of(st.binary(max_size=30), st.text(max_size=10).map(str.encode)))
    return data, [list(data[begin:end]) for begin, end in cut(draw, len(data))]


def byte_decoder() -> ByteDecoder:
    return ByteDecoder(lambda token_id: bytes([token_id]))


def fallback_decode(token_ids: Sequence[int]) -> str:
    """Decode as sentencepiece vocabularies do: byte tokens below 256, words with their space before them above."""
    out, run = list[str](), bytearray()
    for token_id in [*token_ids, -1]:
        if 0 <= token_id < 256:
            run.append(token_id)
            continue
        try:
            out.append(run.decode())
        except UnicodeDecodeError:
            out.append(UNFINISHED * len(run))
        run.clear()
        if token_id >= 0:
            out.append(f" w{token_id - 256}")
    return "".join(out).removeprefix(" ")


@given(bytes_in_pieces())
def test_bytes_in_any_pieces_give_the_text_of_all_bytes(case: tuple[bytes, list[list[int]]]) -> None:
    data, pieces = case
    decoder = byte_decoder()

    out = [decoder.push(piece) for piece in pieces] + [decoder.finish()]

    assert "".join(out) == data.decode(errors="replace")


@given(st.text(max_size=20))
def test_no_piece_holds_half_a_character(text: str) -> None:
    decoder = byte_decoder()

    out = [decoder.push([byte]) for byte in text.encode()]

    assert "".join(out) == text
    assert all(len(piece.encode()) in (0, 1, 2, 3, 4) for piece in out)
    assert decoder.finish() == ""


@st.composite
def fallback_tokens(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    words = st.integers(256, 300).map(lambda token_id: [token_id])
    characters = st.characters(min_codepoint=0x80, exclude_categories=["Cs"], exclude_characters=UNFINISHED).map(
        lambda text: list(text.encode())
    )
    token_ids = [token_id for part in draw(st.lists(st.one_of(words, characters), max_size=12)) for token_id in part]
    return token_ids, [token_ids[begin:end] for begin, end in cut(draw, len(token_ids))]


@given(fallback_tokens())
def test_words_and_byte_tokens_in_any_pieces_give_the_text_of_all(case: tuple[list[int], list[list[int]]]) -> None:
    token_ids, pieces = case
    decoder = WindowDecoder(fallback_decode, lambda token_id: False)

    out = [decoder.push(piece) for piece in pieces]

    whole = fallback_decode(token_ids)
    if UNFINISHED not in whole:
        assert "".join(out) == whole
    assert "".join(out) + decoder.finish() == whole


def test_a_special_token_does_not_take_the_next_words_space() -> None:
    decoder = WindowDecoder(lambda ids: fallback_decode([i for i in ids if i != 999]), lambda token_id: token_id == 999)

    out = decoder.push([256, 999, 257]) + decoder.finish()

    assert out == "w0 w1"


def test_a_token_without_text_does_not_take_the_next_words_space() -> None:
    decoder = WindowDecoder(lambda ids: fallback_decode([i for i in ids if i != 999]), lambda token_id: False)

    assert decoder.push([256]) + decoder.push([999]) + decoder.push([257]) == "w0 w1"


def test_bytes_that_never_become_a_character_are_let_go_in_linear_time() -> None:
    calls = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal calls
        calls += len(token_ids)
        return fallback_decode(token_ids)

    decoder = WindowDecoder(decode, lambda token_id: False)
    out = decoder.push([0xFF] * 500)

    assert len(out) >= 490
    assert out + decoder.finish() == UNFINISHED * 500
    assert calls < 500 * 20


def test_a_character_after_broken_bytes_is_whole() -> None:
    decoder = WindowDecoder(fallback_decode, lambda token_id: False)

    out = "".join(decoder.push([byte]) for byte in [0xFF, *"🙂".encode(), 256])

    assert out.endswith(" w0")


letters = st.text("ab", max_size=24)


@st.composite
def stops_and_pieces(draw: st.DrawFn) -> tuple[list[str], str, list[str]]:
    stop = draw(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
    text = draw(letters)
    return stop, text, [text[begin:end] for begin, end in cut(draw, len(text))]


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return what comes before the stop string that is complete first, by looking at every end."""
    for end in range(len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


@given(stops_and_pieces())
def test_text_ends_before_the_first_stop_string_however_it_is_cut(case: tuple[list[str], str, list[str]]) -> None:
    stop, text, pieces = case
    stops = StopFilter(stop)

    out = [stops.push(piece) for piece in pieces]
    shown = "".join(out) + stops.finish()

    assert (shown, stops.stopped) == first_stop(text, stop)


@given(stops_and_pieces())
def test_only_what_may_begin_a_stop_string_is_held_back(case: tuple[list[str], str, list[str]]) -> None:
    stop, _, pieces = case
    stops, seen, shown = StopFilter(stop), "", ""

    for piece in pieces:
        seen += piece
        shown += stops.push(piece)
        if stops.stopped is not None:
            break
        held = seen[len(shown) :]
        longest = max(
            (n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) and n < len(s) for s in stop)),
            default=0,
        )
        assert len(held) == longest


@pytest.mark.parametrize("make", [byte_decoder, lambda: WindowDecoder(fallback_decode, lambda _: False)])
def test_a_stop_string_over_several_tokens_never_shows(make: Callable[[], ByteDecoder | WindowDecoder]) -> None:
    detokenizer = Detokenizer(make(), ["é!"])

    out = [detokenizer.push([byte]) for byte in "é".encode()]

    assert out == ["", ""]
    assert detokenizer.stopped is None
    assert detokenizer.finish() == "é"


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(byte_decoder(), ["b"])

    assert detokenizer.push(list(b"ab")) == "a"
    assert detokenizer.push(list(b"cd")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == "b"


def test_the_end_of_the_tokens_can_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(byte_decoder(), [UNFINISHED])

    assert detokenizer.push([ord("a"), 0xF0]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == UNFINISHED
