"""One run from recipe to release: resolve, prepare, train, save, publish."""

from sfumato.run.session import train

__all__ = ["train"]
