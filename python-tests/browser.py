"""What web pages in a real browser can do to a server on this machine: `cargo xtask test browser` runs it.

It starts the real server (GENSET_BIN) and a headless Chromium. The browser opens pages of another port, and of another name for
this machine, as in DNS rebinding. Such pages must neither make the model work nor read anything; pages of an allowed origin may.
"""

import html
import http.server
import json
import re
import subprocess
import tempfile
import threading

from browser_server import PATIENCE_S, Server

CHROMIUM = "chromium"
EVIL = "evil.example"

PAGE = """<!doctype html><pre id="out">nothing</pre><script>
const server = "http://127.0.0.1:SERVER";
const chat = JSON.stringify({model: "tiny-chat", max_tokens: 4, messages: [{role: "user", content: "Hello"}]});
const ask = async (path, options) => {
  try {
    const answer = await fetch(server + path, options);
    return answer.type == "opaque" ? "opaque" : answer.status + " " + await answer.text();
  } catch (error) {
    return "failed";
  }
};
const post = (type, mode) => ask("/v1/chat/completions", {method: "POST", mode, body: chat, headers: {"content-type": type}});
(async () => {
  const told = {
    text: await post("text/plain", "no-cors"),
    json: await post("application/json", "cors"),
    models: await ask("/v1/models", {mode: "cors"}),
    metrics: await ask("/metrics", {mode: "cors"}),
  };
  document.getElementById("out").textContent = JSON.stringify(told);
})();
</script>
"""


class Pages(http.server.BaseHTTPRequestHandler):
    """Serves the page; its path is the port of the server that it calls."""

    def do_GET(self) -> None:
        body = PAGE.replace("SERVER", self.path.strip("/")).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def browse(url: str) -> str:
    """Returns what the page at this address shows when its scripts are done."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            f"--user-data-dir={profile}", f"--host-resolver-rules=MAP {EVIL} 127.0.0.1", "--no-proxy-server",
            "--virtual-time-budget=20000", "--dump-dom", url,
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def told(url: str) -> dict[str, str]:
    """Returns the server's responses to the page at this address."""
    out = re.search(r'<pre id="out">(.*?)</pre>', browse(url), re.DOTALL)
    return json.loads(html.unescape(out[1]))


def main() -> None:
    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    port = pages.server_port

    with Server("out=sample") as server:
        for host in ("127.0.0.1", EVIL):
            what = told(f"http://{host}:{port}/{server.port}")
            assert what == {"text": "opaque", "json": "failed", "models": "failed", "metrics": "failed"}, what
            assert server.given() == 0, f"a page of {host} made the model work"
        for path in ("v1/models", "metrics", "docs"):
            shown = browse(f"http://{EVIL}:{server.port}/{path}")
            assert "host_not_allowed" in shown and "tiny-chat" not in shown, shown
        shown = browse(f"http://localhost:{server.port}/v1/models")
        assert "tiny-chat" in shown, shown
        server.stop()

    with Server("out=sample", "--cors-origins", f"http://{EVIL}:{port}") as listed:
        what = told(f"http://{EVIL}:{port}/{listed.port}")
        assert what["text"] == "opaque", what
        assert what["json"].startswith("200 ") and what["models"].startswith("200 "), what
        assert listed.given() == 4, "it worked for the request with JSON alone"
        listed.stop()
    pages.shutdown()
    print("web pages reach what they may, and nothing else")


main()
