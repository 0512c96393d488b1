"""LiteLLM with this server as its upstream. Needs: pip install litellm

    BASE_URL=http://127.0.0.1:8000 python docs/try/litellm_client.py

Ends with an error if an answer is not what it must be.
"""

from __future__ import annotations

import asyncio
import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import fetches a list of prices

import litellm  # reads the variable above

URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000").rstrip("/") + "/v1"
KEY = os.environ.get("API_KEY", "none")  # the client insists on one; a server without --api-key reads none
ASK = [{"role": "user", "content": "Count from one to twenty."}]
HOW = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 48, "timeout": 120}

litellm.suppress_debug_info = True  # no advertisement when a call fails


def check(true: bool, what: str) -> None:
    if not true:
        sys.exit(f"wrong: {what}")


def ask_once(model: str) -> tuple[str, int]:
    """One whole answer; returns it with its number of tokens."""
    whole = litellm.completion(model=model, messages=ASK, **HOW)
    text, usage = whole.choices[0].message.content, whole.usage
    check(bool(text), "the answer is empty")
    check(usage.prompt_tokens + usage.completion_tokens == usage.total_tokens, f"usage {usage}")
    check(0 < usage.completion_tokens <= 48, f"usage {usage}")
    check(whole.choices[0].finish_reason in {"stop", "length"}, f"finish_reason {whole.choices[0].finish_reason!r}")
    print(f"completion: {text[:60]!r}, {usage.completion_tokens} tokens")
    return text, usage.completion_tokens


def stream(model: str, expected: str, n_tokens: int) -> None:
    """Token by token, and put together again by LiteLLM's own builder."""
    chunks = list(
        litellm.completion(model=model, messages=ASK, stream=True, stream_options={"include_usage": True}, **HOW)
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(said == expected, f"the stream says {said!r}, the whole answer {expected!r}")
    check(len(chunks) > n_tokens // 4, f"{len(chunks)} chunks for {n_tokens} tokens")
    check(chunks[-1].usage.completion_tokens == n_tokens, f"usage of the stream {chunks[-1].usage}")
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    check(built.choices[0].message.content == expected, "the builder has another text")
    check(built.usage.completion_tokens == n_tokens, f"usage of the builder {built.usage}")
    print(f"stream: {len(chunks)} chunks, the same text")


def talk(model: str) -> None:
    """A second turn, with the first answer sent back as it came."""
    first = litellm.completion(model=model, messages=ASK, **HOW).choices[0].message
    again = litellm.completion(model=model, messages=[*ASK, first, {"role": "user", "content": "Go on."}], **HOW)
    check(bool(again.choices[0].message.content), "the second turn's answer is empty")
    print("second turn: answered")


def meet_errors() -> None:
    try:
        litellm.completion(model="openai/no-such-model", messages=ASK, num_retries=0, **HOW)
        check(False, "a model that does not exist answers")
    except litellm.NotFoundError as error:
        print(f"unknown model: {error.status_code}")


async def many_at_once(model: str, expected: str, n_tokens: int) -> None:
    async def said() -> str:
        chunks = await litellm.acompletion(model=model, messages=ASK, stream=True, **HOW)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    answers = await asyncio.gather(*(said() for _ in range(4)))
    check(answers == [expected] * 4, f"four at once say {answers}")
    whole = await litellm.acompletion(model=model, messages=ASK, **HOW)
    check(whole.choices[0].message.content == expected, "acompletion has another answer")
    check(whole.usage.completion_tokens == n_tokens, f"usage of acompletion {whole.usage}")
    print("async: four streams at once, the same text")


def main() -> None:
    # "openai/": speak OpenAI's protocol to api_base. "hosted_vllm/" works too.
    models = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=URL, api_key=KEY
    )
    check(bool(models), "no models")
    model = "openai/" + models[0].removeprefix("openai/")
    text, n_tokens = ask_once(model)
    stream(model, text, n_tokens)
    talk(model)
    meet_errors()
    asyncio.run(many_at_once(model, text, n_tokens))
    print("ok")


if __name__ == "__main__":
    main()
