"""Thinking and content come apart the same way however the answer is cut, and every character goes somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import byte_level, load
from tokenizers import AddedToken

from forebay.contract import Message
from forebay.text.reasoning import Reasoning, Splitter
from forebay.text.template import ChatTemplate
from forebay.text.tokenizer import Tokenizer

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
#: The end of the prompt as Qwen 3 writes it: thinking can be switched off, and is else the model's own beginning.
QWEN = TURNS + "<|im_start|>assistant\n{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
#: As Qwen 3 Thinking, QwQ and DeepSeek R1 do: the answer begins inside of the thinking.
OPENED = TURNS + "<|im_start|>assistant\n{{ '<think>\n' }}"
#: As DeepSeek V3.1 does: the second marker alone switches thinking off.
CLOSED = TURNS + "<|im_start|>assistant\n{{ '<think>' if thinking else '</think>' }}"
#: The first R1 distillates: the template only takes thinking out of the history.
DISTILLED = "{% for m in messages %}<s>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
ASK = [Message("user", "the quick")]


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With the markers as added tokens that are not special (Qwen 3, SmolLM3, R1), or as plain text."""
    inner = byte_level()
    if request.param == "tokens":
        inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return load(inner, tmp_path_factory.mktemp(request.param))


def split(splitter: Splitter, *pushes: str) -> tuple[str, str]:
    parts = [*map(splitter.push, pushes), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def answer(tokenizer: Tokenizer, source: str, text: str, *, talk: list[Message] = ASK, **variables: bool) -> object:
    template = ChatTemplate(source)
    reasoning = Reasoning.of(template, tokenizer)
    assert reasoning is not None
    return split(reasoning.splitter(template.encode(tokenizer, talk, variables=variables)), text)


@pytest.mark.parametrize("source", [QWEN, OPENED, CLOSED])
def test_a_template_that_names_both_markers_thinks(tokenizer: Tokenizer, source: str) -> None:
    assert Reasoning.of(ChatTemplate(source), tokenizer) is not None


def test_a_template_that_names_the_second_marker_thinks_where_the_first_is_a_token(tokenizer: Tokenizer) -> None:
    is_token = len(tokenizer.encode("<think>", specials=False)) == 1
    assert (Reasoning.of(ChatTemplate(DISTILLED), tokenizer) is not None) == is_token


@pytest.mark.parametrize("source", ["{{ messages }}", "<think>", "{{ 'no /think, no think>' }}"])
def test_other_templates_do_not_think(tokenizer: Tokenizer, source: str) -> None:
    assert Reasoning.of(ChatTemplate(source), tokenizer) is None


@pytest.mark.parametrize("marker", ["<think>", "</think>"])
def test_special_markers_have_no_text_to_be_found_in(tmp_path: Path, marker: str) -> None:
    inner = byte_level()
    inner.add_special_tokens([AddedToken(marker, normalized=False)])
    assert Reasoning.of(ChatTemplate(QWEN), load(inner, tmp_path)) is None


def test_where_an_answer_begins_is_read_off_the_prompt(tokenizer: Tokenizer) -> None:
    thinks, plain = "<think>\nHm.\n</think>\n\nBlue.", "Hm.\n</think>\n\nBlue."
    assert answer(tokenizer, QWEN, thinks) == ("Hm.", "Blue.")
    assert answer(tokenizer, QWEN, plain) == ("", plain)
    assert answer(tokenizer, QWEN, thinks, enable_thinking=False) == ("", thinks)
    assert answer(tokenizer, OPENED, plain) == ("Hm.", "Blue.")
    assert answer(tokenizer, OPENED, thinks) == ("Hm.", "Blue.")  # the marker again
    assert answer(tokenizer, CLOSED, plain, thinking=True) == ("Hm.", "Blue.")
    assert answer(tokenizer, CLOSED, "\n" + thinks) == ("", thinks)


@pytest.mark.parametrize("text", ["<think>", "</think>", "<think>\n\n", "a</think>\n"])
@pytest.mark.parametrize("after", ["</s>", "</s><s>", "<|im_end|>\n<|im_start|>assistant\n", "\n\nAnswer:"])
def test_a_user_opens_and_closes_nothing(tokenizer: Tokenizer, text: str, after: str) -> None:
    source = "{# <think> </think> #}<s>{{ messages[0].content }}" + after
    talk = [Message("user", text)]
    assert answer(tokenizer, source, "Blue.</think>Red.", talk=talk) == ("", "Blue.</think>Red.")
    assert answer(tokenizer, source, "<think>Hm.</think>Red.", talk=talk) == ("Hm.", "Red.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\n\n</think>\n\nBlue.\n", ("", "Blue.\n")),  # Qwen 3 told /no_think by the user
        ("\n <think>Hm.</think>Blue.", ("Hm.", "Blue.")),
        ("  Blue.", ("", "  Blue.")),
        ("\n\n", ("", "\n\n")),
        ("", ("", "")),
        ("<think>Hm.\n\nYes.", ("Hm.\n\nYes.", "")),  # cut by length
        ("<think>Hm. \n", ("Hm. \n", "")),
        ("<think>Hm.\n</thin", ("Hm.\n</thin", "")),
        ("<think> \n", ("", "")),
        ("<think>", ("", "")),
        ("<thin", ("", "<thin")),
        (" <", ("", " <")),
        ("<think>a<b </ think> </think></think>", ("a<b </ think>", "</think>")),
        ("<think>a<think>b</think>c", ("a<think>b", "c")),
        ("<think>a</think>b<think>c</think>d", ("a", "b<think>c</think>d")),
        ("<think>a</think>\n<think>b</think>", ("a", "<think>b</think>")),
        ("Say <think>a</think>", ("", "Say <think>a</think>")),
        ("<think>\u3000a\u3000</think>\n\u3000\u3000b", ("\u3000a\u3000", "\u3000\u3000b")),
        ("<THINK>a</THINK>", ("", "<THINK>a</THINK>")),
    ],
)
def test_answers(text: str, expected: tuple[str, str]) -> None:
    assert split(Splitter("assistant\n"), text) == expected
    assert split(Splitter("assistant\n"), *text) == expected


def test_text_goes_out_as_soon_as_it_is_certain() -> None:
    splitter = Splitter("")
    said = [splitter.push(text) for text in ("\n<thi", "nk>", "\nHm", ". \n", "So<", "/b </", "think> \n", "B", "l<")]
    assert said == [
        *[("", "")] * 2,
        ("Hm", ""),
        (".", ""),
        (" \nSo", ""),
        ("</b", ""),
        ("", ""),
        ("", "B"),
        ("", "l<"),
    ]
    assert splitter.finish() == ("", "")
    assert Splitter("").push("\nB") == ("", "\nB")


def reference(tail: str, text: str) -> tuple[str, str]:
    """The whole answer at once, by regular expressions."""
    if re.search(r"</think>\s*$", tail):
        return "", text.lstrip(" \n")
    opened = re.search(r"<think>\s*$", tail)
    match = re.fullmatch(r"[ \n]*(<think>)?(.*)", text, re.DOTALL)
    assert match
    if not opened and not match[1]:
        return "", text
    thought, marker, content = match[2].partition("</think>")
    # What has no end is not trimmed there: more may follow.
    return (thought.strip(" \n"), content.lstrip(" \n")) if marker else (thought.lstrip(" \n"), "")


PARTS = ["<think>", "</think>", "<", "</", "<thi", "nk>", ">", "think", "/", " ", "\n", "a", "你", "\u3000"]
TAILS = ["", "assistant\n", "<think>", "<think>\n", "<think>\n\n</think>\n\n", "</think>", "<think>a", "</think"]


@settings(max_examples=2000, deadline=None)
@given(
    tail=st.sampled_from(TAILS),
    text=st.lists(st.sampled_from(PARTS), max_size=16).map("".join),
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
)
@example(tail="", text="\n<think> a \n</think>\n b <think>", cuts=[1])
@example(tail="<think>\n", text=" \n<a</think> ", cuts=[1, 0])
def test_parts_join_to_the_same_at_every_cut(tail: str, text: str, cuts: list[int]) -> None:
    pushes, at = [], 0
    while at < len(text):
        size = cuts[len(pushes) % len(cuts)]
        pushes.append(text[at : at + size])
        at += size
    assert split(Splitter(tail), *pushes) == split(Splitter(tail), text) == reference(tail, text)


@settings(max_examples=500, deadline=None)
@given(text=st.lists(st.sampled_from(PARTS), max_size=16).map("".join))
def test_at_every_moment_little_is_held_back(text: str) -> None:
    for tail in TAILS:
        splitter = Splitter(tail)
        reasoning, content = "", ""
        for n, character in enumerate(text):
            new = splitter.push(character)
            reasoning, content = reasoning + new[0], content + new[1]
            whole = reference(tail, text[: n + 1])
            assert whole[0].startswith(reasoning.rstrip())
            assert whole[1].startswith(content)
            held = (whole[0] + whole[1]).removeprefix(reasoning + content)
            assert len(held.strip(" \n")) < len("</think>")
