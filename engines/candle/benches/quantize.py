"""Quantizes a GGUF file with llama.cpp: quantize.py FROM.gguf TO.gguf TYPE, with a TYPE such as q4_k_m."""

import ctypes
import sys

import llama_cpp


@llama_cpp.llama_log_callback
def say_nothing(level, text, user_data):
    """Drops llama.cpp's log. An error ends the program with its own message."""


def main():
    source, target, kind = sys.argv[1:]
    number = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}", None)
    if number is None:
        raise SystemExit(f"llama.cpp has no type {kind}")
    llama_cpp.llama_log_set(say_nothing, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = number
    failed = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if failed:
        raise SystemExit(f"llama.cpp cannot quantize {source} to {kind}")


if __name__ == "__main__":
    main()
