"""Stored sources are run under the names that they had, whatever is there today."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from pathlib import Path

import pytest

from lockstep.launcher.rank_process import run_code
from lockstep.tools.replay.stored_sources import StoredSources

MODEL = "from pathlib import Path\nhere = Path(__file__).name\ndef fail():\n    return 1 / 0\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Let everything that an import changes be as before afterwards."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "home"), *sys.path])
    monkeypatch.setattr(linecache, "cache", {**linecache.cache})
    before = {*sys.modules}
    (tmp_path / "home").mkdir()
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def store(place: Path, **files: str) -> StoredSources:
    for name, text in files.items():
        original = place / "home" / name.replace("__in__", "/")
        stored = place / "sources" / original.with_suffix(".py").relative_to("/")
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(text)
    return StoredSources(place / "sources")


def test_a_module_is_the_stored_one_under_its_own_name(place):
    file = place / "home" / "net_of_mine.py"
    file.write_text("import nothing_like_this  # what is there today\n" * 5)
    store(place, net_of_mine=MODEL).install()
    import net_of_mine

    assert (net_of_mine.__file__, net_of_mine.here) == (str(file), "net_of_mine.py")
    assert inspect.getsource(net_of_mine.fail) == "def fail():\n    return 1 / 0\n"
    with pytest.raises(ZeroDivisionError) as caught:
        net_of_mine.fail()
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{file}", line 4, in fail\n    return 1 / 0' in shown
    assert not (place / "home" / "__pycache__").exists()


def test_packages_and_folders_without_init_are_found_after_their_files_are_gone(place):
    store(
        place,
        pack_of_mine__in____init__="from . import inner_of_mine",
        pack_of_mine__in__inner_of_mine="value = 1",
        space_of_mine__in__deep__in__module_of_mine="value = 2",
    ).install()
    import pack_of_mine
    from space_of_mine.deep import module_of_mine

    assert pack_of_mine.inner_of_mine.value == 1
    assert module_of_mine.value == 2
    assert module_of_mine.__file__ == str(
        place / "home" / "space_of_mine" / "deep" / "module_of_mine.py"
    )


def test_what_is_not_stored_is_imported_as_ever(place):
    (place / "home" / "config_of_mine.py").write_text("value = 3")
    store(place, net_of_mine=MODEL).install()
    import config_of_mine

    assert config_of_mine.value == 3
    with pytest.raises(ModuleNotFoundError, match="nothing_like_this"):
        import nothing_like_this  # noqa: F401


def test_a_script_and_a_module_run_from_their_stored_text(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (place / "home" / "train.py").write_text("print('changed')")
    sources = store(place, train="print(__name__, __file__)")
    sources.install()
    file = str(place / "home" / "train.py")
    run_code("script", file, sources.read(file))
    run_code("module", "train")
    assert capsys.readouterr().out == f"__main__ {file}\n" * 2
    assert sources.read("/nowhere.py") is None
