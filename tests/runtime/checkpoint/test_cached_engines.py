"""Engines in the cache, while other processes make and remove some."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from strength import draws

from runtime.checkpoint.cached_engines import cached_engines, engines_bytes, other_bytes, prune
from runtime.util.cache import make_cache_dir

LARGE = 1 << 20


def test_cache_is_counted_and_cleaned_while_another_process_makes_and_removes_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: a run ended with "No such file or directory: ….tmp", the engine that another process was building."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))
    engines = make_cache_dir() / "engines"
    kept, weights = engines / "kept-0", cache / "weights"
    for directory in (kept, weights):
        directory.mkdir(parents=True)
    (weights / "a.safetensors").write_bytes(bytes(LARGE))
    (kept / "a.safetensors").symlink_to("../../weights/a.safetensors")
    code = (
        "import os, sys; from pathlib import Path\n"
        "while os.getppid() == int(sys.argv[2]):\n"
        "    for name in 'ab':\n"
        "        made = Path(sys.argv[1], f'.{name}.tmp'); (made / 'c' / 'd').mkdir(parents=True)\n"
        "        entry = made.with_name(name); made.rename(entry)\n"
        "        (entry / 'c' / 'd').rmdir(); (entry / 'c').rmdir(); entry.rmdir()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(engines), str(os.getpid())]) as other:
        try:
            for _ in range(draws(300, 60)):
                found = {engine.path: engine.num_bytes for engine in cached_engines()}
                assert found[kept] == LARGE <= other_bytes() + engines_bytes(cached_engines())
                assert prune([]) == []
            assert other.poll() is None
        finally:
            other.kill()
    assert (kept / "a.safetensors").stat().st_size == LARGE
