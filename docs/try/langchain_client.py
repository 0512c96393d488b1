"""LangChain's ChatOpenAI. Needs: pip install langchain-openai

    BASE_URL=http://127.0.0.1:8000 python docs/try/langchain_client.py

Ends with an error if an answer is not what it must be.
"""

from __future__ import annotations

import asyncio
import os
import sys

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000").rstrip("/") + "/v1"
KEY = os.environ.get("API_KEY", "none")  # the client insists on one; a server without --api-key reads none
ASK = "Count from one to twenty."


def check(true: bool, what: str) -> None:
    if not true:
        sys.exit(f"wrong: {what}")


def ask_once(chat: ChatOpenAI) -> tuple[str, int]:
    """One whole answer; returns it with its number of tokens."""
    answer = chat.invoke(ASK)
    usage = answer.usage_metadata
    check(bool(answer.content), "the answer is empty")
    check(usage is not None and usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"], f"{usage}")
    check(answer.response_metadata["finish_reason"] in {"stop", "length"}, f"{answer.response_metadata}")
    print(f"invoke: {answer.content[:60]!r}, {usage['output_tokens']} tokens")
    return answer.content, usage["output_tokens"]


def stream(chat: ChatOpenAI, expected: str, n_tokens: int) -> None:
    """Chunks can be added up; the sum has the text and the usage."""
    chunks = list(chat.stream(ASK))
    whole = sum(chunks[1:], chunks[0])
    check(isinstance(whole, AIMessageChunk) and whole.content == expected, f"the stream says {whole.content!r}")
    check(len(chunks) > n_tokens // 4, f"{len(chunks)} chunks for {n_tokens} tokens")
    check(whole.usage_metadata["output_tokens"] == n_tokens, f"usage of the stream {whole.usage_metadata}")
    print(f"stream: {len(chunks)} chunks, the same text")


def batch(chat: ChatOpenAI, expected: str) -> None:
    """Several at once, each over its own connection; company changes nothing."""
    answers = chat.batch([ASK, "Say hello.", ASK, "What is the capital of France?"])
    texts = [answer.content for answer in answers]
    check(all(texts), f"empty answers in {texts}")
    check(texts[0] == texts[2] == expected, f"the batch says {texts[0]!r} and {texts[2]!r}")
    print(f"batch: {len(texts)} answers")


def chain(chat: ChatOpenAI) -> None:
    """A prompt template, the model, a parser; whole and as a stream."""
    prompt = ChatPromptTemplate.from_messages([("system", "You are {who}."), ("human", "Where is {what}?")])
    steps = prompt | chat | StrOutputParser()
    asked = {"who": "a teacher of geography", "what": "Paris"}
    text = steps.invoke(asked)
    check(bool(text), "the chain's answer is empty")
    check("".join(steps.stream(asked)) == text, "the chain streams another text")
    print(f"chain: {text[:60]!r}")


def talk(chat: ChatOpenAI) -> None:
    """A second turn, with the first answer sent back as it came."""
    history = [SystemMessage("Be brief."), HumanMessage("My name is Ada.")]
    history += [chat.invoke(history), HumanMessage([{"type": "text", "text": "What is my name?"}])]
    check(bool(chat.invoke(history).content), "the second turn's answer is empty")
    print("second turn: answered")


def meet_errors() -> None:
    """LangChain passes the openai client's errors on."""
    try:
        ChatOpenAI(base_url=URL, api_key=KEY, model="no-such-model", max_retries=0).invoke(ASK)
        check(False, "a model that does not exist answers")
    except openai.NotFoundError as error:
        print(f"unknown model: {error.status_code}")


async def many_at_once(chat: ChatOpenAI, expected: str) -> None:
    async def said() -> str:
        return "".join([chunk.content async for chunk in chat.astream(ASK)])

    answers = await asyncio.gather(*(said() for _ in range(4)))
    check(answers == [expected] * 4, f"four at once say {answers}")
    check((await chat.ainvoke(ASK)).content == expected, "ainvoke has another answer")
    print("async: four streams at once, the same text")


def main() -> None:
    with openai.OpenAI(base_url=URL, api_key=KEY) as client:
        model = next(iter(client.models.list())).id
    # stream_usage: with a base_url of one's own LangChain does not ask for it by itself.
    chat = ChatOpenAI(
        base_url=URL, api_key=KEY, model=model, temperature=0, max_tokens=48, timeout=120, stream_usage=True
    )
    text, n_tokens = ask_once(chat)
    stream(chat, text, n_tokens)
    batch(chat, text)
    chain(chat)
    talk(chat)
    meet_errors()
    asyncio.run(many_at_once(chat, text))
    print("ok")


if __name__ == "__main__":
    main()
