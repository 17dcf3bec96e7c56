"""Logs of a service: JSON lines on stdout, ours and those of libraries alike. Prompts are never logged."""

import logging
import sys
from typing import Any

import orjson
import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _dumps(value: Any, **_: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def configure(service: str, instance: str, level: str = "info", rank: int | None = None) -> None:
    """Every line carries `service` and `instance`, and a rank its number. Raises ValueError for an unknown
    level."""
    if level not in _LEVELS:
        raise ValueError(f"log_level={level!r} is not one of {', '.join(_LEVELS)}")

    def whose(_: Any, __: str, event: Any) -> Any:
        event.setdefault("service", service)
        event.setdefault("instance", instance)
        if rank is not None:
            event.setdefault("rank", rank)
        return event

    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        whose,
    ]
    structlog.configure(
        processors=[*common, structlog.processors.JSONRenderer(serializer=_dumps)],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(serializer=_dumps),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[level], logging.INFO))
    for noisy in ("uvicorn", "uvicorn.error", "uvicorn.access", "nats"):
        logging.getLogger(noisy).handlers.clear()
        logging.getLogger(noisy).propagate = True
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def get_logger(**bound: Any) -> Any:
    return structlog.get_logger(**bound)
