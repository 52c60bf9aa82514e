"""Copies of images: verified by their digest, and never visible incomplete."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.images import catalog, transfer
from multiverse.images.catalog import Image, list_images, load, write_manifest
from multiverse.images.transfer import ImageStore

_RECEIVES = """
import sys
from pathlib import Path
from multiverse.images import transfer
brought = Path(sys.argv.pop(1)) if sys.argv[1].endswith(".tar") else None
transfer.receive(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.stdin.buffer, sys.stdout.buffer, brought)
"""
BLOCK = 64 << 10


def image(images: Path, name: str = "slim", key: str = "k", disk: bytes = b"boot") -> Image:
    """An image whose disk is a hole but for its first bytes and a few in the middle."""
    made = Image(name, "slim", key, "b", images / name, "quiet", "6.1", "bookworm")
    made.path.mkdir(parents=True, exist_ok=True)
    write_manifest(made, made.path)
    made.kernel.write_bytes(b"kernel")
    made.initrd.write_bytes(b"initrd")
    with made.disk.open("wb") as file:
        file.write(disk)
        file.seek(100 * BLOCK + 5 * 4096 + 7)
        file.write(b"middle")
        file.truncate(64 << 20)
    return made


def receiver(images: Path) -> list[str]:
    images.mkdir(exist_ok=True)
    return [sys.executable, "-c", _RECEIVES, str(images)]


def content(one: Image) -> list[bytes]:
    return [path.read_bytes() for path in (one.disk, one.kernel, one.initrd)]


def remains(images: Path) -> list[str]:
    return [path.name for path in images.iterdir() if "@" in path.name]


def test_an_image_arrives_whole_and_sparse_and_once(tmp_path: Path) -> None:
    sent, there = image(tmp_path / "here"), tmp_path / "there"
    assert transfer.send(sent, receiver(there)) is True
    got = load(there, "slim")
    assert content(got) == content(sent)
    assert got.disk.stat().st_blocks * 512 < 1 << 20, "holes stay holes"
    assert catalog.recorded_digest(got.path) == catalog.digest_of(sent.path) == catalog.digest_of(got.path)
    assert got.path.stat().st_mode & 0o777 == 0o755
    assert transfer.send(sent, receiver(there)) is False
    assert remains(there) == []


def test_an_archive_may_be_brought_by_another_program(tmp_path: Path) -> None:
    """As sbcast does. Nothing is brought that is there already, and what cannot be brought leaves nothing."""
    sent, there, archive = image(tmp_path / "here"), tmp_path / "there", tmp_path / "slim.tar"
    receives = receiver(there)
    receives.insert(3, str(archive))
    brought: list[Path] = []

    def bring(file: Path) -> None:
        brought.append(file)
        shutil.copy(file, archive)

    def fail(file: Path) -> None:
        raise Broken("sbcast failed", hint="it is repeated")

    with pytest.raises(Broken, match="sbcast failed"):
        transfer.send(sent, receives, fail)
    assert list_images(there) == [] == remains(there)
    assert transfer.send(sent, receives, bring) is True
    assert content(load(there, "slim")) == content(sent) and remains(there) == []
    assert transfer.send(sent, receives, bring) is False
    assert len(brought) == 1 and not brought[0].exists(), "the sender's archive is removed"


def test_a_newer_image_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    there = tmp_path / "there"
    transfer.send(image(tmp_path / "here"), receiver(there))
    with (there / "slim" / "disk.raw").open("rb") as used:
        transfer.send(image(tmp_path / "here", key="new", disk=b"next"), receiver(there))
        assert used.read(4) == b"boot", "a VM that uses the old one keeps its file"
    assert load(there, "slim").key == "new"
    assert load(there, "slim").disk.read_bytes()[:4] == b"next"
    assert remains(there) == []


class Crash(BaseException):
    """The machine loses power."""


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets this process crash after so many renames from then on."""
    rename = Path.rename

    def crash_after(renames: int) -> None:
        done = itertools.count()

        def rename_or_crash(path: Path, target: Path) -> Path:
            if next(done) >= renames:
                raise Crash
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", rename_or_crash)
        # Nothing is removed after a crash either.
        monkeypatch.setattr(catalog.shutil, "rmtree", lambda *args, **kwargs: None)

    return crash_after


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_an_image_is_replaced_leaves_one_in_its_place(
    tmp_path: Path, crashing: Callable[[int], None], renames: int
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    transfer.copy(image(tmp_path / "here"), there)
    newer = image(tmp_path / "here", key="new", disk=b"next")
    crashing(renames)
    with contextlib.suppress(Crash):
        transfer.copy(newer, there)
    assert load(there, "slim").key == "new"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_where_names_cannot_be_exchanged_the_old_image_is_put_back_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashing: Callable[[int], None], renames: int
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    transfer.copy(image(tmp_path / "here"), there)
    newer = image(tmp_path / "here", key="new", disk=b"next")

    def cannot(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "not on NFS")

    monkeypatch.setattr(catalog.kernel, "exchange", cannot)
    crashing(renames)
    with contextlib.suppress(Crash):
        transfer.copy(newer, there)
    monkeypatch.undo()
    newest = image(tmp_path / "here", key="newest")
    newest.disk.unlink()
    with pytest.raises(Exhausted):  # the next attempt fails as well
        transfer.copy(newest, there)
    assert load(there, "slim").key == ("new" if renames == 2 else "k")
    assert remains(there) == []


def test_what_is_not_the_image_of_that_digest_does_not_appear(tmp_path: Path) -> None:
    sent, there = image(tmp_path / "here"), tmp_path / "there"
    catalog.record_digest(sent.path, "0" * 64)
    with pytest.raises(Broken, match=r"has the digest \w+, and not 000000000000"):
        transfer.send(sent, receiver(there))
    assert list_images(there) == [] and remains(there) == []


def test_what_breaks_off_does_not_appear_and_can_be_repeated(tmp_path: Path) -> None:
    sent, there = image(tmp_path / "here"), tmp_path / "there"
    there.mkdir()
    archive = tmp_path / "archive"
    with archive.open("wb") as file:
        transfer._archive(sent, file)
    expected = catalog.digest_of(sent.path)
    half = tmp_path / "half"
    half.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with half.open("rb") as source, pytest.raises((Exhausted, Broken)):
        transfer.receive(there, "slim", expected, source, io.BytesIO())
    assert list_images(there) == [] and remains(there) == []
    (there / ".slim@new-killed").mkdir()  # of a receiver that was killed
    answers = io.BytesIO()
    with archive.open("rb") as source:
        transfer.receive(there, "slim", expected, source, answers)
    assert answers.getvalue() == b"send\ndone\n"
    assert content(load(there, "slim")) == content(sent) and remains(there) == []


def test_an_image_is_not_listed_while_it_arrives(tmp_path: Path) -> None:
    sent, there = image(tmp_path / "here"), tmp_path / "there"
    there.mkdir()
    archive = tmp_path / "archive"
    with archive.open("wb") as file:
        transfer._archive(sent, file)
    data, expected = archive.read_bytes(), catalog.digest_of(sent.path)
    out, into = os.pipe()

    def receive() -> None:
        with os.fdopen(out, "rb") as source:
            transfer.receive(there, "slim", expected, source, io.BytesIO())

    arriving = threading.Thread(target=receive)
    arriving.start()
    with os.fdopen(into, "wb") as target:
        target.write(data[: len(data) // 2])
        target.flush()
        while not remains(there):
            pass
        assert list_images(there) == []
        target.write(data[len(data) // 2 :])
    arriving.join(20)
    assert [one.name for one in list_images(there)] == ["slim"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/no/such/command"], "cannot run"),
        (["sh", "-c", "echo no route >&2; exit 255"], "no route"),
        (["false"], "ended"),
    ],
)
def test_the_sender_says_why_a_host_did_not_take_an_image(command: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(Broken, match=said):
        transfer.send(image(tmp_path), command)


def test_a_name_leads_to_no_other_directory(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        transfer.receive(tmp_path, "../x", "0", io.BytesIO(), io.BytesIO())


# --- digests -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40 * 16), st.binary(min_size=1, max_size=8)), max_size=5))
def test_a_digest_depends_on_content_and_not_on_holes(pieces: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as install:
        one, other = (image(Path(install, name)) for name in ("one", "other"))
        size = 41 * BLOCK
        plain = bytearray(size)
        with one.disk.open("wb") as file:
            for page, data in pieces:  # holes begin and end within blocks
                file.seek(page * 4096)
                file.write(data)
                plain[page * 4096 : page * 4096 + len(data)] = data
            file.truncate(size)
        other.disk.write_bytes(plain)
        assert catalog.digest_of(one.path) == catalog.digest_of(other.path)
        plain[-1] ^= 1
        other.disk.write_bytes(plain)
        assert catalog.digest_of(one.path) != catalog.digest_of(other.path)


@pytest.mark.parametrize("file", catalog.FILES)
def test_a_digest_depends_on_each_file(file: str, tmp_path: Path) -> None:
    one = image(tmp_path)
    before = catalog.digest_of(one.path)
    (one.path / file).write_bytes((one.path / file).read_bytes() + b"x")
    assert catalog.digest_of(one.path) != before


# --- on demand ---------------------------------------------------------------------------------------


def test_an_image_of_the_site_is_listed_and_copied_when_it_is_needed(tmp_path: Path) -> None:
    """Whatever the umask is: each QEMU runs as a user of its own."""
    site, local = tmp_path / "site", tmp_path / "local"
    offered = image(site)
    store = ImageStore(local, site)
    assert store.listed() == [offered] and not local.exists()
    assert store.disk_size(offered) == 64 << 20
    umask = os.umask(0o077)
    try:
        got = store.fetch("slim")
    finally:
        os.umask(umask)
    assert got.path == local / "slim" and content(got) == content(offered)
    assert [path.stat().st_mode & 0o777 for path in (local, got.path, got.disk)] == [0o755, 0o755, 0o644]
    assert store.listed() == [got] and store.disk_size(got) is None


def test_an_image_that_was_built_again_is_found_though_nobody_lists_any(tmp_path: Path) -> None:
    """As in an agent for VMs inside jobs alone, whose copy is older."""
    site, local = tmp_path / "site", tmp_path / "local"
    image(local, key="old")
    offered = image(site, key="new")
    store = ImageStore(local, site)
    assert store.found("slim") == offered
    assert store.fetch("slim").key == "new" and store.found("slim").path == local / "slim"


def test_threads_that_list_at_the_same_time_wait_for_the_same_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    offered, looks, go_on = image(site), threading.Semaphore(0), threading.Event()

    def slowly(path: Path) -> list[Image]:
        if path == site:
            looks.release()
            assert go_on.wait(60)
        return list_images(path)

    monkeypatch.setattr(catalog, "list_images", slowly)
    monkeypatch.setattr("multiverse.images.transfer._PATIENCE", 60)
    store = ImageStore(tmp_path / "local", site)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.listed)
        assert looks.acquire(timeout=60)
        second = threads.submit(store.listed)
        wait([second], timeout=0.2)  # one that does not wait has ended by then
        go_on.set()
        assert first.result() == second.result() == [offered]


def test_an_image_of_the_site_is_found_also_while_no_look_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, go_on = tmp_path / "site", threading.Event()
    offered, listed = image(site), list_images
    monkeypatch.setattr(catalog, "list_images", lambda path: listed(path) if path != site or go_on.wait(60) else [])
    monkeypatch.setattr("multiverse.images.transfer._PATIENCE", 0)
    store = ImageStore(tmp_path / "local", site)
    assert store.listed() == [] and store.found("slim") == offered
    go_on.set()


def test_a_newer_image_of_the_site_is_described_and_copied(tmp_path: Path) -> None:
    site, local = tmp_path / "site", tmp_path / "local"
    image(site)
    store = ImageStore(local, site)
    old = store.fetch("slim")
    newer = image(site, key="new", disk=b"next")
    assert [one.key for one in store.listed()] == ["new"]
    assert store.described("slim") == newer
    assert store.fetch("slim").disk.read_bytes()[:4] == b"next"
    assert store.described("slim").key == "new" != old.key


def test_what_is_here_is_used_when_the_site_does_not_offer_it(tmp_path: Path) -> None:
    own = image(tmp_path / "local")
    for site in (None, tmp_path / "absent"):
        store = ImageStore(tmp_path / "local", site)
        assert store.listed() == [own] == [store.fetch("slim")] == [store.described("slim")]
        with pytest.raises(Refused):
            store.fetch("other")


def test_a_site_that_cannot_be_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    offered = image(site)
    store = ImageStore(tmp_path / "local", site)
    assert store.listed() == [offered]

    def stale(path: Path) -> list[Image]:
        if path == site:
            raise OSError(errno.ESTALE, "stale file handle")
        return list_images(path)

    monkeypatch.setattr(catalog, "list_images", stale)
    assert store.listed() == store.listed() == [offered]


def test_an_image_that_somebody_else_could_change_is_not_copied(tmp_path: Path) -> None:
    image(tmp_path / "site")

    def check(path: Path) -> None:
        raise Refused(f"others may write to {path}")

    with pytest.raises(Refused, match="others may write"):
        ImageStore(tmp_path / "local", tmp_path / "site", check).fetch("slim")
    assert not (tmp_path / "local").exists()
