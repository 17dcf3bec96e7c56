"""API keys and their file."""

from pathlib import Path

import pytest

from services.gateway.auth import KeyFileError, Keys, read_keys
from services.gateway.errors import ApiError


def test_a_key_names_its_tenant_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nsk-1 alice\n\nsk-2   # nobody in particular\n")
    keys = read_keys(str(file))
    assert keys.required
    assert keys.tenant(b"Bearer sk-1") == "alice"
    assert keys.tenant(b"bearer  sk-2 ") == ""
    for header in (None, b"", b"Bearer", b"Bearer sk-", b"Bearer sk-11", b"Basic sk-1", b"sk-1"):
        with pytest.raises(ApiError) as refused:
            keys.tenant(header)
        assert refused.value.status == 401
        assert b"sk-1" not in refused.value.body()


def test_without_a_file_nobody_needs_a_key() -> None:
    assert not read_keys("").required
    assert Keys({}).tenant(None) == ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "holds no key"), ("# only\n", "holds no key"), ("a b c", "line 1"), ("a\na x", "line 2")],
)
def test_a_file_that_cannot_be_meant_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=complaint):
        read_keys(str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="nothing-here"):
        read_keys(str(tmp_path / "nothing-here"))


def test_no_digest_is_the_same_in_another_process() -> None:
    assert Keys({"k": ""})._tenants.keys() != Keys({"k": ""})._tenants.keys()
