"""``python -m sfumato`` and ``torchrun -m sfumato``."""

from sfumato.cli import main

main()
