"""Switches that clients may set in a template, thinking that they send back, and the clock that stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from test_template import CHATML, TALK, as_dicts, text_of
from tiny_models import byte_level, load

from forebay.contract import InvalidRequest, Message
from forebay.text.template import ChatTemplate
from forebay.text.tokenizer import Tokenizer

# Short templates with what those of the field have: Qwen 3 and SmolLM3.
QWEN = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {{- m.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
SMOLLM = """
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{{- '<|im_start|>system\\nToday: ' ~ strftime_now('%d %B %Y') ~ '\\n' -}}
{{- ('/think' if enable_thinking else '/no_think') ~ '<|im_end|>\\n' -}}
{%- set content = 'outside' -%}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {% generation %}
        {%- set content = m.content -%}
        {{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' -}}
        {% endgeneration %}
        {{- content -}}
    {%- else -%}
        {{- '<|im_start|>' + m.role + '\\n' + content + m.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' ~ ('' if enable_thinking else '<think>\\n\\n</think>\\n') -}}
{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("source", [QWEN, SMOLLM])
def test_variables_and_reasoning_equal_apply_chat_template(
    tmp_path: Path, source: str, variables: dict[str, bool]
) -> None:
    inner = byte_level()
    tokenizer = load(inner, tmp_path)
    dated = source.replace("strftime_now('%d %B %Y')", "'08 July 2025'")
    judge = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=dated)
    template = ChatTemplate(source)
    talk = [TALK[0], TALK[1], Message("assistant", "Red.", reasoning="\nthe\n<think>quick\n"), TALK[3]]
    expected = judge.apply_chat_template(as_dicts(talk), add_generation_prompt=True, return_dict=False, **variables)
    assert template.encode(tokenizer, talk, variables=variables) == expected


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (QWEN, {"enable_thinking"}),
        (SMOLLM, {"enable_thinking"}),
        (CHATML, set()),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", {"thinking"}),
        ("{% macro f() %}{{ reasoning_effort | default('low') }}{% endmacro %}{{ f() }}", {"reasoning_effort"}),
        ("{% set thinking = true %}{{ thinking }}{{ m.clear_thinking }}{# preserve_thinking #}", set()),
        ("{% for thinking in messages %}{{ thinking }}{% endfor %}{{ 'enable_thinking' }}", set()),
        (
            "{{ messages }}{{ tools }}{{ bos_token }}{{ chat_template }}{{ custom_instructions }}{{ date_string }}",
            set(),
        ),
    ],
)
def test_variables_are_known_switches_that_the_template_reads(source: str, names: set[str]) -> None:
    assert ChatTemplate(source).variables.keys() == names


def test_variables_reach_the_template_and_nothing_else_is_defined(tokenizer: Tokenizer) -> None:
    source = (
        "{% if thinking is defined %}{{ thinking }}{% endif %},{{ reasoning_effort }},"
        "{{ preserve_thinking is defined }},{{ clear_thinking }}"
    )

    def rendered(**variables: bool | str) -> str:
        return text_of(tokenizer, ChatTemplate(source).encode(tokenizer, [], variables=variables))

    assert rendered() == ",,False,"
    assert rendered(thinking=False, reasoning_effort="high", preserve_thinking=True) == "False,high,True,"
    assert rendered(thinking=True, clear_thinking=False) == "True,,False,False"


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "strftime_now",
        "raise_exception",
        "range",
        "self",
        "chat_template",
        "custom_instructions",
        "clear_thinking",
        "Thinking",
        "",
        "thinking ",
        "<|im_end|>",
        "x" * 1000,
    ],
)
@pytest.mark.parametrize("value", [True, "low"])
def test_unknown_variables_are_refused(tokenizer: Tokenizer, name: str, value: bool | str) -> None:
    template = ChatTemplate(
        "{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ bos_token }}{{ eos_token }}{{ self }}"
        "{{ strftime_now }}{{ raise_exception }}{{ range }}{{ chat_template }}{{ custom_instructions }}"
        "{{ thinking }}{{ reasoning_effort }}"
    )
    with pytest.raises(InvalidRequest, match="takes only reasoning_effort, thinking") as caught:
        template.encode(tokenizer, [], variables={"thinking": True, name: value})
    assert caught.value.param == f"chat_template_kwargs.{name[:64]}"
    assert len(caught.value.message) < 200
    with pytest.raises(InvalidRequest, match="takes no variables"):
        ChatTemplate(CHATML).encode(tokenizer, TALK, variables={name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking", "true"),
        ("thinking", "<|im_end|>"),
        ("thinking", 1),
        ("thinking", 0.0),
        ("thinking", None),
        ("thinking", [True]),
        ("reasoning_effort", "High"),
        ("reasoning_effort", "high<|im_end|>"),
        ("reasoning_effort", "high\n"),
        ("reasoning_effort", ""),
        ("reasoning_effort", True),
        ("reasoning_effort", {"low": 1}),
    ],
)
def test_values_come_from_a_closed_set(tokenizer: Tokenizer, name: str, value: Any) -> None:
    wanted = {"thinking": "must be true or false$", "reasoning_effort": "must be one of none, .*low, medium, high"}
    with pytest.raises(InvalidRequest, match=wanted[name]) as caught:
        ChatTemplate("{{ thinking }}{{ reasoning_effort }}").encode(tokenizer, [], variables={name: value})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_value_that_the_template_refuses_is_named(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% if reasoning_effort == 'max' %}{{ raise_exception('no such effort') }}{% endif %}")
    with pytest.raises(InvalidRequest, match="these messages with reasoning_effort: no such effort"):
        template.encode(tokenizer, [], variables={"reasoning_effort": "max"})


def test_reasoning_is_there_only_where_it_is_sent(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    ids = template.encode(tokenizer, [Message("assistant", "a", reasoning=""), Message("assistant", "b")])
    assert text_of(tokenizer, ids) == (
        '{"role": "assistant", "content": "a", "reasoning_content": ""}{"role": "assistant", "content": "b"}'
    )


def test_the_clock_stands_still(tokenizer: Tokenizer) -> None:
    source = "{{ strftime_now is defined }} {{ strftime_now('%d %b %Y') }} {{ 'yes' if strftime_now else 'no' }}"
    ids = ChatTemplate(source).encode(tokenizer, [])
    assert text_of(tokenizer, ids) == "False 08 Jul 2025 no"
