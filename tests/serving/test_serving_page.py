"""The page at `/` in headless Chromium, as its user sees and uses it; and its text, for what no browser would show."""

import os
import re
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import Forks
from openai_server import DONE, Asked, Reply, Server, event, failure, running
from page_server import DRAFTED, PAGE, TEXT, serve_page, streamed
from waiting import HANG_S, wait_until

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
INSTALLING = os.environ.get("CI_BROWSER_INSTALLING")
"""A file that is there while Chromium is still being installed."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if INSTALLING is not None:
        wait_until(lambda: not Path(INSTALLING).exists())
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None or find_spec("playwright") is None:
        pytest.skip("no Chromium here (package `chromium`), or no Playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """`open_page(server, …)`: the page in a context of its own; nothing it does may be an error or go elsewhere."""
    problems: list[str] = []
    contexts = []

    def open_(server: Server, **context: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 800}, **context))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * HANG_S)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda message: problems.append(message.text) if "Content Security" in message.text else None
        )
        page.on("request", lambda one: None if one.url.startswith(server.url) else problems.append(f"asks {one.url}"))
        page.goto(server.url)
        page.wait_for_selector("#state.up, #state.down")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def ask(page: Any, prompt: str = "What is it?") -> None:
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")


def wait_for_answer(page: Any) -> None:
    page.wait_for_selector("#said:not(:empty)", state="attached")


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else_and_fits_the_policy() -> None:
    """One script and one style, nothing inline, no address; and no way from a text to HTML."""
    tags = Tags(PAGE).found
    assert [tag for tag, _ in tags if tag in ("script", "style")] == ["style", "script"]
    for tag, attributes in tags:
        assert tag not in {"iframe", "object", "embed", "img", "base"}
        assert tag != "link" or attributes == {"rel": "icon", "href": "data:,"}
        assert not {"style", "src", "srcset", "action", "background"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith(("#", "data:"))
    assert not re.search(r"https?://|url\(|@import", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser", PAGE)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", PAGE)


def test_tokens_are_marked_by_their_kind_and_counted(open_page: Open) -> None:
    with running(serve_page()) as server:
        page = open_page(server)
        ask(page)
        wait_for_answer(page)
        assert page.text_content(".answer .text") == TEXT
        marked = [(span.text_content(), span.get_attribute("class")) for span in page.query_selector_all(".answer .t")]
        assert marked == [
            ("lative ", "t accepted"), ("dec", "t recovered"), ("oding drafts ", "t accepted"), ("cheap ", "t bonus"),
            ("tokens.\n", "t recovered"),
        ]  # fmt: skip
        counts = {kind: page.text_content(f"#count-{kind}") for kind in ("accepted", "recovered", "bonus", "plain")}
        assert counts == {"accepted": "5", "recovered": "2", "bonus": "1", "plain": "1"}
        assert page.text_content("#per-step") == "2.25" and page.text_content("#acceptance") == "56 %"
        assert float(page.text_content("#rate").replace(",", "")) > 0 and page.text_content("#ttft").endswith("ms")
        assert "accepted there: 67, 67, 50; drafts: 3, 3, 2" in page.get_attribute("#chart", "aria-label")
        assert len(page.query_selector_all("#chart .few")) == 3  # of fewer than 20 drafts
        assert page.get_attribute("#steps", "aria-label") == "Tokens of each step: 1, 3, 4, 1"
        assert "4 steps, up to 4 tokens; 2.25 a step in all" in page.text_content("#steps")
        assert "5 of 9 drafted tokens accepted" in page.text_content(".figures")


def test_what_is_asked_is_the_contract(open_page: Open) -> None:
    with running(serve_page()) as server:
        page = open_page(server)
        page.fill("#max-tokens", "17")
        page.fill("#temperature", "0.5")
        ask(page, "One")
        wait_for_answer(page)
        ask(page, "Two")
        wait_for_answer(page)
        page.get_by_role("radio", name="Text to continue").check(force=True)
        ask(page, "Three")
        wait_for_answer(page)
        first, second, third = (one for one in server.generations())
    assert first.path == second.path == "/v1/chat/completions" and third.path == "/v1/completions"
    common = {
        "model": "demo", "max_tokens": 17, "temperature": 0.5, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_kinds": True,
    }  # fmt: skip
    for one in (first, second, third):
        assert common.items() <= one.body.items() and "speculative" not in one.body
        assert "authorization" not in one.headers
    assert first.body["messages"] == [{"role": "user", "content": "One"}]
    assert second.body["messages"] == [
        {"role": "user", "content": "One"}, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "Two"},
    ]  # fmt: skip
    assert third.body["prompt"] == "Three"


def test_the_drafter_is_switched_for_the_next_answer(open_page: Open) -> None:
    with running(serve_page()) as server:
        page = open_page(server)
        today = datetime.now(UTC).date().isoformat()
        assert page.text_content("#facts") == f"4 and 8 bits · bfloat16 · A <b>processor</b>, 2 cores · {today}"
        own = page.text_content("#drafter option")
        assert own == "the server’s own: suffix matching, drafts of up to 6 tokens"
        wanted = {
            ("own", ""): None, ("own", "3"): {"draft_len": 3}, ("ngram", "4"): {"ngram_config": [4, 2]},
            ("suffix", ""): {"suffix_config": 6}, ("off", ""): False,
        }  # fmt: skip
        for i, (drafter, length) in enumerate(wanted):
            page.select_option("#drafter", drafter)
            if drafter != "off":
                page.fill("#draft-len", length)
            ask(page)
            page.wait_for_selector(f".turn:nth-child({i + 2}) .figures:not(:empty)")
            page.wait_for_selector("#send", state="visible")
        assert [one.body.get("speculative") for one in server.generations()] == list(wanted.values())
        assert page.is_disabled("#both") and page.is_disabled("#draft-len")
        assert len(page.query_selector_all("#steps .turn-begins")) == len(wanted) - 1
        assert page.get_attribute("#steps", "aria-label").endswith("4, 1" + ", 1" * 9)  # without drafts all are 1
        page.select_option("#drafter", "suffix")
        page.fill("#draft-len", "7")
        ask(page)
        assert page.is_visible("#send") and len(server.generations()) == len(wanted)  # too long for the engine
        page.fill("#draft-len", "")
        page.click("#clear")
        assert page.get_attribute("#steps", "aria-label") == "No step yet"


def test_side_by_side_runs_the_same_prompt_both_ways(open_page: Open) -> None:
    with running(serve_page(wait_s=0.04)) as server:
        page = open_page(server)
        page.get_by_role("switch", name="With and without speculation, side by side").check()
        ask(page)
        page.wait_for_selector(".verdict")
        answers = page.query_selector_all(".answer")
        assert [one.query_selector(".text").text_content() for one in answers] == [TEXT, TEXT]
        boxes = [one.bounding_box() for one in answers]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        verdict = page.text_content(".verdict")
        rates = [float(one.query_selector(".speed").text_content().split()[0].replace(",", "")) for one in answers]
        prepared, first, second = (one.body for one in server.generations())
    ratio = float(verdict.partition("×")[0])
    assert ratio == pytest.approx(rates[0] / rates[1], rel=0.01) and "the same text" in verdict
    assert second.pop("speculative") is False
    assert first == second  # the seed too
    assert prepared["max_tokens"] == 1 and prepared["messages"] == first["messages"] and "stream" not in prepared


def test_texts_of_servers_and_users_are_shown_as_text(open_page: Open) -> None:
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    steps = [[(evil, "plain")], [(evil, "accepted"), (evil, "bonus")]]
    rows = [{"id": evil, "prompt_tokens": 1, "completion_tokens": 2, "tokens_per_step": 1.5, "running_s": 0.1}]
    with running(serve_page(steps, requests=lambda: rows)) as server:
        page = open_page(server)
        ask(page, evil)
        wait_for_answer(page)
        page.wait_for_selector("#requests td")
        assert page.text_content(".answer .text") == evil * 3
        assert page.text_content(".said") == evil and page.text_content("#requests td") == evil
        assert page.title() == "specdec" and page.query_selector("main img, main script") is None
        assert page.query_selector("#model i") is None and "<i>other</i>" in page.text_content("#model")


def test_errors_are_told_where_the_answer_would_be(open_page: Open) -> None:
    def generate(asked: Asked) -> Reply:
        said = asked.body["messages"][-1]["content"]
        broken = streamed(DRAFTED, 0.0, chat=True, counts=None)[:2]
        return {
            "refuse": failure(400, "the prompt has <b>too many</b> tokens"),
            "break": Reply([*broken, (0.0, event({"error": {"message": "out of memory"}}))]),
            "cut": Reply(broken),
            "garble": Reply([*broken, (0.0, b"data: {half\n\n"), (0.0, DONE)]),
        }[said]

    with running(serve_page(generate=generate)) as server:
        page = open_page(server)
        for said, words in {
            "refuse": "The server answers 400: the prompt has <b>too many</b> tokens",
            "break": "out of memory",
            "cut": "broke off",
            "garble": "JSON",
        }.items():
            ask(page, said)
            page.wait_for_selector(".turn:last-child [role=alert]")
            assert words in page.text_content(".turn:last-child [role=alert]")
            assert page.is_visible("#send") and page.is_hidden("#stop")
    assert page.text_content(".turn:nth-child(3) .text").startswith("Speculative")  # what came before it is kept
    page.wait_for_selector("#state.down")  # the server has gone away
    ask(page)
    page.wait_for_selector(".turn:nth-child(6) [role=alert]")
    assert "cannot be reached" in page.text_content(".turn:nth-child(6) [role=alert]")


def test_the_api_key_is_sent_and_kept_nowhere(open_page: Open) -> None:
    with running(serve_page(api_key="sesame")) as server:
        page = open_page(server)
        assert page.text_content("#state") == "needs an API key"
        page.click("#key-box summary")
        page.get_by_label("API key").last.fill("sesame")
        page.keyboard.press("Tab")
        page.wait_for_selector("#state.up")
        page.keyboard.press("Escape")
        ask(page)
        wait_for_answer(page)
        assert server.generations()[-1].headers["authorization"] == "Bearer sesame"
        assert page.context.cookies() == []
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert "sesame" not in page.content() and "sesame" not in page.url
        page.reload()
        page.wait_for_selector("#state.down")
        assert page.input_value("#key") == ""


def test_stop_ends_the_request_and_keeps_what_came(open_page: Open) -> None:
    slow = [[("a ", "plain")] for _ in range(4000)]
    with running(serve_page(slow, wait_s=0.05)) as server:
        page = open_page(server)
        ask(page)
        page.wait_for_selector(".answer .text span")
        assert page.get_attribute("#log", "aria-busy") == "true"
        page.keyboard.press("Escape")
        page.wait_for_selector("#send")
        assert "stopped" in page.text_content(".figures")
        assert page.text_content(".answer .text").startswith("a ")
        (asked,) = server.generations()
        wait_until(lambda: asked.is_broken_off)
        assert len(asked.sent_s) < len(slow)
        assert page.query_selector("[role=alert]") is None


def test_the_keyboard_reaches_and_does_everything(open_page: Open) -> None:
    with running(serve_page()) as server:
        page = open_page(server)
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        wanted = [
            "Skip to the prompt", "model", "API key", "prompt", "max-tokens", "temperature", "drafter", "draft-len",
            "both", "clear", "send",
        ]  # fmt: skip
        assert list(dict.fromkeys(one for one in reached if one in wanted)) == wanted
        assert "colours" in reached and "requests" in reached
        page.focus("#both")
        page.keyboard.press("Space")
        assert page.is_checked("#both")
        page.focus("input[value=chat]")
        page.keyboard.press("ArrowRight")
        assert page.is_checked("input[value=text]")
        page.focus("#prompt")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict")
        assert {one.body["prompt"] for one in server.generations()} == {"one\ntwo"}
        focused = page.evaluate("document.activeElement.id")
        assert focused == "prompt"


@pytest.fixture
def real_server(llama_engine_dir: Path, forks: Forks) -> Iterator[SimpleNamespace]:
    """`specdec serve` itself, in a process of its own, with n-gram lookup."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    process = forks.start("serve", "--engine-dir", llama_engine_dir, "--ngram-config", "4,2", "--port", port)
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            break
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}")
    process.terminate()
    process.communicate()


def test_the_page_works_with_the_server_itself(open_page: Open, real_server: SimpleNamespace) -> None:
    page = open_page(real_server)
    page.get_by_role("radio", name="Text to continue").check(force=True)
    page.fill("#max-tokens", "40")
    page.check("#both")
    ask(page, "The little dog had a red ball. The little dog had a")
    page.wait_for_selector(".verdict, [role=alert]")
    assert "the same text" in page.text_content(".verdict")
    assert (
        page.query_selector(".answer .accepted") is not None and page.query_selector(".answer .recovered") is not None
    )
    counts = {kind: int(page.text_content(f"#count-{kind}")) for kind in ("accepted", "recovered", "bonus", "plain")}
    num_steps = counts["recovered"] + counts["bonus"] + counts["plain"]
    assert sum(counts.values()) == 40 and page.text_content("#count-forced") == "0"
    # The last step may have been cut before its own token.
    possible = [pytest.approx(40 / steps, abs=0.01) for steps in (num_steps, num_steps + 1)]
    assert float(page.text_content("#per-step")) in possible
    facts = page.text_content("#facts")
    assert facts.startswith("32 bits · float32 · ") and ("cores" in facts or "1 core" in facts)
    assert "n-gram lookup, drafts of up to 4 tokens" in page.text_content("#drafter option")
    sizes = page.get_attribute("#steps", "aria-label").partition(": ")[2].split(", ")
    assert sum(map(int, sizes)) == 40 and max(map(int, sizes)) > 1
    assert page.query_selector("#chart .axis") is not None
    page.uncheck("#both")
    page.fill("#schema", '{"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}')
    ask(page, "The ball is ")
    page.wait_for_selector(".turn:nth-child(3) .answer .forced, [role=alert]")
    wait_for_answer(page)
    text = page.text_content(".turn:last-child .answer .text")
    assert text.startswith('{"colour": "red"')
    assert int(page.text_content("#count-forced")) >= 5
