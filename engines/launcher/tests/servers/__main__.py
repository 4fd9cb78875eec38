"""Runs a real server behind the real binary and writes the table that `cargo xtask servers-test` prints.

servers KIND --genset FILE --model FOLDER --bin FOLDER --out FOLDER; it fails if a row fails.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time

import adapters
import media
import operated
from genset import Genset, Refused
from kinds import KINDS
from life import TRIALS
from questions import QUESTIONS, Asking

# The test methods of a run.
PARTS = ("questions", "life", "adapters", "media", "operated", "kit")


class Run:
    def __init__(self, kind, args):
        self.kind, self.args, self.rows = kind, args, []
        self.log = os.path.join(args.out, f"{args.kind}.log")
        if os.path.exists(self.log):
            os.remove(self.log)

    def genset(self, front, *more, model=None, extra=None, env=None):
        words = [front, f"out={self.kind.out}", model or self.kind.model, *self.kind.words, *more]
        extra = {**(self.kind.extra or {}), **(extra or {})}
        if extra:
            path = os.path.join(self.args.out, f"{self.args.kind}.json")
            with open(path, "w") as file:
                json.dump(extra, file)
            words += ["--extra-engine-args", path]
        return Genset(self.args.genset, words, {**self.kind.env, **(env or {})}, self.log)

    def row(self, name, what):
        """Runs a trial and records its result."""
        begun = time.monotonic()
        try:
            took = what()
            result = "ok"
        except Refused as refused:
            is_named = refused.status == 400 and (refused.error.get("param") or "text" in self.args.kind)
            result = f"refused: {refused.error.get('param')}" if is_named else f"FAILED: {refused}"
            took = None
        except Exception as error:
            result, took = f"FAILED: {type(error).__name__}: {error}", None
        if result.startswith("refused") != (name in self.kind.refused) and not result.startswith("FAILED"):
            result = f"FAILED: {result}, which is not what is known of it"
        seconds = time.monotonic() - begun
        shown = f"{result}, {took:.2f} s" if isinstance(took, float) else result
        self.rows.append((name, shown))
        print(f"{seconds:7.1f} s  {name}: {shown[:2000]}", flush=True)

    def questions(self):
        with self.genset("in=http") as genset:
            self.row("the start", lambda: genset.until_ready(self.kind.start))
            if genset.process.poll() is None:
                on = Asking(self.kind, genset)
                for name, function in QUESTIONS:
                    self.row(name, lambda: function(on))

    def life(self):
        for name, words, needs, function in TRIALS:
            if needs and not getattr(self.kind, needs):
                continue
            with self.genset("in=http", *words) as genset:
                genset.until_ready(self.kind.start)
                self.row(name, lambda: function(self.kind, genset))

    def adapters(self):
        if not self.kind.has_adapters:
            return
        with self.genset("in=http", *adapters.words(self.kind)) as genset:
            genset.until_ready(self.kind.start)
            self.row("two adapters and the model in one batch", lambda: adapters.in_one_batch(self.kind, genset))

    def media(self):
        if not self.kind.has_images:
            return
        with self.genset("in=http", *media.WORDS, model=media.model(self.kind)) as genset:
            genset.until_ready(self.kind.start)
            seen = media.Seen(self.kind, genset)
            for name, function in media.QUESTIONS:
                self.row(name, lambda: function(seen))

    def operated(self):
        if not self.kind.has_tokens:
            return
        folder = os.path.join(self.args.out, f"{self.args.kind}-operated")
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        operated.tried(self, folder)

    def kit(self):
        discovery = os.path.join(self.args.out, f"{self.args.kind}-discovery")
        report = os.path.join(self.args.out, f"{self.args.kind}-report.json")
        place = ("--discovery-path", discovery)
        with self.genset("in=dyn://real.backend.generate", *place) as genset:
            genset.until_ready(self.kind.start)
            # KV events belong to one instance.
            instance = re.search(r"instance=(\w+)", genset.said())[1]
            kit = [self.args.genset, "conform", "run", "--endpoint", "dyn://real.backend.generate", *place]
            kit += ["--tokenizer", self.args.model] if self.kind.has_tokens else []
            kit += ["--only", self.args.checks] if self.args.checks else []
            code = subprocess.run([*kit, "--instance", instance, "--json", report]).returncode
        with open(report) as file:
            checks = json.load(file)["checks"]
        failed = [check["id"] for check in checks if check["verdict"] == "fail"]
        passed = sum(check["verdict"] == "pass" for check in checks)
        result = f"{passed} passed, {len(failed)} failed"
        self.rows.append(("the conformance kit", result if code == 0 else f"FAILED: {result}: {', '.join(failed)}"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    for name in ("genset", "model", "bin", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--checks", help="only checks of the kit whose ids start with these, with commas between")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    run = Run(KINDS[args.kind](args), args)
    for part in args.only or PARTS:
        getattr(run, part)()
    print(f"\n| {args.kind} | |\n|---|---|")
    for name, result in run.rows:
        cell = " ".join(result.split())[:200].replace("|", "\\|")
        print(f"| {name} | {cell} |")
    sys.exit(any(result.startswith("FAILED") for _, result in run.rows))


if __name__ == "__main__":
    main()
