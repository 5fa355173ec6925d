"""A checkpoint file's checksum is that of its content, computed by any thread."""

from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.plugin.checkpoint import storage
from ns_multigpu.plugin.checkpoint.storage import StampedFile
from ns_multigpu.plugin.checkpoint.verify import Digest, Stamp, stamp_of

SIZES = [3, 1 << 20, 0, 7, (1 << 17) - 1, 1 << 17, 12]


def test_writes_of_all_sizes_enter_the_checksum(tmp_path: Path) -> None:
    file = StampedFile(tmp_path / "some")
    for number, size in enumerate(SIZES):
        assert file.write(bytes([number]) * size) == size
    stamp = file.finish()
    assert stamp.size == sum(SIZES) == (tmp_path / "some").stat().st_size
    assert stamp == stamp_of(tmp_path / "some", Digest())


def test_a_checksum_is_crc_32_as_zlib_has_it(tmp_path: Path) -> None:
    file = StampedFile(tmp_path / "some")
    for piece in (b"123", b"456789", b""):
        file.write(piece)
    assert file.finish() == Stamp(9, "crc32:cbf43926"), "the check value of this CRC"


def test_a_piece_is_its_owners_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes the next tensor where this one was: the checksum must have been taken by then."""
    monkeypatch.setattr(storage, "write_bytes", lambda *_: None)
    piece, file = bytearray(b"a" * (1 << 26)), StampedFile(tmp_path / "some")
    expected = Digest()
    for letter in (b"b", b"c"):
        expected.update(piece)
        file.write(memoryview(piece))
        piece[:] = letter * len(piece)
    assert file.finish() == Stamp(2 * len(piece), expected.hexdigest())


def test_a_piece_that_cannot_be_written_is_the_owners_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C during a write no thread may read the buffer once it is freed."""
    taken: list[Any] = []

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_bytes", interrupted)
    file = StampedFile(tmp_path / "some")
    plain = file._digest.update

    class Slow(Digest):
        def update(self, data: Any) -> None:
            plain(data)
            taken.append(len(data))

    file._digest = Slow()
    with pytest.raises(KeyboardInterrupt):
        file.write(b"a" * (1 << 26))
    assert taken == [1 << 26]
