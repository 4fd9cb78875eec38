"""CTranslate2 behind Genset: the same model, served with `register_llm` by a function of your own program.

    python make_model.py /tmp/model 2048       # or ct2-transformers-converter, for a real one
    python ctranslate2_handler.py --model /tmp/model --tokenizer ../../../models/tiny-chat
"""

from __future__ import annotations

import argparse
import asyncio

from ctranslate2_model import OPTIONS, Model, add_arguments
from genset.llm import LoadPublisher, MetricsPublisher, ModelType, register_llm
from genset.runtime import Runtime, worker


@worker()
async def main(runtime: Runtime, args: argparse.Namespace) -> None:
    # On a thread, so that the runtime stays responsive.
    model = await asyncio.to_thread(Model, args.model, args.context_length, args.parallel, args.device)
    endpoint = runtime.namespace(args.namespace).component("ctranslate2").endpoint("generate")
    await register_llm(
        ModelType.Backend,
        endpoint,
        args.tokenizer,
        args.model_name,
        args.context_length,
        # The engine keeps no prefixes, so there are no blocks to route by.
        kv_cache_block_size=None,
        sampling=OPTIONS,
        vocab_size=model.vocab_size,
        max_num_seqs=args.parallel,
    )
    publisher = asyncio.create_task(model.publish(LoadPublisher(endpoint).publish, MetricsPublisher(endpoint).publish))
    try:
        # Returns after a signal has drained the program.
        await endpoint.serve_endpoint(model.generate)
    finally:
        publisher.cancel()
        await model.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="ctranslate2_handler.py", description="Serves a CTranslate2 model")
    add_arguments(parser)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and the chat template, or its name in the Hub")
    asyncio.run(main(parser.parse_args()))
