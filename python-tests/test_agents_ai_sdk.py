"""The AI SDK's agent, in JavaScript: `ai_sdk/agent.mjs`, once per conversation."""

import json
import os
import subprocess
from pathlib import Path

from agent_case import MODEL, RESPONSES, TALK_SECONDS, base_url, every_talk  # noqa: F401


@every_talk
def test_agent(base_url, talk, api, streamed):  # noqa: F811
    folder = os.environ.get("AI_SDK_DIR")
    assert folder, "AI_SDK_DIR names no folder with the AI SDK; run: cargo xtask test openai-client"
    asked = {"baseURL": base_url, "model": MODEL, "api": api, "streamed": streamed, "question": talk.question}
    command = ["node", Path(folder) / "agent.mjs", json.dumps(asked)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TALK_SECONDS)
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    talk.check(answer["calls"], answer["text"])
    # Where the server keeps answers, the SDK names their items by their ids.
    assert (answer["references"] > 0) == (api == RESPONSES)
