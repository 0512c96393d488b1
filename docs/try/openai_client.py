"""The official `openai` client, as people use it. Needs: pip install openai

    BASE_URL=http://127.0.0.1:8000 python docs/try/openai_client.py

Ends with an error if an answer is not what it must be.
"""

from __future__ import annotations

import asyncio
import os
import sys

import openai
from openai import AsyncOpenAI, OpenAI

URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000").rstrip("/") + "/v1"
KEY = os.environ.get("API_KEY", "none")  # the client insists on one; a server without --api-key reads none
ASK = [{"role": "user", "content": "Count from one to twenty."}]


def check(true: bool, what: str) -> None:
    if not true:
        sys.exit(f"wrong: {what}")


def ask_once(client: OpenAI, model: str) -> tuple[str, int]:
    """One whole answer; returns it with its number of tokens."""
    whole = client.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=48)
    text, usage = whole.choices[0].message.content, whole.usage
    check(bool(text), "the answer is empty")
    check(usage is not None and usage.prompt_tokens + usage.completion_tokens == usage.total_tokens, f"usage {usage}")
    check(0 < usage.completion_tokens <= 48, f"usage {usage}")
    check(whole.choices[0].finish_reason in {"stop", "length"}, f"finish_reason {whole.choices[0].finish_reason!r}")
    print(f"answer: {text[:60]!r}, {usage.completion_tokens} tokens")
    return text, usage.completion_tokens


def stream(client: OpenAI, model: str, expected: str, n_tokens: int) -> None:
    """Token by token, with the usage at the end."""
    said, frames, usage = "", 0, None
    for chunk in client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_tokens=48, stream=True, stream_options={"include_usage": True}
    ):
        frames += 1
        said += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage
    check(said == expected, f"the stream says {said!r}, the whole answer {expected!r}")
    # A frame per token, fewer only where this program reads too slowly.
    check(frames > n_tokens // 4, f"{frames} frames for {n_tokens} tokens")
    check(usage is not None and usage.completion_tokens == n_tokens, f"usage of the stream {usage}")
    print(f"stream: {frames} frames, the same text")


def stream_with_helper(client: OpenAI, model: str, expected: str) -> None:
    """The client's own helper, which puts the chunks together again."""
    with client.chat.completions.stream(model=model, messages=ASK, temperature=0, max_tokens=48) as events:
        said = "".join(event.delta for event in events if event.type == "content.delta")
        # Not get_final_completion(): that raises when an answer ends at max_tokens.
        built = events.current_completion_snapshot.choices[0].message.content
    check(said == built == expected, f"the helper says {built!r}")
    print("stream helper: the same text")


def go_on_from_texts(client: OpenAI, model: str) -> None:
    """The older API without a chat template: several prompts at once, streamed and whole."""
    prompts = ["One, two, three,", "Monday, Tuesday,"]
    whole = client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=12, echo=True)
    texts = [choice.text for choice in whole.choices]
    starts = all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    check(starts, f"an echo does not begin with its prompt: {texts}")
    said = ["", ""]
    for chunk in client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=12, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.text
    told = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
    check(told == texts, f"completions stream {told}, whole they are {texts}")
    print(f"completions: {texts[0][:40]!r}, {texts[1][:40]!r}")


def look_at_the_response(client: OpenAI, model: str, expected: str) -> None:
    """The HTTP response around an answer: its headers, and its bytes as they come."""
    raw = client.chat.completions.with_raw_response.create(model=model, messages=ASK, temperature=0, max_tokens=48)
    check(raw.status_code == 200, f"status {raw.status_code}")
    check(raw.headers["content-type"].startswith("application/json"), f"content-type {raw.headers['content-type']!r}")
    check(bool(raw.headers.get("x-request-id")), "no x-request-id")
    check(raw.parse().choices[0].message.content == expected, "the raw response holds another answer")
    with client.chat.completions.with_streaming_response.create(
        model=model, messages=ASK, temperature=0, max_tokens=48, stream=True
    ) as response:
        kind = response.headers["content-type"]
        check(kind.startswith("text/event-stream"), f"content-type of a stream {kind!r}")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    check(lines[-1] == "data: [DONE]", f"the stream ends with {lines[-1]!r}")
    print(f"raw response: request {raw.headers['x-request-id']}; raw stream: {len(lines)} frames, the last is [DONE]")


def meet_errors(client: OpenAI, model: str) -> None:
    """Errors are the client's own exceptions; a timeout is the client's, and ends the work on the server."""
    once = client.with_options(max_retries=0)
    try:
        once.chat.completions.create(model="no-such-model", messages=ASK)
        check(False, "a model that does not exist answers")
    except openai.NotFoundError as error:
        print(f"unknown model: {error.status_code}, {error.code}")
    try:
        once.chat.completions.create(model=model, messages=ASK, temperature=9)
        check(False, "temperature 9 is taken")
    except openai.BadRequestError as error:
        check(error.param == "temperature", f"param {error.param!r}")
        print(f"temperature 9: {error.status_code}, {error.param}")
    try:
        # ignore_eos is no field of OpenAI's; such fields go into extra_body.
        once.with_options(timeout=0.05).chat.completions.create(
            model=model, messages=ASK, max_tokens=1000, extra_body={"ignore_eos": True}
        )
        check(False, "1,000 tokens in 0.05 s")
    except openai.APITimeoutError:
        print("timeout of 0.05 s: APITimeoutError")


def leave(client: OpenAI, model: str) -> None:
    """Leaving the block closes the connection, and the server stops generating."""
    with client.chat.completions.create(model=model, messages=ASK, max_tokens=1000, stream=True) as chunks:
        for i, _ in enumerate(chunks):
            if i == 3:
                break
    print("left a stream after 4 frames")


async def many_at_once(model: str, expected: str) -> None:
    """Four streams side by side; company changes nothing."""
    async with AsyncOpenAI(base_url=URL, api_key=KEY, timeout=120) as client:

        async def said() -> str:
            chunks = await client.chat.completions.create(
                model=model, messages=ASK, temperature=0, max_tokens=48, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        answers = await asyncio.gather(*(said() for _ in range(4)))
        check(answers == [expected] * 4, f"four at once say {answers}")
        whole = await client.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=48)
        check(whole.choices[0].message.content == expected, "the asynchronous client has another answer")
    print("async: four streams at once, the same text")


def main() -> None:
    # A server that is full says 503 with Retry-After; the client waits for that long and tries again.
    with OpenAI(base_url=URL, api_key=KEY, timeout=120, max_retries=5) as client:
        models = [model.id for model in client.models.list()]
        check(bool(models), "no models")
        model = models[0]
        check(client.models.retrieve(model).id == model, "models.retrieve names another model")
        print(f"models: {', '.join(models)}")
        text, n_tokens = ask_once(client, model)
        stream(client, model, text, n_tokens)
        stream_with_helper(client, model, text)
        go_on_from_texts(client, model)
        look_at_the_response(client, model, text)
        meet_errors(client, model)
        leave(client, model)
    asyncio.run(many_at_once(model, text))
    print("ok")


if __name__ == "__main__":
    main()
