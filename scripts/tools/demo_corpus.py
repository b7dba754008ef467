"""The text of the demo: documented Python items, split by module, and the article pairs drawn from them.

Everything here is a function of the pinned packages and a seed: files are visited in sorted order, no path of
the machine enters, and a held-out item never stands in training, whatever module it was copied to.
"""

import ast
import platform
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

Category = Literal["digest", "describe"]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]
SKIPPED_PARTS = {"test", "tests", "testing", "_vendor", "vendored", "vendor", "extern", "externals"}
NUM_HELD_OUT_MODULES = 170
SHORT_CUT, LONG_CUT = 320, 900  # characters of a docstring that an article shows
LONG_SHARE = 0.3  # of the pairs have the long cut
DULL_WORDS = {"See", "Deprecated", "Internal", "Alias", "Same", "Like"}


@dataclass(frozen=True)
class Item:
    """One public documented function or class; `code` is a function without its docstring, else empty."""

    source: str  # "package module"
    name: str
    signature: str
    docstring: str
    sentence: str  # the docstring's first sentence, on one line
    rest: str  # the docstring without it
    code: str


@dataclass(frozen=True)
class Pair:
    """An article, the reference highlights for it, and where both come from."""

    category: Category
    article: str
    highlights: str
    source: str


@dataclass(frozen=True)
class Split:
    """Modules (each a list of items) to train on and to evaluate on, and the counts that led there."""

    train: list[list[Item]]
    held_out: list[list[Item]]
    counts: dict[str, int]


@dataclass(frozen=True)
class Package:
    """A pinned package of the corpus."""

    name: str
    version: str
    licence: str


def read_packages(path: Path) -> list[Package]:
    """Packages of the pinned list, whose lines read `name==version  # licence`."""
    matches = re.finditer(r"^(\S+)==(\S+)  # (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return sorted((Package(*match.groups()) for match in matches), key=lambda package: package.name)


def corpus_files(corpus_dir: Path, packages: list[Package]) -> Iterator[tuple[str, str, Path]]:
    """(package, module, file) of each source file, in sorted order, the standard library first."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(path.relative_to(stdlib).as_posix() for path in stdlib.rglob("*.py")):
        if not {*SKIPPED_PARTS, "site-packages"} & set(path.split("/")):
            yield "python", module_name(path), stdlib / path
    found = {normalised_name(dist): dist for dist in distributions(path=[str(corpus_dir)])}
    for package in packages:
        dist = found.get(package.name)
        if dist is None or dist.version != package.version:
            raise SystemExit(f"not installed in the corpus directory: {package.name}=={package.version}")
        for path in sorted(file.as_posix() for file in dist.files or [] if file.suffix == ".py"):
            if not SKIPPED_PARTS & set(path.split("/")):
                yield package.name, module_name(path), corpus_dir / path


def normalised_name(dist: Distribution) -> str:
    """Distribution name as the pinned list writes it: lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower()


def module_name(path: str) -> str:
    """Dotted module of a relative path: `json/decoder.py` is `json.decoder`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def first_sentence(docstring: str) -> str:
    """The docstring up to its first full stop, or its first paragraph, on one line."""
    text = " ".join(docstring.strip().split("\n\n")[0].split())
    match = re.match(r"(.+?[.!?])(\s|$)", text)
    return match.group(1) if match else text


def without_sentence(docstring: str, sentence: str) -> str:
    """The docstring after its first sentence, however that was broken into lines."""
    match = re.match(r"\s+".join(map(re.escape, sentence.split())), docstring)
    return docstring[match.end() :].strip() if match else ""


def module_items(source: str, path: Path) -> Iterator[Item]:
    """Each public item whose first sentence has 20 to 140 characters; none of a file under the GPL."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, OSError):
        return
    if "General Public License" in text or any(token in text for token in SPECIAL_TOKENS):
        return
    for node in ast.walk(tree):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            docstring = (ast.get_docstring(node) or "").strip()
            sentence = first_sentence(docstring)
            if len(docstring) >= 30 and 20 <= len(sentence) <= 140:
                rest = without_sentence(docstring, sentence)
                yield Item(source, node.name, signature_of(node), docstring, sentence, rest, code_of(node))


def signature_of(node: Definition) -> str:
    """`def name(first six arguments):` or `class Name:`."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {node.name}({', '.join(argument.arg for argument in node.args.args[:6])}):"


def code_of(node: Definition) -> str:
    """A function's code without decorators, comments and docstring; empty for classes and stubs."""
    if isinstance(node, ast.ClassDef) or len(node.body) < 2:
        return ""
    body, decorators = node.body, node.decorator_list
    node.body, node.decorator_list = body[1:], []
    code = ast.unparse(node)
    node.body, node.decorator_list = body, decorators
    return code


def item_keys(item: Item) -> list[str]:
    """Keys by which two items are the same: name with first sentence, docstring, or code, each normalised."""
    texts = [f"name {item.name} {item.sentence}", f"doc {item.docstring}"]
    texts += [f"code {item.code}"] if item.code else []
    return [" ".join(re.findall(r"\w+", text.lower())) for text in texts]


def load_split(corpus_dir: Path, packages: list[Package], seed: int) -> Split:
    """Read the corpus, keep one of each (name, first sentence), and hold modules out by a seeded draw."""
    modules: list[list[Item]] = []
    seen: set[str] = set()
    num_files = num_items = 0
    for package, module, path in corpus_files(corpus_dir, packages):
        items = list(module_items(f"{package} {module}", path))
        num_files, num_items = num_files + 1, num_items + len(items)
        new = list({key: item for item in items if (key := item_keys(item)[0]) not in seen}.values())
        seen.update(item_keys(item)[0] for item in new)
        if len(new) >= 2:
            modules.append(new)
    random.Random(seed).shuffle(modules)
    held_out, train = hold_out(modules)
    held_out_keys = {key for items in held_out for item in items for key in item_keys(item)}
    kept = [[item for item in items if held_out_keys.isdisjoint(item_keys(item))] for items in train]
    counts = {
        "num_files": num_files,
        "num_items_found": num_items,
        "num_modules": len(modules),
        "num_items_distinct": sum(map(len, modules)),
        "num_held_out_modules": len(held_out),
        "num_held_out_items": sum(map(len, held_out)),
        "num_train_items_before_overlap_removed": sum(map(len, train)),
        "num_train_items": sum(map(len, kept)),
        "num_train_modules": sum(len(items) >= 2 for items in kept),
    }
    return Split([items for items in kept if len(items) >= 2], held_out, counts)


def hold_out(modules: list[list[Item]]) -> tuple[list[list[Item]], list[list[Item]]]:
    """(held out, rest): the first modules of the shuffled list with 4 to 40 items are held out."""
    chosen = [i for i, items in enumerate(modules) if 4 <= len(items) <= 40][:NUM_HELD_OUT_MODULES]
    indices = set(chosen)
    return [modules[i] for i in chosen], [items for i, items in enumerate(modules) if i not in indices]


def cut(text: str, max_characters: int) -> str:
    """The text, ended at a word with ` ...` if it is longer than allowed."""
    return text if len(text) <= max_characters else text[:max_characters].rsplit(" ", 1)[0] + " ..."


def draw_cut(rng: random.Random) -> int:
    """Number of characters of each docstring that an article shows."""
    return LONG_CUT if rng.random() < LONG_SHARE else SHORT_CUT


def make_digest(items: list[Item], rng: random.Random, min_items: int) -> Pair:
    """`min_items` to 5 items of one module; the reference names each with its first sentence."""
    chosen = rng.sample(items, min(rng.randint(min_items, 5), len(items)))
    max_characters = draw_cut(rng)
    blocks = [f'{item.signature}\n    """{cut(item.docstring, max_characters)}"""' for item in chosen]
    article = "\n\n".join(blocks)
    highlights = "\n".join(f"{item.name}: {item.sentence}" for item in chosen)
    return Pair("digest", article, highlights, chosen[0].source)


def describable(item: Item) -> bool:
    """True if the first sentence is plain English and there is something to write it from."""
    words = item.sentence.split()
    plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,.()'/=-]+\.", item.sentence) is not None
    letters = sum(character.isalpha() or character == " " for character in item.sentence)
    dull = words[0] in DULL_WORDS or "docstring" in item.sentence
    enough = len(item.rest.split()) >= 12 or len(item.code) >= 80
    return plain and not dull and len(words) >= 4 and letters >= 0.9 * len(item.sentence) and enough


def make_describe(item: Item, rng: random.Random) -> Pair:
    """A docstring without its first sentence, or a function's code; the reference is that sentence."""
    choices = [item.rest] if len(item.rest.split()) >= 12 else []
    choices += [item.code] if len(item.code) >= 80 else []
    text = rng.choice(choices)
    max_characters = draw_cut(rng) * (2 if text is item.code else 3)
    return Pair("describe", cut(text, max_characters), item.sentence, item.source)


def article_rows(held_out: list[list[Item]], seed: int) -> Iterator[tuple[Pair, Pair]]:
    """A digest and a describe pair of each held-out module that has both."""
    for index, items in enumerate(held_out):
        rng = random.Random(f"articles {seed} {index}")
        digest = make_digest(items, rng, min_items=2)
        candidates = [item for item in items if describable(item)]
        if candidates:
            yield digest, make_describe(rng.choice(candidates), rng)


def prompt_text(article: str) -> str:
    """The prompt that `summarize` feeds for an article (TensorRT-LLM's `summarize.py`)."""
    return (article + " TL;DR: ").strip().replace(" n't", "n't")


NOTICE = """\
The demo models were trained on, and `articles.jsonl` quotes, documentation and code of the packages below.
Each is named with the version read, its licence, and the copyright lines at the head of its licence file.

"""


def notice(packages: list[Package], corpus_dir: Path) -> str:
    """Name, version, licence and copyright lines of each package and of the standard library."""
    found = {normalised_name(dist): dist for dist in distributions(path=[str(corpus_dir)])}
    python = f"python {platform.python_version()} (standard library): PSF-2.0"
    entries = [[python, sys.copyright.split("\n")[0]]]
    for package in packages:
        lines = copyright_lines(found[package.name])
        entries.append([f"{package.name} {package.version}: {package.licence}", *lines])
    return NOTICE + "\n".join("\n    ".join(lines) for lines in entries) + "\n"


def copyright_lines(dist: Distribution) -> list[str]:
    """Copyright lines at the head of the package's licence file; further down are those of bundled works."""
    names = re.compile(r"[^/]+\.dist-info/(licenses/)?(LICEN[CS]E|COPYING)[^/]*", re.IGNORECASE)
    files = [file for file in dist.files or [] if names.fullmatch(file.as_posix())]
    for file in sorted(files, key=lambda file: (len(file.as_posix()), file.as_posix())):
        head = Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")[:1200]
        lines = re.findall(r"^[\s*#-]*(Copyright.*(?:\d{4}|\([cC]\)|©).*?)[\s,]*$", head, re.MULTILINE)
        if lines:
            return list(dict.fromkeys(lines))
    return []


def to_json(split: Split) -> dict[str, object]:
    """The split as plain JSON values."""
    return asdict(split)


def from_json(values: dict[str, object]) -> Split:
    """The split of `to_json`."""
    train, held_out, counts = values["train"], values["held_out"], values["counts"]
    assert isinstance(train, list) and isinstance(held_out, list) and isinstance(counts, dict)
    return Split(
        [[Item(**item) for item in items] for items in train],
        [[Item(**item) for item in items] for items in held_out],
        counts,
    )
