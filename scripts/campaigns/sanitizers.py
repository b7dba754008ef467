"""The kernels and how they share their work, without torch, under AddressSanitizer and ThreadSanitizer.

python -m scripts.campaigns.sanitizers [address thread]

Compiles the programs of tests/runtime/kernels/standalone/ for this processor and for plain x86-64, and runs them;
UndefinedBehaviorSanitizer is beside AddressSanitizer. Exit 1 if one does not compile, or if anything is said.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.tools.cross import INCLUDES, STANDALONE

SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
}
PROGRAMS = ("tasks", "main")
_FLAGS = ["-std=c++20", "-O1", "-g1", "-pthread", "-Wno-psabi"]


def find(program: str, sanitizer: str, march: str = "native", includes: Sequence[Path] = ()) -> str | None:
    """Report of a program; None if it ends well. `includes` come before the kernels' own."""
    with tempfile.TemporaryDirectory() as directory:
        binary = str(Path(directory) / program)
        command = ["g++", *_FLAGS, *SANITIZERS[sanitizer], f"-march={march}"]
        command += [*(f"-I{path}" for path in (*includes, *INCLUDES)), str(STANDALONE / f"{program}.cpp")]
        compiled = subprocess.run([*command, "-o", binary], capture_output=True, text=True)
        if compiled.returncode:
            return compiled.stderr
        # At addresses that do not change: ThreadSanitizer ends at some.
        done = subprocess.run(["setarch", "-R", binary], capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode or done.stderr else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", nargs="*", help=", ".join(SANITIZERS))
    any_found = False
    for sanitizer in parser.parse_args().sanitizers or SANITIZERS:
        for program in PROGRAMS:
            for march in ("native", "x86-64"):
                found = find(program, sanitizer, march)
                any_found |= found is not None
                print(f"{program}.cpp, {sanitizer}, {march}: {found or 'nothing'}", flush=True)
    return 1 if any_found else 0


if __name__ == "__main__":
    sys.exit(main())
