"""Start `qattn serve` as its help says, ask it for a chat, and end it by Ctrl-C in the middle of a stream.

Usage: python .ci/serve.py QATTN [OPTION...], where QATTN is the command, such as .venv/bin/qattn.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

SECONDS = 120  # for the start, on a busy machine
ENDS = 5  # seconds from Ctrl-C to the end of the process


def ask(port: int, **body: Any) -> Any:
    """The open answer of a chat; the server listens before it answers, so nothing is asked twice."""
    data = {"messages": [{"role": "user", "content": "Once upon a time"}], **body}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(data).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=SECONDS)


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until_it_listens(server: subprocess.Popen[bytes], port: int) -> None:
    """Waits for the port of a server that starts."""
    last = time.monotonic() + SECONDS
    while time.monotonic() < last and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server does not listen: exit code {server.poll()}")


def main(command: list[str]) -> None:
    """Run the check; an error ends it with a code other than 0."""
    program = next((at for at, word in enumerate(command) if word.startswith("--")), len(command))
    port = free_port()
    serve = [*command[:program], "serve", "--port", str(port), *command[program:]]
    server = subprocess.Popen(serve)
    try:
        until_it_listens(server, port)
        with ask(port, max_tokens=8) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        assert said, "an empty answer"
        busy = subprocess.run(serve, capture_output=True, text=True, timeout=SECONDS)
        assert busy.returncode == 1 and "--port" in busy.stderr, busy
        with ask(port, stream=True) as stream:
            lines = [stream.readline() for _ in range(8)]  # the role and three pieces of text
            assert all(line.startswith(b"data: ") for line in lines[::2]), lines
            server.send_signal(signal.SIGINT)
            began = time.monotonic()
            code = server.wait(ENDS)
            took = time.monotonic() - began
        assert code == 0, f"exit code {code}"
        print(f"said {said!r}; a second server was refused its port; Ctrl-C in a stream ended it in {took:.1f} s")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
