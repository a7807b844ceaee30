"""What HTTP costs: `python benchmarks/51_server.py`.

The default model answers 32 requests at once (64 tokens in, 64 out, greedy): streamed over HTTP
from `minigen serve` in its own process, and directly through `LLM.generate` in this one, by turns.
The client only reads bytes and counts events, which costs very little, but it shares the cores.
"""

import argparse
import asyncio
import json
import statistics
from pathlib import Path

from common import interleaved, random_prompts, write_results
from server_process import server

from minigen import LLM, SamplingParams

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 64
OPTIONS = ["--max-num-seqs", "64", "--no-enable-prefix-caching"]


async def stream(host: str, port: int, prompt: list[int]) -> int:
    """Read one streamed answer and return its number of events."""
    asked = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    tail, num_events = b"", 0
    while piece := await reader.read(2**16):
        tail = tail[-4096:] + piece
        num_events += piece.count(b"data: ")
    writer.close()
    assert f'"completion_tokens": {OUTPUT_TOKENS}'.encode() in tail, tail
    return num_events


def main() -> None:
    """Measure, print, and write JSON if a file was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--repeats", type=int, default=5, help="number of counted turns")
    options = parser.parse_args()
    prompts = random_prompts(STREAMS, PROMPT_TOKENS, seed=3)
    llm = LLM.load(max_num_seqs=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with server(*OPTIONS) as (host, port):

        async def all_streams() -> None:
            await asyncio.gather(*(stream(host, port, prompt) for prompt in prompts))

        seconds = interleaved(
            {
                "engine": lambda: llm.generate(prompts, params, progress=False),
                "http": lambda: asyncio.run(all_streams()),
            },
            options.repeats,
        )
    num_tokens = STREAMS * OUTPUT_TOKENS
    shares = [alone / over for alone, over in zip(seconds["engine"], seconds["http"], strict=True)]
    results = {
        "streams": STREAMS,
        "output_tokens_per_second": {
            name: num_tokens / statistics.median(times) for name, times in seconds.items()
        },
        "share": statistics.median(shares),
        "shares": shares,
    }
    for name, times in seconds.items():
        print(f"{name:<8} {num_tokens / statistics.median(times):7.1f} output tokens/s")
    print(f"over HTTP {results['share']:.1%} of the engine's ({min(shares):.1%}-{max(shares):.1%})")
    if options.json is not None:
        write_results(options.json, results)


if __name__ == "__main__":
    main()
