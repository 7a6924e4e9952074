"""These tests need Triton's CPU interpreter, which can't share a process with the compiler."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
