"""Settings from the environment: what is read, what is refused and how it is said."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shared.runtime.settings import ServiceSettings, SettingsError, as_env, load


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(ServiceSettings):
    heartbeat_s: float = 1.0
    depth: int = 2
    mock: bool = False
    model_dir: Path = Path("none")
    kind: Literal["a", "b"] = "a"
    limit: int | None = None


def test_values_are_converted_to_the_types_of_their_fields() -> None:
    settings = load(
        ProbeSettings,
        {
            "HORTATOR_HEARTBEAT_S": "0.25",
            "HORTATOR_DEPTH": "4",
            "HORTATOR_MOCK": "yes",
            "HORTATOR_MODEL_DIR": "/models/x",
            "HORTATOR_KIND": "b",
            "HORTATOR_LIMIT": "9",
            "HORTATOR_INSTANCE": "w0",
            "PATH": "/bin",
        },
    )
    assert settings == ProbeSettings(
        heartbeat_s=0.25, depth=4, mock=True, model_dir=Path("/models/x"), kind="b", limit=9, instance="w0"
    )


def test_a_process_without_a_name_draws_one_that_tells_its_service() -> None:
    first, second = load(ProbeSettings, {}), load(ProbeSettings, {})
    assert first.instance.startswith("probe-")
    assert first.instance != second.instance


def test_an_unknown_key_is_refused_with_the_nearest_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"HORTATOR_HEARTBEATS.*HORTATOR_HEARTBEAT_S"):
        load(ProbeSettings, {"HORTATOR_HEARTBEATS": "1"})


def test_a_key_like_no_other_is_refused_without_suggestions() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting HORTATOR_ZZZ\. Unset it"):
        load(ProbeSettings, {"HORTATOR_ZZZ": "1"})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("HORTATOR_LOG_LEVEL", "loud"),
        ("HORTATOR_DEPTH", "2.5"),
        ("HORTATOR_HEARTBEAT_S", "fast"),
        ("HORTATOR_MOCK", "maybe"),
        ("HORTATOR_KIND", "c"),
        ("HORTATOR_LIMIT", "x"),
    ],
)
def test_an_unreadable_value_is_refused_with_its_key_and_text(key: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"{key}='{text}'"):
        load(ProbeSettings, {key: text})


@pytest.mark.parametrize(
    ("key", "text"),
    [("HORTATOR_DEPTH", "-1"), ("HORTATOR_LIMIT", "-5")]
    + [("HORTATOR_HEARTBEAT_S", text) for text in ("-0.5", "nan", "inf", "-inf", "1e999")],
)
def test_a_number_below_zero_or_without_a_value_is_refused_with_its_key(key: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"{key}='{text}' must be a finite number of at least 0"):
        load(ProbeSettings, {key: text})


def test_settings_survive_the_way_through_an_environment() -> None:
    settings = ProbeSettings(instance="w0", mock=True, depth=7, limit=3, kind="b", model_dir=Path("/m"))
    env = as_env(settings)
    assert env["HORTATOR_MOCK"] == "1"
    assert "HORTATOR_HEARTBEAT_S" not in env
    assert load(ProbeSettings, env) == settings


def test_secrets_do_not_show_in_the_settings_representation() -> None:
    shown = repr(ServiceSettings(nats_password="secret1", redis_url="redis://u:secret2@h"))
    assert "secret" not in shown
