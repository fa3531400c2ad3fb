"""Planted faults in the paper's audit: each must be found by the tests it names."""

from planting import fault, rewrite  # attacks/ is on the path

SUMS = "audit/test_many_models.py::test_each_model_gets_the_engines_sum_over_its_own_batch"


@fault("filled-up-pairs-counted", tests=(SUMS,))
def filled_up_pairs_counted(patch):
    rewrite(
        patch,
        "sfumato.audit.many_models:ManySums.__call__",
        "value.view(present.shape) * present",
        "value.view(present.shape)",
    )


@fault("another-models-batch", tests=(SUMS,))
def another_models_batch(patch):
    rewrite(
        patch,
        "sfumato.audit.many_models:ManySums._blocks",
        "indices.numpy() % self.num_models",
        "(indices.numpy() + 1) % self.num_models",
    )


@fault("many-models-without-clip", tests=(SUMS,))
def many_models_without_clip(patch):
    rewrite(patch, "sfumato.audit.many_models:ManySums.__call__", "squares, self.clip_norm", "squares, 1e9")


@fault("judged-by-those-that-chose", tests=("audit/test_paper.py",))
def judged_by_those_that_chose(patch):
    rewrite(
        patch,
        "sfumato.audit.paper_results:table_row",
        "scores[0][:held], scores[1][:held]",
        "scores[0], scores[1]",
    )
