"""The sample engine inside this program: `engine.py MODEL_PATH`."""

import asyncio
import sys
from pathlib import Path

from genset import WorkerConfig
from genset.backend import Worker

sys.path.insert(0, str(Path(__file__).parents[2]))

from sample_engine import SampleEngine  # noqa: E402

config = WorkerConfig(namespace="py", model_name="sample", model_path=sys.argv[1], user_data={"adapter": "none"})
asyncio.run(Worker(SampleEngine(), config).run())
print("left", flush=True)
