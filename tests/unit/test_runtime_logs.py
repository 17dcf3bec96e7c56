"""Logs of a service process, read as another program reads them."""

import json
import subprocess
import sys

PROGRAM = """
import logging, structlog
from shared.runtime import logs
logs.configure("kvstore", "k0", "info")
log = logs.get_logger()
structlog.contextvars.bind_contextvars(request_id="r1")
log.info("hello", n=1, odd={1: b"x"})
log.debug("hidden")
logging.getLogger("uvicorn.error").warning("library %s", "line")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def test_every_line_is_json_with_service_instance_and_context_also_those_of_libraries() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["hello", "library line", "failed"]
    assert all((line["service"], line["instance"]) == ("kvstore", "k0") for line in lines)
    assert all(line["request_id"] == "r1" for line in lines)
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert "ZeroDivisionError" in lines[2]["exception"]
