"""The web pages in a real browser, with real clicks and keys: `cargo xtask test browser` runs it.

With PICTURES set to a folder, it saves screenshots there for people.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from genset_server import GensetServer
from headless import Browser

SCRIPT = r"""
[[reply]]
match.exact = "markdown"
chunk_chars = 7
text = '''
# A title

Some **bold**, *leaning* and `code`, a [link](https://example.com/a), [a bad one](javascript:alert(1)).

<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>

![picture](https://example.com/p.png)

- one
  - inner
- two

1. first
2. second

| a | b |
|---|--:|
| 1 | 2 |

> quoted (from https://example.com/w_(x))

```rust
fn main() { println!("<b>"); }
```
'''

[[reply]]
match.exact = "wide"
chunk_chars = 8000
text = '''
# Wide SPACES title

no | table
| DASHES x

That is all.
'''

[[reply]]
match = { contains = "weather", last_role = "tool" }
text = "It rains in Oslo."

[[reply]]
match.contains = "weather"
text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
chunk_chars = 5

[[reply]]
match.exact = "think"
token_ms = 20
text = "<think>Seven times six is what is asked here.</think>The answer is 42, as everybody knows."

[[reply]]
match.exact = "for ever"
token_ms = 50
text = "on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on and on"

[[reply]]
match.exact = "break"
text = "This sentence will never be"
[reply.fault]
action = "error"
kind = "disconnected"
after_chunks = 3

[[reply]]
text = "You said: {{last_user}}"
""".replace("SPACES", " " * 20_000).replace("DASHES", "- " * 10_000)

ANSWER = "document.querySelector('#log .message.assistant:last-of-type')"
IDLE = "document.getElementById('stop').hidden"
PICTURES = Path(os.environ["PICTURES"]) if "PICTURES" in os.environ else None


def picture(browser: Browser, name: str) -> None:
    if PICTURES:
        PICTURES.mkdir(parents=True, exist_ok=True)
        browser.picture(PICTURES / f"{name}.png")


def say(browser: Browser, text: str, *, by_key: bool = True) -> None:
    browser.until("document.querySelectorAll('#model option').length > 0 && document.getElementById('model').value !== ''")
    browser.click("#input")
    browser.type(text)
    if by_key:
        browser.press("Enter", 13)
    else:
        browser.click("#send")


def answer(browser: Browser, holds: str) -> str:
    browser.until(f"{IDLE} && {ANSWER}?.innerText.includes({json.dumps(holds)})")
    return browser.run(f"{ANSWER}.innerText")


def chats(browser: Browser, url: str) -> None:
    browser.look(1200, 800)
    browser.open(url)
    picture(browser, "chat-empty")

    say(browser, "Hello there", by_key=False)
    text = answer(browser, "You said: Hello there")
    assert "tokens" in text, text

    say(browser, "markdown")
    answer(browser, "fn main()")
    found = browser.run(f"""(() => {{
        const answer = {ANSWER};
        const has = (selector) => answer.querySelectorAll(selector).length;
        return {{
            title: answer.querySelector("h3")?.textContent, bold: has("strong"), leaning: has("em"), items: has("ul li"), inner: has("ul ul li"),
            numbered: has("ol li"), cells: has("td"), quoted: has("blockquote"), code: answer.querySelector("pre code")?.textContent,
            links: [...answer.querySelectorAll("a")].map((link) => link.href), images: has("img"), scripts: has("script"), hacked: window.hacked,
            text: answer.innerText,
        }};
    }})()""")
    assert found["title"] == "A title" and found["bold"] == 1 and found["leaning"] == 1, found
    assert (found["items"], found["inner"], found["numbered"], found["cells"], found["quoted"]) == (3, 1, 2, 2, 1), found
    assert found["code"] == 'fn main() { println!("<b>"); }', found
    assert found["links"] == ["https://example.com/a", "https://example.com/p.png", "https://example.com/w_(x)"], found
    assert found["images"] == 0 and found["scripts"] == 0 and found.get("hacked") is None, found
    assert "<script>" in found["text"] and "javascript:alert(1)" in found["text"], "what is refused stays text"
    picture(browser, "chat-markdown")

    say(browser, "wide")
    answer(browser, "That is all.")
    found = browser.run(f"[{ANSWER}.querySelector('h3')?.textContent.replace(/ +/, ' '), {ANSWER}.querySelectorAll('table').length]")
    assert found == ["Wide title", 0], found


def folds(browser: Browser) -> None:
    say(browser, "think")
    text = answer(browser, "42")
    assert "tokens/s" in text and "of them reasoning" in text, text
    reasoning = f"{ANSWER}.querySelector('details.reasoning')"
    assert browser.run(f"{reasoning}.open") is False, "reasoning is folded"
    browser.click("#log .message.assistant:last-of-type details.reasoning summary")
    assert browser.run(f"{reasoning}.open && {reasoning}.innerText.includes('Seven times six')")

    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    browser.click("#open-settings")
    browser.click("#settings [name=tools]")
    browser.type(json.dumps(tools))
    browser.click("#settings button[type=submit]")
    say(browser, "weather?")
    answer(browser, "Tool call: get_weather")
    browser.click("#log .message.assistant:last-of-type details.call summary")
    assert "Oslo" in browser.run(f"{ANSWER}.querySelector('details.call pre').innerText")
    picture(browser, "chat-tools")
    browser.click("#log form.results textarea")
    browser.type("rain")
    browser.click("#log form.results button")
    answer(browser, "It rains in Oslo.")


def stops_and_fails(browser: Browser) -> None:
    say(browser, "for ever")
    browser.until(f"{ANSWER}?.innerText.includes('on and on')")
    browser.press("Escape", 27)
    text = answer(browser, "stopped")
    assert "on and on" in text, "what has come stays"

    say(browser, "break")
    browser.until(f"{IDLE} && {ANSWER}?.querySelector('.problem')?.textContent !== ''")
    assert "This sentence will" in browser.run(f"{ANSWER}.innerText")

    browser.click("#open-settings")
    browser.run("document.querySelector('#settings [name=tools]').value = ''")
    browser.click("#settings [name=tools]")
    browser.type("no json")
    browser.click("#settings button[type=submit]")
    assert "not JSON" in browser.until("document.getElementById('tools-problem').textContent")
    browser.run("document.querySelector('#settings [name=tools]').value = ''")
    browser.click("#settings [name=max_completion_tokens]")
    browser.type("2")
    picture(browser, "chat-settings")
    browser.click("#settings button[type=submit]")
    say(browser, "one two three four five")
    text = answer(browser, "cut at its limit")
    assert "You said:" in text and "three" not in text, text


def keeps(browser: Browser, url: str) -> None:
    browser.press("n", 78, modifiers=1)  # some keyboard layouts make another character of it
    browser.click("#new-chat")
    say(browser, "Second one")
    answer(browser, "You said:")
    titles = "[...document.querySelectorAll('#conversations .open')].map((each) => each.textContent)"
    assert browser.run(titles) == ["Second one", "Hello there"], browser.run(titles)
    browser.open(url)
    browser.click("#conversations .open", 1)
    browser.until("document.getElementById('log').innerText.includes('It rains in Oslo.')")
    browser.click("#conversations li.current [title=Rename]")
    browser.until(f"{titles}.includes('renamed')")
    browser.click("#conversations li.current [title=Delete]")
    browser.until(f"{titles}.length === 1")
    browser.click("#conversations .open")
    browser.until("document.getElementById('log').innerText.includes('Second one')")
    browser.click("#log .message.user button:last-of-type")
    assert browser.run("document.getElementById('input').value") == "Second one", "a message to be edited"
    browser.type(" again")
    browser.press("Enter", 13)
    answer(browser, "You said:")
    assert browser.run("document.querySelectorAll('#log .message').length") == 2


def fits(browser: Browser) -> None:
    """Tests a narrow screen, a dark one, and keyboard navigation."""
    say(browser, "markdown")
    browser.until(IDLE)
    for name, width, height, is_dark in [("chat-dark", 1200, 800, True), ("chat-narrow", 360, 720, False), ("chat-narrow-dark", 360, 720, True)]:
        browser.look(width, height, is_dark)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name}: nothing lies beside the screen"
        picture(browser, name)
    browser.click("#open-sidebar")
    browser.until("document.elementFromPoint(40, 20).closest('#sidebar') !== null")
    picture(browser, "chat-narrow-list")
    browser.click("#close-sidebar")
    browser.look(1200, 800)
    names = browser.run("""[...document.querySelectorAll("button, input, select, textarea, a[href]")].filter((each) =>
        !(each.textContent.trim() || each.ariaLabel || each.labels?.length || each.title)).map((each) => each.outerHTML)""")
    assert names == [], f"controls without a name: {names}"


def dashboard(browser: Browser, url: str) -> None:
    browser.open(url + "dashboard")
    browser.until("document.getElementById('state').textContent === 'ready'")
    browser.until("document.querySelectorAll('#charts svg path').length >= 10")
    for answered in range(3):
        browser.run("""fetch("/v1/chat/completions", {method: "POST", headers: {"content-type": "application/json"},
            body: JSON.stringify({model: "scripted", messages: [{role: "user", content: "think"}]})}).then((answer) => answer.text())""")
    browser.until("/\\d/.test(document.querySelectorAll('.tile b')[2].textContent) && document.querySelectorAll('.tile b')[2].textContent !== '0'")
    browser.until("/ m?s$/.test(document.querySelectorAll('.tile b')[3].textContent)")
    assert "scripted" in browser.run("document.getElementById('models').innerText")
    cells = "[...document.querySelectorAll('#workers tbody td')].map((each) => each.textContent)"
    browser.until(f"/ m?s$/.test({cells}[7])")  # the worker's own time to first token
    found = browser.run(cells)
    assert found[1:3] == ["scripted", "aggregated"] and found[8] == "serves", found
    labels = browser.run("[...document.querySelectorAll('#charts svg')].map((each) => each.getAttribute('aria-label'))")
    assert any(label.startswith("Time to first token: p50 ") for label in labels), labels
    assert any(label.startswith("Requests at the workers: running ") and "nothing" not in label for label in labels), labels
    for name, width, height, is_dark in [("dashboard", 1200, 1000, False), ("dashboard-dark", 1200, 1000, True), ("dashboard-narrow", 360, 900, False)]:
        browser.look(width, height, is_dark)
        browser.until("document.readyState === 'complete'")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name}: nothing lies beside the screen"
        picture(browser, name)


def asks_for_a_key(browser: Browser, folder: Path) -> None:
    shown = subprocess.run([os.environ["GENSET_BIN"], "key", "browser"], capture_output=True, text=True, check=True).stdout
    _, key, _, lines = shown.split("\n\n", 3)
    keys = folder / "keys.toml"
    keys.write_text(lines)
    with GensetServer("--api-keys", str(keys), out="echo_full") as server:
        browser.complaints.clear()
        browser.look(1200, 800)
        browser.open(f"{server.url}/")
        browser.until("document.getElementById('key').open")
        picture(browser, "chat-key")
        browser.click("#key [name=key]")
        browser.type(key)
        browser.click("#key button[type=submit]")
        browser.until("!document.getElementById('key').open")
        say(browser, "Hello")
        answer(browser, "Hello")
        assert all("401" in complaint for complaint in browser.complaints), browser.complaints
        browser.open(f"{server.url}/dashboard")
        browser.until("document.getElementById('models').innerText.includes('1')")
        assert server.stop() == 0, server.output


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.toml"
        script.write_text(SCRIPT)
        options = ["--script", str(script), "--tool-parser", "hermes", "--reasoning-parser", "qwen3"]
        with Browser() as browser:
            with GensetServer(*options, out="scripted") as server:
                url = f"{server.url}/"
                chats(browser, url)
                folds(browser)
                stops_and_fails(browser)
                keeps(browser, url)
                fits(browser)
                dashboard(browser, url)
                assert browser.complaints == [], f"the console is clean: {browser.complaints}"
                assert server.stop() == 0, server.output
            asks_for_a_key(browser, folder)
            browser.close()
    print("the web pages do what people want of them")


main()
