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

from genset_server import GensetServer
from headless import CHROMIUM, PATIENCE_S

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


def given(server: GensetServer) -> int:
    """The number of tokens generated so far."""
    return int(re.search(r"^genset_http_completion_tokens_total (\d+)", server.metrics(), re.MULTILINE)[1])


def main() -> None:
    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    port = pages.server_port

    with GensetServer(out="sample") as server:
        for host in ("127.0.0.1", EVIL):
            what = told(f"http://{host}:{port}/{server.port}")
            assert what == {"text": "opaque", "json": "failed", "models": "failed", "metrics": "failed"}, what
            assert given(server) == 0, f"a page of {host} made the model work"
        for path in ("v1/models", "metrics", "docs"):
            shown = browse(f"http://{EVIL}:{server.port}/{path}")
            assert "host_not_allowed" in shown and "tiny-chat" not in shown, shown
        shown = browse(f"http://localhost:{server.port}/v1/models")
        assert "tiny-chat" in shown, shown
        assert server.stop() == 0, server.output

    with GensetServer("--cors-origins", f"http://{EVIL}:{port}", out="sample") as listed:
        what = told(f"http://{EVIL}:{port}/{listed.port}")
        assert what["text"] == "opaque", what
        assert what["json"].startswith("200 ") and what["models"].startswith("200 "), what
        assert given(listed) == 4, "it worked for the request with JSON alone"
        assert listed.stop() == 0, listed.output
    pages.shutdown()
    print("web pages reach what they may, and nothing else")


main()
