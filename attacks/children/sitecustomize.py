"""Python imports this as it starts, where it is on the path: programs that tests start have the fault too."""

import os

if os.environ.get("SFUMATO_FAULT"):
    from planted import plant

    plant()
