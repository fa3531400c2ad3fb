"""What each data set has spent over all runs, durable before it is used."""

from sfumato.ledger.ledger import Account, Ledger
from sfumato.ledger.totals import Cap, Record, Total, total_of

__all__ = ["Account", "Cap", "Ledger", "Record", "Total", "total_of"]
