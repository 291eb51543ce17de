"""PLACEHOLDER until the helper's arrives."""

from typing import Any


class Mirror:
    @classmethod
    def open(cls, *a: Any) -> "Mirror":
        return cls()

    def log(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
