"""The "before": a plain chat server over `transformers`, one request at a time.

    python -m forebay.bench.baseline MODEL --port 8100 [--dtype float32]

What one gets in an afternoon, done honestly: the KV cache on, SDPA attention, inference mode, all cores, no copy or
conversion per request. Greedy only. It reads the same file as Forebay does.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import transformers
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from .. import catalog
from ..config import load as load_settings
from ..contract import ForebayError, Unsupported


@dataclass(frozen=True, slots=True)
class Order:
    """One parsed request: ``ids`` is [1, prompt tokens]."""

    ids: torch.Tensor
    max_tokens: int
    ignore_eos: bool


class Baseline:
    """The model and its tokenizer. Not safe for two threads at once: the server holds a lock around it."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        source: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.suffix == ".gguf":
            source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        source["local_files_only"] = True
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**source)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, attn_implementation="sdpa"
        )
        self.model = model.eval()
        # Some versions compute on the packed blocks of a GGUF file, which is another, slower baseline.
        packed = {type(m).__name__ for n, m in model.named_modules() if n.endswith("_proj")} - {"Linear"}
        if packed:
            raise Unsupported(f"transformers kept the weights packed ({', '.join(packed)}): not this baseline")

    def parse(self, body: dict[str, Any]) -> Order:
        if body.get("temperature", 0) != 0:
            raise HTTPException(400, "the baseline is greedy: temperature must be 0")
        ids = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        return Order(ids, int(body.get("max_tokens") or 512), bool(body.get("ignore_eos")))

    def generate(self, order: Order, streamer: Any = None) -> list[int]:
        """Token ids of the answer; with ``ignore_eos`` exactly ``max_tokens`` of them."""
        with torch.inference_mode():
            ids = self.model.generate(
                order.ids,
                attention_mask=torch.ones_like(order.ids),
                do_sample=False,
                use_cache=True,
                max_new_tokens=order.max_tokens,
                min_new_tokens=order.max_tokens if order.ignore_eos else None,
                pad_token_id=self.model.generation_config.eos_token_id,
                streamer=streamer,
            )
        answer: list[int] = ids[0, order.ids.shape[1] :].tolist()
        return answer

    def stream(self, order: Order) -> Iterator[str | list[int]]:
        """Pieces of text as they are made, then the token ids of the whole answer (empty if generate failed)."""
        streamer: Any = transformers.TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        answer: list[int] = []

        def work() -> None:
            try:
                answer.extend(self.generate(order, streamer))
            finally:
                streamer.end()

        thread = threading.Thread(target=work, name="generate")
        thread.start()
        yield from streamer
        thread.join()
        yield answer


def create_app(baseline: Baseline, name: str) -> FastAPI:
    """The same chat endpoint as Forebay's, as far as `forebay bench` needs it."""
    app = FastAPI()
    one_at_a_time = asyncio.Lock()

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "baseline"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        order = baseline.parse(body)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if body.get("stream"):
            return StreamingResponse(stream(order, head), media_type="text/event-stream")
        async with one_at_a_time:
            answer = await asyncio.to_thread(baseline.generate, order)
        text = baseline.tokenizer.decode(answer, skip_special_tokens=True)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": _finish(order, answer),
        }
        usage = _usage(order, answer)
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

    async def stream(order: Order, head: dict[str, Any]) -> AsyncIterator[bytes]:
        async with one_at_a_time:
            pieces = baseline.stream(order)
            while True:
                # A thread per piece: the queue behind it blocks, and the event loop must take new requests.
                piece = await asyncio.to_thread(next, pieces)
                if isinstance(piece, list):
                    break
                if piece:
                    yield _frame(head, {"index": 0, "delta": {"content": piece}, "finish_reason": None})
        if not piece:
            yield b'data: {"error": {"message": "generate failed"}}\n\n'
            return
        yield _frame(head, {"index": 0, "delta": {}, "finish_reason": _finish(order, piece)})
        yield _frame(head, None, _usage(order, piece))
        yield b"data: [DONE]\n\n"

    return app


def _finish(order: Order, answer: list[int]) -> str:
    return "length" if len(answer) >= order.max_tokens else "stop"


def _usage(order: Order, answer: list[int]) -> dict[str, int]:
    prompt = order.ids.shape[1]
    return {"prompt_tokens": prompt, "completion_tokens": len(answer), "total_tokens": prompt + len(answer)}


def _frame(head: dict[str, Any], choice: dict[str, Any] | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if choice is None else [choice]
    frame = {**head, "object": "chat.completion.chunk", "choices": choices, "usage": usage}
    return f"data: {json.dumps(frame)}\n\n".encode()


@click.command(help=__doc__)
@click.argument("model")
@click.option("--port", type=int, default=8100, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
def main(model: str, port: int, dtype: str) -> None:
    try:
        files = catalog.resolve(model, load_settings().paths.data_dir)
        baseline = Baseline(files.path, getattr(torch, dtype))
    except ForebayError as error:
        raise click.ClickException(error.message) from None
    uvicorn.run(create_app(baseline, files.id), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
