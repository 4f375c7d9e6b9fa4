"""What stands between the two GEMMs of an expert: names, constants and their meaning.

Only the description lives here; ``evenep.experts.activations`` computes it.
``g`` is the gate half, ``u`` the up half of the first GEMM; everything is fp32 inside.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .errors import ConfigError, explain

# kind -> (formula, the constants it needs, gated)
KINDS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "swiglu": ("silu(g) * u", (), True),
    "swiglu_clamp_before": ("silu(min(g, L)) * clamp(u, -L, L)", ("limit",), True),
    "swiglu_clamp_after": ("min(silu(g), L) * clamp(u, -L, L)", ("limit",), True),
    "swigluoai": (
        "g' * sigmoid(alpha * g') * (u' + 1), g' = min(g, L), u' = clamp(u, -L, L)",
        ("alpha", "limit"),
        True,
    ),
    "situ": ("b * tanh(g / b) * sigmoid(g) * lb * tanh(u / lb)", ("beta", "linear_beta"), True),
    "relu2": ("relu(u) ** 2, no gate", (), False),
}


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation with its constants. Constants that a kind does not use must stay None."""

    kind: str
    beta: float | None = None
    linear_beta: float | None = None
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                explain("unknown activation", expected=f"one of {sorted(KINDS)}", got=self.kind)
            )
        needed = KINDS[self.kind][1]
        for f in dataclasses.fields(self)[1:]:
            value = getattr(self, f.name)
            if f.name in needed and not _is_positive(value):
                raise ConfigError(
                    explain(
                        f"activation '{self.kind}' needs {f.name}",
                        expected="a positive finite number",
                        got=value,
                    )
                )
            if f.name not in needed and value is not None:
                raise ConfigError(
                    explain(f"activation '{self.kind}' has no constant {f.name}", got=value)
                )

    @property
    def gated(self) -> bool:
        """True when the first GEMM yields gate and up halves, ``[2 I]`` wide."""
        return KINDS[self.kind][2]

    @classmethod
    def situ(cls, beta: float = 4.0, linear_beta: float = 25.0) -> Activation:
        """Kimi-K3's SiTU-GLU; the defaults are the published constants."""
        return cls("situ", beta=beta, linear_beta=linear_beta)
