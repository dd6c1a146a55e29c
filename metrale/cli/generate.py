"""`metrale generate`: continue or answer one prompt, streamed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from metrale.cli.options import model_arguments, open_llm, reading, sampling_arguments, sampling_overrides, say
from metrale.errors import RequestError

HELP = "continue a prompt (or answer it with --chat), streamed to stdout"
EXAMPLES = """  metrale generate smollm2-135m "The capital of France is" --max-tokens 16 --temperature 0
  metrale generate smollm2-135m "Why is the sky blue?" --chat --system "Answer in one sentence."
  cat letter.txt | metrale generate smollm2-135m - --chat"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    model_arguments(parser)
    parser.add_argument("prompt", help="the text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt (implies --chat)")
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object instead of streaming")
    sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Open the model, stream the answer, tell the speed."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise RequestError("prompt: expected some text, got none; write it after the model's name", code="prompt.empty")
    with open_llm(args) as llm:
        if args.chat or args.system:
            messages = [{"role": "system", "content": args.system}] if args.system else []
            source: str | list[int] = llm.chat_ids([*messages, {"role": "user", "content": prompt}])
        else:
            source = prompt
        overrides = sampling_overrides(args)
        if args.json:
            with reading(llm) as bar:
                answer = llm.generate(source, progress=bar.update, **overrides)
            print(json.dumps(asdict(answer), ensure_ascii=False))
            return 0
        result = None
        with reading(llm) as bar:
            for delta in llm.stream(source, progress=bar.update, **overrides):
                bar.close()
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                result = delta.result or result
        print()
    if result is not None:
        timings = result.timings
        say(
            f"{result.usage.prompt_tokens} prompt tokens, first token after {timings.first_token_s:.2f} s; "
            f"{result.usage.completion_tokens} tokens at {timings.decode_tokens_per_s:.1f}/s; seed {result.seed}; "
            f"ended: {result.finish_reason}"
        )
    return 0
