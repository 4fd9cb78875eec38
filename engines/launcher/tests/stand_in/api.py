"""The parts that the APIs of all servers share."""

from controls import Controls
from model import Refused


class Api:
    health = "/health"
    controls = Controls()

    def __init__(self, context):
        self.context = context
        self.seen = []

    def cached(self, prompt):
        """The reported number of cached tokens: half of a prompt that was sent before."""
        is_known = prompt in self.seen
        self.seen.append(prompt)
        return len(prompt) // 2 if is_known else 0

    def get(self, path):
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "stand-in", "max_model_len": self.context}]}
        raise Refused(404, {"detail": "Not Found"})

    def check(self, prompt, max_tokens):
        if len(prompt) + (max_tokens or 0) > self.context:
            message = f"{len(prompt)} and {max_tokens} tokens are more than the context of {self.context}"
            raise Refused(400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
