"""The process that supervision is tested on: serve PORT | exit CODE | deaf | sleep | family
FILE.
"""

import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    print(f"child {what}", flush=True)
    if what == "serve":

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

        http.server.HTTPServer(("127.0.0.1", int(rest[0])), Handler).serve_forever()
    if what == "exit":
        print("the reason", flush=True)
        sys.exit(int(rest[0]))
    if what == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told to end\n"))
    if what == "note":  # writes its name when it is told to end

        def note(*_: object) -> None:
            with Path(rest[0]).open("a") as file:
                file.write(rest[1] + "\n")
            sys.exit(0)

        signal.signal(signal.SIGTERM, note)
    if what == "family":
        grandchild = subprocess.Popen([sys.executable, __file__, "deaf"])
        Path(rest[0]).write_text(f"{os.getpid()} {grandchild.pid}")
    print(f"ready {what}", flush=True)  # its signal handlers are installed
    time.sleep(600)
