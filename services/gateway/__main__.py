"""`python -m services.gateway`: wires settings, model, mesh client and HTTP together."""

import gc
import secrets
from typing import Any

from services.gateway.app import build
from services.gateway.auth import KeyFileError, read_keys
from services.gateway.gateway import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import CardError, ModelCard, load_card
from shared.client import MeshClient
from shared.runtime.service import ServiceContext, entry, run
from shared.runtime.settings import CannotStart, load
from shared.subjects import subject_token

_CLOSING_S = 2.0
"""Of the grace time, for what comes after the last stream."""


def card_of(settings: GatewaySettings) -> ModelCard:
    """Raises CardError."""
    aliases = tuple(alias.strip() for alias in settings.model_aliases.split(",") if alias.strip())
    return load_card(settings.model_dir, settings.model, aliases, settings.max_model_len)


def main() -> None:
    settings = load(GatewaySettings)
    try:
        card = card_of(settings)
        keys = read_keys(settings.api_key_file)
    except (CardError, KeyFileError) as error:
        raise CannotStart(str(error)) from error

    async def serve(context: ServiceContext) -> None:
        # A restarted gateway must not be taken for its former life.
        name = f"{subject_token(settings.instance)[:48]}-{secrets.token_hex(4)}"
        client = MeshClient(context.bus, name, settings.model)
        gateway = Gateway(settings, card, client, context.metrics)
        await gateway.start()
        context.stats = lambda: _stats(gateway)
        context.http_app = build(gateway, keys, context.ops_app)
        # Long-lived objects are many (vocabulary tables); the collector need not look at them again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        await context.stopping.wait()
        await gateway.stop(max(0.0, settings.stop_grace_s - _CLOSING_S))

    run(settings, "gateway", serve)


def _stats(gateway: Gateway) -> dict[str, Any]:
    ready = gateway.canary.readiness()
    return {
        "state": "draining" if gateway.draining else "ready" if ready.ok else "starting",
        "reason": ready.reason,
        "open_requests": gateway.open_requests,
        "epoch": gateway.client.core.epoch,
    }


if __name__ == "__main__":
    entry("gateway", main)
