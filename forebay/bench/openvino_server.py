"""OpenVINO GenAI behind the chat API, for the comparison. A script, run with the Python that has openvino-genai:

    PEERS/ov/bin/python -I openvino_server.py MODEL_DIR --port 8200 --max-seqs 64

Needs tokenizers and uvicorn beside it, and nothing of Forebay. Greedy and streamed only. The pipeline batches
continuously; one thread submits and steps, and hands the news of each step to the event loop at once. A step keeps
Python's lock, so the thread waits until the frames of one step are written before it begins the next: else they would
leave one step late.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]
import uvicorn
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

#: Token budget of a step, and gigabytes of KV cache.
BUDGET, CACHE = 512, 2

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class News:
    """From one step: new token ids, and why the answer ended if it did."""

    tokens: list[int]
    finish: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Order:
    """One request on its way to the engine. ``ids`` is an OpenVINO tensor [1, prompt tokens]."""

    ids: Any
    config: Any
    news: asyncio.Queue[News]
    handle: Any = None


class Engine(threading.Thread):
    def __init__(self, model: Path, max_seqs: int) -> None:
        super().__init__(name="engine", daemon=True)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE
        scheduler.max_num_seqs = max_seqs
        scheduler.max_num_batched_tokens = BUDGET
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", {"KV_CACHE_PRECISION": "u8"})
        self._tokenizer = self._pipeline.get_tokenizer()
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._written = threading.Event()

    def submit(self, body: dict[str, Any]) -> Order:
        """Parse a request and queue it. To be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        text = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        config = genai.GenerationConfig()
        config.max_new_tokens = int(body["max_tokens"])
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        order = Order(self._tokenizer.encode(text, add_special_tokens=False).input_ids, config, asyncio.Queue())
        self._inbox.put(order)
        return order

    def run(self) -> None:
        live: list[Order] = []
        numbers = itertools.count()
        while True:
            try:
                while not live or not self._inbox.empty():
                    live.append(self._inbox.get())
                    live[-1].handle = self._pipeline.add_request(next(numbers), live[-1].ids, live[-1].config)
                self._pipeline.step()
                news = [(order, _read(order.handle)) for order in live]
            except Exception as error:
                traceback.print_exc()
                news = [(order, News([], error=repr(error))) for order in live]
            live = [order for order, new in news if not (new.finish or new.error)]
            self._hand_over(news)

    def _hand_over(self, news: list[tuple[Order, News]]) -> None:
        def put(loop: asyncio.AbstractEventLoop) -> None:
            for order, new in news:
                order.news.put_nowait(new)
            loop.call_soon(self._written.set)  # behind the readers that were just woken

        if loop := self._loop:
            loop.call_soon_threadsafe(put, loop)
            self._written.wait()
            self._written.clear()


def _read(handle: Any) -> News:
    tokens: list[int] = []
    finish = None
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
            if output.finish_reason != genai.GenerationFinishReason.NONE:
                finish = output.finish_reason.name.lower()
    if finish is None and handle.get_status() != genai.GenerationStatus.RUNNING:
        return News(tokens, error=f"ended as {handle.get_status().name}")
    return News(tokens, finish)


class App:
    """ASGI: /ready, /v1/models and a streamed /v1/chat/completions."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/v1/chat/completions":
            body = b""
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            await self._chat(json.loads(body), send)
        elif path in ("/ready", "/v1/models"):
            await _start(send, 200, b"application/json")
            await _write(send, json.dumps({"object": "list", "data": [{"id": self._name}]}), more=False)
        else:
            await _start(send, 404, b"text/plain")
            await _write(send, "not found", more=False)

    async def _chat(self, body: dict[str, Any], send: Send) -> None:
        if not body.get("stream") or body.get("temperature", 0) != 0:
            await _start(send, 400, b"application/json")
            await _write(send, json.dumps({"error": {"message": "only stream and temperature 0"}}), more=False)
            return
        order = self._engine.submit(body)
        await _start(send, 200, b"text/event-stream")
        text = DecodeStream(skip_special_tokens=True)
        answered = 0
        while True:
            new = await order.news.get()
            answered += len(new.tokens)
            said = "".join([text.step(self._tokenizer, token) or "" for token in new.tokens])
            if said or new.finish:
                choice = {"index": 0, "delta": {"content": said}, "finish_reason": new.finish}
                await _write(send, _frame({"model": self._name, "choices": [choice]}))
            if new.error:
                await _write(send, _frame({"error": {"message": new.error}}), more=False)
                return
            if new.finish:
                break
        usage = {"prompt_tokens": order.ids.shape[1], "completion_tokens": answered}
        await _write(send, _frame({"choices": [], "usage": usage}) + "data: [DONE]\n\n", more=False)


def _frame(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _start(send: Send, status: int, content_type: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})


async def _write(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-seqs", type=int, default=64)
    options = parser.parse_args()
    engine = Engine(options.model, options.max_seqs)
    engine.start()
    app = App(engine, Tokenizer.from_file(str(options.model / "tokenizer.json")), options.model.name)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
