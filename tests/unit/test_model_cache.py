import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.model import ModelError
from shared.model.cache import ModelCache, bytes_under
from shared.model.manifest import MANIFEST, differences, read_manifest, write_manifest


def filled(folder):
    (folder / "a.txt").write_text("a")
    write_manifest(folder, "m", ("n",), "test", "none")


def test_whoever_asks_at_once_gets_one_build(tmp_path):
    builds = []

    def build(folder):
        builds.append(folder)
        filled(folder)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ModelCache(tmp_path).ensure("m", build), range(8)))
    assert len(builds) == 1
    assert set(found) == {tmp_path / "models" / "m"}


def test_two_processes_build_once_between_them(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from shared.model.cache import ModelCache\n"
        "from shared.model.manifest import write_manifest\n"
        "root = Path(sys.argv[1])\n"
        "def build(folder):\n"
        "    with (root / 'builds').open('a') as log: log.write('x')\n"
        "    write_manifest(folder, 'm', (), 'test', '')\n"
        "ModelCache(root).ensure('m', build)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [p.wait(60) for p in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path):
    cache = ModelCache(tmp_path)

    def broken(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("cable out")

    with pytest.raises(RuntimeError, match="cable out"):
        cache.ensure("m", broken)
    assert cache.names() == []
    assert [p.name for p in cache.models.iterdir()] == [".m.lock"]
    assert cache.ensure("m", filled).is_dir()


def test_what_a_killed_build_left_is_swept_by_the_next_one(tmp_path):
    cache = ModelCache(tmp_path)
    left = cache.models / ".m.build-dead"
    left.mkdir(parents=True)
    cache.ensure("m", filled)
    assert not left.exists()


def test_counting_bytes_survives_folders_that_vanish_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "kept").write_bytes(b"12345")
    scandir = os.scandir

    def racing(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert bytes_under(tmp_path) == 5


def test_removal_frees_a_model_and_sweeping_leaves_a_build_at_work_alone(tmp_path):
    cache = ModelCache(tmp_path)
    cache.ensure("m", filled)
    size = cache.size("m")
    assert cache.remove("m") == size > 0
    assert cache.names() == []
    assert cache.remove("m") == 0
    (cache.models / ".killed.build-x").mkdir()
    (cache.models / ".killed.build-x" / "half").write_text("four")

    def build(folder):
        filled(folder)
        assert ModelCache(tmp_path).sweep() == 4
        assert folder.is_dir()

    cache.ensure("busy", build)
    assert cache.names() == ["busy"]
    assert not list(cache.models.glob(".*.build-*"))


def test_verification_names_changed_cut_and_missing_files(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text("content")
    manifest = write_manifest(tmp_path, "m", (), "test", "")
    assert list(differences(tmp_path, manifest)) == []
    (tmp_path / "a").write_text("CONTENT")
    (tmp_path / "b").write_text("cut")
    (tmp_path / "c").unlink()
    found = list(differences(tmp_path, read_manifest(tmp_path)))
    assert [f.split()[0] for f in found] == ["a", "b", "c"]
    assert MANIFEST not in manifest.files


def test_a_file_is_hashed_again_only_when_it_changed(tmp_path):
    cache, file = ModelCache(tmp_path / "cache"), tmp_path / "x.gguf"
    file.write_bytes(b"one")
    first = cache.content_hash(file)
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    note.write_text(note.read_text().replace(first, "remembered"))
    assert cache.content_hash(file) == "remembered"
    file.write_bytes(b"three")
    assert cache.content_hash(file) not in (first, "remembered")


def test_a_file_replaced_by_one_of_its_size_and_time_is_hashed_again(tmp_path):
    cache, file, other = ModelCache(tmp_path / "cache"), tmp_path / "x.gguf", tmp_path / "other"
    file.write_bytes(b"one")
    first, stat = cache.content_hash(file), file.stat()
    other.write_bytes(b"two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    second = cache.content_hash(file)
    assert second != first
    file.write_bytes(b"one")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache.content_hash(file) == first


def test_a_cache_that_cannot_be_written_says_so_and_serves_what_it_has(tmp_path):
    root, file = tmp_path / "cache", tmp_path / "x.gguf"
    file.write_bytes(b"one")
    cache = ModelCache(root)
    there = cache.ensure("there", filled)
    for folder in ("hashes", "models"):
        kept = root / f"{folder}.kept"
        if (root / folder).exists():
            (root / folder).rename(kept)
        (root / folder).write_text("a file where a folder belongs, as nothing can be written then")
    assert len(cache.content_hash(file)) == 64
    with pytest.raises(ModelError, match=f"models.* cannot be written .*HORTATOR_CACHE.*{root}"):
        cache.ensure("new", filled)
    (root / "models").unlink()
    (root / "models.kept").rename(root / "models")
    assert cache.ensure("there", filled) == there


def test_a_disk_that_becomes_full_while_building_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "part").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = ModelCache(tmp_path)
    with pytest.raises(ModelError, match=r"No space left.*make room.*HORTATOR_CACHE"):
        cache.ensure("m", build)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"]
