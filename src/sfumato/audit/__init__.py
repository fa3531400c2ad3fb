"""Statistics of an audit: functions of two arrays of scores, higher = more likely a member.

| function | answers | assumes |
|---|---|---|
| ``clopper_pearson_bound`` | ε from below, many trainings | independent scores |
| ``gdp_bound`` | μ and ε from below, many trainings | independent scores; the claim is μ-GDP |
| ``gaussian_scores_bound`` | the same, sharper | scores Gaussian with one standard deviation |
| ``one_run_bound`` | ε from below, one training | canaries in by independent fair coins |
| ``one_run_gdp_bound`` | μ and ε from below, one training | the same; the claim is μ-GDP |
| ``one_run_epsilon``, ``one_run_mu`` | the same from counts; the ceiling if all are right | the same |
| ``tpr_at_fpr``, ``auc``, ``membership_advantage`` | how good an attack is | independent scores |
| ``gaussian_total_variation`` | which canary shows most (an estimate) | scores about Gaussian |
| ``largest_advantage``, ``epsilon_of_mu`` | what a guarantee allows at most | |
| ``bootstrap`` | the spread of any statistic (an estimate) | many scores |
| ``roc_curve``, ``score_histogram`` | points to plot | |

Results are frozen and have ``as_dict()`` for JSON. docs/audit.md says what each can and cannot find.
"""

from sfumato.audit.bootstrap import bootstrap
from sfumato.audit.bounds import Bound, clopper_pearson_bound, epsilon_of_mu, gdp_bound
from sfumato.audit.curves import (
    Estimate,
    RocCurve,
    TprAtFpr,
    auc,
    largest_advantage,
    membership_advantage,
    roc_curve,
    score_histogram,
    tpr_at_fpr,
)
from sfumato.audit.gaussian import gaussian_scores_bound, gaussian_total_variation
from sfumato.audit.one_run import (
    OneRunBound,
    guess_grid,
    one_run_bound,
    one_run_epsilon,
    one_run_gdp_bound,
    one_run_mu,
)

__all__ = [
    "Bound",
    "Estimate",
    "OneRunBound",
    "RocCurve",
    "TprAtFpr",
    "auc",
    "bootstrap",
    "clopper_pearson_bound",
    "epsilon_of_mu",
    "gaussian_scores_bound",
    "gaussian_total_variation",
    "gdp_bound",
    "guess_grid",
    "largest_advantage",
    "membership_advantage",
    "one_run_bound",
    "one_run_epsilon",
    "one_run_gdp_bound",
    "one_run_mu",
    "roc_curve",
    "score_histogram",
    "tpr_at_fpr",
]
