"""guidellm against a service: ``python with_guidellm.py URL MODEL TOKENIZER``. Exit 0 when everything it was asked is right.

Beside this interpreter is guidellm's own program; TOKENIZER is a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from asking import check

REQUESTS, ANSWER_TOKENS = 16, 16


def main() -> None:
    """Ask both endpoints, streaming and not."""
    url, model, tokenizer = sys.argv[1:]
    for path, stream in (("/v1/chat/completions", True), ("/v1/completions", True), ("/v1/completions", False)):
        name = f"{path}, {'streaming' if stream else 'in one piece'}"
        report = Path("guidellm.json")
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run",
            "--backend", f"kind=openai_http,target={url},model={model},request_format={path},stream={str(stream).lower()}",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={ANSWER_TOKENS}",
            "--output", f"kind=json,path={report}",
            "--disable-console",
        ]  # fmt: skip
        # A tokenizer's folder is all that is wanted: no hub is asked.
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        (run,) = json.loads(report.read_text("utf-8"))["benchmarks"]
        totals = run["metrics"]["request_totals"]
        check(f"{name}: every request is answered", (totals["successful"], totals["errored"]) == (REQUESTS, 0))
        tokens = run["metrics"]["output_token_count"]["successful"]
        # It asks for so many with min_tokens or ignore_eos, whichever the server knows.
        check(f"{name}: each answer has its tokens", tokens["total_sum"] == REQUESTS * ANSWER_TOKENS)


main()
