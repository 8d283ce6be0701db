"""Equal content numbers mean equal tokens; different ones differ within a few tokens; special tokens never appear."""

from hypothesis import given
from hypothesis import strategies as st

from loadtest.content import (
    ChatPrompt,
    Message,
    Segment,
    TextPrompt,
    TokenPrompt,
    TokenRun,
    as_text,
    content_id,
    continued,
    header_tokens,
    token_ids,
    words,
)

CONTENTS = st.integers(0, 2**64 - 1)
VOCABULARIES = st.integers(32, 200_000)


@given(CONTENTS, st.integers(0, 300), st.integers(0, 300), VOCABULARIES)
def test_a_shorter_segment_is_the_beginning_of_a_longer_one(content: int, a: int, b: int, vocab: int) -> None:
    short, long = (token_ids(TokenPrompt((Segment(content, length),)), vocab) for length in sorted((a, b)))

    assert len(short) == min(a, b)
    assert long[: len(short)] == short


@given(CONTENTS, CONTENTS, VOCABULARIES)
def test_different_contents_differ_within_the_header(a: int, b: int, vocab: int) -> None:
    header = header_tokens(vocab)
    first, second = (token_ids(TokenPrompt((Segment(content, header),)), vocab) for content in (a, b))

    assert (first == second) == (a == b)


@given(CONTENTS, st.integers(1, 200), VOCABULARIES)
def test_tokens_stay_clear_of_both_ends_of_the_vocabulary(content: int, length: int, vocab: int) -> None:
    ids = token_ids(TokenPrompt((Segment(content, length),)), vocab)

    assert all(vocab // 16 <= token < vocab - vocab // 16 for token in ids)


def test_content_ids_depend_on_every_name() -> None:
    names = [("a", 1, 2), ("a", 1, 3), ("a", 2, 2), ("b", 1, 2), ("a", 12)]

    assert len({content_id(*name) for name in names}) == len(names)


def test_a_conversation_continues_with_the_real_answer() -> None:
    first, following = TokenPrompt((Segment(1, 4),)), TokenPrompt((Segment(2, 3),))

    assert continued(first, [7, 8], "x", following) == TokenPrompt((Segment(1, 4), TokenRun((7, 8)), Segment(2, 3)))


def test_a_chat_continues_with_the_real_answer_as_the_assistants_message() -> None:
    first, following = ChatPrompt((Message("user", "hi"),)), ChatPrompt((Message("user", "more"),))

    prompt = continued(first, [7], "hello", following)

    assert isinstance(prompt, ChatPrompt)
    assert [(m.role, m.content) for m in prompt.messages] == [("user", "hi"), ("assistant", "hello"), ("user", "more")]


def test_a_text_continues_with_the_real_answer() -> None:
    assert continued(TextPrompt("a"), [], "b", TextPrompt("c")) == TextPrompt("abc")


@given(CONTENTS, st.integers(1, 50))
def test_words_follow_from_the_content(content: int, count: int) -> None:
    assert len(words(content, count).split()) == count
    assert words(content, count) == words(content, count)


def test_prompts_as_words_share_what_the_tokens_shared() -> None:
    first, second = (as_text(TokenPrompt((Segment(1, 30), Segment(own, 30)))).text for own in (2, 3))

    assert first.startswith(words(1, 30))
    assert second.startswith(words(1, 30))
    assert first != second
