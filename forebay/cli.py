"""The ``forebay`` command. The only place that sees every room.

Each command imports what it needs when it runs, so that ``forebay --help`` answers at once.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from . import __version__
from .commands.options import SettingsCommand
from .contract import ForebayError

_URL = "http://127.0.0.1:8000"


class _Forebay(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """An error that a user can act on is one line and exit code 2, never a traceback."""
        try:
            return super().invoke(ctx)
        except ForebayError as error:
            click.echo(f"error: {error.message}", err=True)
            ctx.exit(2)


@click.group(cls=_Forebay, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="forebay")
def main() -> None:
    """An LLM chat server for the hour when everyone writes at once."""


@main.command(
    cls=SettingsCommand,
    epilog="Every option is also a key of forebay.toml (max_batch = 32) and a variable (FOREBAY_MAX_BATCH=32).",
)
@click.argument("model", required=False)
def serve(model: str | None, config: Path | None, **flags: str | None) -> None:
    """Serve MODEL over the OpenAI API: a catalog name, a .gguf file or a Hugging Face directory."""
    from .config import load

    settings = load({"model": model, **flags}, file=config)
    from .commands.serve import run  # slow: after the settings, so that a typing error is told at once

    sys.exit(run(settings))


@main.command(cls=SettingsCommand, only=("data_dir",))
@click.argument("name")
def pull(name: str, config: Path | None, **flags: str | None) -> None:
    """Fetch a model of the catalog."""
    from . import catalog
    from .config import load

    catalog.pull(name, load(flags, file=config).paths.data_dir)
    click.echo(f"{name} is ready: forebay serve {name}")


@main.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON: name -> {value, origin}.")
def config(model: str | None, as_json: bool, config: Path | None, **flags: str | None) -> None:
    """Show every setting as `forebay serve` would take it, and where it was said; secrets are masked."""
    from .commands.config import show
    from .config import load_with_origins

    show(*load_with_origins({"model": model, **flags}, file=config), as_json=as_json)


@main.group()
def key() -> None:
    """API keys of tenants, for the table [keys] of forebay.toml."""


@key.command()
@click.option("--tenant", required=True, help="Whose key it is; tenants share no cached prompts.")
@click.option("--name", help="The key's name in the file and in the log. [default: the tenant's]")
@click.option("--class", "service_class", type=click.Choice(["interactive", "batch"]), default="interactive")
def new(tenant: str, name: str | None, service_class: str) -> None:
    """Make a key: prints it once, and the line with its hash for forebay.toml."""
    from .commands.keys import new as make

    make(tenant, name or tenant, service_class)


@main.group()
def cache() -> None:
    """The answer cache of a server that runs."""


@cache.command()
@click.option("--url", default=_URL, show_default=True, help="Server to talk to.")
@click.option("--api-key", envvar="FOREBAY_API_KEY", show_envvar=True, help="Whose tenant's answers it is about.")
def purge(url: str, api_key: str | None) -> None:
    """Forget all answers of the tenant."""
    from .bench.client import Endpoint
    from .commands.cache import purge as forget

    click.echo(f"{asyncio.run(forget(Endpoint(url, api_key)))} answers forgotten")


@main.command()
@click.option("--url", default=_URL, show_default=True, help="Server to talk to.")
@click.option("--model", help="Model name; the server's first one if not given.")
@click.option("--api-key", envvar="FOREBAY_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--system", help="A system message to begin with.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="The server's default if not given.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer; the server's default if not given.")
def chat(
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
) -> None:
    """Chat in the terminal. Every line is one message; a piped stdin too.

    Ctrl-C stops the answer, Ctrl-D leaves.
    """
    from .bench.client import Endpoint
    from .commands.chat import Chat

    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    talk = Chat(Endpoint(url, api_key), model, system, {k: v for k, v in sampling.items() if v is not None})
    sys.exit(talk.run())


@main.command(cls=SettingsCommand, only=("data_dir",))
@click.argument("model")
@click.option("--report", is_flag=True, help="Measure, and store the verdict that `auto` goes by.")
def quantize(model: str, report: bool, config: Path | None, **flags: str | None) -> None:
    """What quantization costs and gains MODEL on this machine.

    Measures speed, memory and accuracy of each mode of --quantize and --kv-dtype; some minutes for a small model.
    """
    import subprocess

    from .config import load

    if not report:
        raise click.UsageError("give --report to measure and store a verdict")
    # In a process of its own, because the command line stays without torch.
    command = [sys.executable, "-m", "forebay.bench.quality", model, "--data-dir"]
    sys.exit(subprocess.run([*command, str(load(flags, file=config).paths.data_dir)], check=False).returncode)


@main.command()
@click.option("--url", default=_URL, show_default=True, help="Any server that speaks the OpenAI API.")
@click.option("--model", help="Model name; the server's first one if not given.")
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True, help="Clients at once.")
@click.option("--requests", type=click.IntRange(1), help="Requests measured. [default: 4 x concurrency]")
@click.option("--prompt-tokens", type=click.IntRange(1), default=300, show_default=True, help="Words of the prompt.")
@click.option("--output-tokens", type=click.IntRange(1), default=100, show_default=True, help="Tokens of the answer.")
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Requests before, not counted.")
@click.option("--seed", help="Of the prompts; drawn if not given, so that no run meets a cache the last one filled.")
@click.option("--prompts", type=click.Choice(["distinct", "shared"]), default="distinct", show_default=True)
@click.option("--no-stream", is_flag=True, help="One JSON answer per request: no TTFT, no ITL.")
@click.option("--strict-openai", is_flag=True, help="Do not send ignore_eos; answers may then be shorter.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds per request.")
@click.option("--api-key", envvar="FOREBAY_API_KEY", show_envvar=True, help="Sent as a bearer token.")
def bench(url: str, api_key: str | None, requests: int | None, no_stream: bool, **options: Any) -> None:
    """Measure a server with a closed loop of clients; the last line of the output is JSON."""
    from .bench import report
    from .bench.client import Endpoint
    from .bench.load import Plan, run_closed_loop
    from .bench.workload import draw_seed

    options["seed"] = options["seed"] or draw_seed()
    plan = Plan(requests=requests or 4 * options["concurrency"], stream=not no_stream, **options)
    with report.progress(plan) as advance:
        result = asyncio.run(run_closed_loop(Endpoint(url, api_key), plan, advance))
    summary = report.summarize(result)
    report.show(summary)
    sys.exit(1 if summary["failed"] else 0)
