"""Settings: one frozen object per room, read once, validated, never mutated.

Order of precedence: flag > environment (``FOREBAY_*``) > file (``forebay.toml``) > default. Every flag is a key
of the file and an environment variable under the same name; names are unique over all rooms. Only the file has the
table ``[keys]``.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .contract import InvalidRequest

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: object) -> object:
    """``"2GiB"``, ``"500MB"``, ``2147483648`` -> bytes (int); ``0.25`` or ``"25%"`` -> a fraction (float)."""
    text = str(value).strip().lower()
    if re.fullmatch(r"\d+", text):
        return int(text)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)", text):
        return int(float(match[1]) * _UNITS[match[2].rstrip("b")])
    if match := re.fullmatch(r"(\d*\.\d+|\d+(?=\s*%))\s*(%?)", text):
        fraction = float(match[1]) / (100 if match[2] else 1)
        if fraction <= 1:
            return fraction
    raise ValueError("expected bytes like 2GiB or a fraction like 0.25")


Size = Annotated[int | float, BeforeValidator(parse_size), Field(gt=0)]
Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Quota = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


def _strip(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


class Room(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineSettings(Room):
    """The engine process: what is loaded and how much it may take."""

    engine: str = Field(
        default="model",
        pattern=r"^(model|simulated:[a-z0-9_-]+)$",
        description="What computes: the model, or simulated:PROFILE (cpu, 8xa100), which only takes the time.",
    )
    batching: Literal["continuous", "window", "serial"] = Field(
        default="continuous",
        description="When waiting requests may join: in any step; 8 together or after 100 ms (10 in a burst); singly.",
    )
    max_gap: float = Field(
        default=0.075,
        ge=0,
        description="Seconds that a step may take for the sake of prompts while answers run; 0: no limit.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and KV cache; auto takes bfloat16 where the hardware computes in it.",
    )
    quantize: Literal["auto", "none", "int8", "int4"] = Field(
        default="auto",
        description="Linear layers; auto takes what `forebay quantize --report` found best, unless a dtype is named.",
    )
    kv_dtype: Literal["auto", "model", "int8"] = Field(
        default="auto", description="KV cache: the model's type or 8 bits; auto as for quantize."
    )
    quantize_anyway: bool = Field(
        default=False, description="Take a quantization that has failed its report on this model."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs.")
    threads: int = Field(
        default=0, ge=0, le=1024, description="Compute threads of the engine; 0 takes every core that it may use."
    )
    nice: int = Field(
        default=3, ge=0, le=19, description="How far the engine stands back on a busy CPU, so that streams flow on."
    )
    kernels: Literal["auto", "off"] = Field(
        default="auto", description="Compiled CPU kernels; off takes torch's operators everywhere."
    )
    max_batch: int = Field(default=16, ge=1, le=4096, description="Sequences that run at once.")
    token_budget: int = Field(
        default=512, ge=16, le=1 << 20, description="Tokens in one step, decodes and prefill together."
    )
    kv_memory: Size = Field(default=0.25, description="KV cache: bytes (2GiB) or a fraction of the free memory (0.25).")
    kv_disk: Quota = Field(
        default=2 * 2**30, description="KV of conversations on disk, in data-dir, up to so many bytes; 0: none."
    )
    kv_host: Quota | None = Field(
        default=None,
        description="The same in the host's memory, above the disk. Default: a quarter of it with a GPU, else 0.",
    )
    max_context: int = Field(default=0, ge=0, description="Prompt + answer, in tokens; 0 takes the model's own limit.")
    start_timeout: float = Field(default=600.0, gt=0, description="Seconds for loading and warm-up.")
    hang_timeout: float = Field(default=30.0, gt=0, description="Seconds without news before the engine is restarted.")


class AdmissionSettings(Room):
    """The gate in the front: who waits, who is refused, and in which order."""

    max_queue: int = Field(default=0, ge=0, le=1_000_000, description="Requests that may wait; 0 takes 5 x max-batch.")
    max_queued_tokens: int = Field(
        default=0, ge=0, le=10**9, description="Prompt tokens that may wait; 0 takes 512 x max-queue."
    )
    queue_timeout: float = Field(default=60.0, gt=0, description="Seconds a request may wait before it is refused.")
    slo_ttft: float = Field(
        default=4.0,
        ge=0,
        le=10**6,
        description="Seconds to the first token that are promised; who would wait longer is refused. 0: nobody.",
    )
    user_concurrency: int = Field(
        default=0, ge=0, le=1_000_000, description="Requests of one user at once, waiting or running; 0: no limit."
    )
    user_share: float = Field(
        default=2.0,
        ge=0,
        le=10**6,
        description="What a user may have, in equal parts of what all had lately, where not all get all; 0: all.",
    )
    user_tokens: float = Field(
        default=0.0, ge=0, description="Tokens of one user per second, over a minute; 0: no limit."
    )
    brownout: bool = Field(default=True, description="Do with less for everybody while requests wait for long.")
    busy_text: str = Field(
        default="We are busy just now, please try again shortly. 系统繁忙，请稍后再试。",
        description="What who is refused reads first.",
    )
    busy_hint: str = Field(default="", description="What it reads then: where else to turn to, say 转人工.")


class ServerSettings(Room):
    """HTTP."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; others than loopback need --api-key.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    # A header's value never begins or ends with white space, and a key that was read from a file often does.
    api_key: Annotated[pydantic.SecretStr, BeforeValidator(_strip)] | None = Field(
        default=None, min_length=1, description="Key that clients must send as a bearer token."
    )
    default_max_tokens: int = Field(default=512, ge=1, description="Answer length when the request does not say.")
    stream_hold: float = Field(
        default=10.0, ge=0, description="Seconds a stream waits for its first token before the 200."
    )
    keep_alive: float = Field(
        default=10.0, gt=0, description="Seconds of silence before a stream gets a comment frame."
    )
    reader_timeout: float = Field(default=30.0, gt=0, description="Seconds a client may stop reading before it is cut.")
    head_timeout: float = Field(default=10.0, gt=0, description="Seconds a client gets to send a request's head.")
    body_timeout: float = Field(default=20.0, gt=0, description="Seconds a client gets to send a request's body.")
    max_connections: int = Field(default=4096, ge=1, le=1_000_000, description="Open connections; more are refused.")
    max_body: Bytes = Field(default=8 * 2**20, description="Largest request body, in bytes.")
    max_messages: int = Field(default=2048, ge=1, description="Most messages in one request.")
    max_choices: int = Field(default=16, ge=1, le=1024, description="Most answers to one request: prompts x n.")
    drain_timeout: float = Field(default=25.0, ge=0, description="Seconds open requests get to finish at shutdown.")
    log_format: Literal["text", "json"] = Field(default="text", description="Form of the log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged."
    )


class StateSettings(Room):
    """Conversations, in Redis or Valkey."""

    state_url: Annotated[pydantic.SecretStr, BeforeValidator(_strip)] | None = Field(
        default=None,
        description="Redis or Valkey, as redis:// or rediss:// or unix://, or off. Default: an own Valkey in data-dir.",
    )
    state_memory: Bytes = Field(default=256 * 2**20, description="Most memory of the own Valkey, in bytes.")
    session_ttl: float = Field(default=1800.0, gt=0, le=10**7, description="Seconds a conversation is kept unused.")
    session_turns: int = Field(default=256, ge=1, le=10**6, description="Most turns kept of a conversation.")
    session_bytes: Bytes = Field(default=2**20, description="Most bytes kept of a conversation.")
    on_conflict: Literal["reject", "queue"] = Field(
        default="reject", description="A turn of a session that is just being answered: 409, or wait."
    )

    @pydantic.field_validator("state_url")
    @classmethod
    def _known_scheme(cls, url: pydantic.SecretStr | None) -> pydantic.SecretStr | None:
        text = "off" if url is None else url.get_secret_value()
        if text != "off" and not re.match(r"(rediss?|valkeys?|unix)://.", text):
            raise ValueError("expected redis://, rediss:// (TLS) or unix://, or off")
        return url


class AnswerSettings(Room):
    """Answers in the front's memory: such as were given, and such as are being given."""

    answer_cache: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = Field(
        default=64 * 2**20, description="Memory of the answer cache, in bytes; 0: equal questions share nothing."
    )
    answer_ttl: float = Field(default=600.0, gt=0, le=10**7, description="Seconds a cached answer is given again.")
    resume_window: float = Field(
        default=10.0,
        ge=0,
        le=600,
        description="Seconds that a turn with an Idempotency-Key goes on without its client, which may come back.",
    )


class PathSettings(Room):
    """Where files are."""

    model: str = Field(
        default="smollm2-135m-instruct", description="Catalog name, .gguf file or Hugging Face directory."
    )
    public_system: Path | None = Field(
        default=None, description="File with a system message whose KV tenants may share; all else is a tenant's own."
    )
    data_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        default=Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay",
        description="Models and conversations.",
    )


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class KeySettings(Room):
    """One entry of the file's table ``[keys]``: whose key it is, and the SHA-256 of it in hex, never the key."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: Name
    service_class: Literal["interactive", "batch"] = Field(default="interactive", alias="class")
    rate: float = Field(default=0.0, ge=0, description="Requests per second, over ten seconds; 0: no limit.")
    slo_ttft: float | None = Field(default=None, ge=0, description="As the setting of this name, for this key.")


class Settings(Room):
    """All rooms together, as the command line sees them; ``keys`` by name."""

    paths: PathSettings = PathSettings()
    engine: EngineSettings = EngineSettings()
    admission: AdmissionSettings = AdmissionSettings()
    server: ServerSettings = ServerSettings()
    state: StateSettings = StateSettings()
    answers: AnswerSettings = AnswerSettings()
    keys: dict[Name, KeySettings] = {}

    @pydantic.field_validator("keys")
    @classmethod
    def _distinct(cls, keys: dict[Name, KeySettings]) -> dict[Name, KeySettings]:
        if len({key.sha256 for key in keys.values()}) < len(keys):
            raise ValueError("two names have the same sha256; a key belongs to one")
        return keys

    @property
    def needs_key(self) -> bool:
        return self.server.api_key is not None or bool(self.keys)

    @property
    def max_queue(self) -> int:
        return self.admission.max_queue or 5 * self.engine.max_batch

    @property
    def max_queued_tokens(self) -> int:
        return self.admission.max_queued_tokens or 512 * self.max_queue


ROOMS: dict[str, type[Room]] = {
    "paths": PathSettings,
    "engine": EngineSettings,
    "admission": AdmissionSettings,
    "server": ServerSettings,
    "state": StateSettings,
    "answers": AnswerSettings,
}
#: setting name -> room name
NAMES: dict[str, str] = {name: room for room, cls in ROOMS.items() for name in cls.model_fields}


class SettingsError(InvalidRequest):
    """A setting is unknown or out of range; the message says which, from where, and what would be right."""


def _known(name: str, origin: str) -> str:
    key = name.replace("-", "_")
    if key not in NAMES:
        near = difflib.get_close_matches(key, NAMES, n=1)
        hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
        raise SettingsError(f"unknown setting {name!r} in {origin}{hint}", param=name)
    return key


class _Found(NamedTuple):
    value: Any
    kind: str
    where: str


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Merge all sources into one Settings. Raises SettingsError. A missing ``file`` is an error only if named;
    without a name, ``forebay.toml`` in the current folder is read where it exists."""
    return load_with_origins(flags, environ, file)[0]


def load_with_origins(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> tuple[Settings, dict[str, str]]:
    """As ``load``, and where each setting that is not at its default was said: ``environment FOREBAY_PORT``. What the
    file's table ``[keys]`` says is under ``keys``."""
    environ = os.environ if environ is None else environ
    found: dict[str, _Found] = {}
    if file is None and Path("forebay.toml").is_file():
        file = Path("forebay.toml")
    keys: Any = {}
    if file is not None:
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"cannot read {file}: {error}", param="config") from error
        keys = table.pop("keys", {})
        found |= {_known(key, str(file)): _Found(value, "file", str(file)) for key, value in table.items()}
    for variable, value in environ.items():
        if variable.startswith("FOREBAY_") and variable not in RESERVED:
            name = _known(variable.removeprefix("FOREBAY_").lower(), "the environment")
            found[name] = _Found(value, "environment", variable)
    for key, value in (flags or {}).items():
        if value is not None:
            found[_known(key, "the command line")] = _Found(value, "flag", "--" + key.replace("_", "-"))
    rooms: dict[str, Room] = {}
    for room, cls in ROOMS.items():
        try:
            rooms[room] = cls(**{name: item.value for name, item in found.items() if NAMES[name] == room})
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise SettingsError(f"{found[name].where}: {name}: {first['msg']}", param=name) from None
    engine = rooms["engine"]
    if isinstance(engine, EngineSettings) and engine.token_budget < engine.max_batch:
        raise SettingsError(
            f"token_budget ({engine.token_budget}) must be at least max_batch ({engine.max_batch}): every sequence "
            "that runs gets a token in each step",
            param="token_budget",
        )
    try:
        settings = Settings(**rooms, keys=keys)  # type: ignore[arg-type]
    except pydantic.ValidationError as error:  # of the keys: the rooms are valid by now
        first = error.errors(include_url=False)[0]
        raise SettingsError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}", param="keys") from None
    origins = {name: f"{item.kind} {item.where}" for name, item in found.items()}
    return settings, origins | ({"keys": f"file {file}"} if keys else {})


#: Environment variables that are no settings: where the settings are.
RESERVED = frozenset({"FOREBAY_CONFIG"})
