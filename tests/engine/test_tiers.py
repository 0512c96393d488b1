"""The tiers below the device, with a real model and real files: what comes back is what was computed."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import Judge

from forebay.catalog import ModelFiles
from forebay.config import EngineSettings
from forebay.engine.files import PageFiles, sweep
from forebay.engine.kv.tiers import Block, Realm, blocks_of, root_key
from forebay.engine.loop import Engine
from forebay.engine.runner import Built, build
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Emit, GenSpec
from forebay.engine.tiers import PageTiers, PoolBytes

PRINT = bytes(range(32))


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + 7 * i + 3 + salt * 97) % 199 for i in range(n)]


def tokens(news: list[Emit]) -> list[int]:
    return [token for emit in news for token in emit.tokens]


@dataclass
class Rig:
    """An engine as it is after a start: nothing on the device, what there is in ``folder`` on disk."""

    engine: Engine
    tiers: PageTiers

    def ask(self, ids: list[int], n: int = 8, *, ttl: float = 60.0, salt: str = "") -> Emit:
        """The last news of a turn; its tokens are all of the answer."""
        id = self.engine.scheduler._arrivals + 1
        news = self.engine.generate([GenSpec(id, ids, n, ttl=ttl, salt=salt)])[id]
        while self.engine.has_work:  # pages that are still to be copied
            self.engine.step()
        self.tiers.settle()
        self.engine.scheduler.check()
        return Emit(id, tokens(news), news[-1].end, cached=news[-1].cached, tier=news[-1].tier)


Start = Callable[..., Rig]


@pytest.fixture(scope="module")
def built(plain: tuple[ModelFiles, Judge]) -> Built:
    settings = EngineSettings.model_validate({"dtype": "float32", "device": "cpu", "kv_memory": 2**24})
    return build(plain[0], settings)


@pytest.fixture
def start(built: Built, tmp_path: Path) -> Start:
    def make(
        *,
        n_pages: int = 64,
        host: int = 0,
        disk: int = 2**24,
        page_cost: float = 10.0,
        layout: bytes = PRINT,
        clock: Callable[[], float] = time.time,
    ) -> Rig:
        built.pool.zero_()
        pool = PoolBytes(built.pool)
        files = PageFiles(tmp_path / "kv", layout, pool.page_bytes, disk, clock) if disk else None
        tiers = PageTiers(
            pool, host_bytes=host * pool.page_bytes, files=files, page_cost=page_cost, clock=time.monotonic
        )
        scheduler = Scheduler(n_pages=n_pages, max_batch=4, token_budget=64, max_context=1024, tiers=tiers)
        return Rig(Engine(scheduler, built.runner, vocab_size=199, clock=time.monotonic), tiers)

    return make


def test_a_conversation_goes_on_after_a_restart_from_disk(
    start: Start, built: Built, plain: tuple[ModelFiles, Judge]
) -> None:
    rig = start()
    first = rig.ask(prompt(150))
    assert (first.cached, first.tier) == (0, "")
    on_disk = rig.tiers.counts()["disk_bytes"]
    assert on_disk > 9 * PoolBytes(built.pool).page_bytes
    assert start().tiers.counts()["disk_bytes"] == on_disk
    turn = [*prompt(150), *first.tokens, *prompt(20, 5)]
    second = start().ask(turn)
    assert (second.cached, second.tier) == ((150 + 8 - 1) // 16 * 16, "disk")
    assert second.tokens == plain[1].greedy(turn, 8)


def test_what_is_no_conversation_is_not_kept(start: Start, tmp_path: Path) -> None:
    start().ask(prompt(150), ttl=0.0)
    assert list((tmp_path / "kv").iterdir()) == []
    assert start().ask(prompt(150)).cached == 0


@pytest.mark.parametrize(("host", "disk", "tier"), [(64, 0, "host"), (64, 2**24, "host"), (0, 2**24, "disk")])
def test_pages_that_strangers_push_out_come_back(
    start: Start, plain: tuple[ModelFiles, Judge], host: int, disk: int, tier: str
) -> None:
    rig = start(n_pages=24, host=host, disk=disk)
    first = rig.ask(prompt(150))
    for stranger in range(1, 6):
        rig.ask(prompt(300, stranger), 4, ttl=0.0)
    turn = [*prompt(150), *first.tokens, *prompt(20, 9)]
    second = rig.ask(turn)
    assert (second.cached, second.tier) == (144, tier)
    assert second.tokens == plain[1].greedy(turn, 8)


def test_conversations_outlast_strangers_on_the_device(start: Start) -> None:
    """Expected reuse, not plain LRU: the strangers came later, and go first."""
    rig = start(n_pages=40, disk=0)
    first = rig.ask(prompt(150))
    for stranger in range(1, 12):
        rig.ask(prompt(100, stranger), 4, ttl=0.0)
    second = rig.ask([*prompt(150), *first.tokens, *prompt(20, 9)])
    assert (second.cached, second.tier) == (144, "device")
    stranger = rig.ask([*prompt(100, 1), 5], 4, ttl=0.0)
    assert stranger.cached == 0


def test_tenants_share_no_tier(start: Start) -> None:
    start(host=64).ask(prompt(150), salt="a")
    rig = start(host=64)
    assert rig.ask(prompt(150), salt="b").cached == 0
    assert rig.ask([*prompt(150), 1], salt="a").tier == "disk"


def test_another_layout_finds_nothing_and_leaves_the_files_to_their_owner(start: Start, tmp_path: Path) -> None:
    start().ask(prompt(150))
    kept = {path: path.read_bytes() for path in (tmp_path / "kv").iterdir()}
    old = tmp_path / "model" / "kv-old"
    old.parent.mkdir()
    (tmp_path / "kv").rename(old)
    assert start(layout=bytes(32)).ask(prompt(150)).cached == 0
    sweep(tmp_path, tmp_path / "kv")
    assert {tmp_path / "kv" / path.name for path in old.iterdir()} == set(kept)
    for path in old.iterdir():
        os.utime(path, (1, 1))
    sweep(tmp_path, tmp_path / "kv")
    assert list(old.iterdir()) == []


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [flip(0), flip(20), flip(60), flip(100), flip(130), flip(250), flip(-1), lambda data: data[:-1], lambda data: b""],
    ids=["magic", "fingerprint", "key", "parent", "tokens", "hash", "page", "short", "empty"],
)
@pytest.mark.parametrize("after_start", [False, True])
def test_a_damaged_file_is_a_miss_and_goes(
    start: Start,
    plain: tuple[ModelFiles, Judge],
    tmp_path: Path,
    spoil: Callable[[bytes], bytes],
    *,
    after_start: bool,
) -> None:
    start().ask(prompt(150))
    third = list(blocks_of(Realm(), root_key(""), prompt(150), 0, 3))[2]
    path = tmp_path / "kv" / f"{third.key.hex()}.kv"
    rig = start() if after_start else None  # what it looked at then is not what it finds
    mtime = path.stat().st_mtime
    path.write_bytes(spoil(path.read_bytes()))
    os.utime(path, (mtime, mtime))
    spoiled = path.read_bytes()
    answer = (rig or start()).ask([*prompt(150), 3])
    assert (answer.cached, answer.tier) == (32, "disk")
    assert answer.tokens == plain[1].greedy([*prompt(150), 3], 8)
    assert not path.exists() or path.read_bytes() != spoiled  # computed and kept again


def test_a_page_of_other_tokens_under_the_right_name_is_a_miss(start: Start, tmp_path: Path) -> None:
    start().ask(prompt(150))
    start().ask(prompt(150, 1))
    ours, theirs = (
        tmp_path / "kv" / f"{next(blocks_of(Realm(), root_key(''), prompt(150, salt), 0, 1)).key.hex()}.kv"
        for salt in (0, 1)
    )
    ours.write_bytes(theirs.read_bytes())
    assert start().ask([*prompt(150), 3]).cached == 0


def test_too_slow_a_disk_is_not_read(start: Start) -> None:
    start().ask(prompt(150))
    rig = start(page_cost=0.0)
    rig.tiers._costs["disk"] = 1.0
    assert rig.ask([*prompt(150), 3]).cached == 0


def test_the_quota_holds_and_what_expires_first_goes_first(start: Start, built: Built, tmp_path: Path) -> None:
    page = PoolBytes(built.pool).page_bytes + 1024
    rig = start(disk=12 * page)
    rig.ask(prompt(150), ttl=50.0)
    rig.ask(prompt(100, 1), ttl=100.0)
    files = list((tmp_path / "kv").iterdir())
    assert sum(path.stat().st_size for path in files) <= 12 * page
    assert start(disk=12 * page).ask([*prompt(100, 1), 3]).cached == 96


def test_what_has_expired_goes_while_the_server_runs_and_at_its_start(start: Start, tmp_path: Path) -> None:
    now = [time.time()]
    rig = start(clock=lambda: now[0])
    rig.ask(prompt(150))
    assert list((tmp_path / "kv").iterdir())
    now[0] += 61
    rig.tiers.tidy()
    rig.tiers.settle()
    assert not list((tmp_path / "kv").iterdir())
    rig.ask(prompt(150, 1))
    assert start(clock=lambda: now[0] + 61).ask([*prompt(150, 1), 3]).cached == 0


def test_a_turn_keeps_all_of_its_conversation_the_longer(start: Start, tmp_path: Path) -> None:
    rig = start()
    first = rig.ask(prompt(150), ttl=5.0)
    rig.ask([*prompt(150), *first.tokens, *prompt(20, 9)], ttl=500.0)
    assert all(path.stat().st_mtime > time.time() + 400 for path in (tmp_path / "kv").iterdir())


def test_a_deleted_conversation_is_in_no_tier_and_its_neighbour_stays(start: Start, tmp_path: Path) -> None:
    rig = start(host=64)
    system = prompt(64)
    mine, others = [*system, *prompt(100, 1)], [*system, *prompt(100, 2)]
    rig.ask(mine)
    rig.ask(others)
    before = len(list((tmp_path / "kv").iterdir()))
    rig.engine.purge(Realm(), mine)
    rig.tiers.settle()
    assert len(list((tmp_path / "kv").iterdir())) == before - 6
    assert rig.ask([*mine, 3], ttl=0.0).cached == 64
    assert start().ask([*others, 3]).cached == 160


def test_a_neighbours_copies_in_memory_stay(start: Start) -> None:
    rig = start(host=64, disk=0)
    mine, others = ([*prompt(64), *prompt(100, salt)] for salt in (1, 2))
    rig.ask(mine)
    rig.ask(others)
    rig.engine.purge(Realm(), mine)
    offers = [rig.tiers.find(blocks_of(Realm(), root_key(""), ids, 0, 10)) for ids in (mine, others)]
    assert [len(offer.blocks) for offer in offers if offer is not None] == [4, 10]


def test_a_disk_that_is_full_costs_nothing_but_the_pages(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forebay.engine.files.os.utime", full)
    assert len(rig.ask(prompt(150)).tokens) == 8
    assert rig.tiers.counts()["skipped"] == 9
    assert caplog.text.count("No space left") == 1
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_disk_that_fails_later_ends_nothing(
    start: Start, plain: tuple[ModelFiles, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted anew to be read only, say."""
    rig = start()
    first = rig.ask(prompt(150))

    def fails(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("os.utime", "Path.unlink", "Path.open"):
        monkeypatch.setattr(f"forebay.engine.files.{name}", fails)
    turn = [*prompt(150), *first.tokens, *prompt(60, 5)]
    second = rig.ask(turn)
    assert second.tokens == plain[1].greedy(turn, 8)
    rig.engine.purge(Realm(), turn)
    rig.tiers.tidy()
    rig.tiers.settle()
    assert rig.tiers.counts()["skipped"] >= 3
    assert not rig.tiers.extend(list(blocks_of(Realm(), root_key(""), turn, 0, 12))[-1].key, 60.0)


def test_where_room_is_made_a_conversation_loses_its_end_first(start: Start, built: Built) -> None:
    page = PoolBytes(built.pool).page_bytes + 1024
    start(disk=6 * page).ask(prompt(150))
    assert start(disk=6 * page).ask([*prompt(150), 3]).cached >= 5 * 16
    host = start(host=6, disk=0, n_pages=24)
    host.ask(prompt(150))
    for stranger in range(1, 6):
        host.ask(prompt(374, stranger), 4, ttl=0.0)
    again = host.ask([*prompt(150), 3])
    assert (again.cached, again.tier) == (6 * 16, "host")


def test_another_server_on_the_folder_keeps_what_it_needs(start: Start, tmp_path: Path) -> None:
    now = [time.time()]
    one = start(clock=lambda: now[0])
    one.ask(prompt(150), ttl=60.0)
    other = start(clock=lambda: now[0])
    other.ask([*prompt(150), 3], ttl=1000.0)
    now[0] += 100
    one.tiers.tidy()
    one.tiers.settle()
    assert len(list((tmp_path / "kv").iterdir())) >= 9


def test_ids_that_none_can_be_purge_nothing(start: Start) -> None:
    rig = start()
    rig.ask(prompt(150))
    rig.engine.purge(Realm(), [2**70] * 32)
    assert rig.ask([*prompt(150), 3]).cached == 144


def test_pages_as_bytes_are_the_pool_itself(built: Built) -> None:
    pool = PoolBytes(built.pool)
    before = pool.read(3)
    pool.write(3, pool.read(3) ^ 255)
    assert (pool.read(3) == before ^ 255).all()
    assert built.pool[3].view(torch.uint8).flatten().tolist() == (before ^ 255).tolist()
    pool.write(3, before)


def test_law_11_keys_are_chains_of_sha256_over_salt_and_tokens() -> None:
    ids = list(range(32))
    first, second = blocks_of(Realm("a"), root_key("a"), ids, 0, 2)
    root = hashlib.sha256(b"roota").digest()
    spelled = [b"".join(id.to_bytes(8, "little") for id in page) for page in (ids[:16], ids[16:])]
    assert first == Block(hashlib.sha256(root + spelled[0]).digest(), root, tuple(ids[:16]))
    assert second.key == hashlib.sha256(first.key + spelled[1]).digest()
    assert next(blocks_of(Realm("b"), root_key("b"), ids, 0, 1)).key != first.key
