"""The sandboxes of this machine, and programs that try to get out of one."""

from __future__ import annotations

import pytest

from rlhf.verifiers.sandbox import why_no_bubblewrap


def bubblewrap_or_skip() -> None:
    """Skip the test if bubblewrap does not work."""
    why = why_no_bubblewrap()
    if why is not None:
        pytest.skip(why)


RIGHT = "def f(x):\n    return x + 1\n"

# Each runs before a right definition of f: a sandbox that lets it happen passes the tests, or takes the outcome stated.
ESCAPES: dict[str, str] = {
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(100)",
    "8 GB": "x = 'a' * (8 * 10**9)",
    "8 GB in a list": "x = [0] * 10**9",
    "growing list": "x = [1]\nwhile True: x += x",
    "deep recursion": "def g(n): return g(n + 1)\ng(0)",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "network by library": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT/')",
    "read a file": "open('SECRET').read()",
    "read accounts": "open('/etc/passwd').read()",
    "write a file": "open('TARGET', 'w').write('out')",
    "write to the library": "import os\nopen(os.__file__, 'a').write('#')",
    "remove a folder": "import shutil\nshutil.rmtree('FOLDER')",
    "fill the disk": "with open('/tmp/big', 'wb') as file:\n    for _ in range(100): file.write(b'x' * 2**20)",
    "fork": "import os\nos.fork()",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
    "kill all": "import os\nos.kill(-1, 9)",
    "kill the parent": "import os\nos.kill(PARENT, 9)",
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "raise SystemExit": "raise SystemExit(0)",
    "raise an error": "raise ValueError",
    "native code": "import ctypes\nctypes.string_at(0)",
    "no assertions": "import builtins\nbuiltins.AssertionError = ValueError\nraise ValueError",
    "say success": "import os\nos.write(1, b'ran')\nos._exit(0)",
    "read the tests": (
        "import os\nfds = []\nfor fd in range(3, 64):\n"
        "    try: fds += [fd] * bool(os.fstat(fd))\n    except OSError: pass\n"
        "source, answers = fds[:2]\nos.write(answers, b'ran\\n')\nn = int.from_bytes(os.read(source, 8), 'big')\n"
        "os.write(answers, os.read(source, n) + b'\\n')\nos._exit(0)"
    ),
    "write to all descriptors": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'passed')\n    except OSError: pass\nos._exit(0)"
    ),
    "memory of other processes": (
        "import os\nothers = [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 2 and int(p) != os.getpid()]\n"
        "for p in others: open(f'/proc/{p}/mem', 'rb+')\nassert others"
    ),
    "the environment": "import os\nos.environ['RLHF_SECRET']",
}
