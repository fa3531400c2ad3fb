"""The scores of several findings as rows of text: for the card, the report and the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from sfumato.release.documents import FindingDocument

COLUMNS = ("finding", "images with it", "AUC (95 %)", "called from", "sensitivity", "specificity")


def finding_rows(findings: Mapping[str, FindingDocument]) -> list[tuple[str, ...]]:
    """For each finding what ``COLUMNS`` says; the last two at the probability from which it is called."""
    rows: list[tuple[str, ...]] = []
    for name, found in findings.items():
        ends = found["auc_interval"]
        auc = "-" if found["auc"] is None else f"{found['auc']:.4f}"
        auc += "" if ends is None else f" ({ends[0]:.4f} to {ends[1]:.4f})"
        cut = found.get("threshold", 0.5)  # what earlier versions took for granted
        shares = f"{cut:.3g}", _percent(found["sensitivity"]), _percent(found["specificity"])
        rows.append((name, f"{found['num_positive']:,}", auc, *shares))
    return rows


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
